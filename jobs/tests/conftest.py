from __future__ import annotations

from collections.abc import Iterator

import pytest

from fake_comfy import FakeComfy
from jobs.tests.helpers import make_worker, start
from jobs.worker import Worker


@pytest.fixture
def fake() -> Iterator[FakeComfy]:
    """A ComfyUI on a real port, whose sampler takes a moment."""
    with FakeComfy(seconds=0.1) as server:
        yield server


@pytest.fixture
def running_worker(fake: FakeComfy) -> Iterator[Worker]:
    """A worker of that ComfyUI, at work on the test database."""
    worker = make_worker(fake.url)
    thread = start(worker.run)
    yield worker
    worker.stop()
    thread.join(20)
