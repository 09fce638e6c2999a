"""Field cases: leases at their edges."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError
from django.db.models import F
from django.db.models.functions import Now
from django.utils import timezone

from comfy.client import ComfyClient
from fake_comfy import FakeComfy
from jobs.leases import Renewer
from jobs.models import Asset, Job, JobEvent, LeaseLost
from jobs.status import JobStatus, Step
from jobs.tests.helpers import (
    LEASE,
    TERMS,
    claim,
    claim_new_job,
    diary,
    fresh,
    let_lease_expire,
    make_worker,
    queue_job,
    run_until_done,
    start,
    take_over,
    wait_until,
)
from jobs.tests.processes import worker_process
from jobs.tests.test_case_cancel import STEPS, live_worker, saw
from jobs.tests.test_worker import runs

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]


def has_expired(job: Job) -> bool:
    return Job.objects.filter(pk=job.pk, lease_expires_at__lt=Now()).exists()


# the same name


def test_a_worker_restarted_under_the_same_name_does_not_pass_for_the_one_that_died(
    fake: FakeComfy,
) -> None:
    fake.seconds = 1
    job = queue_job()
    with worker_process(fake.url, "--name", "pod-0") as victim:
        wait_until(lambda: runs(fake, job) == (1, 1))
        victim.kill()

    with worker_process(fake.url, "--name", "pod-0") as second:
        wait_until(lambda: saw(fake, "GET", "/system_stats"))
        # A fresh heartbeat of that name says nothing of this job.
        assert fresh(job).fencing_token == 1
        let_lease_expire(job)
        wait_until(lambda: fresh(job).is_final)
        second.kill()

    row = fresh(job)
    assert (row.status, row.fencing_token, row.lost_workers) == ("succeeded", 2, 1)
    assert runs(fake, job) == (1, 1)


def test_a_worker_with_the_same_id_to_the_last_letter_cannot_write_for_the_other() -> None:
    dead = claim_new_job("pod-0-1")
    let_lease_expire(dead)
    alive = claim("pod-0-1")
    assert alive is not None

    with pytest.raises(LeaseLost):
        Job.objects.checkpoint(dead, Step.UPLOAD, {}, LEASE)
    Job.objects.checkpoint(alive, Step.UPLOAD, {}, LEASE)


# renewal


def test_a_lease_is_renewed_through_a_slow_upload_and_a_slow_download(fake: FakeComfy) -> None:
    fake.fault("hang_upload", seconds=7)
    fake.fault("hang_view", seconds=7)
    job = queue_job()

    with live_worker(fake.url, lease=5.0):
        wait_until(lambda: fresh(job).is_final)

    row = fresh(job)
    assert (row.status, row.fencing_token, row.attempt) == ("succeeded", 1, 1)
    assert diary(job).count("claimed") == 1


def test_a_lease_ends_for_its_holder_before_it_ends_in_the_database() -> None:
    queue_job()
    renewer = Renewer(20.0, 1.0, threading.Event())
    asked_at = time.monotonic()
    held = claim(terms=replace(TERMS, lease=timedelta(seconds=20)))
    assert held is not None
    lease = renewer.hold(held, asked_at)

    for _ in range(2):
        before = time.monotonic()
        left = F("lease_expires_at") - Now()
        in_database = Job.objects.values_list(left, flat=True).get(pk=held.pk).total_seconds()
        assert time.monotonic() + lease.remaining() < before + in_database
        renewer.renew_all()


def test_a_worker_that_cannot_renew_lets_go_of_its_job(fake: FakeComfy) -> None:
    fake.seconds = 6
    job = queue_job()
    worker = make_worker(fake.url, lease=3.0)  # its renewer does not run
    thread = start(worker.run_once)
    wait_until(lambda: runs(fake, job) == (1, 1))

    wait_until(lambda: has_expired(job))
    seen = len(fake.requests)
    wait_until(lambda: fake.prompts[str(job.pk)]["finished"])

    assert len(fake.requests) - seen <= 2  # one last look may have been on its way
    assert (fresh(job).status, fresh(job).step) == ("running", "wait")
    assert claim("w2")
    worker.renewer.renew_all()
    thread.join()
    assert (fresh(job).worker_id, fresh(job).fencing_token) == ("w2", 2)


def test_a_worker_that_could_not_renew_goes_on_if_nobody_took_its_job(
    fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*args: Any) -> None:
        raise OperationalError("the database is away")

    fake.seconds = 4
    job = queue_job()
    with live_worker(fake.url, lease=2.0, concurrency=1):
        wait_until(lambda: runs(fake, job) == (1, 1))
        monkeypatch.setattr(Job.objects, "renew", away)
        wait_until(lambda: has_expired(job))
        assert fresh(job).status == "running"

        monkeypatch.undo()
        wait_until(lambda: fresh(job).is_final)

    row = fresh(job)
    assert (row.status, row.fencing_token, row.attempt) == ("succeeded", 1, 1)
    assert runs(fake, job) == (1, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_whose_renewing_thread_died_gives_its_job_back_and_ends(
    fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(renewer: Renewer) -> None:
        raise RuntimeError("a bug of ours")

    fake.seconds = 20
    job = queue_job(steps=150)
    worker = make_worker(fake.url)
    ended_well: list[bool] = []
    thread = start(lambda: ended_well.append(worker.run()))
    wait_until(lambda: runs(fake, job) == (1, 1))

    monkeypatch.setattr(Renewer, "_try_to_renew", die)
    thread.join()

    row = fresh(job)
    assert (row.status, row.attempt, row.lost_workers) == ("queued", 1, 0)
    assert ended_well == [False]


def test_a_lease_lost_right_after_the_claim_ends_the_job_and_not_the_worker(
    fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = queue_job()
    worker = make_worker(fake.url)

    def lose(*args: Any) -> None:
        let_lease_expire(job)
        assert claim("w2")
        worker.renewer.renew_all()
        raise OperationalError("the database is away")

    monkeypatch.setattr("jobs.worker.read_up_on", lose)

    assert worker.run_once()

    assert fresh(job).worker_id == "w2"
    assert not worker.renewer.held()


def test_a_renewal_that_comes_too_late_does_not_take_the_job_back() -> None:
    first = claim_new_job("w1")
    let_lease_expire(first)
    assert claim("w2")

    renewed = Job.objects.renew({first.pk: first.fencing_token}, LEASE)

    assert renewed == {}
    assert fresh(first).fencing_token == 2


# SIGSTOP


@pytest.mark.parametrize(
    ("step", "fault", "request_seen"), [step for step in STEPS if step[0] != "wait"]
)
def test_a_worker_frozen_in_any_step_past_its_lease_changes_nothing_when_it_wakes_up(
    fake: FakeComfy, step: str, fault: str, request_seen: tuple[str, str]
) -> None:
    fake.fault(fault, seconds=2)
    job = queue_job()
    with worker_process(fake.url, GENFLOW_LEASE_SECONDS=4) as frozen:
        wait_until(lambda: saw(fake, *request_seen) and fresh(job).step == step)
        frozen.freeze()
        take_over(job, make_worker(fake.url))
        row = fresh(job)
        before = Job.objects.values().get(pk=job.pk)

        frozen.send(signal.SIGCONT)
        other = queue_job(seed=8)
        wait_until(lambda: fresh(other).is_final)
        frozen.send(signal.SIGTERM)
        assert frozen.wait() == 0

    assert (row.status, row.outputs.count()) == ("succeeded", 1)
    assert Job.objects.values().get(pk=job.pk) == before
    assert runs(fake, job) == (1, 1)
    assert Asset.objects.exclude(job=None).count() == Job.objects.count()


# a process that was stopped between its check and POST /prompt: the known gap


class Frozen:
    """Stops the next POST /prompt of this process where it hurts most: after the last check, before the send."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.woken = threading.Event(), threading.Event()
        self.taken = False
        send = ComfyClient.submit

        def submit(client: ComfyClient, *args: Any, **kwargs: Any) -> Any:
            if not self.taken:
                self.taken = True
                self.reached.set()
                assert self.woken.wait(30)
            return send(client, *args, **kwargs)

        monkeypatch.setattr(ComfyClient, "submit", submit)


