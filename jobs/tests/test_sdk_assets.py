"""The public client of the Comfy API v2, which knows nothing of us: its assets against our server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import httpx
import pytest
from comfy_low import ComfyLow
from comfy_low.errors import HashMismatch
from comfy_sdk import AsyncComfy, Comfy
from comfy_sdk.exceptions import ComfyError, NotFound
from pytest_django.live_server_helper import LiveServer

from jobs.models import Asset, Blob
from jobs.tests.helpers import make_user, photo_bytes, queue_job
from jobs.tests.helpers_api import finish, picture_bytes, token_of

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def url(live_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COMFY_BASE_URL", live_server.url)
    return str(live_server.url)


@pytest.fixture
def comfy(url: str) -> Iterator[Comfy]:
    with Comfy(api_key=token_of(make_user())) as client:
        yield client


def test_it_uploads_a_file_once_however_often_it_is_sent(comfy: Comfy, tmp_path: Path) -> None:
    path = tmp_path / "me.png"
    path.write_bytes(picture_bytes())

    first = comfy.assets.from_file(path)
    second = comfy.assets.from_file(path)
    assert first.commit() == second.commit()

    assert (first.created_new, second.created_new) == (True, False)
    assert (Asset.objects.count(), Blob.objects.count()) == (1, 1)
    (row,) = Asset.objects.all()
    assert (row.name, row.content_type, row.hash) == ("me.png", "image/png", first.hash)


def test_it_has_two_assets_over_the_same_bytes_and_deletes_one(comfy: Comfy) -> None:
    one = comfy.assets.from_bytes(picture_bytes(), filename="one.png")
    two = comfy.assets.from_bytes(picture_bytes(), filename="faces/two.png")
    first, second = one.commit(), two.commit()
    assert (first != second, two.created_new) == (True, False)

    one.delete()

    assert comfy.assets.get(second).file_path == "faces/two.png"
    assert Blob.objects.count() == 1
    with pytest.raises(NotFound):
        comfy.assets.delete(first)


def test_it_reads_its_bytes_back_by_the_url_alone_and_in_part(url: str) -> None:
    content = os.urandom(3 * 2**20 + 7)
    with ComfyLow(url, api_key=token_of(make_user())) as low:
        asset = low.post_assets(BytesIO(content), "application/x-weights", "face.safetensors")

        assert (asset.created_new, asset.size_bytes, asset.job_id) == (True, len(content), None)
        assert httpx.get(str(asset.url)).content == content
        with low.get_asset_content(asset.id, range=(2**20 - 3, 2**20 + 3)) as part:
            assert (part.status_code, part.read()) == (206, content[2**20 - 3 : 2**20 + 4])
        low.delete_asset(asset.id)
        assert httpx.get(str(asset.url)).status_code == 401


def test_it_sends_tags_and_a_media_type_with_a_charset(url: str) -> None:
    with ComfyLow(url, api_key=token_of(make_user())) as low:
        asset = low.post_assets(
            BytesIO(b"abc"), "text/plain; charset=utf-8", "a.txt", tags=["input", "text"]
        )

    assert (asset.content_type, asset.file_path) == ("text/plain", "a.txt")


def test_it_hears_that_bytes_were_changed_on_the_way(url: str) -> None:
    with ComfyLow(url, api_key=token_of(make_user())) as low, pytest.raises(HashMismatch):
        low.post_assets(BytesIO(b"other"), "text/plain", "a.txt", expected_hash="blake3:00")

    assert not Asset.objects.exists()


def test_it_makes_an_input_of_an_output_without_sending_it(comfy: Comfy) -> None:
    job = queue_job()
    (output,) = finish(job, picture_bytes())

    asset = comfy.assets.from_bytes(picture_bytes(), filename="next.png")

    assert asset.as_reference()["info"] == {
        "id": asset.commit(),
        "hash": output.hash,
        "file_path": "next.png",
    }
    assert (asset.created_new, Blob.objects.filter(name=output.file.name).count()) == (False, 1)
    assert Asset.objects.get(pk=asset.commit()).file == output.file


def test_it_does_not_delete_what_a_job_needs(comfy: Comfy) -> None:
    photo = queue_job().inputs.get()

    with pytest.raises(ComfyError) as refused:
        comfy.assets.delete(str(photo.pk))

    assert refused.value.code == "asset_in_use"


def test_strangers_find_nothing_by_hash_or_id(comfy: Comfy, url: str) -> None:
    mine = comfy.assets.from_bytes(photo_bytes(), filename="me.jpg")
    mine.commit()
    with Comfy(api_key=token_of(make_user("bob"))) as bob:
        theirs = bob.assets.from_bytes(photo_bytes(), filename="me.jpg")
        theirs.commit()

        assert theirs.created_new is True
        for ask in (bob.assets.get, bob.assets.delete):
            with pytest.raises(NotFound):
                ask(str(mine.id))


def test_it_does_all_of_that_without_blocking_too(url: str) -> None:
    async def lead(token: str) -> None:
        async with AsyncComfy(api_key=token) as comfy:
            asset = comfy.assets.from_bytes(picture_bytes(), filename="me.png")
            await asset.commit()
            again = comfy.assets.from_bytes(picture_bytes(), filename="me.png")
            assert await again.commit() == asset.id
            await again.delete()
            with pytest.raises(NotFound):
                await asset.delete()

    asyncio.run(lead(token_of(make_user())))
