from __future__ import annotations

from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from pytest_django import Settings

from jobs.management.commands import runworkers
from jobs.worker import Worker

COMFY = "http://127.0.0.1:8188"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What workers were made with; they do not run."""
    made: list[Any] = []
    monkeypatch.setattr(Worker, "__init__", lambda self, *args: made.append(args))
    monkeypatch.setattr(f"{runworkers.__name__}.run_until_signal", lambda worker: True)
    return made


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--comfy-url", "gpu:8188"], "write it like http://"),
        (["--comfy-url", "http://gpu box"], "write it like http://"),
        (["--comfy-url", f"http://{'a' * 300}"], "write it like http://"),
        (["--concurrency", "0"], "must be 1 or more"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: list[str], sentence: str) -> None:
    with pytest.raises(CommandError, match=sentence):
        call_command("runworkers", *options)


def test_a_password_in_a_wrong_address_is_not_repeated() -> None:
    with pytest.raises(CommandError) as refused:
        call_command("runworkers", "--comfy-url", "http://me:secret@gpu:99999")

    assert "secret" not in str(refused.value)


def test_without_a_comfyui_there_is_nothing_to_run(settings: Settings) -> None:
    settings.COMFY_URLS = []

    with pytest.raises(CommandError, match="COMFY_URL is empty"):
        call_command("runworkers")


@pytest.mark.django_db(transaction=True)
def test_a_database_without_all_migrations_is_told(started: list[Any]) -> None:
    (newest,) = MigrationLoader(connection).graph.leaf_nodes("jobs")
    MigrationRecorder(connection).record_unapplied(*newest)

    try:
        with pytest.raises(CommandError, match=r"run `manage\.py migrate` first"):
            call_command("runworkers")
    finally:
        MigrationRecorder(connection).record_applied(*newest)

    assert not started


@pytest.mark.django_db(transaction=True)
def test_one_comfyui_in_two_spellings_is_one(started: list[Any]) -> None:
    call_command("runworkers", "--comfy-url", COMFY, "--comfy-url", f"{COMFY}/")

    assert started[0][0] == [COMFY]
