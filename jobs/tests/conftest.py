from __future__ import annotations

from collections.abc import Iterator

import pytest

from fake_comfy import FakeComfy


@pytest.fixture
def fake() -> Iterator[FakeComfy]:
    """A ComfyUI on a real port, whose sampler takes a moment."""
    with FakeComfy(seconds=0.1) as server:
        yield server
