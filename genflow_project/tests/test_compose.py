"""The container files against the repository: what they name must exist. No Docker is needed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.conf import settings
from django.core.management import get_commands
from django.test import Client

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_TEXT = (ROOT / "compose.yaml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE_TEXT)["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
OF_THE_POSTGRES_IMAGE = {"POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD"}

each_of_ours = pytest.mark.parametrize("service", OURS.values(), ids=OURS)


def variables_of(text: str) -> set[str]:
    return set(re.findall(r"\$\{(\w+)", text))


def example_variables() -> set[str]:
    return set(re.findall(r"^#? ?(\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))


@each_of_ours
def test_every_command_is_one_of_this_repository(service: dict[str, Any]) -> None:
    match service["command"]:
        case ["python", "manage.py", command]:
            assert command in get_commands()
        case ["python", "-m", "uvicorn", application, *_]:
            assert application.replace(":", ".") == settings.ASGI_APPLICATION
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(f"{module}.__main__")
        case other:
            pytest.fail(f"unknown command {other}")


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_waits_for_what_it_needs(name: str) -> None:
    for needed, wait in SERVICES[name].get("depends_on", {}).items():
        assert wait["condition"] != "service_healthy" or "healthcheck" in SERVICES[needed]
        assert (needed == "migrate") == (wait["condition"] == "service_completed_successfully")


def test_every_variable_is_explained_in_the_example() -> None:
    set_here = {name for service in OURS.values() for name in service.get("environment", {})}

    assert set_here <= example_variables()
    assert variables_of(COMPOSE_TEXT) <= example_variables() | OF_THE_POSTGRES_IMAGE


def test_secrets_come_from_outside_and_their_lack_is_said() -> None:
    for secret in ("SECRET_KEY", "POSTGRES_PASSWORD"):
        uses = re.findall(rf"\$\{{{secret}[^}}]*\}}", COMPOSE_TEXT)
        assert uses
        assert all(use.startswith(f"${{{secret}:?Set ") for use in uses)


def test_the_health_check_of_the_web_server_asks_a_page_that_needs_no_database() -> None:
    path = re.search(r"127\.0\.0\.1:8000(/\w+)", str(SERVICES["web"]["healthcheck"]["test"]))

    assert path
    assert Client().get(path[1]).status_code == 200


def test_a_worker_has_time_to_give_its_jobs_back() -> None:
    for name in ("worker", "worker-gpu"):
        grace = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
        assert grace > settings.GENFLOW_SHUTDOWN_SECONDS


def test_only_the_gpu_worker_waits_for_its_profile() -> None:
    assert {name for name, service in SERVICES.items() if "profiles" in service} == {"worker-gpu"}


def test_only_the_web_server_is_reached_from_outside_and_only_from_this_machine() -> None:
    assert {name: service["ports"] for name, service in SERVICES.items() if "ports" in service} == {
        "web": ["127.0.0.1:8000:8000"]
    }


def test_postgres_keeps_its_data_where_version_18_does() -> None:
    assert SERVICES["postgres"]["image"].startswith("postgres:18")
    assert SERVICES["postgres"]["volumes"] == ["postgres:/var/lib/postgresql"]


@pytest.mark.parametrize(
    "image", [*re.findall(r"^FROM (\S+)", DOCKERFILE, re.M), SERVICES["postgres"]["image"]]
)
def test_images_are_pinned(image: str) -> None:
    assert re.search(r":\d", image)


def test_the_image_runs_as_an_ordinary_user_and_holds_no_secret() -> None:
    assert re.findall(r"^USER (\S+)", DOCKERFILE, re.M)[-1].isdigit()
    assert not re.search(r"^(ENV|ARG) .*(SECRET|PASSWORD|TOKEN)", DOCKERFILE, re.M)


def test_the_image_has_what_the_commands_need() -> None:
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }

    assert all((ROOT / name).exists() for name in kept)
    assert kept >= {"manage.py", "requirements.txt", "genflow_project", "jobs", "comfy"}
    assert kept >= {"fake_comfy", "templates", "static"}
