from __future__ import annotations

from collections.abc import Iterator

import pytest

from fake_comfy import FakeComfy
from jobs.auth import GOOD_TOKENS, WRONG_TOKENS
from jobs.tests.helpers import make_worker, start
from jobs.throttling import OWNERS
from jobs.worker import Worker


@pytest.fixture(autouse=True)
def nobody_has_asked_yet() -> None:
    """What a web process remembers of earlier requests is not to reach from one test into another."""
    OWNERS.clear()
    WRONG_TOKENS.clear()
    GOOD_TOKENS.clear()


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
