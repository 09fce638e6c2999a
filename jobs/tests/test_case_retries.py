"""Field cases: what is tried again, when, how often, and who gets to know."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from django.db.models import F
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from fake_comfy import FakeComfy
from jobs.backoff import backoff
from jobs.models import Asset, Job
from jobs.tests.go_between import GoBetween, Reply
from jobs.tests.helpers import (
    diary,
    fresh,
    make_staff,
    make_user,
    make_worker,
    queue_job,
    run_until_done,
    start,
    wait_until,
)
from jobs.tests.helpers_api import API, client_of
from jobs.tests.test_worker import runs

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(180)]
# For those with threads or processes of their own.
committed = pytest.mark.django_db(transaction=True)
HOUR = 3600.0


@pytest.fixture
def between(fake: FakeComfy) -> Iterator[GoBetween]:
    with GoBetween(fake.url) as server:
        yield server


def seconds_to_wait(job: Job) -> float:
    """Return how long the job is to wait for its next attempt, which its row must agree with."""
    retry = job.events.filter(kind="retry").annotate(wait=F("job__run_after") - F("created_at"))
    facts, wait = retry.values_list("facts", "wait").get()
    seconds: float = facts["seconds"]
    # The row was written a few statements before the diary.
    assert timedelta(seconds=seconds - 10) < wait <= timedelta(seconds=seconds + 0.001)
    return seconds


def http_date(in_seconds: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=in_seconds), usegmt=True)


# Retry-After


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ("20", 20, 20),
        ("1.5", 1.5, 1.5),
        (" 7 ", 7, 7),
        ("999999999", HOUR, HOUR),
        (100, 90, 100),
        (10 * HOUR, HOUR, HOUR),
        (-100, 0, 1),
        ("soon", 0, 1),
        ("-5", 0, 1),
        ("", 0, 1),
        ("NaN", 0, 1),
        ("1e9", 0, 1),
        ("inf", 0, 1),
        ("Wed, 99 Oct 2026 07:28:00 GMT", 0, 1),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_says_when_to_come_back_is_obeyed_up_to_an_hour(
    fake: FakeComfy, between: GoBetween, status: int, value: Any, least: float, most: float
) -> None:
    header = value if isinstance(value, str) else http_date(value)
    between.instead("POST /upload/image", Reply(status, headers={"Retry-After": header}))
    job = queue_job()

    make_worker(between.url, retry_base=1.0).run_once()

    row = fresh(job)
    assert (row.status, row.attempt) == ("queued", 2)
    assert least <= seconds_to_wait(row) <= most
    assert run_until_done(job, make_worker(between.url)).status == "succeeded"


def test_a_worker_whose_clock_is_wrong_waits_by_the_databases(
    fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = timezone.now
    monkeypatch.setattr("django.utils.timezone.now", lambda: real() + timedelta(days=1))
    fake.fault("http_503", seconds=100, path="/upload/image")
    job = queue_job()

    worker = make_worker(fake.url)
    worker.run_once()

    assert seconds_to_wait(fresh(job)) == 100
    assert not worker.run_once()


# the delays


def test_the_wait_doubles_up_to_its_maximum_and_is_spread_over_all_of_it() -> None:
    for attempt, ceiling in [(1, 2), (2, 4), (3, 8), (8, 256), (9, 300), (50, 300), (10**6, 300)]:
        waits = [backoff(attempt, 2, 300).total_seconds() for _ in range(400)]
        assert max(waits) <= ceiling
        assert min(waits) < ceiling / 4 < ceiling * 3 / 4 < max(waits)


def test_what_a_server_asks_for_is_a_floor_and_no_ceiling() -> None:
    waits = [backoff(9, 2, 300, at_least=100).total_seconds() for _ in range(400)]

    assert min(waits) == 100
    assert 200 < max(waits) <= 300
    assert backoff(1, 2, 300, at_least=HOUR).total_seconds() == HOUR


# the reason and the next time


@pytest.fixture
def waiting(fake: FakeComfy) -> Job:
    fake.fault("http_503", seconds=600, path="/upload/image")
    job = queue_job(make_user("ann"))
    make_worker(fake.url).run_once()
    return fresh(job)


def test_a_job_that_waits_says_why_and_until_when_in_the_api(waiting: Job) -> None:
    body = client_of(waiting.owner).get(f"{API}/jobs/{waiting.pk}").json()

    assert (body["status"], body["attempt"]) == ("queued", 2)
    assert body["retry"]["code"] == "unknown"
    assert body["retry"]["message"] == "The image server is in trouble. Please try again later."
    assert datetime.fromisoformat(body["retry"]["at"]) == waiting.run_after


def test_a_job_that_waits_says_why_and_until_when_on_its_page(waiting: Job) -> None:
    client = Client()
    client.force_login(waiting.owner)

    page = client.get(reverse("job-detail", args=[waiting.pk])).content.decode()

    assert "The image server is in trouble." in page
    assert "Try 2 of 5." in page
    assert waiting.run_after.isoformat()[:16] in page


def test_a_job_that_waits_says_all_to_an_operator(waiting: Job) -> None:
    client = Client()
    client.force_login(make_staff())

    page = client.get(reverse("admin:jobs_job_change", args=[waiting.pk])).content.decode()

    assert "POST /upload/image: 503 Service Unavailable" in page
    assert "retry" in page
    assert "600" in page


# what spends an attempt


def test_a_lost_connection_during_the_upload_spends_one_attempt_and_no_second_photo(
    fake: FakeComfy,
) -> None:
    fake.fault("drop_upload")
    job = queue_job()

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.attempt) == ("succeeded", 2)
    assert [path.name for path in (fake.data / "input" / "genflow").iterdir()] == [
        f"{job.pk}-0.jpeg"
    ]


def test_a_job_that_waits_for_its_next_upload_keeps_no_place_on_the_gpu(fake: FakeComfy) -> None:
    fake.fault("http_500", times=2, path="/upload/image")
    first, second = queue_job(), queue_job()
    worker = make_worker(fake.url, retry_base=1000.0, retry_max=100_000.0)
    worker.run_once()
    worker.run_once()
    assert {fresh(job).attempt for job in (first, second)} == {2}

    third = queue_job()
    worker.run_once()

    assert fresh(third).status == "succeeded"


@committed
@pytest.mark.parametrize(("failed_looks", "attempt"), [(3, 1), (7, 2)])
def test_trouble_while_the_picture_is_drawn_keeps_the_run(
    fake: FakeComfy, failed_looks: int, attempt: int
) -> None:
    fake.seconds = 1
    job = queue_job()
    worker = make_worker(fake.url)
    thread = start(worker.run_once)
    wait_until(lambda: fresh(job).step == "wait")
    fake.fault("html_502", times=failed_looks, path="GET /queue")
    thread.join()

    row = run_until_done(job, worker)

    assert (row.status, row.attempt) == ("succeeded", attempt)
    assert runs(fake, job) == (1, 1)


def test_no_death_deploy_or_refusal_counts_as_an_attempt(fake: FakeComfy) -> None:
    job = queue_job(max_attempts=1)
    worker = make_worker(fake.url)
    for _ in range(3):
        fake.fault("refuse", times=None)
        worker.run_once()
        fake.clear_faults()
        worker.housekeeper.probe_all()

    row = run_until_done(job, worker)

    assert (row.status, row.attempt) == ("succeeded", 1)
    assert diary(row).count("handed_back") == 3


@committed
def test_a_bug_of_ours_fails_the_attempt_whatever_its_words_are(
    fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(asset: Asset) -> bytes:
        raise ValueError("a\0b \ud83d" + "c" * 3_000_000)

    monkeypatch.setattr("jobs.steps.read_input", stumble)
    job = queue_job(max_attempts=2)

    row = run_until_done(job, make_worker(fake.url))

    assert row.error is not None
    assert (row.status, row.attempt, row.error["code"]) == ("failed", 2, "unknown")
    assert row.error["message"] == "Something went wrong while drawing. Please try again."
    assert "in stumble" in row.error_detail
    assert "ValueError: ab ?ccc" in row.error_detail
    assert len(row.error_detail) < 50_000


def test_a_failure_that_was_overcome_leaves_no_trace_for_the_user(fake: FakeComfy) -> None:
    fake.fault("http_500", path="POST /prompt")
    job = queue_job(make_user("ann"))

    run_until_done(job, make_worker(fake.url))

    body = client_of(job.owner).get(f"{API}/jobs/{job.pk}").json()
    assert (body["status"], body["error"], body["retry"]) == ("succeeded", None, None)
    assert "retry" in diary(job)
