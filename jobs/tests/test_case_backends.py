"""Field cases: ComfyUI servers that are down, locked, broken, stuck, or lack what a job needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.db.models.functions import Now

from fake_comfy import FakeComfy
from jobs.models import Backend
from jobs.tests.go_between import GoBetween, Reply
from jobs.tests.helpers import (
    diary,
    fresh,
    make_worker,
    queue_job,
    run_until_done,
    start,
    wait_until,
)
from jobs.tests.processes import worker_process
from jobs.tests.test_worker import runs, stop_after_submit
from jobs.worker import Options, Worker

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(180)]
# For those with threads or processes of their own.
committed = pytest.mark.django_db(transaction=True)


@pytest.fixture
def other() -> Iterator[FakeComfy]:
    with FakeComfy(seconds=0.1) as server:
        yield server


def worker_of(*servers: FakeComfy) -> Worker:
    urls = [server.url for server in servers]
    worker = Worker(urls, Options.from_settings(poll=0.05, retry_base=0.01))
    worker.meet_backends()
    return worker


def backend_of(server: FakeComfy) -> Backend:
    return Backend.objects.get(url=server.url)


def let_it_have_rested(server: FakeComfy, worker: Worker) -> None:
    Backend.objects.filter(url=server.url).update(rest_until=Now())
    worker.housekeeper.probe_all()


def posts(server: FakeComfy) -> int:
    return sum((r.method, r.path) == ("POST", "/prompt") for r in server.requests)


# something is missing


@pytest.mark.parametrize("fault", ["missing_model", "missing_node", "model_not_found_at_run"])
def test_what_one_server_lacks_another_draws_and_the_first_is_not_asked_again(
    fake: FakeComfy, other: FakeComfy, fault: str
) -> None:
    fake.fault(fault, times=None)
    job = queue_job()

    row = run_until_done(job, worker_of(fake, other))

    assert (row.status, row.attempt, row.backend) == ("succeeded", 1, backend_of(other))
    assert (posts(fake), posts(other)) == (1, 1)
    assert backend_of(fake).status == "up"


@pytest.mark.parametrize(
    ("fault", "code"), [("missing_model", "model_missing"), ("missing_node", "node_missing")]
)
def test_what_no_server_has_fails_after_each_was_asked_once(
    fake: FakeComfy, other: FakeComfy, fault: str, code: str
) -> None:
    fake.fault(fault, times=None)
    other.fault(fault, times=None)
    job = queue_job()

    row = run_until_done(job, worker_of(fake, other))

    assert row.error is not None
    assert (row.status, row.attempt, row.error["code"]) == ("failed", 1, code)
    assert (posts(fake), posts(other)) == (1, 1)


def test_a_job_that_one_server_refused_waits_for_another_that_rests(
    fake: FakeComfy, other: FakeComfy
) -> None:
    fake.fault("missing_model", times=None)
    worker = worker_of(fake, other)
    backend_of(other).rest("no answer")
    job = queue_job()

    worker.run_once()
    assert not worker.run_once()
    assert fresh(job).status == "queued"

    let_it_have_rested(other, worker)
    assert run_until_done(job, worker).status == "succeeded"


def test_a_job_that_waits_for_a_server_that_was_taken_away_fails_in_words(
    fake: FakeComfy, other: FakeComfy
) -> None:
    fake.fault("missing_model", times=None)
    job = queue_job()
    both = worker_of(fake, other)
    backend_of(other).rest("no answer")
    both.run_once()
    Backend.objects.filter(url=other.url).update(last_seen_at=Now() - timedelta(hours=1))

    row = run_until_done(job, worker_of(fake))

    assert row.error is not None
    assert (row.status, row.error["code"]) == ("failed", "model_missing")


# down


def test_jobs_sent_while_the_server_starts_up_all_end_on_their_first_attempt(
    fake: FakeComfy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fake.seconds = 0.02
    jobs = [queue_job() for _ in range(20)]
    worker = worker_of(fake)
    fake.fault("refuse", times=None)
    for _ in range(30):
        worker.run_once()
        worker.housekeeper.probe_all()
    assert {fresh(job).attempt for job in jobs} == {1}
    lines = [record.message for record in caplog.records]
    assert (lines.count("job.error"), lines.count("backend.no_answer")) == (1, 1)

    fake.clear_faults()
    worker.housekeeper.probe_all()
    while worker.run_once():
        pass

    assert {(fresh(job).status, fresh(job).attempt) for job in jobs} == {("succeeded", 1)}
    assert backend_of(fake).failures == 0


@committed
def test_workers_that_start_before_their_server_draw_as_soon_as_it_is_there(
    fake: FakeComfy,
) -> None:
    fake.fault("refuse", times=None)
    jobs = [queue_job() for _ in range(3)]

    with worker_process(fake.url, "--drain", GENFLOW_LEASE_SECONDS=3) as worker:
        wait_until(lambda: Backend.objects.filter(status="resting"))
        fake.clear_faults()
        assert worker.wait() == 0

    assert {(fresh(job).status, fresh(job).attempt) for job in jobs} == {("succeeded", 1)}


@committed
def test_a_job_on_a_server_that_nobody_reached_for_a_minute_moves_to_another(
    fake: FakeComfy, other: FakeComfy
) -> None:
    job = queue_job()
    stop_after_submit(worker_of(fake), fake, job)
    fake.fault("refuse", times=None)
    worker = worker_of(fake, other)
    assert not worker.run_once()

    Backend.objects.filter(url=fake.url).update(last_seen_at=Now() - timedelta(seconds=61))
    worker.housekeeper.probe_all()
    row = run_until_done(job, worker)

    assert (row.status, row.attempt, row.backend) == ("succeeded", 1, backend_of(other))
    assert (runs(fake, job), runs(other, job)) == ((1, 1), (1, 1))


# locked


@pytest.mark.parametrize("fault", ["unauthorized", "redirect"])
def test_a_server_that_locks_us_out_is_set_aside_and_its_jobs_wait(
    fake: FakeComfy, fault: str
) -> None:
    jobs = [queue_job() for _ in range(3)]
    worker = worker_of(fake)
    fake.fault(fault, times=None)

    for _ in range(10):
        worker.run_once()
        worker.housekeeper.probe_all()

    assert {(fresh(job).status, fresh(job).attempt) for job in jobs} == {("queued", 1)}
    assert backend_of(fake).status == "resting"
    assert ("401" if fault == "unauthorized" else "/login") in backend_of(fake).reason
    assert sum(r.path == "/upload/image" for r in fake.requests) == 1

    fake.clear_faults()
    let_it_have_rested(fake, worker)
    assert all(run_until_done(job, worker).status == "succeeded" for job in jobs)


def test_the_jobs_of_a_locked_server_go_to_another(fake: FakeComfy, other: FakeComfy) -> None:
    jobs = [queue_job() for _ in range(4)]
    worker = worker_of(fake, other)
    fake.fault("unauthorized", times=None)

    while worker.run_once():
        pass

    assert {fresh(job).backend for job in jobs} == {backend_of(other)}
    assert {(fresh(job).status, fresh(job).attempt) for job in jobs} == {("succeeded", 1)}


def test_a_server_that_refuses_posts_but_answers_probes_is_tried_ever_more_seldom(
    fake: FakeComfy,
) -> None:
    with GoBetween(fake.url) as between:
        between.instead("POST /upload/image", Reply(403), None)
        worker = make_worker(between.url)
        job = queue_job()

        for rests in range(1, 5):
            worker.run_once()
            backend = Backend.objects.get()
            assert (backend.status, backend.failures) == ("resting", rests)
            assert not worker.run_once()
            Backend.objects.update(rest_until=Now())
            worker.housekeeper.probe_all()

        assert (fresh(job).status, fresh(job).attempt) == ("queued", 1)
        assert len(between.requests("POST /upload/image")) == 4

        between.clear()
        assert run_until_done(job, worker).status == "succeeded"


@committed
def test_a_key_that_expires_in_mid_run_costs_the_run_nothing(fake: FakeComfy) -> None:
    fake.seconds = 1
    job = queue_job()
    worker = worker_of(fake)
    thread = start(worker.run_once)
    wait_until(lambda: fresh(job).step == "wait")
    fake.fault("unauthorized", times=None)
    thread.join()
    assert (fresh(job).status, fresh(job).step) == ("queued", "wait")

    fake.clear_faults()
    let_it_have_rested(fake, worker)
    row = run_until_done(job, worker)

    assert (row.status, row.attempt) == ("succeeded", 1)
    assert runs(fake, job) == (1, 1)


# a broken GPU


def test_a_broken_gpu_does_not_take_the_queue_down_with_it(fake: FakeComfy) -> None:
    fake.fault("cuda_broken")
    jobs = [queue_job() for _ in range(10)]
    worker = worker_of(fake)

    for _ in range(50):
        worker.run_once()

    assert sum(fresh(job).attempt - 1 for job in jobs) == 1
    assert {fresh(job).status for job in jobs} == {"queued"}
    assert "device-side assert" in backend_of(fake).reason

    for _ in range(3):  # still broken: one job at a time finds out
        let_it_have_rested(fake, worker)
        worker.run_once()
        worker.run_once()
    assert sum(fresh(job).attempt - 1 for job in jobs) == 4

    fake.restart()
    let_it_have_rested(fake, worker)
    assert all(run_until_done(job, worker).status == "succeeded" for job in jobs)


def test_the_jobs_of_a_broken_gpu_are_drawn_by_another(fake: FakeComfy, other: FakeComfy) -> None:
    fake.fault("cuda_broken")
    jobs = [queue_job() for _ in range(6)]

    worker = worker_of(fake, other)
    for job in jobs:
        run_until_done(job, worker, tries=20)

    assert {fresh(job).status for job in jobs} == {"succeeded"}
    assert {fresh(job).backend for job in jobs} == {backend_of(other)}
    assert sum(fresh(job).attempt - 1 for job in jobs) == 1


# stuck


def test_a_server_whose_worker_thread_died_rests_and_draws_after_its_restart(
    fake: FakeComfy,
) -> None:
    fake.fault("zombie")
    job = queue_job()
    worker = make_worker(fake.url, stall=1.0)

    worker.run_once()

    row = fresh(job)
    assert (row.status, row.attempt, row.backend) == ("queued", 1, None)
    assert backend_of(fake).status == "resting"
    assert "no sign of life for 1 s" in backend_of(fake).reason
    assert diary(job)[-1] == "handed_back"

    fake.restart()
    let_it_have_rested(fake, worker)
    assert run_until_done(job, make_worker(fake.url)).status == "succeeded"


def test_a_job_on_a_zombie_is_drawn_by_another_server(fake: FakeComfy, other: FakeComfy) -> None:
    fake.fault("zombie")
    job = queue_job()
    Backend.objects.register(fake.url)
    worker = Worker(
        [fake.url, other.url], Options.from_settings(poll=0.05, retry_base=0.01, stall=1.0)
    )
    worker.meet_backends()

    row = run_until_done(job, worker)

    assert (row.status, row.attempt, row.backend) == ("succeeded", 1, backend_of(other))
    assert (runs(fake, job), runs(other, job)) == ((1, 1), (1, 1))


def test_a_run_that_shows_no_sign_of_life_is_stopped_and_handed_back(fake: FakeComfy) -> None:
    fake.seconds = 600
    job = queue_job(steps=1)

    make_worker(fake.url, stall=1.0).run_once()

    assert (fresh(job).status, fresh(job).attempt, fresh(job).step) == ("queued", 1, "upload")
    assert backend_of(fake).status == "resting"


@committed
def test_a_run_that_hangs_every_time_fails_in_words_and_after_a_few_runs(fake: FakeComfy) -> None:
    fake.seconds = 600
    job = queue_job(steps=1)
    worker = make_worker(fake.url, stall=0.5, max_resubmits=2)

    for _ in range(3):
        Backend.objects.use_again()
        worker.run_once()

    row = fresh(job)
    assert (row.status, row.attempt, row.resubmits) == ("failed", 1, 2)
    assert row.error is not None
    assert row.error["code"] == "backend_stuck"


@committed
def test_a_prompt_in_a_queue_that_does_not_move_is_taken_out_of_it(fake: FakeComfy) -> None:
    fake.fault("zombie")
    worker = make_worker(fake.url, stall=1.0)
    first, second = queue_job(), queue_job()
    threads = [start(worker.run_once) for _ in range(2)]
    for thread in threads:
        thread.join()

    assert {(fresh(job).status, fresh(job).attempt) for job in (first, second)} == {("queued", 1)}
    assert sum(fake.prompts[str(job.pk)]["deleted"] for job in (first, second)) == 1


@committed
def test_a_prompt_behind_a_long_run_of_ours_is_not_taken_for_stuck(fake: FakeComfy) -> None:
    fake.seconds = 4
    worker = make_worker(fake.url, stall=1.5)
    first, second = queue_job(steps=40), queue_job(steps=40, seed=8)
    threads = [start(worker.run_once) for _ in range(2)]
    for thread in threads:
        thread.join()

    assert {fresh(job).status for job in (first, second)} == {"succeeded"}
    assert backend_of(fake).failures == 0
    assert [runs(fake, job) for job in (first, second)] == [(1, 1), (1, 1)]
