"""Field cases: the WebSocket brings progress, and nothing depends on it."""

from __future__ import annotations

import pytest

from fake_comfy import FakeComfy
from jobs.tests.go_between import GoBetween, Reply, html_reply
from jobs.tests.helpers import (
    fresh,
    make_worker,
    queue_job,
    run_until_done,
    start,
    wait_until,
)
from jobs.tests.test_worker import runs

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]


def test_a_socket_that_falls_silent_keeps_no_picture_back(fake: FakeComfy) -> None:
    fake.fault("ws_silent", times=None)
    job = queue_job()

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.attempt) == ("succeeded", 1)
    assert runs(fake, job) == (1, 1)


def test_a_socket_that_drops_in_mid_run_is_opened_again_and_the_run_goes_on(
    fake: FakeComfy,
) -> None:
    fake.seconds = 3
    fake.fault("ws_drop")
    job = queue_job(steps=30)
    thread = start(make_worker(fake.url).run_once)

    sockets = wait_until(lambda: [r for r in fake.requests if r.path == "/ws"][1:])
    thread.join()

    assert (fresh(job).status, fresh(job).attempt) == ("succeeded", 1)
    assert runs(fake, job) == (1, 1)
    assert {r.query["clientId"] for r in sockets} == {str(job.pk)}


@pytest.mark.parametrize(
    "answer", [Reply(404), Reply(403), html_reply(502), Reply(200, b"hi"), b"", b"HTTP/1.1 101\r\n"]
)
def test_a_proxy_that_passes_no_sockets_on_costs_only_the_progress(
    fake: FakeComfy, answer: Reply | bytes
) -> None:
    with GoBetween(fake.url) as between:
        between.instead("GET /ws", answer, None)
        job = queue_job()

        row = run_until_done(job, make_worker(between.url))

    assert (row.status, row.attempt) == ("succeeded", 1)


def test_whoever_takes_the_job_over_hears_its_events(fake: FakeComfy) -> None:
    fake.seconds = 4
    job = queue_job(steps=40)
    first = make_worker(fake.url)
    thread = start(first.run_once)
    wait_until(lambda: runs(fake, job) == (1, 1))
    first.stop()
    thread.join()
    before = fresh(job).progress or {"step": 0}

    second = start(make_worker(fake.url).run_once)
    wait_until(lambda: (fresh(job).progress or {"step": 0})["step"] not in (None, before["step"]))
    second.join()

    assert fresh(job).status == "succeeded"
    assert runs(fake, job) == (1, 1)