def test_a_worker_frozen_right_before_its_post_sends_a_double_that_is_deleted(
    fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.seconds = 3
    job = queue_job()
    freezer = Frozen(monkeypatch)
    frozen = make_worker(fake.url)
    first = start(frozen.run_once)
    assert freezer.reached.wait(50)
    let_lease_expire(job)
    second = start(make_worker(fake.url).run_once)
    wait_until(lambda: runs(fake, job) == (1, 1))

    freezer.woken.set()
    first.join()
    second.join()

    row, counts = fresh(job), fake.prompts[str(job.pk)]
    assert (row.status, row.outputs.count(), row.fencing_token) == ("succeeded", 1, 2)
    assert (counts["submitted"], counts["executed"], counts["deleted"]) == (2, 1, 1)


def test_a_worker_that_wakes_up_before_its_post_after_all_is_done_stops_what_it_sent(
    fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = queue_job(steps=150)
    freezer = Frozen(monkeypatch)
    first = start(make_worker(fake.url).run_once)
    assert freezer.reached.wait(50)
    let_lease_expire(job)
    row = run_until_done(job, make_worker(fake.url))
    run_until_done(
        queue_job(seed=8), make_worker(fake.url)
    )  # ComfyUI's cache holds the last run only
    before = Job.objects.values().get(pk=job.pk)

    fake.seconds = 20
    freezer.woken.set()
    first.join()
    with ComfyClient(fake.url) as client:
        wait_until(lambda: client.look_up(str(job.pk)).place == "finished")

    counts = fake.prompts[str(job.pk)]
    assert row.status == "succeeded"
    assert Job.objects.values().get(pk=job.pk) == before
    assert (counts["submitted"], counts["interrupted"] + counts["deleted"]) == (2, 1)


def test_a_post_gets_no_more_time_than_is_left_of_the_lease(fake: FakeComfy) -> None:
    fake.fault("hang_prompt", times=None, seconds=600)
    job = queue_job()
    with live_worker(fake.url, lease=4.0):
        # Renewals go on: the request's own time is what it had when it began.
        wait_until(lambda: fresh(job).is_final, seconds=25)

    assert fresh(job).fencing_token == 1
    assert runs(fake, job) == (1, 1)


# a worker that kills


def test_a_job_that_outlives_its_workers_ends_in_words_for_its_owner(fake: FakeComfy) -> None:
    job = queue_job()
    for death in range(4):
        held = claim(f"w{death}")
        assert held is not None
        let_lease_expire(held)
    assert claim("w4") is None

    row = fresh(job)
    assert row.error is not None
    assert (row.status, row.error["code"], row.attempt) == ("failed", "worker_lost", 1)
    assert row.completed_at is not None
    lost = JobEvent.objects.filter(job=job, kind="claimed", facts__has_key="lost_worker")
    assert [event.facts["lost_worker"] for event in lost] == ["w0", "w1", "w2"]


def test_a_lease_is_measured_by_the_database_alone(
    fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = timezone.now
    monkeypatch.setattr("django.utils.timezone.now", lambda: real() + timedelta(days=1))
    monkeypatch.setattr("time.time", lambda: 0.0)
    held = claim_new_job("w1")

    assert claim("w2") is None
    assert not has_expired(held)
    assert fresh(held).status == JobStatus.RUNNING
