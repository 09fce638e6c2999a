"""Previews on their way from ComfyUI to the job's row."""

from __future__ import annotations

import io

import pytest
import requests
from PIL import Image

from fake_comfy import FakeComfy
from jobs.models import Job, Preview
from jobs.tests.helpers import fresh, make_worker, queue_job, start, wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]


def previews_of(job: Job) -> list[Preview]:
    """Return the last preview, if there is one."""
    return list(Preview.objects.filter(job=job))


def wish(fake: FakeComfy, job: Job) -> object:
    """Return what its prompt asked for."""
    history = requests.get(f"{fake.url}/history/{job.pk}", timeout=10).json()
    return history[str(job.pk)]["prompt"][3]["preview_method"]


def test_a_run_shows_previews_until_it_ends(fake: FakeComfy) -> None:
    fake.seconds = 4
    job = queue_job(steps=40)
    thread = start(make_worker(fake.url).run_once)

    [first] = wait_until(lambda: previews_of(job))
    [second] = wait_until(lambda: [p for p in previews_of(job) if p.saved_at > first.saved_at])
    thread.join()

    assert first.node_id == "3"
    assert Image.open(io.BytesIO(first.image)).format == "JPEG"
    assert first.content_type == "image/jpeg"
    assert bytes(first.image) != bytes(second.image)
    assert fresh(job).status == "succeeded"
    assert not previews_of(job)
    assert wish(fake, job) == "auto"


def test_previews_can_be_done_without(fake: FakeComfy) -> None:
    fake.seconds = 2
    job = queue_job(steps=20)
    thread = start(make_worker(fake.url, preview_method="none").run_once)

    wait_until(lambda: (fresh(job).progress or {}).get("value", 0) > 0.5)
    seen = previews_of(job)
    thread.join()

    assert not seen
    assert wish(fake, job) == "none"
