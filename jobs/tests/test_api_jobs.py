from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoAssertNumQueries

from jobs.models import Asset, Blob, Failure, Job
from jobs.tests.helpers import claim, claim_new_job, fresh, make_user, queue_job
from jobs.tests.helpers_api import API, check, client_of, error_of, finish, picture_bytes

pytestmark = pytest.mark.django_db

FAILURE = Failure("no_face", "There is no face in the photo.", "18", "IPAdapterFaceID", "Traceback")


def get_job(job: Job, client: Client | None = None) -> dict[str, Any]:
    """Return the job as the API tells it, in the contract's shape."""
    response = (client or client_of()).get(f"{API}/jobs/{job.pk}")
    assert response.status_code == 200
    body: dict[str, Any] = response.json()
    check("Job", body)
    return body


def list_jobs(query: str = "", client: Client | None = None) -> dict[str, Any]:
    response = (client or client_of()).get(f"{API}/jobs{query}")
    assert response.status_code == 200
    body: dict[str, Any] = response.json()
    return body


def ids(page: dict[str, Any]) -> list[str]:
    return [job["id"] for job in page["jobs"]]


# --- one job ---


def test_a_running_job_tells_its_progress_and_no_place_in_the_queue() -> None:
    held = claim_new_job()
    progress = {"value": 0.5, "nodes_done": 3, "nodes_total": 9, "step": 2, "steps": 4}
    Job.objects.show_progress(held, progress)

    job = get_job(held)

    assert (job["status"], job["queue_position"], job["progress"]) == ("running", None, progress)
    assert job["started_at"] >= job["created_at"]
    assert job["metrics"]["queue_ms"] >= 0
    assert job["metrics"]["execution_ms"] is None


def test_a_finished_job_tells_its_pictures_in_order() -> None:
    job = queue_job()
    first, second = finish(job, picture_bytes("red"), picture_bytes("blue"))

    body = get_job(job)

    assert body["status"] == "succeeded"
    assert [output["id"] for output in body["outputs"]] == [str(first.pk), str(second.pk)]
    output = body["outputs"][0]
    assert (output["name"], output["type"], output["node_id"]) == (
        "portrait_00001_.png",
        "image",
        "9",
    )
    assert (output["hash"], output["size_bytes"]) == (first.hash, first.size)
    assert output["url"].startswith(f"http://testserver{API}/assets/{first.pk}/content?")


def test_a_job_to_be_tried_again_tells_when_and_why() -> None:
    held = claim_new_job()
    Job.objects.retry(held, FAILURE, timedelta(minutes=1), redraw=False)

    job = get_job(held)

    assert (job["status"], job["attempt"], job["error"]) == ("queued", 2, None)
    assert job["retry"]["code"] == "no_face"
    assert job["retry"]["message"] == FAILURE.message
    assert job["retry"]["at"] > job["created_at"]


def test_a_job_whose_next_try_is_due_waits_for_nothing() -> None:
    held = claim_new_job()
    Job.objects.retry(held, FAILURE, timedelta(0), redraw=False)

    assert get_job(held)["retry"] is None


def test_a_failed_job_tells_its_owner_why_and_nothing_for_operators() -> None:
    held = claim_new_job()
    Job.objects.fail(held, FAILURE)

    job = get_job(held)

    assert job["status"] == "failed"
    assert job["error"] == {
        "code": "no_face",
        "message": "There is no face in the photo.",
        "node_id": "18",
        "class_type": "IPAdapterFaceID",
    }
    assert not {"error_detail", "backend", "worker_id", "fencing_token"} & set(job)
    assert "Traceback" not in str(job)


def test_the_workflow_behind_a_job_is_its_graph() -> None:
    job = queue_job()

    body = client_of().get(f"{API}/jobs/{job.pk}/workflow").json()

    check("JobWorkflowResponse", body)
    assert body == {"workflow": job.graph, "format": "api"}


def test_there_is_no_event_stream_yet() -> None:
    job = queue_job()

    response = client_of().get(
        f"{API}/jobs/{job.pk}/events", headers={"Accept": "text/event-stream"}
    )

    assert (response.status_code, error_of(response)["code"]) == (501, "not_implemented")


