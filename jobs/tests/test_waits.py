"""Answers held back until a job changes: `?wait=` and `Prefer: wait=`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import httpx
import pytest
from django.contrib.auth.models import User
from django.test import Client

from jobs.models import ApiToken, Failure, Job
from jobs.tests.clients import bearer, get
from jobs.tests.helpers import claim, claim_new_job, make_user, queue_job
from jobs.tests.helpers_api import API, client_of, error_of, finish, picture_bytes
from jobs.tests.processes import WebProcess, web_process

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]

Ask = Callable[..., "Future[httpx.Response]"]


@pytest.fixture
def web(transactional_db: None) -> Iterator[WebProcess]:
    with web_process() as web:
        yield web


@pytest.fixture
def ask(web: WebProcess) -> Iterator[Ask]:
    """Send a request on a thread of its own."""
    with ThreadPoolExecutor() as threads:
        yield lambda job, query="", **headers: threads.submit(
            get, web, f"/jobs/{job.pk}{query}", **bearer(job.owner), **headers
        )


def version(job: Job) -> dict[str, str]:
    """Return the header that says that the client knows the job as it is now."""
    return {"If-None-Match": client_of(job.owner).get(f"{API}/jobs/{job.pk}")["ETag"]}


# --- versions ---


def test_a_version_that_the_client_knows_is_not_sent_again() -> None:
    client, job = client_of(), claim_new_job()
    path = f"{API}/jobs/{job.pk}"

    known = client.get(path, headers=version(job))
    unknown = client.get(path, headers={"If-None-Match": 'W/"another"'})
    odd = client.get(path, headers={"If-None-Match": "nonsense"})

    assert (known.status_code, known.content) == (304, b"")
    assert known["ETag"] == unknown["ETag"]
    assert unknown.status_code == odd.status_code == 200


def test_a_version_ends_with_a_status_an_attempt_or_a_picture() -> None:
    job = queue_job()
    versions = [version(job)["If-None-Match"]]
    held = claim()
    assert held is not None
    versions.append(version(job)["If-None-Match"])
    Job.objects.show_progress(held, {"value": 0.5})
    assert version(job)["If-None-Match"] == versions[-1]
    Job.objects.retry(held, Failure("unknown", "Again."), timedelta(), redraw=True)
    versions.append(version(job)["If-None-Match"])
    finish(job, picture_bytes())
    versions.append(version(job)["If-None-Match"])

    assert len(set(versions)) == 4


# --- waiting ---


def test_an_answer_is_held_back_until_the_job_changes_for_everybody_who_waits(ask: Ask) -> None:
    job = queue_job()
    known = version(job)
    waiting = [ask(job, "?wait=50", **known), ask(job, Prefer="wait=50", **known)]

    assert not any(answer.done() for answer in waiting)
    claim()

    answers = [answer.result(20) for answer in waiting]
    assert [answer.json()["status"] for answer in answers] == ["running", "running"]
    assert [answer.headers.get("Preference-Applied") for answer in answers] == [None, "wait=50"]
    assert answers[0].headers["ETag"] != known["If-None-Match"]


def test_who_knows_no_version_waits_for_the_next(ask: Ask) -> None:
    answer = ask(job := queue_job(), "?wait=50")

    while not answer.done():  # one change may come before the question does
        if (held := claim()) is not None:
            Job.objects.hand_back(held, "worker_stopped")

    assert answer.result().json()["id"] == str(job.pk)


def test_a_job_that_has_changed_is_told_at_once(ask: Ask) -> None:
    job = queue_job()
    known = version(job)
    claim()

    assert ask(job, "?wait=50", **known).result(20).json()["status"] == "running"


def test_a_job_that_has_ended_is_told_at_once(ask: Ask) -> None:
    finish(job := queue_job(), picture_bytes())

    assert ask(job, "?wait=50").result(20).json()["status"] == "succeeded"
    assert ask(job, "?wait=50", **version(job)).result(20).status_code == 304


def test_nobody_waits_for_longer_than_asked(ask: Ask) -> None:
    job = claim_new_job()
    known = version(job)
    Job.objects.show_progress(job, {"value": 0.5})

    assert ask(job, "?wait=0.1", **known).result(20).status_code == 304
    assert ask(job, "?wait=0.1").result(20).json()["progress"] == {"value": 0.5}


def delete_job(user: User) -> None:
    Job.objects.delete_for_owner(user.jobs.get().pk)


def revoke_tokens(user: User) -> None:
    ApiToken.objects.filter(user=user).delete()


@pytest.mark.parametrize(("end", "status"), [(delete_job, 404), (revoke_tokens, 401)])
def test_the_wait_ends_with_the_right_to_see_the_job(
    ask: Ask, end: Callable[[User], None], status: int
) -> None:
    job = claim_new_job()

    answer = ask(job, "?wait=50", **version(job))
    end(job.owner)

    assert answer.result(20).status_code == status


def test_nobody_waits_for_a_strangers_job(web: WebProcess) -> None:
    answer = get(web, f"/jobs/{queue_job().pk}?wait=50", **bearer(make_user("eve")))

    assert answer.status_code == 404


# --- what may be asked for ---


@pytest.mark.parametrize("wait", ["-1", "61", "nan", "inf", "a minute", "1e400"])
def test_a_wait_that_makes_no_sense_is_refused(wait: str) -> None:
    answer = client_of().get(f"{API}/jobs/{queue_job().pk}", {"wait": wait})

    assert answer.status_code == 422
    assert error_of(answer)["details"] == {"wait": ["Must be a number from 0 to 60."]}


@pytest.mark.parametrize(
    ("prefer", "applied"),
    [
        ("wait=10", "wait=10"),
        ('respond-async, Wait = "20"; x', "wait=20"),
        ("wait=100000", "wait=60"),
        ("wait=soon", None),
        ("wait", None),
        ("nowait=3", None),
        ("return=minimal", None),
    ],
)
def test_a_preference_is_granted_as_far_as_it_can_be(prefer: str, applied: str | None) -> None:
    client: Client = client_of()
    finish(job := queue_job(), picture_bytes())

    answer = client.get(f"{API}/jobs/{job.pk}", headers={"Prefer": prefer})

    assert (answer.status_code, answer.get("Preference-Applied")) == (200, applied)
