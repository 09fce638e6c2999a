"""Owners take turns: nobody's flood keeps another one waiting."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.db.models.functions import Now

from jobs.models import Failure, Job, Terms
from jobs.tests.helpers import LEASE, claim, explained, fresh, make_backend, make_user
from jobs.tests.test_claims import fill_table

pytestmark = pytest.mark.django_db

FLOOD = 40
PATIENT = Terms(LEASE, prompts_per_backend=10_000, max_lost_workers=3)
BROKEN = Failure("unknown", "The server that draws did not answer.")


@pytest.fixture
def ann() -> User:
    make_backend()
    return make_user("ann")


@pytest.fixture
def bob() -> User:
    return make_user("bob")


def submit(owner: User, priority: int = 0) -> Job:
    """Queue a job of nothing: that is fast."""
    return Job.objects.submit(
        Job(owner=owner, priority=priority, max_attempts=5),
        inputs=[],
        queue_limit=1_000_000,
        queue_limit_per_owner=1_000_000,
        retention=timedelta(days=1),
    )


def flood(owner: User, priority: int = 0, jobs: int = FLOOD) -> list[Job]:
    return [submit(owner, priority) for _ in range(jobs)]


def claim_next() -> Job:
    job = claim(terms=PATIENT)
    assert job is not None
    return job


def serve(jobs: int = 1) -> list[Job]:
    """Claim the next jobs and end each before the next is claimed."""
    served = [claim_next() for _ in range(jobs)]
    for job in served:
        Job.objects.succeed(job, [], {})
    return served


def place_of(job: Job) -> int:
    """Return how many jobs are claimed up to this one, itself included."""
    for place in range(1, 1000):
        if claim_next().pk == job.pk:
            return place
    raise AssertionError


def send_back(job: Job, delay: timedelta) -> None:
    Job.objects.retry(job, BROKEN, delay, redraw=True)


def test_five_hundred_jobs_of_one_owner_do_not_delay_the_first_of_another(
    ann: User, bob: User
) -> None:
    flood(ann, jobs=500)

    assert place_of(submit(bob)) == 2


def test_nor_when_half_of_them_are_done(ann: User, bob: User) -> None:
    flood(ann)
    serve(FLOOD // 2)

    assert place_of(submit(bob)) == 2


def test_who_has_had_many_drawn_is_not_behind_the_flood_of_a_newcomer(ann: User, bob: User) -> None:
    flood(ann)
    serve(FLOOD)
    flood(bob)

    assert place_of(submit(ann)) == 2


def test_what_was_canceled_counts_for_nothing(ann: User, bob: User) -> None:
    flood(bob)
    for job in flood(ann):
        Job.objects.cancel(job.pk, by="owner")

    assert place_of(submit(ann)) == 2


def test_nor_does_what_was_asked_for_at_another_priority(ann: User, bob: User) -> None:
    flood(bob)
    flood(ann, priority=-1)

    assert place_of(submit(ann)) == 2


@pytest.mark.parametrize("priority", [-5, 5])
def test_turns_are_taken_within_each_priority(ann: User, bob: User, priority: int) -> None:
    flood(ann, priority)

    assert place_of(submit(bob, priority)) == 2


def test_a_higher_priority_goes_before_all_turns(ann: User, bob: User) -> None:
    flood(ann)
    submit(bob)

    assert place_of(submit(ann, priority=1)) == 1


def test_who_sends_one_at_a_time_gets_every_other_place_and_no_more(ann: User, bob: User) -> None:
    flood(ann)
    served = []

    for _ in range(12):
        if not Job.objects.filter(owner=bob, status="queued").exists():
            submit(bob)
        served += serve()

    assert [job.owner for job in served] == [ann, bob] * 6


def test_three_owners_who_come_and_go_each_get_their_share(ann: User, bob: User) -> None:
    flood(ann)
    serve(10)
    eve = make_user("eve")
    flood(bob, jobs=11)
    serve(10)
    flood(eve, jobs=6)

    shares = [job.owner for job in serve(18)]

    assert [shares.count(owner) for owner in (ann, bob, eve)] == [6, 6, 6]
    assert {job.owner for job in serve(5)} == {ann}
    assert place_of(submit(eve)) == 2


def test_a_job_that_waits_for_its_next_try_lets_nobody_pass(ann: User, bob: User) -> None:
    flood(ann)
    send_back(claim_next(), timedelta(hours=1))  # its turn is the first for an hour
    serve(20)
    flood(bob)

    assert [job.owner for job in serve(6)] == [ann, bob] * 3


def test_a_job_that_comes_back_is_not_behind_the_flood_of_a_newcomer(ann: User, bob: User) -> None:
    flood(ann)
    serve(FLOOD - 1)
    last = claim_next()
    send_back(last, timedelta(hours=1))
    flood(bob)
    Job.objects.filter(pk=last.pk).update(run_after=Now())

    assert place_of(last) <= 2


def test_a_newcomer_is_not_behind_a_flood_that_failed_and_comes_back(ann: User, bob: User) -> None:
    flood(ann)
    for _ in range(FLOOD):
        send_back(claim_next(), timedelta(hours=1))
    Job.objects.update(run_after=Now())
    held = [claim_next() for _ in range(3)]

    assert place_of(submit(bob)) <= 2
    assert fresh(held[0]).owner == ann


def test_a_turn_among_a_hundred_thousand_jobs_of_one_owner_is_found_by_index(
    ann: User, bob: User
) -> None:
    fill_table(ann.pk, 200_000)  # half of them queued

    with explained("jobs_job") as plans:
        submit(bob)
        submit(ann)

    for last, served in (plans[2:4], plans[7:9]):  # after the counts of those in the queue
        assert "Index Only Scan Backward using job_owner_queue" in last
        assert "Index Scan using job_queue" in served
        assert "Sort" not in last + served
