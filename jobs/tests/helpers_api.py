"""Plain functions that the tests of the API share."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import yaml
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from PIL import Image

from jobs.models import ApiToken, Asset, Job
from jobs.tests.helpers import claim, make_user, photo_bytes

API = "/api/v2"
Answer = Any  # what the test client returns; its stubs have no public name for it
CONTRACT = Path(__file__).parent / "data" / "comfy-api-v2.openapi.yaml"


def token_of(user: User) -> str:
    token: str = ApiToken.objects.create(user=user)[1]
    return token


def client_of(user: User | None = None) -> Client:
    """A client with a bearer token of the user (by default ann)."""
    token = token_of(user or make_user())
    return Client(headers={"Authorization": f"Bearer {token}"}, raise_request_exception=False)


def photo_file(content: bytes | None = None, name: str = "me.jpg") -> SimpleUploadedFile:
    return SimpleUploadedFile(name, photo_bytes() if content is None else content, "image/jpeg")


def post_portrait(client: Client, **fields: Any) -> Answer:
    """Send a small portrait. A field that is None is left out."""
    form = {"photo": photo_file(), "prompt": "a quiet portrait"} | fields
    return client.post(
        f"{API}/portraits", {name: value for name, value in form.items() if value is not None}
    )


def picture_bytes(colour: str = "navy") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    return buffer.getvalue()


def finish(job: Job, *pictures: bytes) -> list[Asset]:
    """Let a worker end the next job in the queue, which must be this one, with these pictures."""
    held = claim()
    assert held is not None
    assert held.pk == job.pk
    assets = [
        Asset.store(
            content,
            owner=job.owner,
            job=job,
            node_id="9",
            name=f"portrait_{number:05}_.png",
            content_type="image/png",
        )
        for number, content in enumerate(pictures, 1)
    ]
    Job.objects.succeed(held, assets, {})
    return assets


def error_of(response: Answer) -> dict[str, Any]:
    """Return the error in an answer, which must be in the contract's envelope."""
    body = response.json()
    check("ErrorEnvelope", body)
    error: dict[str, Any] = body["error"]
    return error


def check(name: str, body: Any) -> None:
    """Fail unless the body is what the contract's schema of this name says."""
    jsonschema.validate(body, {"$ref": f"#/components/schemas/{name}"} | _contract())


@cache
def _contract() -> dict[str, Any]:
    contract: dict[str, Any] = _as_json_schema(yaml.safe_load(CONTRACT.read_text()))
    return contract


def _as_json_schema(part: Any) -> Any:
    """Say `nullable`, a word of OpenAPI 3.0, in JSON Schema's."""
    if isinstance(part, list):
        return [_as_json_schema(item) for item in part]
    if not isinstance(part, dict):
        return part
    schema = {key: _as_json_schema(value) for key, value in part.items()}
    if schema.pop("nullable", None) is True:
        return {"anyOf": [schema, {"type": "null"}]}
    return schema
