"""What becomes of jobs when their time is over."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now

from jobs.housekeeping import sweep
from jobs.models import EXPIRED_KEPT_FOR, Job
from jobs.status import JobStatus
from jobs.tests.helpers import (
    claim,
    claim_new_job,
    diary,
    fresh,
    make_backend,
    make_user,
    queue_job,
)
from jobs.tests.helpers_api import API, check, client_of, finish

pytestmark = pytest.mark.django_db


def let_its_time_be_over(job: Job) -> None:
    Job.objects.filter(pk=job.pk).update(expires_at=Now() - timedelta(seconds=1))


def test_a_job_that_no_worker_took_in_its_time_is_not_taken_any_more() -> None:
    late, next_one = queue_job(), queue_job(make_user("bob"))
    let_its_time_be_over(late)

    held = claim()

    assert held is not None
    assert held.pk == next_one.pk
    assert claim() is None


def test_it_ends_as_expired_and_tells_so_for_a_while() -> None:
    job = queue_job()
    let_its_time_be_over(job)

    sweep()

    row = fresh(job)
    assert (row.status, row.step, row.completed_at is not None) == ("expired", "", True)
    assert diary(row) == ["submitted", "expired"]
    assert Job.objects.filter(expires_at__gt=Now() + EXPIRED_KEPT_FOR / 2).exists()
    answer = client_of().get(f"{API}/jobs/{job.pk}").json()
    check("Job", answer)
    assert (answer["status"], answer["queue_position"], answer["error"]) == ("expired", None, None)
    page = client_of().get(f"{API}/jobs?status=expired").json()
    assert [each["id"] for each in page["jobs"]] == [str(job.pk)]


def test_then_it_is_deleted_with_its_photo() -> None:
    job = queue_job()
    for _ in range(2):
        let_its_time_be_over(job)
        sweep()

    assert not Job.objects.exists()
    assert not make_user().assets.exists()


def test_a_job_that_waits_for_a_second_try_expires_too() -> None:
    job = queue_job(backend=make_backend())
    Job.objects.update(run_after=Now() + timedelta(hours=1))
    let_its_time_be_over(job)

    sweep()

    assert fresh(job).status == "expired"


@pytest.mark.parametrize("status", [JobStatus.RUNNING, JobStatus.CANCELING])
def test_a_job_that_a_worker_has_goes_on(status: JobStatus) -> None:
    job = claim_new_job()
    Job.objects.update(status=status)
    let_its_time_be_over(job)

    sweep()

    assert fresh(job).status == status


def test_a_finished_job_is_deleted_when_its_time_is_over() -> None:
    job = queue_job()
    finish(job, b"png")
    let_its_time_be_over(job)

    sweep()

    assert not Job.objects.exists()


def test_so_many_are_ended_in_one_batch() -> None:
    for _ in range(3):
        let_its_time_be_over(queue_job())

    assert [Job.objects.expire(2), Job.objects.expire(2), Job.objects.expire(2)] == [2, 1, 0]


def test_an_expired_job_cannot_be_canceled_any_more() -> None:
    job = queue_job()
    let_its_time_be_over(job)
    sweep()

    answer = client_of().post(f"{API}/jobs/{job.pk}/cancel").json()

    assert answer["status"] == "expired"
