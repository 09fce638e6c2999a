"""Field cases: a worker that is told to stop, at each step, once and twice."""

from __future__ import annotations

import signal

import pytest

from fake_comfy import FakeComfy
from jobs.models import Backend
from jobs.tests.go_between import GoBetween
from jobs.tests.helpers import (
    diary,
    fresh,
    let_lease_expire,
    make_worker,
    queue_job,
    run_until_done,
    wait_until,
)
from jobs.tests.processes import WorkerProcess, worker_process
from jobs.tests.test_case_cancel import STEPS, saw
from jobs.tests.test_worker import runs

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]


@pytest.mark.parametrize(("step", "fault", "request_seen"), STEPS)
def test_a_stop_at_any_step_gives_the_job_back_in_time_and_without_charge(
    fake: FakeComfy, step: str, fault: str | None, request_seen: tuple[str, str]
) -> None:
    fake.seconds = 0.5 if step == "download" else 4
    if fault:
        fake.fault(fault, seconds=600)
    job = queue_job(max_attempts=1)
    with worker_process(fake.url, GENFLOW_SHUTDOWN_SECONDS=3) as stopped:
        wait_until(lambda: saw(fake, *request_seen) and fresh(job).step == step)
        stopped.send(signal.SIGTERM)
        assert stopped.wait() == 0
    row = fresh(job)
    assert (row.status, row.step, row.attempt, row.lost_workers) == ("queued", step, 1, 0)
    assert diary(row)[-1] == "handed_back"
    done = ["upload", "submit", "wait", "download"]
    saved = row.checkpoints.values_list("step", flat=True)
    assert sorted(saved) == sorted(done[: done.index(step)])

    with worker_process(fake.url, "--drain") as second:
        assert second.wait() == 0

    row = fresh(job)
    assert (row.status, row.attempt, row.lost_workers) == ("succeeded", 1, 0)
    assert runs(fake, job) == (1, 1)


def test_one_deploy_after_another_costs_a_job_nothing(fake: FakeComfy) -> None:
    fake.seconds = 8
    job = queue_job(max_attempts=1)
    for _ in range(3):
        with worker_process(fake.url) as worker:
            wait_until(lambda: fresh(job).step == "wait" and fresh(job).status == "running")
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0
        assert diary(job)[-1] == "handed_back"

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.attempt, row.lost_workers) == ("succeeded", 1, 0)
    assert runs(fake, job) == (1, 1)


def test_a_worker_that_is_stopping_takes_no_new_job(fake: FakeComfy) -> None:
    fake.fault("hang_upload", seconds=600)
    first = queue_job()
    with worker_process(fake.url, GENFLOW_SHUTDOWN_SECONDS=3) as worker:
        wait_until(lambda: saw(fake, "POST", "/upload/image"))
        worker.send(signal.SIGTERM)
        second = queue_job()
        assert worker.wait() == 0

    assert (fresh(first).status, fresh(second).status) == ("queued", "queued")
    assert diary(second) == ["submitted"]


def insist(worker: WorkerProcess, signum: int) -> int | None:
    """Send a signal once more: one that comes before the last was handled is no second one."""
    if worker.process.poll() is None:
        worker.send(signum)
    return worker.process.poll()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGINT),
    ],
)
def test_a_second_signal_ends_the_worker_at_once(
    fake: FakeComfy, first: signal.Signals, second: signal.Signals
) -> None:
    fake.fault("hang_upload", seconds=600)
    job = queue_job()
    with worker_process(fake.url, GENFLOW_SHUTDOWN_SECONDS=600) as worker:
        wait_until(lambda: saw(fake, "POST", "/upload/image"))
        worker.send(first)
        code = wait_until(lambda: insist(worker, second))
        assert code in (128 + first, 128 + second)
    assert fresh(job).status == "running"

    let_lease_expire(job)
    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.attempt, row.lost_workers) == ("succeeded", 1, 1)


def test_a_stop_before_anything_was_done_ends_well(fake: FakeComfy) -> None:
    fake.fault("refuse", times=None)
    job = queue_job()
    with worker_process(fake.url) as worker:
        wait_until(lambda: Backend.objects.filter(status="resting"))
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0

    assert (fresh(job).status, fresh(job).attempt) == ("queued", 1)


def test_a_job_handed_back_on_its_way_to_the_queue_is_not_sent_twice(fake: FakeComfy) -> None:
    job = queue_job()
    with GoBetween(fake.url) as between:
        with worker_process(between.url, GENFLOW_SHUTDOWN_SECONDS=2) as worker:
            late = between.hold("POST /prompt")
            assert late.arrived.wait(50)
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0
        assert (fresh(job).status, fresh(job).step) == ("queued", "submit")
        late.release()

        row = run_until_done(job, make_worker(between.url))

    assert row.status == "succeeded"
    assert runs(fake, job) == (1, 1)
