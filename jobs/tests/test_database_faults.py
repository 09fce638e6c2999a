"""A database that goes away, turns read-only, is full or loses an answer; rows that change under a worker."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import InterfaceError, OperationalError, connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F
from django.db.models.functions import Now
from django.test import Client

from fake_comfy import FakeComfy
from genflow_project import embedded_postgres
from jobs.models import Asset, Backend, Blob, Job, JobQuerySet, QueueFull
from jobs.status import HELD, JobStatus
from jobs.tests.databases import (
    OwnPostgres,
    age_of_oldest_transaction,
    cut_connections,
    database_default,
    execute,
    other_connections,
    own_database,
)
from jobs.tests.helpers import (
    diary,
    fresh,
    make_staff,
    make_user,
    make_worker,
    queue_job,
    start,
    wait_until,
)
from jobs.tests.helpers_api import API, client_of, error_of, post_portrait
from jobs.tests.processes import WorkerProcess, worker_process
from jobs.tests.test_crash import assert_one_picture, saw
from jobs.tests.test_worker import runs
from jobs.worker import Worker

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]

# Where a worker can be met inside each step: the step, the fault that keeps it there, the request it made.
MOMENTS = [
    ("upload", "hang_upload", "POST", "/upload/image"),
    ("submit", "hang_prompt", "POST", "/prompt"),
    ("wait", None, "POST", "/prompt"),
    ("download", "hang_view", "GET", "/view"),
]
NAMES = ("step", "fault", "method", "path")


def messages(worker: WorkerProcess) -> list[str]:
    """Stop a worker politely, which must work, and return what it logged."""
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    return [json.loads(line)["message"] for line in worker.log().splitlines()]


def prepare(fake: FakeComfy, fault: str | None) -> None:
    """Let ComfyUI keep a worker inside the step for a second."""
    fake.seconds = 1
    if fault:
        fake.fault(fault, seconds=1)


def assert_undisturbed(fake: FakeComfy, job: Job) -> None:
    """One picture, at the first attempt, by the first worker."""
    wait_until(lambda: fresh(job).is_final)
    assert_one_picture(fake, job)
    assert (fresh(job).attempt, fresh(job).lost_workers) == (1, 0)


# --- connections are cut ---


@pytest.mark.parametrize(NAMES, MOMENTS)
def test_connections_cut_inside_a_step_cost_the_job_nothing(
    fake: FakeComfy, step: str, fault: str | None, method: str, path: str
) -> None:
    job = queue_job()
    prepare(fake, fault)
    with worker_process(fake.url) as worker:
        wait_until(lambda: saw(fake, method, path) and fresh(job).step == step)

        assert cut_connections()

        assert_undisturbed(fake, job)
        assert "worker.thread_died" not in messages(worker)


def test_an_idle_worker_whose_connections_were_cut_takes_the_next_job(fake: FakeComfy) -> None:
    with worker_process(fake.url) as worker:
        wait_until(Backend.objects.exclude(last_seen_at=None).exists)
        wait_until(other_connections)
        cut_connections()

        job = queue_job()

        assert_undisturbed(fake, job)
        assert "worker.thread_died" not in messages(worker)


@pytest.mark.parametrize("error", [OperationalError, InterfaceError])
def test_a_chore_that_the_database_breaks_off_is_left_for_later(
    fake: FakeComfy, error: type[Exception]
) -> None:
    def chore() -> None:
        raise error("the connection is closed")

    make_worker(fake.url).housekeeper._try(chore)


# --- a failover leaves it read-only ---


@pytest.mark.parametrize(NAMES, MOMENTS[1::2])
def test_a_database_that_turns_read_only_inside_a_step_costs_the_job_nothing(
    fake: FakeComfy, step: str, fault: str | None, method: str, path: str
) -> None:
    job = queue_job()
    prepare(fake, fault)
    with worker_process(fake.url) as worker:
        wait_until(lambda: saw(fake, method, path) and fresh(job).step == step)
        with database_default("default_transaction_read_only", "on"):
            wait_for_reconnects()

        # Its connections are not cut again: it must leave those that are read-only by itself.
        assert_undisturbed(fake, job)
        assert "worker.thread_died" not in messages(worker)


def wait_for_reconnects() -> None:
    """Return when the worker has left several connections for new ones."""
    seen: set[int] = set()

    def has_tried_again() -> bool:
        seen.update(other_connections())
        return len(seen) > 8

    wait_until(has_tried_again)


@pytest.fixture
def read_only() -> Iterator[Callable[[], None]]:
    yield lambda: execute("SET default_transaction_read_only = on")
    execute("SET default_transaction_read_only = off")


def test_a_read_only_database_refuses_posts_for_now_and_still_answers_reads(
    read_only: Callable[[], None],
) -> None:
    job = queue_job()
    client = client_of(job.owner)

    read_only()
    posts = [
        post_portrait(client),
        client.post(f"{API}/jobs/{job.pk}/cancel"),
        client.delete(f"{API}/jobs/{job.pk}"),
    ]
    reads = [client.get(f"{API}/jobs/{job.pk}"), client.get(f"{API}/jobs")]

    for answer in posts:
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        assert error_of(answer)["code"] == "database_unavailable"
    assert [answer.status_code for answer in reads] == [200, 200]
    assert fresh(job).status == JobStatus.QUEUED


# --- stricter isolation than the default ---


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_serialization_failures_neither_fail_nor_repeat_a_job(fake: FakeComfy, level: str) -> None:
    fake.seconds = 0.02
    owners = [make_user("ann"), make_user("bob")]
    jobs = [queue_job(owners[n % 2], seed=n) for n in range(10)]
    ended = threading.Event()

    def edit() -> None:
        """As operators do, on rows that workers write at the same time."""
        while not ended.wait(0.02):
            # The operator, too, can meet a serialization failure.
            with suppress(OperationalError), transaction.atomic():
                Job.objects.update(metadata={"seen": "yes"})
                ended.wait(0.05)

    with database_default("default_transaction_isolation", level), ExitStack() as stack:
        editor = start(edit)
        stack.callback(editor.join)
        stack.callback(ended.set)
        workers = [
            stack.enter_context(
                worker_process(
                    fake.url, "--drain", "--concurrency", "2", GENFLOW_PROMPTS_PER_BACKEND=6
                )
            )
            for _ in range(2)
        ]
        assert [worker.wait(120) for worker in workers] == [0] * 2

    assert {fresh(job).status for job in jobs} == {"succeeded"}
    assert {runs(fake, job) for job in jobs} == {(1, 1)}
    assert {fresh(job).attempt for job in jobs} == {1}


def test_the_queue_limit_is_exact_under_stricter_isolation() -> None:
    ann = make_user()
    everyone = threading.Barrier(8)
    outcomes: list[str] = []

    def submit() -> None:
        everyone.wait()
        try:
            Job.objects.submit(
                Job(owner=ann, max_attempts=1),
                inputs=[],
                queue_limit=3,
                queue_limit_per_owner=3,
                retention=timedelta(days=1),
            )
            outcomes.append("queued")
        except QueueFull as exc:
            outcomes.append(exc.code)

    with database_default("default_transaction_isolation", "repeatable read"):
        for thread in [start(submit) for _ in range(8)]:
            thread.join()

    assert sorted(outcomes) == ["queue_full"] * 5 + ["queued"] * 3


# --- an answer gets lost: what was asked for is done, and nobody hears of it ---


class Answers:
    """What the database answers to this thread's writes: to a COMMIT, or outside of a transaction. The nth gets lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lose = 0
        self.count = 0
        self._watched: BaseDatabaseWrapper | None = None
        commit = BaseDatabaseWrapper._commit  # type: ignore[attr-defined]

        def commit_and_hear(wrapper: BaseDatabaseWrapper) -> None:
            commit(wrapper)
            self._hear(wrapper)

        monkeypatch.setattr(BaseDatabaseWrapper, "_commit", commit_and_hear)
        monkeypatch.setattr("jobs.worker.DATABASE_PAUSE", 0.01)

    @contextmanager
    def counted(self) -> Iterator[None]:
        mine = connections["default"]
        self._watched = mine
        with mine.execute_wrapper(self._execute):
            yield
        self._watched = None

    def _execute(self, execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        result = execute(sql, *args)
        wrapper = args[-1]["connection"]
        if not wrapper.in_atomic_block and not sql.startswith("SELECT"):
            self._hear(wrapper)
        return result

    def _hear(self, wrapper: BaseDatabaseWrapper) -> None:
        if wrapper is not self._watched:
            return
        self.count += 1
        if self.count == self.lose:
            wrapper.connection.close()
            raise OperationalError("server closed the connection unexpectedly")


@dataclass(frozen=True)
class Life:
    """What befalls a job on the way, and how it ends."""

    fault: str | None
    status: str = "succeeded"
    attempt: int = 1
    drawing: int = 0


LIVES = {
    "drawn": Life(None),
    "tried again": Life("runtime_error", attempt=2, drawing=1),
    "lost by ComfyUI": Life("forget_queue", drawing=1),
    "failed": Life("no_face", status="failed"),
    "handed back": Life("unauthorized"),
}


@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
def test_a_lost_answer_of_the_database_changes_nothing_wherever_it_happens(
    fake: FakeComfy, monkeypatch: pytest.MonkeyPatch, life: Life
) -> None:
    fake.seconds = 0.02
    worker = make_worker(fake.url)
    answers = Answers(monkeypatch)
    while answers.lose <= answers.count:
        answers.lose, answers.count = answers.lose + 1, 0
        if life.fault:
            fake.fault(life.fault)
        job = queue_job(steps=2)

        row = drive_to_its_end(job, worker, answers)

        ended = Life(life.fault, row.status, row.attempt, row.drawing)
        assert ended == life, f"answer {answers.lose}: {diary(job)}"
        assert_kept_once(fake, row)
    assert answers.count >= 5


def drive_to_its_end(job: Job, worker: Worker, answers: Answers) -> Job:
    def step() -> bool:
        # If the answer to a claim gets lost, nobody holds the job until its lease has run out.
        Job.objects.filter(pk=job.pk, status__in=HELD).update(lease_expires_at=Now())
        Job.objects.filter(pk=job.pk).update(run_after=Now())
        worker.housekeeper.probe_all()
        with answers.counted():
            worker._try(worker.run_once)
        return fresh(job).is_final

    wait_until(step)
    return fresh(job)


def assert_kept_once(fake: FakeComfy, row: Job) -> None:
    """As many prompts as drawings, one picture if it succeeded, and the bytes of every row there."""
    assert runs(fake, row)[0] == row.drawing + 1
    assert row.outputs.count() == (row.status == JobStatus.SUCCEEDED)
    assert all(asset.file.size == asset.size for asset in Asset.objects.all())


def test_a_claim_that_nothing_can_be_read_after_is_dropped_by_a_worker_told_to_stop(
    fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(fake.url, lease=0.5)
    job = queue_job()

    def away(job: Job) -> None:
        worker.stop()
        raise OperationalError("connection refused")

    monkeypatch.setattr("jobs.worker.read_up_on", away)

    assert worker.run_once()
    assert fresh(job).status == JobStatus.RUNNING  # until its lease has run out


# --- no transaction is open while something slow happens ---


def test_no_transaction_is_open_while_comfyui_takes_its_time(fake: FakeComfy) -> None:
    fake.seconds = 2
    for fault in ("hang_upload", "hang_prompt", "hang_view"):
        fake.fault(fault, seconds=2)
    job = queue_job()
    ages: list[float] = []

    def is_done() -> bool:
        ages.append(age_of_oldest_transaction())
        return fresh(job).is_final

    with worker_process(fake.url):
        wait_until(is_done)

    assert max(ages) < 1.5  # of the two seconds that each step took
    assert_undisturbed(fake, job)


def test_a_worker_frozen_inside_a_claim_keeps_the_others_waiting_for_seconds_only(
    fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, other, job = make_worker(fake.url), make_worker(fake.url), queue_job()
    locked, thawed = threading.Event(), threading.Event()
    look = JobQuerySet._abandoned
    outcomes: list[bool] = []

    def look_slowly(jobs: JobQuerySet, backends: Sequence[int]) -> Job | None:
        if not locked.is_set():
            locked.set()
            thawed.wait(60)
        return look(jobs, backends)

    monkeypatch.setattr(JobQuerySet, "_abandoned", look_slowly)
    thread = start(lambda: outcomes.append(frozen._try(frozen.run_once)))
    locked.wait()
    execute("SET lock_timeout = '20s'")

    assert other.run_once()  # the server has ended the frozen one's transaction by then

    thawed.set()
    thread.join()
    assert_undisturbed(fake, job)
    assert outcomes == [False]  # it takes it for an outage, and goes on


def test_a_job_in_mid_run_can_be_edited_and_canceled_without_waiting_for_its_worker(
    fake: FakeComfy,
) -> None:
    fake.seconds = 30
    job = queue_job(steps=150)
    boss = Client()
    boss.force_login(make_staff())
    with worker_process(fake.url):
        wait_until(lambda: runs(fake, job) == (1, 1) and fresh(job).step == "wait")

        execute("SET lock_timeout = '1s'")
        Job.objects.filter(pk=job.pk).update(priority=F("priority") + 1)
        answer = boss.post(
            "/admin/jobs/job/", {"action": "cancel", "_selected_action": [str(job.pk)]}
        )

        assert answer.status_code == 302
        wait_until(lambda: fresh(job).status == JobStatus.CANCELED)
    assert fake.stats()["prompts"][str(job.pk)]["interrupted"] == 1


# --- rows change under the worker ---


def delete_job(job: Job) -> None:
    Job.objects.filter(pk=job.pk).delete()


def delete_owner(job: Job) -> None:
    job.owner.delete()


def fail_by_hand(job: Job) -> None:
    Job.objects.filter(pk=job.pk).update(status=JobStatus.FAILED, completed_at=Now())


@pytest.mark.parametrize("take_away", [delete_job, delete_owner, fail_by_hand])
def test_a_job_taken_away_in_mid_run_is_dropped_and_its_prompt_stopped(
    fake: FakeComfy, take_away: Callable[[Job], None]
) -> None:
    fake.seconds = 30
    job = queue_job(steps=150)
    with worker_process(fake.url) as worker:
        wait_until(lambda: runs(fake, job) == (1, 1) and fresh(job).step == "wait")

        take_away(job)

        wait_until(lambda: fake.stats()["prompts"][str(job.pk)]["interrupted"])
        fake.seconds = 0.05
        assert_undisturbed(fake, queue_job(make_user("bob")))
        assert messages(worker).count("job.lease_lost") == 1
    assert list(Job.objects.filter(pk=job.pk).values_list("status", flat=True)) == (
        ["failed"] if take_away is fail_by_hand else []
    )
    assert not Asset.objects.filter(job=job.pk).exists()


def test_a_job_deleted_during_its_download_leaves_no_file(fake: FakeComfy) -> None:
    fake.fault("hang_view", seconds=1)
    job = queue_job()
    with worker_process(fake.url) as worker:
        wait_until(lambda: saw(fake, "GET", "/view"))

        delete_job(job)

        assert_undisturbed(fake, queue_job())
        assert messages(worker).count("job.lease_lost") == 1
    assert Blob.objects.count() == Asset.objects.count()


def test_a_photo_deleted_in_mid_run_is_not_missed(fake: FakeComfy) -> None:
    fake.seconds = 1
    job = queue_job()
    with worker_process(fake.url):
        wait_until(lambda: fresh(job).step == "wait")

        Blob.objects.all().delete()

        assert_undisturbed(fake, job)


# --- a server of our own goes down ---


@pytest.fixture
def server(transactional_db: None) -> Iterator[OwnPostgres]:
    with own_database() as server:
        yield server


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_jobs_go_on_when_postgres_was_restarted(
    server: OwnPostgres, fake: FakeComfy, mode: str
) -> None:
    fake.seconds = 0.5
    jobs = [queue_job(seed=n) for n in range(6)]
    options = {"GENFLOW_LEASE_SECONDS": 3, "GENFLOW_PROMPTS_PER_BACKEND": 4}
    with worker_process(fake.url, **options) as one, worker_process(fake.url, **options) as two:
        for ended in (1, 3):
            wait_until(lambda ended=ended: Job.objects.finished().count() >= ended)  # type: ignore[misc]
            server.stop(mode)
            server.start()
            connection.close()

        wait_until(lambda: not Job.objects.unfinished().exists())
        assert not {"worker.thread_died"} & {*messages(one), *messages(two)}
    assert {runs(fake, job) for job in jobs} == {(1, 1)}
    assert {(fresh(job).status, fresh(job).attempt) for job in jobs} == {("succeeded", 1)}


def test_a_run_that_ends_while_postgres_is_away_is_not_drawn_again(
    server: OwnPostgres, fake: FakeComfy
) -> None:
    fake.seconds = 4
    job = queue_job()
    options = {"GENFLOW_LEASE_SECONDS": 2}
    with worker_process(fake.url, **options) as one, worker_process(fake.url, **options) as two:
        wait_until(lambda: fresh(job).step == "wait")
        server.stop("fast")
        connection.close()
        # Longer than the lease: nobody knows whose the job is when the database is back.
        wait_until(lambda: fake.stats()["prompts"][str(job.pk)]["finished"])
        server.start()

        wait_until(lambda: fresh(job).is_final)
        assert_one_picture(fake, job)
        assert not {"worker.thread_died"} & {*messages(one), *messages(two)}


# --- no connection is left for us ---


@pytest.fixture
def small_server(monkeypatch: pytest.MonkeyPatch, transactional_db: None) -> Iterator[OwnPostgres]:
    monkeypatch.setitem(embedded_postgres.OPTIONS, "max_connections", 20)
    with own_database() as server:
        yield server


def crowd(stack: ExitStack) -> None:
    """Take every connection that is left, until the stack ends."""
    where = connection.get_connection_params() | {"autocommit": True}
    with suppress(psycopg.OperationalError):
        while True:
            stack.enter_context(psycopg.connect(**where))


def test_a_worker_that_gets_no_connection_waits_for_one(
    small_server: OwnPostgres, fake: FakeComfy
) -> None:
    job = queue_job()
    client = client_of(job.owner)

    def is_refused() -> bool:
        connection.close()  # the server may take a moment to notice
        crowd(others)
        return client.get(f"{API}/jobs/{job.pk}").status_code == 503

    with ExitStack() as others:
        crowd(others)
        known = small_server.log().count("too many clients")
        with worker_process(fake.url) as worker:
            wait_until(lambda: small_server.log().count("too many clients") > known + 1)
            wait_until(is_refused)

            others.close()

            assert_undisturbed(fake, job)
            assert client.get(f"{API}/jobs/{job.pk}").status_code == 200
            assert "worker.database_away" in messages(worker)


def test_a_worker_process_has_a_connection_for_each_slot_and_three_beside(
    small_server: OwnPostgres, fake: FakeComfy
) -> None:
    fake.seconds = 0.3
    # So short a lease that all its threads come to the database before the jobs are done.
    options = {"GENFLOW_PROMPTS_PER_BACKEND": 12, "GENFLOW_LEASE_SECONDS": 2}
    with worker_process(fake.url, "--concurrency", "12", **options):
        jobs = [queue_job(seed=n) for n in range(12)]
        most = 0

        def is_done() -> bool:
            nonlocal most
            most = max(most, len(other_connections()))
            return not Job.objects.unfinished().exists()

        wait_until(is_done, 60)

    assert {fresh(job).status for job in jobs} == {"succeeded"}
    assert 12 < most <= 12 + 3
