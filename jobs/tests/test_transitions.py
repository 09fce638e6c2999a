from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.db.models.functions import Now

from jobs.models import (
    Asset,
    Backend,
    Blob,
    CancelRequested,
    Failure,
    Job,
    LeaseLost,
    Preview,
    QueueFull,
)
from jobs.status import FINAL, TRANSITIONS, JobStatus, Step, sources_of
from jobs.tests.helpers import (
    LEASE,
    claim,
    claim_new_job,
    diary,
    fresh,
    let_lease_expire,
    make_backend,
    make_user,
    queue_job,
)

pytestmark = pytest.mark.django_db
FAILURE = Failure("unknown", "It went wrong.", "3", "KSampler", "Traceback")


def preview_of(job: Job, image: bytes = b"image") -> Preview:
    return Preview(job=job, node_id="3", content_type="image/jpeg", image=image)


def holder_writes(job: Job) -> dict[str, Any]:
    """Everything a holder can write, as calls."""
    return {
        "checkpoint": lambda: Job.objects.checkpoint(job, Step.UPLOAD, {}, LEASE),
        "show_progress": lambda: Job.objects.show_progress(job, {"value": 0.5}, preview_of(job)),
        "succeed": lambda: Job.objects.succeed(job, [], {}),
        "fail": lambda: Job.objects.fail(job, FAILURE),
        "retry": lambda: Job.objects.retry(job, FAILURE, timedelta(), redraw=True),
        "hand_back": lambda: Job.objects.hand_back(job, "test"),
        "resubmit": lambda: Job.objects.resubmit(job, LEASE),
        "finish_cancel": lambda: Job.objects.finish_cancel(job),
        "release": lambda: Job.objects.release(job),
    }


WRITES = list(holder_writes(Job()))


@pytest.mark.parametrize("write", WRITES)
def test_a_worker_that_lost_its_lease_changes_nothing(write: str) -> None:
    held = claim_new_job("w1")
    let_lease_expire(held)
    claim("w2")
    before = Job.objects.values().get(pk=held.pk)

    with pytest.raises(LeaseLost):
        holder_writes(held)[write]()

    assert Job.objects.values().get(pk=held.pk) == before
    assert not held.checkpoints.exists()
    assert not Preview.objects.exists()
    assert diary(held) == ["submitted", "claimed", "claimed"]


@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_written_to_a_job_that_has_ended(write: str) -> None:
    held = claim_new_job("w1")
    Job.objects.fail(held, FAILURE)
    before = Job.objects.values().get(pk=held.pk)

    with pytest.raises(LeaseLost):
        holder_writes(held)[write]()

    assert Job.objects.values().get(pk=held.pk) == before


@pytest.mark.parametrize(
    "write", [w for w in WRITES if w not in {"fail", "finish_cancel", "release"}]
)
def test_a_canceling_job_neither_goes_on_nor_back_to_the_queue(write: str) -> None:
    held = claim_new_job("w1")
    Job.objects.cancel(held.pk, by="owner")

    with pytest.raises(CancelRequested):
        holder_writes(held)[write]()

    assert fresh(held).status == JobStatus.CANCELING


def test_every_final_status_is_final() -> None:
    assert {status for status, targets in TRANSITIONS.items() if not targets} == set(FINAL)
    assert JobStatus.SUCCEEDED not in TRANSITIONS[JobStatus.CANCELING]
    assert sources_of(JobStatus.QUEUED) == [JobStatus.RUNNING]


def test_the_last_preview_is_kept_while_its_drawing_goes_on() -> None:
    held = claim_new_job("w1")
    Job.objects.show_progress(held, {"value": 0.5}, preview_of(held))
    first = Preview.objects.get().saved_at
    let_lease_expire(held)
    again = claim("w2")
    assert again is not None
    Job.objects.show_progress(again, {"value": 0.6}, preview_of(again, b"another"))
    Job.objects.checkpoint(again, Step.UPLOAD, {}, LEASE)
    Job.objects.hand_back(again, "worker_stopped")

    kept = Preview.objects.get()
    assert bytes(kept.image) == b"another"
    assert kept.saved_at > first


@pytest.mark.parametrize("write", ["succeed", "fail", "finish_cancel", "retry", "resubmit"])
def test_the_preview_goes_with_its_drawing(write: str) -> None:
    held = claim_new_job()
    Job.objects.show_progress(held, None, preview_of(held))
    if write == "finish_cancel":
        Job.objects.cancel(held.pk, by="owner")

    holder_writes(held)[write]()

    assert not Preview.objects.exists()


def test_the_preview_of_a_job_goes_when_its_time_is_past() -> None:
    held = claim_new_job()
    Job.objects.show_progress(held, None, preview_of(held))
    Job.objects.hand_back(held, "worker_stopped")
    Job.objects.filter(pk=held.pk).update(expires_at=Now())

    assert Job.objects.expire(10) == 1
    assert not Preview.objects.exists()


