"""Files in a bucket: what is stored there, and that nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import boto3
import pytest
from botocore.client import BaseClient
from botocore.exceptions import EndpointConnectionError
from django.core.files.base import ContentFile
from django.core.files.storage import default_storage
from django.db import DataError
from django.db.models.functions import Now
from django.test import Client
from moto import mock_aws
from pytest_django import Settings

from fake_comfy import FakeComfy
from jobs.developing import Photo
from jobs.housekeeping import sweep
from jobs.models import Blob, Job
from jobs.outage import StorageAway
from jobs.portraits import submit_portrait
from jobs.status import JobStatus
from jobs.storage import CHUNK_BYTES
from jobs.tests.helpers import (
    fresh,
    make_user,
    make_worker,
    photo_bytes,
    queue_job,
)
from jobs.tests.helpers_api import API, client_of, error_of, finish, photo_file, picture_bytes

pytestmark = pytest.mark.django_db

BACKEND = "jobs.object_storage.ObjectStorage"
OPTIONS = {"bucket_name": "pictures", "location": "genflow", "region_name": "us-east-1"}


@pytest.fixture
def bucket(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        bucket = boto3.resource("s3", region_name="us-east-1").Bucket("pictures")
        bucket.create()
        settings.STORAGES = settings.STORAGES | {
            "default": {"BACKEND": BACKEND, "OPTIONS": OPTIONS}
        }
        yield bucket


def names_in(bucket: Any) -> list[str]:
    return [stored.key for stored in bucket.objects.all()]


def test_bytes_come_back_as_they_were_whatever_their_size_whole_and_in_part(bucket: Any) -> None:
    for size in (0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 1):
        content = os.urandom(size)

        name = default_storage.save(f"assets/{size}", ContentFile(content))

        assert default_storage.open(name).read() == content
        assert default_storage.size(name) == size


def test_what_is_not_there_is_not_found(bucket: Any) -> None:
    assert not default_storage.exists("assets/x")
    with pytest.raises(FileNotFoundError):
        default_storage.open("assets/x")


def test_a_deleted_job_is_gone_from_the_bucket_with_the_next_sweep(bucket: Any) -> None:
    job = queue_job()
    finish(job, picture_bytes())
    assert len(names_in(bucket)) == 2
    assert all(name.startswith("genflow/assets/") for name in names_in(bucket))

    Job.objects.delete_for_owner(job.pk)
    sweep()

    assert names_in(bucket) == []
    assert not Blob.objects.exists()


def test_bytes_that_another_asset_shares_stay_in_the_bucket(bucket: Any) -> None:
    job = queue_job()
    (picture,) = finish(job, picture_bytes())
    client = client_of()
    body = {"hash": picture.hash}
    asset = client.post(f"{API}/assets/from-hash", body, "application/json").json()

    Job.objects.delete_for_owner(job.pk)
    sweep()

    assert Client().get(asset["url"]).getvalue() == picture_bytes()
    assert len(names_in(bucket)) == 1


def test_the_bytes_of_a_deleted_user_are_swept(bucket: Any) -> None:
    user = make_user()
    queue_job(user)
    user.delete()
    Blob.objects.update(kept_until=Now() - timedelta(seconds=1))  # a day has passed

    sweep()

    assert names_in(bucket) == []


def test_a_refused_portrait_leaves_nothing_in_the_bucket(bucket: Any) -> None:
    photo = Photo(photo_bytes(), "image/jpeg", 96, 96)

    with pytest.raises(DataError):
        submit_portrait(make_user(), photo, {"prompt": "x", "priority": 99_999})
    sweep()

    assert names_in(bucket) == []


def test_a_part_is_fetched_alone(bucket: Any) -> None:
    content = os.urandom(2 * CHUNK_BYTES)
    form = {"file": photo_file(content), "content_type": "image/png", "file_path": "a.png"}
    url = client_of().post(f"{API}/assets", form).json()["url"]

    part = Client().get(url, headers={"Range": f"bytes={CHUNK_BYTES - 1}-{CHUNK_BYTES}"})

    assert part.getvalue() == content[CHUNK_BYTES - 1 : CHUNK_BYTES + 1]


def cut_off(monkeypatch: pytest.MonkeyPatch, *, calls: int) -> None:
    """Let nothing get through to the bucket for so many calls."""
    left = iter(range(calls))
    call = BaseClient._make_api_call

    def refuse(*args: Any) -> Any:
        if next(left, None) is not None:
            raise EndpointConnectionError(endpoint_url="https://s3.test")
        return call(*args)

    monkeypatch.setattr(BaseClient, "_make_api_call", refuse)


def test_a_bucket_that_is_away_is_told_as_such(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of()
    form = {"file": photo_file(), "content_type": "image/png", "file_path": "a.png"}
    asset = client.post(f"{API}/assets", form).json()
    cut_off(monkeypatch, calls=2)

    form["file"] = photo_file(b"other")
    for answer in (client.post(f"{API}/assets", form), client.get(asset["url"])):
        assert (answer.status_code, error_of(answer)["code"]) == (503, "storage_unavailable")
        assert int(answer["Retry-After"]) > 0
        assert "s3.test" not in answer.content.decode()


def test_an_asset_can_be_deleted_while_the_bucket_is_away(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"file": photo_file(), "content_type": "image/png", "file_path": "a.png"}
    asset = client_of().post(f"{API}/assets", form).json()
    cut_off(monkeypatch, calls=1)

    assert client_of().delete(f"{API}/assets/{asset['id']}").status_code == 204
    with pytest.raises(StorageAway):
        sweep()
    assert len(names_in(bucket)) == 1

    sweep()

    assert names_in(bucket) == []


@pytest.mark.django_db(transaction=True)
def test_a_bucket_that_is_away_costs_a_job_no_attempt(
    bucket: Any, fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = queue_job()
    cut_off(monkeypatch, calls=2)

    make_worker(fake.url).run_once()

    assert (fresh(job).status, fresh(job).attempt) == (JobStatus.SUCCEEDED, 1)
    assert len(names_in(bucket)) == 2
