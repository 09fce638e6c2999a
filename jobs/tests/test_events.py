"""The event stream of a job, on a real web server, with real workers where one draws."""

from __future__ import annotations

import asyncio
import base64
import io
import signal
from collections.abc import Iterator
from typing import Any

import comfy_sdk
import httpx
import pytest
from comfy_sdk.events import OutputReady, Progress, StatusChange
from django.contrib.auth.models import User
from django.test import Client
from PIL import Image

from fake_comfy import FakeComfy
from jobs.models import ApiToken, Job, Preview
from jobs.tests.clients import bearer, get, listening
from jobs.tests.helpers import (
    claim,
    claim_new_job,
    fresh,
    make_user,
    queue_job,
    wait_until,
)
from jobs.tests.helpers_api import check, error_of, finish, picture_bytes, token_of
from jobs.tests.processes import WebProcess, web_process, worker_process

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]

SCHEMAS = {
    "status": "StatusEvent",
    "progress": "Progress",
    "preview": "PreviewEvent",
    "output": "Output",
}
HALF = {"value": 0.5, "nodes_done": 5, "nodes_total": 10}


@pytest.fixture
def web(transactional_db: None) -> Iterator[WebProcess]:
    with web_process() as web:
        yield web


def show(job: Job, progress: dict[str, Any], image: bytes | None = None) -> None:
    """Write progress, and a preview, as the worker does that holds the job."""
    preview = image and Preview(job=job, node_id="3", content_type="image/jpeg", image=image)
    Job.objects.show_progress(job, progress, preview or None)


def test_a_job_tells_its_life_from_the_queue_to_its_picture(
    web: WebProcess, fake: FakeComfy
) -> None:
    fake.seconds = 4
    job = queue_job(steps=20)

    with listening(web, job) as client:
        wait_until(lambda: client.statuses() == ["queued"])
        with worker_process(fake.url):
            wait_until(client.has_ended)

    assert client.response.headers["Content-Type"] == "text/event-stream"
    assert "no-store" in client.response.headers["Cache-Control"]
    assert client.response.headers["X-Accel-Buffering"] == "no"
    assert client.lines[0] == "retry: 1000"
    for event in client.events:
        check(SCHEMAS[event.name], event.payload)
    assert client.events[0].payload == {"status": "queued", "queue_position": 1}
    assert client.statuses() == ["queued", "running", "succeeded"]
    assert client.events[-1].payload == {"status": "succeeded", "queue_position": None}
    values = [progress["value"] for progress in client.of("progress")]
    assert values == sorted(values)
    assert 0 < values[0] < values[-1] == 1
    image = Image.open(io.BytesIO(base64.b64decode(client.of("preview")[0]["data_base64"])))
    assert image.format == "JPEG"
    (output,) = client.of("output")
    assert httpx.get(output["url"]).content.startswith(b"\x89PNG")
    assert not Preview.objects.exists()


def test_whoever_comes_in_the_middle_is_told_how_things_stand(web: WebProcess) -> None:
    job = claim_new_job()
    show(job, HALF, picture_bytes())

    with listening(web, job) as first:
        wait_until(lambda: first.of("preview"))
    last_id = first.events[-1].id
    with listening(web, job, **{"Last-Event-ID": str(last_id)}) as second:
        wait_until(lambda: second.of("progress"))
        show(job, HALF | {"value": 0.6}, picture_bytes("red"))
        wait_until(lambda: second.of("preview"))

    assert [event.name for event in first.events] == ["status", "progress", "preview"]
    # The preview that it had already is not sent again.
    assert [event.name for event in second.events] == ["status", "progress", "progress", "preview"]
    assert base64.b64decode(second.of("preview")[0]["data_base64"]) == picture_bytes("red")


def test_the_stream_of_a_job_that_has_ended_tells_its_pictures_and_ends(web: WebProcess) -> None:
    job = queue_job()
    finish(job, picture_bytes(), picture_bytes("red"))

    with listening(web, job) as client:
        wait_until(client.has_ended)

    assert [event.name for event in client.events] == ["output", "output", "status"]
    assert client.statuses() == ["succeeded"]


def test_the_stream_goes_on_when_another_worker_does(web: WebProcess, fake: FakeComfy) -> None:
    fake.seconds = 8
    job = queue_job(steps=40)

    with listening(web, job) as client, worker_process(fake.url, GENFLOW_LEASE_SECONDS=2) as first:
        wait_until(lambda: client.of("preview"))
        first.kill()
        before = client.of("progress")[-1]["step"]
        kept = Preview.objects.get(job=job)
        with worker_process(fake.url, GENFLOW_LEASE_SECONDS=2):
            wait_until(client.has_ended)

    assert kept.image
    assert client.statuses()[-2:] == ["running", "succeeded"]
    assert fresh(job).lost_workers == 1
    steps = [progress["step"] for progress in client.of("progress") if progress["step"]]
    assert max(steps) > before


def test_places_in_the_queue_are_told_as_they_change(web: WebProcess) -> None:
    first, second = queue_job(), queue_job()

    with listening(web, second) as client:
        wait_until(lambda: client.of("status"))
        Job.objects.cancel(first.pk, by="owner")
        wait_until(lambda: len(client.of("status")) == 2)

    assert [status["queue_position"] for status in client.of("status")] == [2, 1]


