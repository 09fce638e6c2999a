"""How long assets live, who keeps them, and what two at once do to each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.base import ContentFile
from django.db import transaction
from django.db.models.functions import Now

from jobs.assets import Reference, mint, over_bytes, upload
from jobs.housekeeping import sweep
from jobs.models import Asset, AssetGone, Blob, Job, hash_of, lock_assets
from jobs.tests.helpers import claim, make_user, queue_job, start
from jobs.tests.helpers_api import finish, picture_bytes

pytestmark = pytest.mark.django_db

AN_HOUR = timedelta(hours=1)
NO_LIMIT = 10**12


def reference(content: bytes, owner: User, **values: Any) -> Reference:
    said: dict[str, Any] = {"name": "me.png", "content_type": "image/png", "lifetime": AN_HOUR}
    return Reference(owner_id=owner.pk, hash=hash_of(ContentFile(content)), **said | values)


def uploaded(content: bytes = b"a face", owner: User | None = None, **values: Any) -> Asset:
    wanted = reference(content, owner or make_user(), **values)
    return upload(ContentFile(content), wanted, NO_LIMIT)[0]


def submit_with(*inputs: Asset) -> Job:
    """Queue a job with these inputs."""
    return Job.objects.submit(
        Job(owner=make_user(), kind=Job.Kind.WORKFLOW, max_attempts=5),
        inputs=inputs,
        queue_limit=1000,
        queue_limit_per_owner=1000,
        retention=timedelta(days=30),
    )


def let_time_pass(*assets: Asset) -> None:
    """Put the end of uploads into the past."""
    chosen = Asset.objects.filter(pk__in=[asset.pk for asset in assets])
    chosen.update(expires_at=Now() - timedelta(seconds=1))


def is_there(asset: Asset) -> bool:
    return Asset.objects.filter(pk=asset.pk).exists()


# --- how long they live ---


def test_an_upload_is_swept_when_its_time_is_over_and_not_before() -> None:
    old, young = uploaded(b"old"), uploaded(b"young")
    let_time_pass(old)

    sweep()

    assert (is_there(old), is_there(young)) == (False, True)
    assert Blob.objects.get().name == young.file.name


def test_a_sweep_of_one_leaves_shared_bytes_to_the_other() -> None:
    old, young = uploaded(name="old.png"), uploaded(name="young.png")
    let_time_pass(old)

    sweep()

    assert young.file.read() == b"a face"


def test_a_job_keeps_what_it_uses_past_its_time() -> None:
    asset = uploaded()
    job = submit_with(asset)
    let_time_pass(asset)

    sweep()
    assert asset in Asset.objects.available()

    finish(job)
    Job.objects.delete_for_owner(job.pk)
    assert asset not in Asset.objects.available()
    sweep()
    assert not Blob.objects.exists()


def test_a_deleted_job_leaves_an_upload_to_its_own_time() -> None:
    asset = uploaded()
    job = submit_with(asset)
    finish(job)

    Job.objects.delete_for_owner(job.pk)

    assert asset in Asset.objects.available()


def test_an_upload_stays_while_a_job_that_uses_it_is_on_its_way_out() -> None:
    asset = uploaded()
    job = submit_with(asset)
    claim()

    Job.objects.delete_for_owner(job.pk)

    assert asset in Asset.objects.available()


def test_a_deleted_job_leaves_its_picture_to_a_job_that_is_drawn_from_it() -> None:
    first = queue_job()
    (picture,) = finish(first, picture_bytes())
    second = submit_with(picture)

    Job.objects.delete_for_owner(first.pk)
    assert second.inputs.get().file.read() == picture_bytes()
    assert picture in Asset.objects.available()

    finish(second)
    Job.objects.delete_for_owner(second.pk)
    assert not Blob.objects.exists()


def test_a_deleted_job_leaves_its_bytes_to_an_upload_over_them() -> None:
    job = queue_job()
    (picture,) = finish(job, picture_bytes())
    asset = uploaded(picture_bytes())
    assert asset.file == picture.file

    Job.objects.delete_for_owner(job.pk)

    assert asset.file.read() == picture_bytes()
    assert Blob.objects.count() == 1


def test_an_owner_who_deletes_all_has_no_upload_left() -> None:
    unused, used = uploaded(b"unused"), uploaded(b"used")
    job = submit_with(used)
    held = claim()
    assert held is not None

    Job.objects.delete_all_for_owner(job.owner)
    assert not Asset.objects.available().filter(pk__in=[unused.pk, used.pk])

    Job.objects.finish_cancel(Job.objects.get(pk=job.pk))
    sweep()
    assert not Blob.objects.exists()


def test_bytes_without_a_row_are_swept_when_no_row_can_come_any_more() -> None:
    Asset.store(b"crashed", owner=make_user(), content_type="image/png")
    sweep()
    assert Blob.objects.exists()

    Blob.objects.update(kept_until=Now() - timedelta(seconds=1))
    sweep()

    assert not Blob.objects.exists()


def test_a_job_is_not_queued_with_an_input_that_is_gone() -> None:
    asset = uploaded()
    asset.delete()

    with pytest.raises(AssetGone):
        submit_with(asset)

    assert not Job.objects.exists()


# --- two at once ---


def at_once(*targets: Callable[[], object]) -> None:
    """Run these on threads that begin together, and wait for their end."""
    barrier = threading.Barrier(len(targets))

    def run(target: Callable[[], object]) -> None:
        barrier.wait()
        target()

    for thread in [start(partial(run, target)) for target in targets]:
        thread.join()


@pytest.mark.django_db(transaction=True)
def test_many_uploads_of_the_same_bytes_at_once_are_one() -> None:
    owner, answers = make_user(), list[tuple[Asset, bool]]()

    def send() -> None:
        content = ContentFile(b"a face")
        answers.append(upload(content, reference(b"a face", owner), NO_LIMIT))

    at_once(*[send] * 8)

    assert len({asset.pk for asset, _is_new in answers}) == 1
    assert sorted(is_new for _asset, is_new in answers) == [False] * 7 + [True]
    assert (Asset.objects.count(), Blob.objects.count()) == (1, 1)


@pytest.mark.django_db(transaction=True)
def test_an_upload_beside_a_delete_of_the_same_bytes_keeps_its_own() -> None:
    for _ in range(20):
        old = uploaded(name="old.png")

        at_once(
            Asset.objects.filter(pk=old.pk).delete_with_files,
            lambda: uploaded(name="new.png"),
        )

        assert Asset.objects.get(name="new.png").file.read() == b"a face"
        assert Blob.objects.count() == 1
        Asset.objects.all().delete_with_files()


@pytest.mark.django_db(transaction=True)
def test_the_last_two_over_the_same_bytes_deleted_at_once_leave_none() -> None:
    for _ in range(20):
        assets = [uploaded(name=f"{n}.png") for n in range(2)]

        at_once(*(Asset.objects.filter(pk=a.pk).delete_with_files for a in assets))

        assert not Blob.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_who_mints_waits_for_a_delete_and_finds_nothing() -> None:
    asset = uploaded()
    answers = list[object]()

    with transaction.atomic():
        lock_assets(asset.owner_id)
        waiting = start(lambda: answers.append(mint(reference(b"a face", asset.owner))))
        Asset.objects.filter(pk=asset.pk).delete_with_files()
    waiting.join()

    assert answers == [None]


@pytest.mark.django_db(transaction=True)
def test_a_job_sent_beside_a_delete_of_its_input_has_it_or_is_not_queued() -> None:
    for _ in range(20):
        asset = uploaded()

        def send(asset: Asset = asset) -> None:
            with suppress(AssetGone):
                submit_with(asset)

        def delete(asset: Asset = asset) -> None:
            with transaction.atomic():
                lock_assets(asset.owner_id)
                if not asset.is_in_use:
                    Asset.objects.filter(pk=asset.pk).delete_with_files()

        at_once(send, delete)

        assert Job.objects.count() == Job.inputs.through.objects.count() == Blob.objects.count()
        Job.objects.all().delete()
        Asset.objects.all().delete_with_files()


@pytest.mark.django_db(transaction=True)
def test_a_picture_drawn_from_while_its_job_is_deleted_is_there_or_refused() -> None:
    for _ in range(10):
        first = queue_job()
        (picture,) = finish(first, picture_bytes())

        def send(picture: Asset = picture) -> None:
            with suppress(AssetGone):
                submit_with(picture)

        at_once(send, partial(Job.objects.delete_for_owner, first.pk))

        for job in Job.objects.all():
            assert job.inputs.get().file.read() == picture_bytes()
        Job.objects.all().delete()
        Asset.objects.all().delete_with_files()


@pytest.mark.django_db(transaction=True)
def test_a_job_that_is_being_drawn_from_is_purged_later() -> None:
    job = queue_job()
    finish(job, picture_bytes())
    Job.objects.update(deleted_at=Now())

    with transaction.atomic():
        Job.objects.select_for_update(no_key=True).get(pk=job.pk)
        start(Job.objects.purge_deleted).join(20)
        assert job.inputs.exists()
    sweep()

    assert not Job.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_one_owner_waits_for_no_other() -> None:
    bob = make_user("bob")
    answers = list[Asset]()

    with transaction.atomic():
        lock_assets(make_user().pk)
        start(lambda: answers.append(uploaded(owner=bob))).join(20)

    assert answers
    assert not over_bytes(make_user().pk, answers[0].hash).exists()
