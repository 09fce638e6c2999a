"""Assets by HTTP: uploads, hashes, deletes, and what strangers see of them."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import DataError, connection
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils.dateparse import parse_datetime
from pytest_django import Settings

from jobs.models import Asset, Blob
from jobs.pictures import PIECE_BYTES
from jobs.storage import CHUNK_BYTES, PostgresStorage
from jobs.tests.helpers import make_user, queue_job
from jobs.tests.helpers_api import (
    API,
    Answer,
    check,
    client_of,
    error_of,
    finish,
    picture_bytes,
    token_of,
)

pytestmark = pytest.mark.django_db

ASSETS = f"{API}/assets"
ODD_HASHES = ["x", "blake3:", "blake3:" + "0" * 63, "blake3:" + "G" * 64, "sha256:" + "0" * 64]
NONE = "blake3:" + "0" * 64
FILE_WITHOUT_END = b'--XX\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\na fa'


def upload(client: Client, content: bytes = b"a face", **fields: Any) -> Answer:
    """Send bytes as an asset. A field that is None is left out."""
    form = {
        "file": SimpleUploadedFile("x", content),
        "content_type": "image/png",
        "file_path": "me.png",
    } | fields
    return client.post(ASSETS, {k: v for k, v in form.items() if v is not None})


def from_hash(client: Client, body: Any) -> Answer:
    return client.post(f"{ASSETS}/from-hash", body, "application/json")


def time_left(answer: Any) -> timedelta:
    return parse_datetime(answer["expires_at"]) - parse_datetime(answer["created_at"])  # type: ignore[operator]


# --- uploads ---


def test_an_upload_is_answered_with_all_that_is_known_of_it(settings: Settings) -> None:
    settings.GENFLOW_JOB_RETENTION_DAYS = 3

    response = upload(client_of(), b"a face", tags=["input", "face"])

    body = response.json()
    check("Asset", body)
    assert (response.status_code, body["created_new"]) == (201, True)
    assert (body["file_path"], body["content_type"], body["size_bytes"]) == (
        "me.png",
        "image/png",
        6,
    )
    assert time_left(body) == timedelta(days=3)
    assert Client().get(body["url"]).getvalue() == b"a face"


def test_the_same_bytes_are_kept_once_whatever_they_are_called() -> None:
    client = client_of()
    first = upload(client)

    second = upload(client, file_path="faces/other.png")

    assert (second.status_code, second.json()["created_new"]) == (200, False)
    assert first.json()["id"] != second.json()["id"]
    assert first.json()["hash"] == second.json()["hash"]
    assert (Asset.objects.count(), Blob.objects.count()) == (2, 1)
    assert Client().get(second.json()["url"]).getvalue() == b"a face"


def test_an_upload_sent_again_is_the_same_asset_and_lives_longer_but_never_shorter() -> None:
    client = client_of()
    first, shorter, longer = (
        upload(client, expires_in=seconds).json() for seconds in (3600, 60, 604_800)
    )

    assert first["id"] == shorter["id"] == longer["id"]
    assert time_left(first) == timedelta(hours=1)
    assert shorter["expires_at"] == first["expires_at"]
    assert longer["expires_at"] > first["expires_at"]


def test_an_empty_file_is_one_too() -> None:
    body = upload(client_of(), b"").json()

    assert (body["size_bytes"], Client().get(body["url"]).getvalue()) == (0, b"")


def test_bytes_that_changed_on_the_way_are_not_kept() -> None:
    client = client_of()
    sent = upload(client).json()["hash"]

    response = upload(client, b"another", expected_hash=sent)

    error = error_of(response)
    assert (response.status_code, error["code"]) == (409, "hash_mismatch")
    assert error["details"]["hash"] != sent
    assert Blob.objects.count() == 1
    assert upload(client, expected_hash=sent).status_code == 200


def test_too_large_a_file_is_refused_and_not_kept(settings: Settings) -> None:
    settings.GENFLOW_ASSET_MAX_BYTES = 5

    response = upload(client_of())

    assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
    assert not Blob.objects.exists()


@pytest.mark.parametrize(
    "name",
    [
        "a" * 251 + ".png",
        "faces/2024/me.png",
        "selfie [output].png",
        "me..png",
        ".png",
        "...",
        "\u00a1\u00a1\u00a1.\u00a1\u00a1",
        "\U0001f60a.png",
        "\u202egnp.exe",
        "\u202e",
        " ",
        " me .png",
        "'; DROP TABLE jobs_asset; --",
        "<img src=x onerror=alert(1)>.png",
    ],
)
@pytest.mark.parametrize("size", [1, 3 * 2**20])
def test_an_odd_name_is_kept_as_it_is(name: str, size: int) -> None:
    response = upload(client_of(), bytes(size), file_path=name)

    assert (response.status_code, response.json()["file_path"]) == (201, name)
    content = Client().get(response.json()["url"])
    assert len(content.getvalue()) == size
    assert content["Content-Disposition"].startswith("inline; filename")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a" * 256,
        "/etc/passwd",
        "../../me.png",
        "a/../b.png",
        "./me.png",
        "..",
        "a//b.png",
        "faces/",
        "C:\\fakepath\\me.jpg",
        "a\0.png",
        "a\r\nSet-Cookie: x.png",
        "a\x7f.png",
        b"a\xff.png",
        b"a\xed\xa0\xbd.png",
    ],
)
def test_a_name_that_could_do_harm_is_refused(name: str | bytes) -> None:
    file = SimpleUploadedFile("x", b"a face")

    response = upload(client_of(), file=file, file_path=name)

    assert (response.status_code, error_of(response)["code"]) == (422, "invalid_request")
    assert not Blob.objects.exists()


@pytest.mark.parametrize("name", ["a" * 300 + ".jpg", "x." + "a" * 300, "..", ".", "\u202e", "\0"])
def test_the_name_of_the_files_part_is_nobodys_business(name: str) -> None:
    part = f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    fields = "".join(
        f'--XX\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'
        for field, value in {"content_type": "image/png", "file_path": "me.png"}.items()
    )
    body = f"{fields}--XX\r\n{part}a face\r\n--XX--\r\n".encode()

    response = client_of().generic("POST", ASSETS, body, "multipart/form-data; boundary=XX")

    assert response.status_code in {201, 422}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("file", None),
        ("file", "text"),
        ("content_type", None),
        ("content_type", "png"),
        ("content_type", "image/png\r\nX: y"),
        ("content_type", "text/" + "a" * 200),
        ("file_path", None),
        ("expires_in", "59"),
        ("expires_in", "604801"),
        ("expires_in", "soon"),
        ("tags", ["x" * 101]),
        ("colour", "red"),
        ("file_path", ["a.png", "b.png"]),
    ],
)
def test_a_field_that_is_wrong_is_named(field: str, value: Any) -> None:
    response = upload(client_of(), **{field: value})

    error = error_of(response)
    assert (response.status_code, error["code"]) == (422, "invalid_request")
    assert list(error["details"]) == [field]
    assert not Blob.objects.exists()


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("image/png", picture_bytes(), 415),
        ("multipart/form-data", b"x", 400),
        ("multipart/form-data; boundary=XX", b"--XX\r\nContent-Disp", 422),
        ("multipart/form-data; boundary=XX", FILE_WITHOUT_END, 422),
        ("multipart/form-data; boundary=XX", b"", 422),
    ],
)
def test_what_is_no_form_is_refused(content_type: str, body: bytes, status: int) -> None:
    response = client_of().generic("POST", ASSETS, body, content_type)

    assert response.status_code == status
    error_of(response)


def test_an_upload_that_cannot_be_saved_leaves_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise DataError("no")

    monkeypatch.setattr(Asset, "save", fail)

    assert upload(client_of()).status_code == 500
    assert not Blob.objects.exists()


def test_who_has_stored_all_that_is_allowed_gets_no_new_bytes_in(settings: Settings) -> None:
    client = client_of()
    upload(client)
    settings.GENFLOW_STORAGE_PER_OWNER_BYTES = len(b"a face")

    refused = upload(client, b"x", file_path="b.png")
    shared = upload(client, file_path="c.png")

    assert (refused.status_code, error_of(refused)["code"]) == (422, "storage_full")
    assert shared.status_code == 200
    assert Blob.objects.count() == 1


def test_an_upload_that_comes_again_with_its_key_is_answered_with_the_asset() -> None:
    client = client_of()
    client.defaults["HTTP_IDEMPOTENCY_KEY"] = "k1"
    first, again = upload(client), upload(client)
    other = upload(client, b"other")

    assert (again.status_code, again["Idempotency-Replayed"]) == (200, "true")
    assert again.json()["id"] == first.json()["id"]
    assert (other.status_code, error_of(other)["code"]) == (422, "idempotency_key_reuse")


def test_a_key_is_spent_by_bytes_that_were_there_too() -> None:
    client = client_of()
    wanted = {"hash": upload(client).json()["hash"], "file_path": "b.png"}
    client.defaults["HTTP_IDEMPOTENCY_KEY"] = "k1"

    first, again = from_hash(client, wanted), from_hash(client, wanted)

    assert (first.status_code, again["Idempotency-Replayed"]) == (201, "true")
    assert again.json()["id"] == first.json()["id"]
    assert from_hash(client, wanted | {"file_path": "c.png"}).status_code == 422


# --- by hash ---


def test_bytes_that_one_has_are_given_another_name_without_sending_them() -> None:
    client = client_of()
    first = upload(client).json()

    response = from_hash(client, {"hash": first["hash"], "file_path": "b.png", "tags": ["x"]})
    again = from_hash(client, {"hash": first["hash"], "file_path": "b.png", "expires_in": 60})

    body = response.json()
    check("Asset", body)
    assert (response.status_code, body["created_new"]) == (201, False)
    assert (body["file_path"], body["content_type"]) == ("b.png", first["content_type"])
    assert (again.status_code, again.json()["id"]) == (200, body["id"])
    assert again.json()["expires_at"] == body["expires_at"]
    assert (Asset.objects.count(), Blob.objects.count()) == (2, 1)


def test_without_a_name_it_is_the_asset_that_there_is() -> None:
    client = client_of()
    first = upload(client).json()

    response = from_hash(client, {"hash": first["hash"]})

    assert (response.status_code, response.json()["id"]) == (200, first["id"])


def test_a_picture_that_was_drawn_can_be_an_input_by_its_hash() -> None:
    (picture,) = finish(queue_job(), picture_bytes())

    body = from_hash(client_of(), {"hash": picture.hash}).json()

    assert body["id"] != str(picture.pk)
    assert "job_id" not in body
    assert Client().get(body["url"]).getvalue() == picture_bytes()


def test_one_can_ask_first_whether_bytes_are_there() -> None:
    client = client_of()
    there = upload(client).json()["hash"]

    assert client.head(f"{ASSETS}/by-hash/{there}").status_code == 200
    assert client.get(f"{ASSETS}/by-hash/{there}").status_code == 405
    assert Client().head(f"{ASSETS}/by-hash/{there}").status_code == 401


@pytest.mark.parametrize("wanted", [NONE, *ODD_HASHES, "a" * 5000])
def test_what_no_bytes_have_as_a_hash_is_not_found(wanted: str) -> None:
    client = client_of()
    upload(client)

    minted = from_hash(client, {"hash": wanted[:100]})

    assert client.head(f"{ASSETS}/by-hash/{wanted}").status_code == 404
    assert (minted.status_code, error_of(minted)["code"]) == (404, "blob_not_found")


def test_bytes_that_got_lost_can_be_sent_anew() -> None:
    client = client_of()
    lost = upload(client).json()
    Blob.objects.all().delete()

    assert client.head(f"{ASSETS}/by-hash/{lost['hash']}").status_code == 404
    assert from_hash(client, {"hash": lost["hash"]}).status_code == 404
    mended = upload(client).json()

    assert mended["created_new"] is True
    assert Client().get(mended["url"]).getvalue() == b"a face"
    assert from_hash(client, {"hash": lost["hash"]}).json()["id"] == mended["id"]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        "[]",
        "7",
        '"x"',
        "{",
        "\ufffe",
        "[" * 100_000,
        '{"a":' * 100_000,
        json.dumps({}),
        json.dumps({"hash": None}),
        json.dumps({"hash": [NONE]}),
        json.dumps({"hash": "a\0"}),
        json.dumps({"hash": NONE, "file_path": "\ud83d.png"}),
        json.dumps({"hash": NONE, "\ud83d": "x"}),
        json.dumps({"hash": NONE, "file_path": "../x"}),
        json.dumps({"hash": NONE, "tags": "input"}),
        json.dumps({"hash": NONE, "tags": [{}]}),
        json.dumps({"hash": NONE, "expires_in": True}),
        json.dumps({"hash": NONE, "expires_in": float("nan")}),
        json.dumps({"hash": NONE, "expires_in": float("inf")}),
        '{"hash": "x", "expires_in": 1e999}',
        '{"hash": "x", "expires_in": ' + "9" * 5000 + "}",
    ],
)
def test_a_body_that_makes_no_sense_is_refused(body: str) -> None:
    response = from_hash(client_of(), body)

    assert response.status_code in {400, 422}
    error_of(response)


# --- delete ---


def test_a_deleted_asset_is_gone_with_its_link_and_its_bytes() -> None:
    client = client_of()
    asset = upload(client).json()

    assert client.delete(f"{ASSETS}/{asset['id']}").status_code == 204

    again = client.delete(f"{ASSETS}/{asset['id']}")
    assert (again.status_code, error_of(again)["code"]) == (404, "not_found")
    assert again.content == client.delete(f"{ASSETS}/{uuid4()}").content
    assert Client().get(asset["url"]).status_code == 401
    assert client.head(f"{ASSETS}/by-hash/{asset['hash']}").status_code == 404
    assert not Blob.objects.exists()


def test_a_deleted_asset_leaves_the_bytes_to_another() -> None:
    client = client_of()
    first, second = upload(client).json(), upload(client, file_path="b.png").json()

    client.delete(f"{ASSETS}/{first['id']}")

    assert Client().get(second["url"]).getvalue() == b"a face"


def test_what_a_job_depends_on_is_not_deleted() -> None:
    job = queue_job()
    (picture,) = finish(job, picture_bytes())

    for asset in (picture, job.inputs.get()):
        response = client_of().delete(f"{ASSETS}/{asset.pk}")

        assert (response.status_code, error_of(response)["code"]) == (409, "asset_in_use")
    assert Asset.objects.count() == 2


def test_an_upload_can_be_deleted_once_no_unfinished_job_uses_it() -> None:
    client = client_of()
    asset = Asset.objects.get(pk=upload(client).json()["id"])
    job = queue_job()
    job.inputs.add(asset)

    refused = client.delete(f"{ASSETS}/{asset.pk}")
    finish(job, picture_bytes())

    assert (refused.status_code, error_of(refused)["code"]) == (409, "asset_in_use")
    assert client.delete(f"{ASSETS}/{asset.pk}").status_code == 204


def test_an_upload_past_its_time_is_gone_before_it_is_swept() -> None:
    client = client_of()
    asset = upload(client).json()
    Asset.objects.update(expires_at=Now())

    assert client.get(f"{ASSETS}/{asset['id']}").status_code == 404
    assert Client().get(asset["url"]).status_code == 401
    assert client.head(f"{ASSETS}/by-hash/{asset['hash']}").status_code == 404


# --- who may see them ---


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/content"),
        ("HEAD", "/content"),
    ],
)
def test_a_strangers_asset_is_answered_like_none_and_with_as_much_work(
    method: str, path: str
) -> None:
    asset = upload(client_of()).json()
    bob = client_of(make_user("bob"))
    headers = {"If-None-Match": f'"{asset["hash"]}"', "Range": "bytes=0-1"}
    bob.get(f"{API}/jobs")  # notes the use of the token, once a minute

    with CaptureQueriesContext(connection) as work_for_theirs:
        theirs = bob.generic(method, f"{ASSETS}/{asset['id']}{path}", headers=headers)
    with CaptureQueriesContext(connection) as work_for_none:
        none = bob.generic(method, f"{ASSETS}/{uuid4()}{path}", headers=headers)

    assert (theirs.status_code, theirs.content) == (none.status_code, none.content)
    assert theirs.status_code == 404
    assert len(work_for_theirs) == len(work_for_none)


def test_a_strangers_hash_is_answered_like_none() -> None:
    asset = upload(client_of()).json()
    bob = client_of(make_user("bob"))

    theirs, none = (from_hash(bob, {"hash": wanted}) for wanted in (asset["hash"], NONE))

    assert (theirs.status_code, theirs.content) == (none.status_code, none.content)
    assert bob.head(f"{ASSETS}/by-hash/{asset['hash']}").status_code == 404


def test_a_strangers_bytes_are_new_to_everybody_else() -> None:
    upload(client_of())

    response = upload(client_of(make_user("bob")))

    assert (response.status_code, response.json()["created_new"]) == (201, True)
    assert Blob.objects.count() == 2


@pytest.mark.parametrize("change", ["set_password", "deactivate"])
def test_a_link_dies_when_its_owner_is_shut_out_or_gets_another_password(change: str) -> None:
    user = make_user()
    url = upload(client_of(user)).json()["url"]
    assert Client().get(url).status_code == 200

    if change == "set_password":
        user.set_password("another")
    else:
        user.is_active = False
    user.save()

    assert Client().get(url).status_code == 401


def test_a_link_is_good_for_parts_and_for_head_and_beside_a_strangers_token() -> None:
    url = upload(client_of()).json()["url"]

    assert Client().head(url).status_code == 200
    assert Client().get(url, headers={"Range": "bytes=2-5"}).getvalue() == b"face"
    assert client_of(make_user("bob")).get(url).getvalue() == b"a face"
    assert Client().delete(url.partition("/content")[0]).status_code == 401


def test_a_token_that_is_none_is_told_even_beside_a_good_link() -> None:
    url = upload(client_of()).json()["url"]

    assert Client(headers={"Authorization": "Bearer gf_x"}).get(url).status_code == 401


# --- bytes ---


@pytest.mark.parametrize(
    ("content_type", "kind"),
    [
        ("image/png", "inline"),
        ("audio/mpeg", "inline"),
        ("video/mp4", "inline"),
        ("image/svg+xml", "attachment"),
        ("text/html", "attachment"),
        ("text/plain; charset=utf-8", "attachment"),
        ("application/pdf", "attachment"),
        ("application/xhtml+xml", "attachment"),
        ("multipart/x-mixed-replace", "attachment"),
    ],
)
def test_a_browser_shows_pictures_and_sound_and_runs_nothing(content_type: str, kind: str) -> None:
    page = b"<script>alert(1)</script>"
    url = upload(client_of(), page, content_type=content_type, file_path="a.x").json()["url"]

    response = Client().get(url)

    assert response["Content-Disposition"] == f'{kind}; filename="a.x"'
    assert response["Content-Security-Policy"] == "sandbox"
    assert response["X-Content-Type-Options"] == "nosniff"
    assert response["Content-Type"] == content_type.partition(";")[0]


def test_no_more_is_read_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"".join(bytes([n]) * CHUNK_BYTES for n in range(4))
    url = upload(client_of(), content).json()["url"]
    read: list[int] = []
    fetch = PostgresStorage._chunk

    def noted(blob: Blob, number: int) -> bytes:
        read.append(number)
        return fetch(blob, number)

    monkeypatch.setattr(PostgresStorage, "_chunk", staticmethod(noted))

    part = f"bytes={2 * CHUNK_BYTES - 1}-{2 * CHUNK_BYTES}"
    assert Client().get(url, headers={"Range": part}).getvalue() == b"\1\2"

    assert read == [1, 2]
    assert Client().head(url)["Content-Length"] == str(len(content))
    assert read == [1, 2]
    assert Client().get(url).getvalue() == content
    assert read == [1, 2, 0, 1, 2, 3]


@pytest.mark.django_db(transaction=True)
def test_a_slow_reader_keeps_no_connection_to_the_database() -> None:
    url = upload(client_of(), bytes(2 * CHUNK_BYTES)).json()["url"]

    pieces = iter(Client().get(url))
    next(pieces)

    assert connection.connection is None
    assert len(b"".join(pieces)) == 2 * CHUNK_BYTES - PIECE_BYTES


def test_a_login_in_the_browser_uploads_by_the_sites_own_forms_alone() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user())

    assert upload(client).status_code == 403
    client.cookies["csrftoken"] = "c" * 32
    client.defaults["HTTP_X_CSRFTOKEN"] = "c" * 32
    assert upload(client).status_code == 201


def test_an_asset_is_uploaded_with_a_token_alone() -> None:
    assert upload(Client()).status_code == 401
    assert (
        upload(Client(headers={"Authorization": f"Bearer {token_of(make_user())}"})).status_code
        == 201
    )
