from __future__ import annotations

from collections.abc import Iterator

import pytest

from fake_comfy import FakeComfy
from fake_comfy.tests.helpers import upload


@pytest.fixture
def fake() -> Iterator[FakeComfy]:
    """A server whose sampler takes no time, with a face uploaded."""
    with FakeComfy(seconds=0) as server:
        upload(server)
        yield server
