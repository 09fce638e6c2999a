"""Real processes, killed, frozen and stopped."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack

import pytest

from fake_comfy import FakeComfy
from jobs.models import Asset, Job
from jobs.status import JobStatus
from jobs.tests.helpers import (
    claim,
    fresh,
    let_lease_expire,
    make_user,
    make_worker,
    queue_job,
    run_until_done,
    take_over,
    wait_until,
)
from jobs.tests.processes import worker_process
from jobs.tests.test_worker import runs

pytestmark = pytest.mark.django_db(transaction=True)


def saw(fake: FakeComfy, method: str, path: str) -> bool:
    return any((r.method, r.path) == (method, path) for r in fake.requests)


def assert_one_picture(fake: FakeComfy, job: Job) -> None:
    row = fresh(job)
    assert (row.status, row.outputs.count()) == ("succeeded", 1)
    assert runs(fake, job) == (1, 1)


@pytest.mark.parametrize(
    ("step", "fault", "method", "path"),
    [
        ("upload", "hang_upload", "POST", "/upload/image"),
        ("submit", "hang_prompt", "POST", "/prompt"),
        ("wait", None, "POST", "/prompt"),
        ("download", "hang_view", "GET", "/view"),
    ],
)
def test_a_worker_killed_inside_a_step_loses_and_repeats_nothing(
    fake: FakeComfy, step: str, fault: str | None, method: str, path: str
) -> None:
    fake.seconds = 1
    if fault:
        fake.fault(fault, seconds=30)
    job = queue_job()
    with worker_process(fake.url) as victim:
        wait_until(lambda: saw(fake, method, path) and fresh(job).step == step)
        victim.kill()
    assert claim("w2") is None  # while the lease holds, nobody can touch the job
    assert fresh(job).status == JobStatus.RUNNING

    let_lease_expire(job)
    run_until_done(job, make_worker(fake.url))

    assert_one_picture(fake, job)
    assert (fresh(job).attempt, fresh(job).lost_workers) == (1, 1)


def test_a_dead_workers_job_is_taken_over_by_itself_when_the_lease_runs_out(
    fake: FakeComfy,
) -> None:
    fake.seconds = 1
    job = queue_job()
    with worker_process(fake.url, GENFLOW_LEASE_SECONDS=2) as victim:
        wait_until(lambda: runs(fake, job) == (1, 1))
        victim.kill()

    with worker_process(fake.url, "--drain", GENFLOW_LEASE_SECONDS=2) as second:
        assert second.wait() == 0

    assert_one_picture(fake, job)


def test_a_worker_frozen_past_its_lease_changes_nothing_when_it_wakes_up(fake: FakeComfy) -> None:
    fake.seconds = 1
    job = queue_job()
    with worker_process(fake.url, GENFLOW_LEASE_SECONDS=2) as frozen:
        wait_until(lambda: fresh(job).step == "wait")
        frozen.freeze()
        take_over(job, make_worker(fake.url))
        before = Job.objects.values().get(pk=job.pk)

        frozen.send(signal.SIGCONT)
        other = queue_job()
        wait_until(lambda: fresh(other).is_final)
        frozen.send(signal.SIGTERM)
        assert frozen.wait() == 0
        lines = [json.loads(line)["message"] for line in frozen.log().splitlines()]

    assert Job.objects.values().get(pk=job.pk) == before
    assert_one_picture(fake, job)
    assert lines.count("job.lease_lost") == 1


def test_a_polite_stop_leaves_the_run_to_the_next_worker(fake: FakeComfy) -> None:
    fake.seconds = 3
    job = queue_job()
    with worker_process(fake.url) as first:
        wait_until(lambda: runs(fake, job) == (1, 1))
        first.send(signal.SIGTERM)
        assert first.wait() == 0
    assert (fresh(job).status, fresh(job).attempt) == ("queued", 1)

    with worker_process(fake.url, "--drain") as second:
        assert second.wait() == 0

    assert_one_picture(fake, job)
    assert (fresh(job).attempt, fresh(job).lost_workers) == (1, 0)


def test_an_idle_worker_stops_at_once_and_a_second_signal_is_not_needed(fake: FakeComfy) -> None:
    with worker_process(fake.url) as idle:
        wait_until(lambda: saw(fake, "GET", "/system_stats"))
        idle.send(signal.SIGINT)
        assert idle.wait(5) == 0


@pytest.mark.timeout(180)
def test_sixty_jobs_on_eight_workers_are_each_drawn_once(fake: FakeComfy) -> None:
    fake.seconds = 0.02
    owners = [make_user("ann"), make_user("bob")]
    jobs = [queue_job(owners[n % 2], seed=n) for n in range(60)]

    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                worker_process(
                    fake.url, "--drain", "--concurrency", "1", GENFLOW_PROMPTS_PER_BACKEND=8
                )
            )
            for _ in range(8)
        ]
        assert [worker.wait(120) for worker in workers] == [0] * 8

    assert {fresh(job).status for job in jobs} == {"succeeded"}
    assert {runs(fake, job) for job in jobs} == {(1, 1)}
    assert Asset.objects.exclude(job=None).count() == 60
