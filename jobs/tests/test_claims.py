from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.db import connection
from django.db.models.functions import Now

from jobs.models import Backend, Job, Terms
from jobs.tests.helpers import (
    LEASE,
    TERMS,
    claim,
    claim_new_job,
    diary,
    explained,
    fresh,
    let_lease_expire,
    make_backend,
    make_user,
    queue_job,
    start,
)

pytestmark = pytest.mark.django_db


def test_a_claim_gives_the_job_a_lease_a_token_and_a_backend() -> None:
    held = claim_new_job("w1")

    row = fresh(held)
    assert (row.status, row.worker_id, row.fencing_token) == ("running", "w1", 1)
    assert row.lease_expires_at is not None
    assert row.started_at is not None
    assert row.backend is not None
    assert row.attempt == 1


def test_nothing_queued_is_nothing_claimed() -> None:
    assert claim() is None


def test_a_job_under_a_lease_is_not_claimed_again() -> None:
    claim_new_job("w1")

    assert claim("w2") is None


def test_a_job_whose_lease_ran_out_goes_to_the_next_worker_without_spending_an_attempt() -> None:
    held = claim_new_job("w1")
    let_lease_expire(held)

    again = claim("w2")

    assert again is not None
    assert (again.pk, again.worker_id, again.fencing_token) == (held.pk, "w2", 2)
    assert (again.attempt, again.lost_workers) == (1, 1)


def test_a_restarted_worker_of_the_same_name_gets_a_new_token() -> None:
    held = claim_new_job("w1")
    let_lease_expire(held)

    again = claim("w1")

    assert again is not None
    assert again.fencing_token == held.fencing_token + 1


def test_a_job_that_outlives_too_many_workers_fails_as_worker_lost() -> None:
    job = queue_job()
    for _ in range(TERMS.max_lost_workers + 1):
        held = claim()
        assert held is not None
        let_lease_expire(held)

    assert claim() is None
    row = fresh(job)
    assert row.error is not None
    assert (row.status, row.error["code"]) == ("failed", "worker_lost")
    assert row.attempt == 1


def test_a_delayed_job_is_not_claimed_before_its_time() -> None:
    job = queue_job()
    Job.objects.filter(pk=job.pk).update(run_after=Now() + timedelta(hours=1))

    assert claim() is None


def test_priority_comes_before_order() -> None:
    queue_job()
    urgent = queue_job(priority=5)

    held = claim()

    assert held is not None
    assert held.pk == urgent.pk


def test_owners_take_turns_however_much_one_of_them_sends() -> None:
    ann, bob = make_user("ann"), make_user("bob")
    flood = [queue_job(ann) for _ in range(4)]
    late = queue_job(bob)
    make_backend()

    order = [claim(terms=Terms(LEASE, 10, 3)) for _ in range(3)]

    assert [job and job.pk for job in order] == [flood[0].pk, late.pk, flood[1].pk]


def test_an_owner_who_comes_late_is_not_put_before_everybody_for_ever() -> None:
    ann, bob = make_user("ann"), make_user("bob")
    for _ in range(3):
        queue_job(ann)
        claim(terms=Terms(LEASE, 10, 3))
    waiting = queue_job(ann)

    first = queue_job(bob)
    second = queue_job(bob)

    assert first.turn == waiting.turn
    assert second.turn == first.turn + 1


def test_a_backend_gets_no_more_prompts_than_its_limit() -> None:
    for _ in range(3):
        queue_job()

    claimed = [claim(), claim(), claim()]

    assert [job is not None for job in claimed] == [True, True, False]


def test_a_dead_holders_job_does_not_block_its_own_takeover() -> None:
    full = Terms(LEASE, prompts_per_backend=1, max_lost_workers=3)
    queue_job()
    held = claim(terms=full)
    assert held is not None
    let_lease_expire(held)

    assert claim("w2", terms=full) is not None


def test_a_job_handed_back_with_its_prompt_keeps_its_place_and_its_backend() -> None:
    make_backend("http://other.test")
    held = claim_new_job("w1")
    Job.objects.hand_back(held, "test")

    again = claim("w2", terms=Terms(LEASE, 1, 3))

    assert again is not None
    assert again.backend_id == held.backend_id
    assert again.lost_workers == 0


