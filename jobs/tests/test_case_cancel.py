"""Field cases: cancel, in every status, at every step, from every door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import requests
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from comfy.client import ComfyClient
from comfy.errors import NotConnected
from fake_comfy import FakeComfy
from jobs.models import Asset, Backend, Blob, Job, new_id
from jobs.tests.go_between import GoBetween, Reply, json_reply
from jobs.tests.helpers import (
    diary,
    fresh,
    let_lease_expire,
    make_staff,
    make_user,
    make_worker,
    queue_job,
    start,
    wait_until,
)
from jobs.tests.helpers_api import API, client_of
from jobs.tests.processes import worker_process
from jobs.tests.test_worker import runs
from jobs.worker import Options, Worker

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]


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
    chosen = {"action": "cancel", "_selected_action": [str(job.pk)]}
    assert client.post("/admin/jobs/job/", chosen).status_code == 302


def assert_canceled_without_a_trace(job: Job) -> None:
    row = fresh(job)
    assert (row.status, row.outputs.count(), row.attempt) == ("canceled", 0, 1)
    assert Blob.objects.count() == Asset.objects.count() == 1
    assert diary(job)[-1] == "canceled"


def last_facts(job: Job) -> dict[str, Any]:
    """Return what the last line of the diary says."""
    facts: dict[str, Any] = job.events.order_by("-pk")[0].facts
    return facts


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

        Job.objects.cancel(job.pk, by="owner")
        wait_until(lambda: fresh(job).is_final)

    assert_canceled_without_a_trace(job)
    if step in ("submit", "wait"):
        assert fake.prompts[str(job.pk)]["interrupted"] == 1


@pytest.mark.parametrize("notifies", [True, False])
@pytest.mark.parametrize("ask", [by_api, by_page, by_admin])
def test_a_cancel_from_any_door_stops_the_gpu_with_and_without_notify(
    fake: FakeComfy, settings: Settings, ask: Callable[[Job], None], notifies: bool
) -> None:
    settings.GENFLOW_NOTIFY = notifies
    fake.seconds = 20
    job = queue_job(make_user("ann"), steps=150)
    with live_worker(fake.url):
        wait_until(lambda: runs(fake, job) == (1, 1))

        ask(job)
        wait_until(lambda: fresh(job).is_final)

    assert_canceled_without_a_trace(job)
    assert fake.prompts[str(job.pk)]["interrupted"] == 1


def test_a_cancel_is_heard_within_a_second_however_long_the_lease() -> None:
    worker = Worker([], Options.from_settings(lease=3600.0, poll=60.0))

    assert worker.renewer.every_seconds <= 1


@pytest.mark.parametrize("retries", [False, True])
def test_a_cancel_of_a_waiting_job_needs_no_worker(fake: FakeComfy, retries: bool) -> None:
    job = queue_job()
    if retries:
        fake.fault("http_500", path="/upload/image")
        make_worker(fake.url, retry_base=1000.0).run_once()

    Job.objects.cancel(job.pk, by="owner")

    assert fresh(job).status == "canceled"


def test_a_cancel_of_a_job_that_waits_for_a_second_look_at_its_run_ends_the_run_too(
    fake: FakeComfy,
) -> None:
    fake.seconds = 20
    job = queue_job(steps=150)
    worker = make_worker(fake.url, retry_base=1000.0, retry_max=1000.0)
    thread = start(worker.run_once)
    wait_until(lambda: runs(fake, job) == (1, 1))
    fake.fault("html_502", times=6, path="/queue")
    thread.join()
    assert (fresh(job).status, fresh(job).attempt) == ("queued", 2)

    Job.objects.cancel(job.pk, by="owner")
    worker.run_once()

    assert fresh(job).status == "canceled"
    assert fake.prompts[str(job.pk)]["interrupted"] == 1


def test_a_cancel_that_cuts_a_connection_short_blames_no_server_for_it(
    fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = queue_job()
    worker = make_worker(fake.url)

    def cut_short(client: ComfyClient, *args: Any, **kwargs: Any) -> str:
        Job.objects.cancel(job.pk, by="owner")
        worker.renewer.renew_all()
        raise NotConnected("given up while it was connecting")

    monkeypatch.setattr(ComfyClient, "upload_image", cut_short)

    worker.run_once()

    assert fresh(job).status == "canceled"
    assert Backend.objects.get().status == "up"


# ComfyUI does not obey


def test_an_interrupt_that_gets_lost_is_repeated(fake: FakeComfy) -> None:
    fake.seconds = 20
    fake.fault("lose_interrupt", times=3)
    job = queue_job(steps=150)
    with live_worker(fake.url):
        wait_until(lambda: runs(fake, job) == (1, 1))

        Job.objects.cancel(job.pk, by="owner")
        wait_until(lambda: fresh(job).is_final)

    assert_canceled_without_a_trace(job)
    assert fake.prompts[str(job.pk)]["interrupted"] == 1


def test_a_picture_that_comes_in_spite_of_the_cancel_is_thrown_away(fake: FakeComfy) -> None:
    fake.seconds = 2
    fake.fault("lose_interrupt", times=None)
    job = queue_job()
    with live_worker(fake.url):
        wait_until(lambda: runs(fake, job) == (1, 1))

        Job.objects.cancel(job.pk, by="owner")
        wait_until(lambda: fresh(job).status == "canceling")
        wait_until(lambda: fresh(job).is_final)

    assert fake.prompts[str(job.pk)]["finished"] == 1
    assert_canceled_without_a_trace(job)
    assert not saw(fake, "GET", "/view")


def test_a_delete_that_came_too_late_for_the_queue_is_followed_by_an_interrupt(
    fake: FakeComfy,
) -> None:
    def still_pending(reply: Reply) -> Reply:
        queue = reply.json
        return json_reply({"queue_running": [], "queue_pending": queue["queue_running"]})

    fake.seconds = 20
    job = queue_job(steps=150)
    with GoBetween(fake.url) as between, live_worker(between.url):
        wait_until(lambda: runs(fake, job) == (1, 1))
        between.spoil("GET /queue", still_pending, 3)

        Job.objects.cancel(job.pk, by="owner")
        wait_until(lambda: fresh(job).is_final)

        assert len(between.requests("POST /queue")) >= 1
    assert_canceled_without_a_trace(job)
    assert fake.prompts[str(job.pk)]["interrupted"] == 1


def test_a_canceled_run_that_the_history_calls_a_success_is_canceled(fake: FakeComfy) -> None:
    def success(reply: Reply) -> Reply:
        history = reply.json
        for entry in history.values():
            entry["status"] |= {"status_str": "success", "completed": True}
        return json_reply(history)

    fake.seconds = 20
    job = queue_job(steps=150)
    with GoBetween(fake.url) as between, live_worker(between.url):
        between.spoil("GET /history", success, None)
        wait_until(lambda: runs(fake, job) == (1, 1))

        Job.objects.cancel(job.pk, by="owner")
        wait_until(lambda: fresh(job).is_final)

    assert_canceled_without_a_trace(job)
    assert runs(fake, job) == (1, 1)


@pytest.mark.parametrize("fault", ["refuse", "slow", "html_502", "unauthorized", "half_json"])
def test_a_comfyui_out_of_reach_keeps_nobody_waiting_for_long(fake: FakeComfy, fault: str) -> None:
    fake.seconds = 20
    job = queue_job(steps=150)
    with live_worker(fake.url, cancel=1.5):
        wait_until(lambda: runs(fake, job) == (1, 1))
        # As if it came down at the very moment of the cancel.
        Job.objects.cancel(job.pk, by="owner")
        fake.fault(fault, times=None, seconds=None if fault == "refuse" else 600)
        wait_until(lambda: fresh(job).is_final)

    assert fresh(job).status == "canceled"
    if not fake.prompts[str(job.pk)]["interrupted"]:  # it may have been faster than we
        assert "may still draw" in last_facts(job)["note"]
        assert last_facts(job)["reason"]


def test_a_cancel_of_a_job_whose_comfyui_went_down_before_is_not_kept_waiting_either(
    fake: FakeComfy,
) -> None:
    fake.seconds = 20
    job = queue_job(steps=150)
    with live_worker(fake.url, cancel=1.0):
        wait_until(lambda: runs(fake, job) == (1, 1))
        fake.fault("refuse", times=None)
        wait_until(lambda: fresh(job).status == "queued")

        Job.objects.cancel(job.pk, by="owner")
        wait_until(lambda: fresh(job).is_final)

    assert_canceled_without_a_trace(job)
    assert "may still draw" in last_facts(job)["note"]


def test_a_zombie_that_answers_every_interrupt_keeps_nobody_waiting_for_long(
    fake: FakeComfy,
) -> None:
    fake.fault("zombie")
    job = queue_job(steps=1)
    with live_worker(fake.url, cancel=1.5):
        wait_until(lambda: runs(fake, job) == (1, 1))

        Job.objects.cancel(job.pk, by="owner")
        wait_until(lambda: fresh(job).is_final)

    assert fresh(job).status == "canceled"
    assert "may still draw" in last_facts(job)["note"]


# never another prompt


def test_an_interrupt_that_arrives_when_the_next_prompt_runs_does_not_stop_that(
    fake: FakeComfy,
) -> None:
    fake.seconds = 2
    first = queue_job()
    with GoBetween(fake.url) as between, live_worker(between.url):
        wait_until(lambda: runs(fake, first) == (1, 1))
        second = queue_job(seed=8)
        wait_until(lambda: runs(fake, second)[0] == 1)
        late = between.hold("POST /interrupt")
        Job.objects.cancel(first.pk, by="owner")
        assert late.arrived.wait(50)
        wait_until(lambda: runs(fake, second) == (1, 1))

        late.release()
        wait_until(lambda: fresh(first).is_final and fresh(second).is_final)

    assert (fresh(first).status, fresh(second).status) == ("canceled", "succeeded")
    assert fake.prompts[str(second.pk)]["interrupted"] == 0


def test_a_cancel_ends_every_copy_of_its_prompt_and_nothing_else(fake: FakeComfy) -> None:
    fake.seconds = 20
    job = queue_job(steps=150)
    foreign = str(new_id())
    with live_worker(fake.url), ComfyClient(fake.url) as client:
        wait_until(lambda: runs(fake, job) == (1, 1))
        _, _, graph, *_ = requests.get(f"{fake.url}/queue", timeout=10).json()["queue_running"][0]
        client.submit(graph, prompt_id=foreign, client_id="somebody")
        client.submit(graph, prompt_id=str(job.pk), client_id=str(job.pk))

        Job.objects.cancel(job.pk, by="owner")
        wait_until(lambda: fresh(job).is_final)
        wait_until(lambda: fake.prompts[foreign]["executed"])

        assert client.look_up(str(job.pk)).place == "finished"
        assert client.look_up(foreign).place == "running"
    counts = fake.prompts[str(job.pk)]
    assert counts["executed"] == counts["interrupted"] <= 2


# whichever of cancel and finish is first, and whoever dies meanwhile


def test_of_a_cancel_and_a_finish_exactly_one_wins(fake: FakeComfy) -> None:
    fake.seconds = 0.05
    jobs = [queue_job(seed=seed) for seed in range(12)]
    moments = ["submit", "wait", "wait", "download", "download", ""]

    def cancel_at(job: Job, moment: str) -> Callable[[], object]:
        def act() -> None:
            wait_until(lambda: fresh(job).step == moment)
            Job.objects.cancel(job.pk, by="owner")

        return act

    threads = [start(cancel_at(job, moments[n % 6])) for n, job in enumerate(jobs)]
    with live_worker(fake.url):
        for thread in threads:
            thread.join()
        wait_until(lambda: all(fresh(job).is_final for job in jobs))

    for job in jobs:
        row = fresh(job)
        ends = [kind for kind in diary(row) if kind in ("succeeded", "canceled", "failed")]
        assert ends == [row.status]
        assert row.outputs.count() == (1 if row.status == "succeeded" else 0)
    assert Blob.objects.count() == Asset.objects.count()


def test_a_cancel_whose_worker_is_killed_is_done_by_the_next(fake: FakeComfy) -> None:
    fake.seconds = 20
    fake.fault("lose_interrupt", times=None)
    job = queue_job(steps=150)
    with worker_process(fake.url) as victim:
        wait_until(lambda: runs(fake, job) == (1, 1))
        Job.objects.cancel(job.pk, by="owner")
        wait_until(lambda: saw(fake, "POST", "/interrupt"))
        victim.kill()
    assert fresh(job).status == "canceling"
    fake.clear_faults()
    let_lease_expire(job)

    make_worker(fake.url).run_once()

    assert_canceled_without_a_trace(job)
    assert fake.prompts[str(job.pk)]["interrupted"] == 1
    assert fresh(job).lost_workers == 1


def test_a_cancel_during_a_polite_stop_is_finished_by_the_next_worker(fake: FakeComfy) -> None:
    fake.seconds = 20
    fake.fault("lose_interrupt", times=None)
    job = queue_job(steps=150)
    with live_worker(fake.url):
        wait_until(lambda: runs(fake, job) == (1, 1))
        Job.objects.cancel(job.pk, by="owner")
        wait_until(lambda: saw(fake, "POST", "/interrupt"))
    assert fresh(job).status == "canceling"
    fake.clear_faults()

    make_worker(fake.url).run_once()

    assert_canceled_without_a_trace(job)
    assert fresh(job).lost_workers == 0


def test_a_job_deleted_in_mid_run_stops_the_gpu_and_leaves_nothing(fake: FakeComfy) -> None:
    fake.seconds = 20
    job = queue_job(make_user("ann"), steps=150)
    with live_worker(fake.url):
        wait_until(lambda: runs(fake, job) == (1, 1))

        assert client_of(job.owner).delete(f"{API}/jobs/{job.pk}").status_code == 204
        wait_until(lambda: not Job.objects.exists())

    assert fake.prompts[str(job.pk)]["interrupted"] == 1
    assert not Asset.objects.exists()
    assert not Blob.objects.exists()
