"""The public client of the Comfy API v2, which knows nothing of us, against our server."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from comfy_sdk import AsyncComfy, Comfy
from comfy_sdk.events import Event, OutputReady, Preview, Progress, StatusChange
from comfy_sdk.exceptions import (
    ComfyError,
    InvalidWorkflow,
    JobFailed,
    MissingAsset,
    NotFound,
    QueueFull,
)
from comfy_sdk.jobs import AsyncJob
from PIL import Image
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from fake_comfy import FakeComfy
from jobs.models import Job
from jobs.tests.go_between import GoBetween
from jobs.tests.helpers import make_user, make_worker, photo_bytes, queue_job, wait_until
from jobs.tests.helpers_api import finish, picture_bytes, token_of
from jobs.tests.test_case_cancel import live_worker
from jobs.tests.test_workflow_runs import node, picture, preview, save, upload, with_a_photo

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]

T = TypeVar("T")


@pytest.fixture
def comfy(live_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Comfy]:
    monkeypatch.setenv("COMFY_BASE_URL", live_server.url)
    with Comfy(api_key=token_of(make_user())) as client:
        yield client


def test_it_follows_a_job_to_its_picture(comfy: Comfy, tmp_path: Path) -> None:
    row = queue_job(metadata={"shoot": "7"})
    job = comfy.jobs.get(str(row.pk))
    assert (job.status, job.metadata) == ("queued", {"shoot": "7"})
    assert list(job.events()) == []  # not served: it polls instead

    finish(row, picture_bytes())

    (output,) = job.result().outputs
    assert (output.type, output.name) == ("image", "portrait_00001_.png")
    assert output.to_file(tmp_path / "out.png").read_bytes() == picture_bytes()
    assert output.to_bytes(range=(0, 7)) == b"\x89PNG\r\n\x1a\n"
    assert job.get_workflow().graph == row.graph


def test_it_lists_all_jobs_page_by_page(comfy: Comfy) -> None:
    jobs = [str(queue_job(metadata={"n": str(n % 2)}).pk) for n in range(5)]

    assert [job.id for job in comfy.list_jobs(limit=2)] == jobs[::-1]
    odd = list(comfy.list_jobs(metadata={"n": "1"}, limit=1))
    assert [job.id for job in odd] == [jobs[3], jobs[1]]
    assert all(job.create_time and job.update_time for job in odd)


def test_it_cancels(comfy: Comfy) -> None:
    assert comfy.jobs.get(str(queue_job().pk)).cancel().status == "canceled"


def test_it_reads_our_errors(comfy: Comfy) -> None:
    with pytest.raises(NotFound):
        comfy.jobs.get("unknown")
    with pytest.raises(ComfyError) as refused:
        list(comfy.list_jobs(metadata={"a": "\0"}))
    assert refused.value.code == "invalid_metadata_filter"


# --- workflows ---


@pytest.fixture
def worker(fake: FakeComfy) -> Iterator[None]:
    with live_worker(fake.url):
        yield


@pytest.mark.usefixtures("worker")
def test_it_runs_a_workflow_and_fetches_every_output(comfy: Comfy) -> None:
    workflow = comfy.workflows.from_json(
        {
            "1": node("LoadImage", image=None),
            "2": node("PrimitiveString", value="as asked"),
            "9": save("1", "portraits/ann"),
            "10": preview("1"),
            "11": node("PreviewAny", source=["2", 0]),
        }
    )
    asset = comfy.assets.from_bytes(photo_bytes(), filename="ann.jpg", content_type="image/jpeg")
    workflow.set_input("1", "image", asset)

    job = comfy.submit(workflow, metadata={"client": "acme"}).result()

    (saved,) = job.get_outputs("9")
    assert (saved.name, saved.type, saved.job_id) == ("ann_00001_.png", "image", job.id)
    assert Image.open(io.BytesIO(saved.to_bytes())).size == (96, 96)
    assert [output.type for output in job.get_outputs("10")] == ["image"]
    assert job.get_outputs("11")[0].to_bytes() == b"as asked"
    assert job.metadata == {"client": "acme"}
    assert [found.id for found in comfy.list_jobs(metadata={"client": "acme"})] == [job.id]
    sent = job.get_workflow()
    assert (sent.format, sent.graph["9"]) == ("api", workflow.json["9"])
    assert sent.graph["1"]["inputs"]["image"]["info"]["id"] == asset.id


@pytest.mark.usefixtures("worker")
def test_it_hands_a_key_to_comfyui(comfy: Comfy, fake: FakeComfy) -> None:
    # A worker that had not heard of the key would not send the graph.
    job = comfy.run(comfy.workflows.from_json({"1": picture(), "2": save("1")}), api_key="sk")

    assert job.status == "succeeded"
    assert fake.prompts[job.id]["submitted"] == 1


@pytest.mark.usefixtures("worker")
def test_it_reads_why_a_workflow_failed(comfy: Comfy) -> None:
    upload(b"no picture at all")
    workflow = comfy.workflows.from_json(
        {"1": node("LoadImage", image="image.png"), "2": save("1")}
    )

    with pytest.raises(JobFailed) as failed:
        comfy.run(workflow)

    error = failed.value.error
    assert error is not None
    assert (error.code, error.node_id, error.class_type) == ("bad_photo", "1", "LoadImage")


@pytest.mark.usefixtures("worker")
def test_it_cancels_a_workflow_under_way(comfy: Comfy, fake: FakeComfy) -> None:
    fake.seconds = 30
    row = queue_job(steps=150)
    job = comfy.submit(comfy.workflows.from_json({"1": picture(), "2": save("1")}))
    wait_until(lambda: str(row.pk) in fake.prompts and job.id in fake.prompts)

    job.cancel()

    assert job.wait(timeout=30).status == "canceled"
    comfy.jobs.get(str(row.pk)).cancel()


def test_it_reads_why_a_workflow_is_refused(comfy: Comfy, fake: FakeComfy) -> None:
    make_worker(fake.url).housekeeper.read_catalogs()
    from_json = comfy.workflows.from_json

    with pytest.raises(InvalidWorkflow) as unknown:
        comfy.submit(from_json({"1": picture(), "2": save("1"), "3": node("Rare")}))
    with pytest.raises(MissingAsset) as missing:
        comfy.submit(from_json({"1": node("LoadImage", image="gone.png"), "2": save("1")}))
    with pytest.raises(ComfyError) as labels:
        comfy.submit(from_json({"1": picture(), "2": save("1")}), metadata={"": "x"})

    assert reasons(unknown.value.details) == {"3": "unknown_class"}
    assert reasons(missing.value.details) == {"1": "missing_asset"}
    assert labels.value.code == "metadata_invalid"
    assert not Job.objects.exists()


def reasons(details: Any) -> dict[str, str]:
    return {node_id: faults[0]["reason"] for node_id, faults in details["node_errors"].items()}


def test_it_waits_for_room_in_a_full_queue_and_gives_up(
    comfy: Comfy, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.GENFLOW_QUEUE_LIMIT_PER_OWNER = 1
    monkeypatch.setattr("comfy_sdk.client._QUEUE_RETRY_BUDGET", 0)
    workflow = comfy.workflows.from_json({"1": picture(), "2": save("1")})
    comfy.submit(workflow)

    with pytest.raises((QueueFull, ComfyError)) as full:
        comfy.submit(workflow)

    assert full.value.code == "owner_queue_full"


# --- without blocking ---


def run_in_a_coroutine(scenario: Callable[[AsyncComfy], Awaitable[T]]) -> T:
    async def run(token: str) -> T:
        async with AsyncComfy(api_key=token) as comfy:
            return await scenario(comfy)

    return asyncio.run(run(token_of(make_user())))


async def submit_with_a_photo(comfy: AsyncComfy) -> AsyncJob:
    workflow = comfy.workflows.from_json(with_a_photo())
    photo = comfy.assets.from_bytes(photo_bytes(), filename="face.jpg")
    workflow.set_input("12", "image", photo)
    return await comfy.submit(workflow)


def test_a_coroutine_draws_from_a_photo_hears_of_it_and_keeps_the_picture(
    server: str, fake: FakeComfy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMFY_BASE_URL", server)
    fake.seconds = 4

    async def draw(comfy: AsyncComfy) -> list[Event]:
        job = await submit_with_a_photo(comfy)
        events = [event async for event in job.events()]
        (output,) = (await job.result()).get_outputs("9")
        await output.to_file(tmp_path / "out.png")
        return events

    events = run_in_a_coroutine(draw)

    job = Job.objects.get()
    assert (job.status, job.inputs.get().name, job.outputs.count()) == ("succeeded", "face.jpg", 2)
    assert {type(event) for event in events} == {StatusChange, Progress, Preview, OutputReady}
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.size == (64, 64)


def test_a_coroutine_cancels_a_job_that_is_being_drawn(
    server: str, fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMFY_BASE_URL", server)
    fake.seconds = 60

    async def cancel(comfy: AsyncComfy) -> AsyncJob:
        job = await submit_with_a_photo(comfy)
        async for event in job.events():
            if isinstance(event, Progress):
                await job.cancel()
        return await job.wait()

    job = run_in_a_coroutine(cancel)

    assert job.status == Job.objects.get().status == "canceled"
    assert fake.prompts[job.id]["interrupted"] == 1


@pytest.mark.usefixtures("comfy")
def test_a_coroutine_reads_our_errors() -> None:
    async def fail(comfy: AsyncComfy) -> None:
        with pytest.raises(NotFound):
            await comfy.jobs.get("unknown")
        with pytest.raises(MissingAsset):
            await comfy.submit(comfy.workflows.from_json(with_a_photo()))

    run_in_a_coroutine(fail)


# --- an answer that is lost on its way ---


@pytest.fixture
def deaf_once(live_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The next job that is made is not heard of."""
    with GoBetween(live_server.url) as between:
        monkeypatch.setenv("COMFY_BASE_URL", between.url)
        between.spoil("POST /api/v2/jobs", b"")
        yield


@pytest.mark.usefixtures("deaf_once")
def test_it_sends_again_what_was_not_answered_and_has_one_job() -> None:
    with Comfy(api_key=token_of(make_user())) as comfy:
        workflow = comfy.workflows.from_json({"1": picture(), "2": save("1")})
        with pytest.raises(httpx.TransportError) as lost:
            comfy.submit(workflow)
        job = comfy.submit(workflow, idempotency_key=vars(lost.value)["idempotency_key"])

    assert job.id == str(Job.objects.get().pk)


@pytest.mark.usefixtures("deaf_once")
def test_a_coroutine_sends_again_what_was_not_answered_and_has_one_job() -> None:
    async def insist(comfy: AsyncComfy) -> AsyncJob:
        workflow = comfy.workflows.from_json({"1": picture(), "2": save("1")})
        with pytest.raises(httpx.TransportError) as lost:
            await comfy.submit(workflow)
        return await comfy.submit(workflow, idempotency_key=vars(lost.value)["idempotency_key"])

    assert run_in_a_coroutine(insist).id == str(Job.objects.get().pk)