def test_a_checkpoint_is_saved_once_and_renews_the_lease() -> None:
    held = claim_new_job()
    let_lease_expire(held)

    Job.objects.checkpoint(held, Step.UPLOAD, {"files": {}}, LEASE)
    held.step = Step.UPLOAD
    Job.objects.checkpoint(held, Step.UPLOAD, {"files": {"other": "x"}}, LEASE)

    row = fresh(held)
    assert row.step == "submit"
    assert row.checkpoints.get().result == {"files": {}}
    assert claim("w2") is None


def test_a_success_brings_outputs_checkpoint_and_status_together() -> None:
    held = claim_new_job()
    picture = Asset.store(
        b"png", owner=held.owner, job=held, content_type="image/png", name="a.png"
    )

    Job.objects.succeed(held, [picture], {"pictures": 1})

    row = fresh(held)
    assert (row.status, row.lease_expires_at, row.step) == ("succeeded", None, "")
    assert row.completed_at is not None
    assert row.outputs.get().hash.startswith("blake3:")
    assert row.checkpoints.get().step == "download"


def test_a_retry_raises_the_attempt_and_waits_by_the_databases_clock() -> None:
    held = claim_new_job()
    Job.objects.checkpoint(held, Step.UPLOAD, {}, LEASE)

    Job.objects.retry(held, FAILURE, timedelta(minutes=5), redraw=False)

    waiting = Job.objects.filter(run_after__gt=Now() + timedelta(minutes=4)).get()
    assert (waiting.status, waiting.attempt) == ("queued", 2)
    assert waiting.error == FAILURE.as_json()
    assert (waiting.drawing, waiting.backend_id) == (0, held.backend_id)


def test_a_redraw_starts_afresh_anywhere_under_a_new_prefix() -> None:
    held = claim_new_job()
    Job.objects.checkpoint(held, Step.UPLOAD, {}, LEASE)

    Job.objects.retry(held, FAILURE, timedelta(), redraw=True)

    row = fresh(held)
    assert (row.drawing, row.spoiled_drawings, row.step, row.backend) == (1, 1, "upload", None)
    assert not row.checkpoints.exists()


def test_a_polite_stop_charges_nothing() -> None:
    held = claim_new_job()
    Job.objects.checkpoint(held, Step.UPLOAD, {}, LEASE)

    Job.objects.hand_back(held, "worker_stopped")

    row = fresh(held)
    assert (row.status, row.attempt, row.lost_workers, row.step) == ("queued", 1, 0, "submit")
    assert row.checkpoints.count() == 1


def test_a_queued_job_is_canceled_at_once() -> None:
    job = queue_job()

    assert Job.objects.cancel(job.pk, by="owner")

    row = fresh(job)
    assert row.status == JobStatus.CANCELED
    assert row.completed_at is not None
    assert claim() is None


def test_a_running_job_is_canceled_by_its_holder_alone() -> None:
    held = claim_new_job()

    Job.objects.cancel(held.pk, by="owner")

    assert fresh(held).status == JobStatus.CANCELING
    assert fresh(held).lease_expires_at is not None
    Job.objects.finish_cancel(held)
    assert fresh(held).status == JobStatus.CANCELED


def test_a_queued_job_whose_prompt_may_be_on_a_gpu_is_ended_there_by_the_next_worker() -> None:
    held = claim_new_job()
    Job.objects.hand_back(held, "worker_stopped")

    Job.objects.cancel(held.pk, by="owner")

    assert fresh(held).status == JobStatus.CANCELING
    again = claim("w2")
    assert again is not None
    assert (again.status, again.lost_workers) == ("canceling", 0)


def test_a_cancel_whose_worker_died_goes_to_the_next_one() -> None:
    held = claim_new_job()
    Job.objects.cancel(held.pk, by="owner")
    let_lease_expire(held)

    again = claim("w2")

    assert again is not None
    assert again.status == JobStatus.CANCELING


def test_a_worker_that_let_go_of_a_canceling_job_cannot_keep_it_from_the_next() -> None:
    held = claim_new_job("w1")
    Job.objects.cancel(held.pk, by="owner")
    Job.objects.release(held)

    Job.objects.renew({held.pk: held.fencing_token}, LEASE)

    assert claim("w2") is not None


def test_a_second_cancel_changes_nothing() -> None:
    job = queue_job()
    Job.objects.cancel(job.pk, by="owner")
    before = fresh(job).completed_at

    assert not Job.objects.cancel(job.pk, by="owner")
    assert fresh(job).completed_at == before
    assert diary(job) == ["submitted", "cancel_asked"]


def test_a_finish_after_a_cancel_loses() -> None:
    held = claim_new_job()
    Job.objects.cancel(held.pk, by="owner")

    with pytest.raises(CancelRequested):
        Job.objects.succeed(held, [], {})


