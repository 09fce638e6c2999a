from __future__ import annotations

from dataclasses import replace

import pytest
from django.db import DataError, OperationalError, transaction
from pytest_django import Settings

from comfy.graph import OUTPUT_NODE
from jobs.developing import Photo
from jobs.models import Asset, Blob, Job, QueueFull
from jobs.portraits import draw_again, draw_like, submit_portrait
from jobs.status import JobStatus
from jobs.tests.helpers import claim, make_user, photo_bytes
from jobs.tests.helpers_api import finish, picture_bytes

pytestmark = pytest.mark.django_db


def photo() -> Photo:
    return Photo(photo_bytes(), "image/jpeg", 96, 96)


def test_a_portrait_is_queued_with_its_photo_its_graph_and_all_its_params() -> None:
    job = submit_portrait(make_user(), photo(), {"prompt": "by the sea", "steps": 4, "seed": None})

    asset = job.inputs.get()
    assert (job.status, job.kind) == (JobStatus.QUEUED, "portrait")
    assert asset.file.read() == photo().content
    assert (asset.width, asset.height, asset.content_type) == (96, 96, "image/jpeg")
    assert job.graph["12"]["inputs"]["image"]["info"]["id"] == str(asset.pk)
    assert job.graph[OUTPUT_NODE]["inputs"]["filename_prefix"] == "portrait"
    assert job.graph["3"]["inputs"]["seed"] == job.params["seed"]
    assert job.params | {"prompt": "by the sea", "steps": 4, "width": 512, "lora": None} == (
        job.params
    )


def test_a_seed_is_drawn_for_those_who_send_none() -> None:
    seeds = {
        submit_portrait(make_user(), photo(), {"prompt": "x"}).params["seed"] for _ in range(3)
    }

    assert len(seeds) == 3
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_what_the_settings_say_is_drawn_with(settings: Settings) -> None:
    settings.GENFLOW_CHECKPOINT = "other.safetensors"

    job = submit_portrait(make_user(), photo(), {"prompt": "x"})

    assert job.graph["4"]["inputs"]["ckpt_name"] == "other.safetensors"


def test_a_full_queue_leaves_neither_rows_nor_bytes(settings: Settings) -> None:
    settings.GENFLOW_QUEUE_LIMIT = 0

    with pytest.raises(QueueFull):
        submit_portrait(make_user(), photo(), {"prompt": "x"})

    assert not Job.objects.exists()
    assert not Asset.objects.exists()
    assert not Blob.objects.exists()


def test_a_refused_portrait_leaves_no_bytes() -> None:
    with pytest.raises(DataError):
        submit_portrait(make_user(), photo(), {"prompt": "x", "priority": 99_999})

    assert not Blob.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_connection_that_dies_after_the_commit_does_not_cost_the_job_its_photo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def submit_and_die(job: Job, **options: object) -> Job:
        job.turn = 0
        job.save(force_insert=True)
        transaction.on_commit(die)
        return job

    def die() -> None:
        raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(Job.objects, "submit", submit_and_die)
    with pytest.raises(OperationalError):
        submit_portrait(make_user(), photo(), {"prompt": "x"})

    assert Asset.objects.get().file.read() == photo().content


def test_drawing_again_makes_a_new_job_of_the_same_photo_and_seed(
    settings: Settings,
) -> None:
    params = {"prompt": "x", "seed": 2**64 - 1, "cfg": 3, "priority": 2}
    old = submit_portrait(make_user(), photo(), params, {"shoot": "7"})
    finish(old, picture_bytes())
    settings.GENFLOW_CHECKPOINT = "mended.safetensors"

    again = draw_again(old)

    assert again.pk != old.pk
    assert (again.status, again.owner, again.priority) == (JobStatus.QUEUED, old.owner, 2)
    assert (again.params, again.metadata) == (old.params, {"shoot": "7"})
    assert list(again.inputs.all()) == list(old.inputs.all())
    assert again.graph["4"]["inputs"]["ckpt_name"] == "mended.safetensors"


def test_what_was_doubtful_about_a_photo_is_said_of_each_portrait_of_it() -> None:
    doubts = [{"code": "no_face", "message": "No face was found."}]
    old = submit_portrait(make_user(), replace(photo(), warnings=doubts), {"prompt": "x"})
    like = draw_like(old, {"prompt": "y"})
    finish(old)

    assert [job.warnings for job in (old, like, draw_again(old))] == [doubts] * 3


def test_a_workflow_is_drawn_again_as_it_was() -> None:
    old = submit_portrait(make_user(), photo(), {"prompt": "x"})
    Job.objects.filter(pk=old.pk).update(kind=Job.Kind.WORKFLOW, graph={"1": {"inputs": {}}})
    finish(old)

    again = draw_again(old)

    assert (again.kind, again.graph) == ("workflow", {"1": {"inputs": {}}})


@pytest.mark.parametrize("claimed", [False, True])
def test_a_job_that_has_not_ended_is_not_drawn_again(claimed: bool) -> None:
    job = submit_portrait(make_user(), photo(), {"prompt": "x"})
    if claimed:
        claim()

    with pytest.raises(Job.DoesNotExist):
        draw_again(job)


def test_the_photo_outlives_the_first_of_two_jobs() -> None:
    old = submit_portrait(make_user(), photo(), {"prompt": "x"})
    finish(old)
    again = draw_again(old)

    Job.objects.delete_for_owner(old.pk)

    assert again.inputs.get().file.read() == photo().content
