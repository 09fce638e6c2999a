"""Web server and worker through a PgBouncer in transaction mode: all works, only news comes later."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from django.db import Error, connection

from fake_comfy import FakeComfy
from jobs.models import Job
from jobs.tests.clients import bearer, get, listening
from jobs.tests.databases import connected_to, fetch
from jobs.tests.helpers import fresh, queue_job, wait_until
from jobs.tests.helpers_api import API, client_of, post_portrait
from jobs.tests.processes import web_process, worker_process
from jobs.tests.test_crash import assert_one_picture

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
CONFIG = """
[databases]
{database}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 4
ignore_startup_parameters = extra_float_digits, options
"""
TIMEOUTS = "SET statement_timeout = 30000; SET idle_in_transaction_session_timeout = 10000"


def database() -> str:
    """Return the line of the test database: where it is, and as whom to go there."""
    config = connection.settings_dict
    where = {
        "host": config["HOST"] or "localhost",
        "port": config["PORT"] or 5432,
        "user": config["USER"],
        "password": config["PASSWORD"],
        "connect_query": TIMEOUTS,
    }
    return f"{config['NAME']} = " + " ".join(f"{k}='{v}'" for k, v in where.items() if v)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture
def bouncer(transactional_db: None) -> Iterator[None]:
    """Lead this process, and those that it starts, through a PgBouncer in transaction mode."""
    if PROGRAM is None:
        if os.environ.get("GENFLOW_REQUIRE_PGBOUNCER") == "1":
            pytest.fail("pgbouncer is not installed")
        pytest.skip("pgbouncer is not installed")
    port = free_port()
    with running(PROGRAM, port), connected_to(HOST="127.0.0.1", PORT=str(port)):
        wait_until(can_connect)
        yield


@contextmanager
def running(program: str, port: int) -> Iterator[None]:
    # It refuses to run as root; the embedded server's socket is open to nobody.
    user = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="genflow-pgbouncer-") as folder:
        Path(folder).chmod(0o755)
        file = Path(folder) / "pgbouncer.ini"
        file.write_text(CONFIG.format(database=database(), listen=port))
        process = subprocess.Popen([program, "--quiet", str(file)], user=user)  # noqa: S603
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


def can_connect() -> bool:
    try:
        return fetch("SELECT 1") == [(1,)]
    except Error:
        connection.close()
        return False


@pytest.mark.usefixtures("bouncer")
@pytest.mark.parametrize("notify", ["1", "0"])
def test_portraits_are_drawn_once_through_a_pooler_in_transaction_mode(
    fake: FakeComfy, notify: str
) -> None:
    fake.seconds = 0.2
    client = client_of()
    with worker_process(
        fake.url, "--concurrency", "6", GENFLOW_PROMPTS_PER_BACKEND=6, GENFLOW_NOTIFY=notify
    ):
        answers = [post_portrait(client, width=64, height=64, seed=n) for n in range(8)]
        assert {answer.status_code for answer in answers} == {201}

        wait_until(lambda: not Job.objects.unfinished().exists(), 60)

    for answer in answers:
        assert_one_picture(fake, fresh(answer.json()["id"]))
        assert client.get(f"{API}/jobs/{answer.json()['id']}/image").status_code == 200


@pytest.mark.usefixtures("bouncer")
@pytest.mark.parametrize("notify", ["1", "0"])
def test_events_come_through_a_pooler_in_transaction_mode(fake: FakeComfy, notify: str) -> None:
    fake.seconds = 3
    job = queue_job(steps=20)
    options = {"GENFLOW_NOTIFY": notify}
    with web_process(**options) as web, listening(web, job) as client:
        with worker_process(fake.url, **options):
            wait_until(client.has_ended)
        assert get(web, f"/jobs/{job.pk}", **bearer(job.owner)).status_code == 200

    assert client.statuses() == ["queued", "running", "succeeded"]
    assert client.of("progress")


@pytest.mark.usefixtures("bouncer")
def test_a_cancel_reaches_the_worker_through_a_pooler_in_transaction_mode(fake: FakeComfy) -> None:
    fake.seconds = 30
    client = client_of()
    with worker_process(fake.url):
        job_id = post_portrait(client, width=64, height=64, steps=150).json()["id"]
        wait_until(lambda: fake.stats()["prompts"].get(job_id, {}).get("executed"))

        client.post(f"{API}/jobs/{job_id}/cancel")

        wait_until(lambda: fresh(job_id).status == "canceled")
