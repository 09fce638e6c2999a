"""Field cases: cancel, in every status, at every step, from every door."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from fake_comfy import FakeComfy
from jobs.models import Asset, Backend, Blob, Job
from jobs.tests.go_between import GoBetween, Reply, json_reply
from jobs.tests.helpers import (
    diary,
    fresh,
    let_lease_expire,
    make_staff,
    make_user,
    make_worker,
    queue_job,
    run_until_done,
    start,
    wait_until,
)
from jobs.tests.helpers_api import API, client_of
from jobs.tests.processes import worker_process
from jobs.tests.test_worker import runs, stop_after_submit
from jobs.worker import Options, Worker

pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def live_worker(url: str, **options: float) -> Iterator[Worker]:
    """A worker with all its threads."""
    worker = Worker(
        [url], Options.from_settings(**{"poll": 0.1, "retry_base": 0.01, "shutdown": 5.0} | options)
    )
    thread = start(worker.run)
    try:
        yield worker
    finally:
        worker.stop()
        thread.join()


def saw(fake: FakeComfy, method: str, path: str) -> bool:
    return any((r.method, r.path) == (method, path) for r in fake.requests)


def by_api(job: Job) -> None:
    assert client_of(job.owner).post(f"{API}/jobs/{job.pk}/cancel").status_code == 200


def by_page(job: Job) -> None:
    client = Client()
    client.force_login(job.owner)
    assert client.post(reverse("cancel-job", args=[job.pk])).status_code == 302


def by_admin(job: Job) -> None:
    client = Client()
    client.force_login(make_staff())
    chosen = {"action": "cancel_jobs", "_selected_action": [str(job.pk)]}
    assert client.post("/admin/jobs/job/", chosen).status_code == 302


def assert_canceled_without_a_trace(job: Job) -> None:
    row = fresh(job)
    assert (row.status, row.outputs.count(), row.attempt) == ("canceled", 0, 1)
    assert Blob.objects.count() == Asset.objects.count() == 1
    assert diary(job)[-1] == "canceled"


STEPS = [
    ("upload", "hang_upload", ("POST", "/upload/image")),
    ("submit", "hang_prompt", ("POST", "/prompt")),
    ("wait", None, ("POST", "/prompt")),
    ("download", "hang_view", ("GET", "/view")),
]


@pytest.mark.parametrize(("step", "fault", "request_seen"), STEPS)
def test_a_cancel_at_any_step_ends_the_job_though_the_server_hangs(
    fake: FakeComfy, step: str, fault: str | None, request_seen: tuple[str, str]
) -> None:
    fake.seconds = 0.1 if step == "download" else 20
    if fault:
        fake.fault(fault, times=None, seconds=600)
    job = queue_job(steps=150)
    with live_worker(fake.url):
        wait_until(lambda: saw(fake, *request_seen) and fresh(job).step == step)
        began = time.monotonic()

        Job.objects.cancel(job.pk, by="owner")
        wait_until(lambda: fresh(job).is_final)
        print(step, time.monotonic() - began)

    assert_canceled_without_a_trace(job)