def test_renewing_tells_what_is_still_ours_and_what_is_to_end() -> None:
    mine, canceled, lost = claim_new_job(), claim_new_job(), queue_job()
    Job.objects.cancel(canceled.pk, by="owner")

    answer = Job.objects.renew({mine.pk: 1, canceled.pk: 1, lost.pk: 1}, LEASE)

    assert answer == {mine.pk: JobStatus.RUNNING, canceled.pk: JobStatus.CANCELING}


def test_the_database_itself_refuses_a_running_job_without_a_lease() -> None:
    job = queue_job()

    with pytest.raises(IntegrityError), transaction.atomic():
        Job.objects.filter(pk=job.pk).update(status=JobStatus.RUNNING)


def test_a_full_queue_stores_nothing() -> None:
    queue_job()
    job = Job(owner=make_user(), max_attempts=5)

    with pytest.raises(QueueFull) as refused:
        Job.objects.submit(
            job, inputs=[], queue_limit=1, queue_limit_per_owner=9, retention=timedelta(days=1)
        )

    assert refused.value.code == "queue_full"
    assert refused.value.retry_after >= 1
    assert Job.objects.count() == 1


def test_one_owners_limit_leaves_room_for_another() -> None:
    queue_job(make_user("ann"))
    limits: dict[str, Any] = {
        "inputs": [],
        "queue_limit": 9,
        "queue_limit_per_owner": 1,
        "retention": timedelta(days=1),
    }

    with pytest.raises(QueueFull) as refused:
        Job.objects.submit(Job(owner=make_user("ann"), max_attempts=5), **limits)
    Job.objects.submit(Job(owner=make_user("bob"), max_attempts=5), **limits)

    assert refused.value.code == "owner_queue_full"


def test_the_wait_for_a_place_comes_from_the_measured_rate() -> None:
    for _ in range(2):
        job = queue_job()
        Job.objects.cancel(job.pk, by="owner")
    Job.objects.update(started_at=Now() - timedelta(seconds=100))

    assert Job.objects.seconds_per_job() == 50


@pytest.mark.parametrize("seed", [0, 2**53 + 1, 2**64 - 1])
def test_seeds_survive_the_round_trip(seed: int) -> None:
    job = queue_job(seed=seed)

    row = fresh(job)
    assert row.params["seed"] == seed
    assert row.graph["3"]["inputs"]["seed"] == seed


def test_a_deleted_job_takes_its_photo_and_pictures_along(
    django_capture_on_commit_callbacks: Any,
) -> None:
    held = claim_new_job()
    picture = Asset.store(b"png", owner=held.owner, job=held, content_type="image/png")
    Job.objects.succeed(held, [picture], {})

    with django_capture_on_commit_callbacks(execute=True):
        Job.objects.delete_for_owner(held.pk)

    assert not Job.objects.exists()
    assert not Asset.objects.exists()
    assert not Blob.objects.exists()


def test_a_photo_that_another_job_uses_stays() -> None:
    first, second = queue_job(), queue_job()
    second.inputs.set(first.inputs.all())

    Job.objects.delete_for_owner(first.pk)

    assert second.inputs.count() == 1


def test_a_job_deleted_in_mid_run_is_hidden_at_once_and_gone_when_its_worker_lets_go() -> None:
    held = claim_new_job()

    Job.objects.delete_for_owner(held.pk)

    assert not Job.objects.visible_to(held.owner).exists()
    assert fresh(held).status == JobStatus.CANCELING
    Job.objects.finish_cancel(held)
    assert not Job.objects.exists()


def test_a_resting_backend_is_up_again_when_it_answers_but_a_disabled_one_is_not() -> None:
    resting, disabled = (
        Backend.objects.register("http://a.test"),
        Backend.objects.register("http://b.test"),
    )
    resting.rest("refused")
    Backend.objects.filter(pk=disabled.pk).update(status=Backend.Status.DISABLED)

    for backend in (resting, disabled):
        backend.seen("0.26.0")

    statuses = dict(Backend.objects.values_list("name", "status"))
    assert statuses == {"a.test": "up", "b.test": "disabled"}


def test_a_backend_rests_for_its_time_even_if_it_answers() -> None:
    backend = make_backend()
    backend.rest("stuck", timedelta(minutes=1))

    backend.seen("0.26.0")

    assert Backend.objects.get().status == Backend.Status.RESTING


def test_a_backend_that_rested_gets_one_job_until_a_run_ends_well_on_it() -> None:
    backend = make_backend()
    backend.rest("stuck")
    backend.seen("0.26.0")
    for _ in range(3):
        queue_job()

    on_trial = [claim(), claim()]
    backend.recovered()
    trusted = claim()

    assert [job is not None for job in on_trial] == [True, False]
    assert trusted is not None
    assert (Backend.objects.get().failures, Backend.objects.get().reason) == (0, "")


def test_a_backends_name_shows_no_password() -> None:
    assert Backend.objects.register("https://user:secret@gpu.test:8188/").name == "gpu.test:8188"