def test_a_retry_a_cancel_and_a_failure_are_told(web: WebProcess) -> None:
    job = claim_new_job()

    with listening(web, job) as client:
        wait_until(lambda: client.statuses() == ["running"])
        Job.objects.hand_back(job, "worker_stopped")
        wait_until(lambda: client.of("status")[-1]["status"] == "queued")
        again = claim()
        wait_until(lambda: client.of("status")[-1]["status"] == "running")
        Job.objects.cancel(job.pk, by="owner")
        wait_until(lambda: client.statuses()[-1] == "canceling")
        assert again is not None
        Job.objects.finish_cancel(again)
        wait_until(client.has_ended)

    assert client.statuses()[-1] == "canceled"


def test_a_silent_stream_says_that_it_is_there(transactional_db: None) -> None:
    job = queue_job()

    with (
        web_process(GENFLOW_HEARTBEAT_SECONDS=0.1) as web,
        listening(web, job) as client,
    ):
        wait_until(lambda: client.statuses() == ["queued"])
        wait_until(lambda: client.lines.count(":") > 5)


# --- the official client ---


@pytest.fixture
def drawn(
    web: WebProcess, fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Job, str]]:
    """A job that a worker draws, and its owner's token, for an SDK that knows where the server is."""
    fake.seconds = 3
    monkeypatch.setenv("COMFY_BASE_URL", web.url)
    job = queue_job(steps=20)
    with worker_process(fake.url):
        yield job, token_of(job.owner)


def assert_told(events: list[Any]) -> None:
    told = {type(event) for event in events}
    assert told == {StatusChange, Progress, comfy_sdk.events.Preview, OutputReady}
    assert [event.status for event in events if isinstance(event, StatusChange)][-1] == "succeeded"
    (preview, *_) = (event for event in events if isinstance(event, comfy_sdk.events.Preview))
    assert preview.to_pil().format == "JPEG"


def test_the_official_client_iterates_over_the_events(drawn: tuple[Job, str]) -> None:
    job, token = drawn

    with comfy_sdk.Comfy(api_key=token) as client:
        events = list(client.jobs.get(str(job.pk)).events())
        (output,) = (event.output for event in events if isinstance(event, OutputReady))
        assert output.to_bytes(range=(0, 3)) == b"\x89PNG"

    assert_told(events)


def test_the_official_client_iterates_over_the_events_in_a_coroutine(
    drawn: tuple[Job, str],
) -> None:
    job, token = drawn

    async def collect() -> list[Any]:
        async with comfy_sdk.AsyncComfy(api_key=token) as client:
            return [event async for event in (await client.jobs.get(str(job.pk))).events()]

    assert_told(asyncio.run(collect()))


# --- who may listen, and for how long ---


def test_a_strangers_job_has_no_events_and_nobody_hears_any(web: WebProcess) -> None:
    job = queue_job()
    path = f"/jobs/{job.pk}/events"

    assert error_of(get(web, path, **bearer(make_user("eve"))))["code"] == "not_found"
    assert error_of(get(web, "/jobs/unknown/events", **bearer(job.owner)))["code"] == "not_found"
    assert error_of(get(web, path, Authorization="Bearer gf_none"))["code"] == "unauthorized"
    assert get(web, path).status_code == 401


def deactivate(user: User) -> None:
    User.objects.filter(pk=user.pk).update(is_active=False)


def revoke_tokens(user: User) -> None:
    ApiToken.objects.filter(user=user).delete()


def delete_job(user: User) -> None:
    Job.objects.delete_for_owner(user.jobs.get().pk)


@pytest.mark.parametrize("end", [deactivate, revoke_tokens, delete_job])
def test_the_stream_ends_with_the_right_to_see_it(web: WebProcess, end: object) -> None:
    job = claim_new_job()

    with listening(web, job) as client:
        wait_until(lambda: client.events)
        assert callable(end)
        end(job.owner)
        wait_until(client.has_ended, 10)

    assert client.statuses()[0] == "running"


def test_a_session_may_listen_until_it_logs_out(web: WebProcess) -> None:
    job = queue_job()
    browser = Client()
    browser.force_login(job.owner)
    cookie = f"sessionid={browser.cookies['sessionid'].value}"

    with listening(web, job, Authorization="", Cookie=cookie) as client:
        wait_until(lambda: client.statuses() == ["queued"])
        browser.logout()
        wait_until(client.has_ended, 10)


def test_an_owner_has_so_many_streams_at_once_and_a_closed_one_makes_room(
    transactional_db: None,
) -> None:
    job = queue_job()
    path = f"/jobs/{job.pk}/events"

    with web_process(GENFLOW_STREAMS_PER_OWNER=2) as web:
        with listening(web, job) as one, listening(web, job) as two:
            wait_until(lambda: one.events and two.events)
            refused = get(web, path, **bearer(job.owner))
            assert get(web, f"/jobs/{job.pk}", **bearer(job.owner)).status_code == 200
            with listening(web, queue_job(make_user("eve"))) as other:
                wait_until(lambda: other.events)

        def has_room() -> bool:
            with listening(web, job) as client:
                return client.response.status_code == 200

        wait_until(has_room)

    assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_streams")
    assert int(refused.headers["Retry-After"]) > 0


def test_a_server_that_stops_lets_its_clients_go(web: WebProcess) -> None:
    job = queue_job()

    with listening(web, job) as client:
        wait_until(lambda: client.events)
        web.process.send_signal(signal.SIGTERM)
        wait_until(client.has_ended, 5)
        assert web.process.wait(10) == -signal.SIGTERM

    assert client.statuses() == ["queued"]
    assert "Traceback" not in web.log()
