"""API keys that go with a workflow: through the workers' memory, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import transaction

from comfy.client import ComfyClient
from comfy.errors import KeyLost
from fake_comfy import FakeComfy
from jobs import keyring
from jobs.keyring import Keyring
from jobs.models import Job
from jobs.tests.go_between import GoBetween
from jobs.tests.helpers import make_user, make_worker, run_until_done, start, wait_until
from jobs.wire import MARKER, on_the_wire
from jobs.worker import Worker
from jobs.workflows import submit_workflow

GRAPH: dict[str, Any] = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 1},
    },
    "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
}
KEY = {"api_key_comfy_org": "sk-secret"}


@pytest.fixture
def between(fake: FakeComfy) -> Iterator[GoBetween]:
    with GoBetween(fake.url) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring, "ARRIVES_WITHIN", 0.05)


def submit() -> Job:
    return submit_workflow(make_user(), GRAPH, extra_data=KEY)


def told(job: Job, **secrets: str) -> str:
    return json.dumps({"job": str(job.pk), "secrets": secrets})


def keyed_job() -> Job:
    return Job(params={"extra_data": ["api_key_comfy_org"]})


def has(keys: Keyring, job: Job) -> bool:
    try:
        return bool(keys.secrets_of(job))
    except KeyLost:
        return False


@contextmanager
def listening(worker: Worker) -> Iterator[Worker]:
    """Let the worker hear notifications, and no more."""
    thread = start(worker.listener.run)
    wait_until(lambda: worker.bell.rings)  # it has connected
    try:
        yield worker
    finally:
        worker.listener.close()
        thread.join()


def sent(between: GoBetween) -> list[dict[str, Any]]:
    return [seen.json.get("extra_data", {}) for seen in between.requests("POST /prompt")]


@pytest.mark.django_db(transaction=True)
def test_the_key_goes_with_the_graph_and_nowhere_else(
    between: GoBetween, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with listening(make_worker(between.url)) as worker:
        job = submit()
        wait_until(lambda: has(worker.keyring, job))

        row = run_until_done(job, worker)

    assert row.status == "succeeded"
    assert [extra["api_key_comfy_org"] for extra in sent(between)] == ["sk-secret"]
    assert not has(worker.keyring, job)
    assert "sk-secret" not in caplog.text
    assert "sk-secret" not in json.dumps(list(Job.objects.values()), default=str)


@pytest.mark.django_db(transaction=True)
def test_the_key_is_kept_for_another_attempt(fake: FakeComfy, between: GoBetween) -> None:
    between.instead("GET /view", b"", 3)
    with listening(make_worker(between.url)) as worker:
        job = submit()
        wait_until(lambda: has(worker.keyring, job))
        Job.objects.filter(pk=job.pk).update(max_attempts=3)
        fake.fault("empty_outputs")

        row = run_until_done(job, worker)

    assert row.status == "succeeded"
    assert all(extra["api_key_comfy_org"] == "sk-secret" for extra in sent(between))


@pytest.mark.django_db(transaction=True)
def test_a_key_is_handed_over_only_if_the_job_is_there() -> None:
    with listening(make_worker("http://127.0.0.1:9")) as worker:
        with transaction.atomic():
            undone = submit()
            transaction.set_rollback(True)
        job = submit()
        wait_until(lambda: has(worker.keyring, job))

    assert not has(worker.keyring, undone)


@pytest.mark.django_db
def test_a_job_whose_key_is_gone_fails_and_says_to_send_it_again(fake: FakeComfy) -> None:
    job = submit()

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.attempt) == ("failed", 1)
    assert row.error is not None
    assert row.error["code"] == "api_key_lost"
    assert "Send the job again, with its key" in row.error["message"]
    assert str(job.pk) not in fake.prompts


@pytest.mark.django_db
def test_a_prompt_that_was_sent_needs_no_key_any_more(fake: FakeComfy) -> None:
    job = submit()
    with ComfyClient(fake.url) as client:
        client.submit(
            on_the_wire(job, {}),
            prompt_id=job.prompt_id,
            client_id=job.prompt_id,
            extra_data={MARKER: 0, **KEY},
        )

    row = run_until_done(job, make_worker(fake.url))

    assert row.status == "succeeded"
    assert fake.prompts[job.prompt_id]["submitted"] == 1


def test_a_job_that_brought_no_key_needs_none() -> None:
    assert Keyring().secrets_of(Job(params={"extra_data": []})) == {}
    assert Keyring().secrets_of(Job(params={"prompt": "a portrait"})) == {}


def test_a_key_that_comes_a_little_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring, "ARRIVES_WITHIN", 50)
    keys, job = Keyring(), keyed_job()
    got: list[Any] = []
    waiting = start(lambda: got.append(keys.secrets_of(job)))

    keys.put(told(job, **KEY))
    waiting.join(50)

    assert got == [KEY]


def test_keys_are_forgotten_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring, "HELD_AT_MOST", 2)
    keys, jobs = Keyring(), [keyed_job() for _ in range(3)]
    for job in jobs:
        keys.put(told(job, **KEY))

    assert [has(keys, job) for job in jobs] == [False, True, True]
    with pytest.raises(KeyLost):
        keys.secrets_of(jobs[0])


def test_keys_are_forgotten_after_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, old, new = Keyring(), keyed_job(), keyed_job()
    keys.put(told(old, **KEY))
    monkeypatch.setattr(keyring, "HELD_FOR", -1)

    keys.put(told(new, **KEY))

    assert (has(keys, old), has(keys, new)) == (False, True)