# --- cancel, delete ---


def test_a_queued_job_is_canceled_at_once_and_again_without_harm() -> None:
    job, client = queue_job(), client_of()

    for _ in range(2):
        response = client.post(f"{API}/jobs/{job.pk}/cancel")

        assert (response.status_code, response.json()["status"]) == (200, "canceled")
        check("Job", response.json())


def test_a_running_job_is_asked_to_stop() -> None:
    held = claim_new_job()

    response = client_of().post(f"{API}/jobs/{held.pk}/cancel")

    assert (response.status_code, response.json()["status"]) == (200, "canceling")
    assert response.json()["completed_at"] is None


def test_canceling_an_ended_job_changes_nothing() -> None:
    job = queue_job()
    finish(job, picture_bytes())

    response = client_of().post(f"{API}/jobs/{job.pk}/cancel")

    assert (response.status_code, response.json()["status"]) == (200, "succeeded")
    assert len(response.json()["outputs"]) == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("ended", [True, False])
def test_a_deleted_job_takes_its_photo_and_pictures_along(ended: bool) -> None:
    job, client = queue_job(), client_of()
    if ended:
        finish(job, picture_bytes())

    response = client.delete(f"{API}/jobs/{job.pk}")

    assert (response.status_code, response.content) == (204, b"")
    assert client.get(f"{API}/jobs/{job.pk}").status_code == 404
    assert client.delete(f"{API}/jobs/{job.pk}").status_code == 404
    assert not Job.objects.exists()
    assert not Asset.objects.exists()
    assert not Blob.objects.exists()


def test_a_running_job_that_was_deleted_is_hidden_at_once_with_its_photo() -> None:
    held = claim_new_job()
    client = client_of()
    photo = held.inputs.get()
    assert client.get(f"{API}/assets/{photo.pk}").status_code == 200

    client.delete(f"{API}/jobs/{held.pk}")

    assert fresh(held).status == "canceling"
    assert client.get(f"{API}/jobs/{held.pk}").status_code == 404
    assert client.get(f"{API}/assets/{photo.pk}").status_code == 404
    assert client.get(f"{API}/assets/{photo.pk}/content").status_code == 404
    assert list_jobs(client=client)["jobs"] == []


# --- whose job ---

CALLS = [
    ("get", ""),
    ("head", ""),
    ("delete", ""),
    ("post", "/cancel"),
    ("get", "/events"),
    ("get", "/image"),
    ("head", "/image"),
    ("get", "/workflow"),
]


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_someone_elses_job_is_answered_like_none_and_with_as_much_work(
    method: str, path: str
) -> None:
    job = queue_job()
    finish(job, picture_bytes())
    bob = client_of(make_user("bob"))
    bob.get(f"{API}/jobs")  # notes the use of the token, once a minute

    with CaptureQueriesContext(connection) as work_for_theirs:
        theirs = getattr(bob, method)(f"{API}/jobs/{job.pk}{path}")
    with CaptureQueriesContext(connection) as work_for_none:
        none = getattr(bob, method)(f"{API}/jobs/{uuid4()}{path}")

    assert theirs.status_code == none.status_code == 404
    assert theirs.content == none.content
    assert len(work_for_theirs) == len(work_for_none)
    assert fresh(job).status == "succeeded"


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_nobody_gets_nothing(method: str, path: str) -> None:
    job = queue_job()

    response = getattr(Client(), method)(f"{API}/jobs/{job.pk}{path}")

    assert response.status_code == 401
    assert response["WWW-Authenticate"] == "Bearer"
    assert fresh(job).status == "queued"


@pytest.mark.parametrize(
    "bad_id", ["1", "not-an-id", "00000000-0000-0000-0000-00000000000g", "..", "%00", "a/b"]
)
@pytest.mark.parametrize(("method", "path"), CALLS)
def test_an_id_that_is_none_is_not_found(method: str, path: str, bad_id: str) -> None:
    response = getattr(client_of(), method)(f"{API}/jobs/{bad_id}{path}")

    assert response.status_code == 404
    if method != "head":
        assert error_of(response)["code"] == "not_found"