def test_a_resting_backend_gets_no_queued_job_but_its_abandoned_ones_are_looked_after() -> None:
    held = claim_new_job("w1")
    queue_job()
    backend = Backend.objects.get()
    backend.rest("connection refused")
    let_lease_expire(held)

    again = claim("w2")

    assert again is not None
    assert again.pk == held.pk
    assert claim("w2") is None


def test_a_disabled_backend_gets_nothing_new_but_what_is_on_it_is_seen_to_its_end() -> None:
    held = claim_new_job("w1")
    Job.objects.hand_back(held, "worker_stopped")
    Backend.objects.update(status=Backend.Status.DISABLED)
    queue_job(priority=5)

    again = claim("w2")

    assert again is not None
    assert again.pk == held.pk
    assert claim("w2") is None


def test_a_job_moves_only_from_a_backend_that_nobody_attends() -> None:
    held = claim_new_job("w1")
    let_lease_expire(held)
    other = make_backend("http://other.test")

    assert Job.objects.claim("w2", [other.pk], TERMS) is None
    first = Backend.objects.exclude(pk=other.pk).get()
    moved = Job.objects.claim("w2", [other.pk], TERMS, unattended=[first.pk])

    assert moved is not None
    assert (moved.pk, moved.backend_id, moved.step) == (held.pk, other.pk, "upload")


def test_the_diary_tells_who_was_lost() -> None:
    held = claim_new_job("w1")
    let_lease_expire(held)
    claim("w2")

    last = held.events.last()
    assert last is not None
    assert last.facts["lost_worker"] == "w1"
    assert diary(held) == ["submitted", "claimed", "claimed"]


@pytest.mark.django_db(transaction=True)
def test_many_workers_claiming_at_once_get_each_job_once() -> None:
    make_backend()
    jobs = {queue_job().pk for _ in range(12)}
    claimed: list[object] = []
    barrier = threading.Barrier(6)

    def work() -> None:
        barrier.wait(10)
        while job := claim(threading.current_thread().name, Terms(LEASE, 100, 3)):
            claimed.append(job.pk)

    for thread in [start(work) for _ in range(6)]:
        thread.join()

    assert len(claimed) == len(jobs)
    assert set(claimed) == jobs


@pytest.mark.django_db(transaction=True)
def test_the_limit_of_a_backend_is_exact_however_many_claim_at_once() -> None:
    make_backend()
    for _ in range(8):
        queue_job()
    claimed: list[object] = []
    barrier = threading.Barrier(6)

    def work() -> None:
        barrier.wait(10)
        if job := claim():
            claimed.append(job.pk)

    for thread in [start(work) for _ in range(6)]:
        thread.join()

    assert len(claimed) == TERMS.prompts_per_backend


def fill_table(owner_id: int, rows: int) -> None:
    """Half of them queued and half succeeded."""
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO jobs_job (id, owner_id, kind, params, graph, metadata, status, step, priority, turn,
                max_attempts, attempt, lost_workers, resubmits, drawing, spoiled_drawings, worker_id,
                fencing_token, error_detail, refused_by, warnings, completed_at)
            SELECT gen_random_uuid(), %s, 'portrait', '{}', '{}', '{}',
                CASE n %% 2 WHEN 0 THEN 'queued' ELSE 'succeeded' END, '', 0, n, 5, 1, 0, 0, 0, 0, '', 0, '', '[]', '[]',
                CASE n %% 2 WHEN 0 THEN NULL ELSE now() END
            FROM generate_series(1, %s) AS n""",
            [owner_id, rows],
        )
        cursor.execute("ANALYZE jobs_job")


def test_a_claim_among_a_hundred_thousand_rows_goes_by_index() -> None:
    make_backend()
    fill_table(make_user().pk, 100_000)

    with explained("jobs_job") as plans:
        held = claim()

    assert held is not None
    busy, abandoned, next_in_queue = plans
    assert "job_on_backend" in busy
    assert "job_held" in abandoned or "job_on_backend" in abandoned
    assert "Index Scan using job_queue" in next_in_queue
    assert "Seq Scan on jobs_job" not in "".join(plans)
