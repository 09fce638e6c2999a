from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.contrib.auth.models import User
from django.test import Client
from pytest_django import Settings

from fake_comfy import FakeComfy
from jobs.auth import GOOD_TOKENS, WRONG_TOKENS
from jobs.tests.helpers import make_user, make_worker, start
from jobs.tests.helpers_pages import logged_in
from jobs.tests.processes import web_process, worker_process
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


@pytest.fixture
def server(transactional_db: None, fake: FakeComfy) -> Iterator[str]:
    """The address of a web server beside a worker of that ComfyUI, each a process of its own."""
    with web_process() as web, worker_process(fake.url):
        yield web.url


@pytest.fixture(autouse=True)
def passwords_hashed_in_no_time(settings: Settings) -> None:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture
def ann(db: None) -> User:
    return make_user("ann")


@pytest.fixture
def as_ann(ann: User) -> Client:
    """A browser in which ann is logged in."""
    return logged_in(ann)