# --- the list ---


def test_jobs_are_listed_newest_first_in_pages() -> None:
    jobs = [str(queue_job().pk) for _ in range(5)]
    queue_job(make_user("bob"))

    first = list_jobs("?limit=2")
    second = list_jobs(f"?limit=2&cursor={first['next_cursor']}")
    third = list_jobs(f"?limit=2&cursor={second['next_cursor']}")

    assert ids(first) + ids(second) + ids(third) == jobs[::-1]
    assert "next_cursor" not in third


def test_a_full_last_page_leads_nowhere() -> None:
    queue_job()

    assert "next_cursor" not in list_jobs("?limit=1")


def test_a_list_tells_of_each_job_what_the_job_tells_and_its_times() -> None:
    job = queue_job(metadata={"shoot": "7"})
    finish(job, picture_bytes())
    waiting = queue_job()

    last, first = list_jobs()["jobs"]

    assert (first["id"], first["status"], first["metadata"]) == (
        str(job.pk),
        "succeeded",
        {"shoot": "7"},
    )
    assert (first["create_time"], first["update_time"]) == (
        first["created_at"],
        first["completed_at"],
    )
    assert len(first["outputs"]) == 1
    assert (last["id"], last["queue_position"]) == (str(waiting.pk), 1)
    assert last["update_time"] == last["created_at"]


def test_a_list_is_narrowed_by_status_and_by_metadata() -> None:
    done = queue_job(metadata={"shoot": "7", "who": "ann"})
    finish(done)
    waiting = queue_job(metadata={"shoot": "7"})
    other = queue_job(metadata={"shoot": "77"})

    assert ids(list_jobs("?status=succeeded")) == [str(done.pk)]
    assert ids(list_jobs("?status=queued")) == [str(other.pk), str(waiting.pk)]
    assert ids(list_jobs("?metadata[shoot]=7")) == [str(waiting.pk), str(done.pk)]
    assert ids(list_jobs("?metadata[shoot]=7&metadata[who]=ann")) == [str(done.pk)]
    assert ids(list_jobs("?metadata[shoot]=7&status=failed")) == []


def test_a_list_takes_the_same_few_queries_however_long(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    client = client_of()
    for _ in range(3):
        finish(queue_job(), picture_bytes())
    for _ in range(3):
        queue_job()

    with django_assert_num_queries(4):  # two for the token, the jobs, their outputs
        list_jobs(client=client)


@pytest.mark.parametrize(
    ("query", "code", "field"),
    [
        ("?limit=0", "invalid_request", "limit"),
        ("?limit=101", "invalid_request", "limit"),
        ("?limit=x", "invalid_request", "limit"),
        ("?limit=1&limit=2", "invalid_request", "limit"),
        ("?status=done", "invalid_request", "status"),
        ("?offset=3", "invalid_request", "offset"),
        ("?metadata=x", "invalid_request", "metadata"),
        ("?metadata[]=x", "invalid_request", "metadata[]"),
        ("?metadata[a]=x&metadata[a]=y", "invalid_request", "metadata[a]"),
        ("?metadata[a]=%00", "invalid_metadata_filter", None),
        ("?metadata[%00]=a", "invalid_metadata_filter", None),
        ("?cursor=x", "invalid_cursor", None),
        ("?cursor=%F0%9F%8C%85", "invalid_cursor", None),
        ("?cursor=%00", "invalid_request", "cursor"),
    ],
)
def test_a_query_that_makes_no_sense_is_refused(query: str, code: str, field: str | None) -> None:
    response = client_of().get(f"{API}/jobs{query}")

    error = error_of(response)
    assert (response.status_code, error["code"]) == (422, code)
    assert list(error["details"] or []) == ([field] if field else [])


@pytest.mark.parametrize("query", ["", "?status=running", "?metadata[shoot]=7"])
def test_the_list_of_one_who_has_none_is_empty(query: str) -> None:
    queue_job(metadata={"shoot": "7"})
    claim()

    assert list_jobs(query, client_of(make_user("bob"))) == {"jobs": []}
