from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from django.db import InterfaceError, InternalError, OperationalError
from django.test import Client

from jobs.models import ApiToken, Job
from jobs.tests.helpers import make_user, queue_job
from jobs.tests.helpers_api import API, client_of, error_of, photo_file, post_portrait, token_of

pytestmark = pytest.mark.django_db


def raising(error: Exception) -> Any:
    def fail(*args: object, **options: object) -> None:
        raise error

    return fail


def read_only() -> InternalError:
    error = InternalError("cannot execute INSERT in a read-only transaction")
    error.__cause__ = psycopg.errors.ReadOnlySqlTransaction()
    return error


@pytest.mark.parametrize(
    "path", ["/api/v2", "/api/v2/", "/api/v2/x", "/api/v2/jobs/", "/api/", "/api/v1/jobs"]
)
@pytest.mark.parametrize("method", ["get", "post", "delete"])
def test_a_path_that_is_none_is_not_found(path: str, method: str) -> None:
    client = Client(enforce_csrf_checks=True)

    response = getattr(client, method)(path)

    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


def test_a_method_that_is_none_is_told_what_there_is() -> None:
    response = client_of().put(f"{API}/jobs")

    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert "GET" in response["Allow"]


@pytest.mark.parametrize("client", [client_of, Client])
def test_no_cache_keeps_an_answer(client: Callable[[], Client]) -> None:
    assert client().get(f"{API}/jobs")["Cache-Control"] == "private, no-store"


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer x", "Bearer a b", "Bearer \xff", "Basic YTpi", "gf_x"]
)
def test_without_a_token_there_is_no_way_in(header: str) -> None:
    response = Client().get(f"{API}/jobs", headers={"Authorization": header})

    assert (response.status_code, error_of(response)["code"]) == (401, "unauthorized")
    assert response["WWW-Authenticate"] == "Bearer"


def test_a_token_taken_back_is_none() -> None:
    client = client_of()
    ApiToken.objects.all().delete()

    assert client.get(f"{API}/jobs").status_code == 401


def test_a_user_shut_out_has_no_token() -> None:
    user = make_user()
    client = client_of(user)
    user.is_active = False
    user.save()

    assert client.get(f"{API}/jobs").status_code == 401


@pytest.mark.parametrize(
    "error", [OperationalError("server closed"), InterfaceError("closed"), read_only()]
)
def test_a_database_that_is_away_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    client = client_of()
    monkeypatch.setattr(Job.objects, "submit", raising(error))

    response = post_portrait(client)

    assert (response.status_code, error_of(response)["code"]) == (503, "database_unavailable")
    assert int(response["Retry-After"]) > 0
    assert str(error) not in response.content.decode()
    assert str(error) in [vars(record).get("reason") for record in caplog.records]


def test_a_database_that_is_away_before_the_login_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = client_of()
    monkeypatch.setattr(
        "jobs.auth.BearerAuthentication.authenticate_credentials", raising(OperationalError("x"))
    )

    response = client.get(f"{API}/jobs")

    assert (response.status_code, error_of(response)["code"]) == (503, "database_unavailable")


def test_what_nobody_foresaw_is_told_in_the_envelope_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = client_of()
    monkeypatch.setattr(Job.objects, "submit", raising(ZeroDivisionError("a secret")))

    response = post_portrait(client)

    assert (response.status_code, error_of(response)["code"]) == (500, "server_error")
    assert "secret" not in response.content.decode()


# --- a login instead of a token ---


def logged_in() -> Client:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user())
    return client


def test_a_login_reads() -> None:
    job = queue_job()

    assert logged_in().get(f"{API}/jobs/{job.pk}").json()["id"] == str(job.pk)


def test_a_login_writes_only_with_the_sites_own_forms() -> None:
    job, client = queue_job(), logged_in()
    cancel = f"{API}/jobs/{job.pk}/cancel"

    refused = client.post(cancel)
    client.cookies["csrftoken"] = "c" * 32
    accepted = client.post(cancel, headers={"X-CSRFToken": "c" * 32})

    assert (refused.status_code, error_of(refused)["code"]) == (403, "forbidden")
    assert (accepted.status_code, accepted.json()["status"]) == (200, "canceled")


def test_a_token_needs_no_form_even_beside_a_stale_login() -> None:
    headers = {"Authorization": f"Bearer {token_of(make_user('bob'))}"}
    stale = Client(enforce_csrf_checks=True)
    stale.cookies["sessionid"] = "left over"

    for client in (logged_in(), stale):
        response = client.post(
            f"{API}/portraits", {"photo": photo_file(), "prompt": "x"}, headers=headers
        )

        assert response.status_code == 201
    assert Job.objects.filter(owner=make_user("bob")).count() == 2
