"""What a web process needs of the database, however many clients it has, and how it stands a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import requests
from django.db import connection

from fake_comfy import FakeComfy
from jobs.models import Job
from jobs.tests.clients import bearer, get, listening
from jobs.tests.databases import OwnPostgres, cut_connections, other_connections, own_database
from jobs.tests.helpers import claim, make_user, photo_bytes, queue_job, wait_until
from jobs.tests.helpers_api import API
from jobs.tests.processes import WebProcess, web_process, worker_process

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]

# One asks for what waiting clients wait for, one listens.
BESIDE = 2


@pytest.fixture
def server(transactional_db: None) -> Iterator[OwnPostgres]:
    with own_database() as server:
        yield server


def submit(web: WebProcess, headers: dict[str, str]) -> int:
    files = {"photo": ("me.jpg", photo_bytes(), "image/jpeg")}
    form = {"prompt": "a quiet portrait", "width": "64", "height": "64"}
    answer = requests.post(
        f"{web.url}{API}/portraits", data=form, files=files, headers=headers, timeout=60
    )
    return answer.status_code


def test_a_crowd_of_pollers_and_submitters_shares_a_few_connections(transactional_db: None) -> None:
    job, headers = queue_job(), bearer(make_user())
    most = 0

    with web_process(GENFLOW_WEB_CONNECTIONS=4) as web, ThreadPoolExecutor(60) as crowd:
        polls = [crowd.submit(get, web, f"/jobs/{job.pk}", **headers) for _ in range(200)]
        submits = [crowd.submit(submit, web, headers) for _ in range(20)]
        while not (all(p.done() for p in polls) and all(s.done() for s in submits)):
            most = max(most, len(other_connections()))

    assert {poll.result().status_code for poll in polls} == {200}
    assert {answer.result() for answer in submits} == {201}
    assert 1 < most <= 4 + BESIDE


class Streams:
    """Many streams of one job at once, as bare sockets."""

    def __init__(self, web: WebProcess, job: Job, headers: dict[str, str]) -> None:
        self.address = web.url.removeprefix("http://").split(":")
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.request = f"GET {API}/jobs/{job.pk}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n"

    async def last_words(self, count: int, act: Callable[[], object]) -> list[bytes]:
        """Open so many, do something when all have heard their job's status, and return what each heard."""
        streams = [await self._open() for _ in range(count)]
        await asyncio.gather(*(reader.readuntil(b"queue_position") for reader, _ in streams))
        await asyncio.to_thread(act)
        heard = await asyncio.gather(*(reader.read() for reader, _ in streams))
        for _, writer in streams:
            writer.close()
        return heard

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(self.request.encode())
        await reader.readuntil(b"\r\n\r\n")
        return reader, writer


def test_hundreds_wait_and_all_is_answered_with_two_connections_more(
    transactional_db: None,
) -> None:
    job, headers = queue_job(), bearer(make_user())
    settings = {"GENFLOW_WEB_CONNECTIONS": 2, "GENFLOW_STREAMS_PER_OWNER": 300}

    with web_process(**settings) as web, ExitStack() as stack:
        clients = stack.enter_context(ThreadPoolExecutor(30))
        waits = [clients.submit(get, web, f"/jobs/{job.pk}?wait=60", **headers) for _ in range(30)]

        most = {"connections": 0, "threads": 0}

        def act() -> None:
            assert {submit(web, headers) for _ in range(10)} == {201}
            most["threads"] = threads_of(web)
            with closing(connection):  # this thread's
                most["connections"] = len(other_connections())
                Job.objects.cancel(job.pk, by="owner")

        connection.close()  # the test's own is not to be counted
        heard = asyncio.run(Streams(web, job, headers).last_words(300, act))

        assert {wait.result().json()["status"] for wait in waits} == {"canceled"}
    assert most["connections"] <= 2 + BESIDE
    assert most["threads"] < 20
    assert all(b'{"status":"canceled","queue_position":null}' in words for words in heard)


def threads_of(web: WebProcess) -> int:
    return len(list(Path(f"/proc/{web.process.pid}/task").iterdir()))


def test_connections_that_were_cut_are_not_missed(transactional_db: None) -> None:
    job = queue_job()

    with web_process() as web, listening(web, job) as client:
        wait_until(lambda: client.events)
        for _ in range(5):
            assert get(web, f"/jobs/{job.pk}", **bearer(job.owner)).status_code == 200
            assert cut_connections()
        claim()
        wait_until(lambda: client.statuses() == ["queued", "running"])


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_streams_stay_open_while_postgres_restarts_and_requests_are_asked_to_come_again(
    server: OwnPostgres, fake: FakeComfy, mode: str
) -> None:
    fake.seconds = 6
    job = queue_job(steps=30)
    headers = bearer(job.owner)
    statuses: set[int] = set()

    def ask() -> bool:
        answer = get(web, f"/jobs/{job.pk}", **headers)
        statuses.add(answer.status_code)
        return answer.status_code == 200

    with web_process() as web, listening(web, job) as client:
        with worker_process(fake.url, GENFLOW_LEASE_SECONDS=3):
            wait_until(lambda: client.of("progress"))
            connection.close()
            server.stop(mode)
            wait_until(lambda: not ask())
            server.start()
            wait_until(ask)
            wait_until(client.has_ended)
        assert "Traceback" not in web.log()

    assert statuses == {200, 503}
    assert client.statuses()[-1] == "succeeded"
