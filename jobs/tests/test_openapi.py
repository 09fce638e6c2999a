"""The API and its description say the same."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from django.test import Client
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.validation import validate_schema
from hypothesis import HealthCheck, settings
from pytest_django.live_server_helper import LiveServer
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from jobs.api_urls import urlpatterns
from jobs.openapi import OPERATIONS
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
