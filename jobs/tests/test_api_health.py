from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import OperationalError, connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.test import Client


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The database cannot be reached."""

    def refuse() -> None:
        raise OperationalError("connection to db.internal refused")

    with monkeypatch.context() as patch:
        patch.setattr(connection, "cursor", refuse)
        yield


def test_the_process_lives_whatever_the_database_does() -> None:
    response = Client().get("/healthz")  # no test database: a query would fail

    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.django_db
def test_a_migrated_database_is_ready() -> None:
    response = Client().get("/readyz")

    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.django_db
def test_a_missing_migration_is_named() -> None:
    (newest,) = MigrationLoader(connection).graph.leaf_nodes("jobs")
    MigrationRecorder(connection).record_unapplied(*newest)

    response = Client().get("/readyz")

    assert response.status_code == 503
    assert ".".join(newest) in response.json()["reason"]


@pytest.mark.django_db
@pytest.mark.usefixtures("away")
def test_without_a_database_it_is_not_ready_and_says_only_in_the_log_where_it_looked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    response = Client().get("/readyz")

    assert response.status_code == 503
    assert "db.internal" in vars(caplog.records[0])["reason"]
    assert response.json() == {"status": "unready", "reason": "The database cannot be reached."}


@pytest.mark.django_db
@pytest.mark.usefixtures("away")
@pytest.mark.parametrize(
    ("path", "says"), [("/login/", "Back in a moment"), ("/api/v2/jobs", "database_unavailable")]
)
def test_while_the_database_is_away_everything_asks_to_come_back(path: str, says: str) -> None:
    client = Client(raise_request_exception=False)
    client.cookies["sessionid"] = "x" * 32

    response = client.get(path)

    assert (response.status_code, response["Retry-After"]) == (503, "5")
    assert says in response.content.decode()
