"""The API and its description say the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from django.conf import settings as settings_of_django
from django.test import Client
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.validation import validate_schema
from hypothesis import HealthCheck, settings
from pytest_django.live_server_helper import LiveServer
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from comfy.errors import ComfyError
from jobs.api_urls import urlpatterns
from jobs.error_codes import JOB_ERRORS, REQUEST_ERRORS
from jobs.errors import CODES
from jobs.models import WORKER_LOST
from jobs.openapi import OPERATIONS, job_error_table
from jobs.tests.helpers import make_user, queue_job
from jobs.tests.helpers_api import finish, picture_bytes, token_of

schema = schemathesis.openapi.from_dict(SchemaGenerator().get_schema(public=True))

# No others: a schema cannot tell a photo from other bytes, or who may have a priority.
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]


@pytest.fixture
def token(transactional_db: None) -> str:
    """A token of somebody who has a picture."""
    job = queue_job(owner=make_user())
    finish(job, picture_bytes())
    return token_of(job.owner)


@schema.parametrize()
@settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_whatever_is_sent_the_answer_is_one_that_is_described(
    case: Case[Any], live_server: LiveServer, token: str
) -> None:
    case.call_and_validate(
        base_url=live_server.url,
        headers={"Authorization": f"Bearer {token}"},
        checks=CHECKS,
    )


def test_every_path_and_method_is_described() -> None:
    views: dict[Any, Any] = {p.name: p.callback for p in urlpatterns if p.name}
    served = {
        (name, method)
        for name, view in views.items()
        for method in ("get", "head", "post", "put", "patch", "delete")
        if hasattr(view.view_class, method)
    }
    assert set(OPERATIONS) == served


def test_the_description_is_valid_and_open_to_all(client: Client) -> None:
    response = client.get("/api/schema")

    assert response.status_code == 200
    validate_schema(response.json())


# --- codes ---

MAKERS = (
    "ApiError",
    "BadPhoto",
    "BadWorkflow",
    "CannotDraw",
    "QueueFull",
    "later",
    "refusal",
    "refuse",
)


def sources_of(package: str) -> list[str]:
    folder = settings_of_django.BASE_DIR / package
    return [path.read_text() for path in folder.glob("*.py") if path.name != "error_codes.py"]


def codes_in(package: str) -> set[str]:
    """Return what looks like a code where the package makes an error."""
    nodes = [node for source in sources_of(package) for node in ast.walk(ast.parse(source))]
    calls = [n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") in MAKERS]
    texts = [arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)]
    return {
        text for text in texts if isinstance(text, str) and re.fullmatch("[a-z]+(_[a-z]+)+", text)
    }


def test_every_code_is_listed_with_what_to_do() -> None:
    assert {*codes_in("jobs"), *CODES.values()} <= {*REQUEST_ERRORS}
    assert {error.code for error in all_subclasses(ComfyError)} | {WORKER_LOST.code} == {
        *JOB_ERRORS
    }


def all_subclasses(kind: type[ComfyError]) -> Iterator[type[ComfyError]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from all_subclasses(subclass)


def test_no_code_is_listed_that_there_is_not() -> None:
    known = "".join(sources_of("jobs"))

    assert [code for code in REQUEST_ERRORS if f'"{code}"' not in known] == []


def test_the_page_about_the_api_lists_the_same() -> None:
    page = (settings_of_django.BASE_DIR / "docs" / "api.md").read_text()
    rows = [f"| `{code}` | {status} | {do} |" for code, (status, do) in REQUEST_ERRORS.items()]

    assert "\n".join(rows) in page
    assert "\n".join(job_error_table()) in page
