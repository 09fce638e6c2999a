"""Recorded answers of real ComfyUI servers: v0.26.0, and v0.3.64 in a folder of its own."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import responses

from comfy.client import ComfyClient
from comfy.history import OutputFile

BASE_URL = "http://127.0.0.1:8188"
DATA = Path(__file__).parent / "data"


def capture(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())  # type: ignore[no-any-return]


def body_of(name: str) -> Any:
    return capture(name)["response"]["body"]


def messages_of(name: str, connection: str) -> list[dict[str, Any]]:
    """The text messages that one WebSocket connection of the capture got."""
    events = capture(name)["events"]
    return [e["text"] for e in events if e["conn"] == connection and "text" in e]


def replay(server: responses.RequestsMock, name: str, **changes: Any) -> None:
    """Let the server answer the request of the capture as the real one did (`changes`: fields of the answer)."""
    recorded = capture(name)
    request, answer = recorded["request"], recorded["response"] | changes
    body = answer["body"] if isinstance(answer["body"], str) else json.dumps(answer["body"])
    skipped = ("content-length", "content-type", "connection")
    server.add(
        request["method"],
        BASE_URL + urlsplit(request["url"]).path,
        body=body,
        status=answer["status"],
        headers={k: v for k, v in answer["headers"].items() if k not in skipped},
        content_type=answer["headers"].get("content-type"),
    )


def prompt_id_of(name: str) -> str:
    """The prompt id that a captured history entry belongs to."""
    (prompt_id,) = body_of(name)
    return str(prompt_id)


def view(client: ComfyClient, file: OutputFile, max_bytes: int = 1_000) -> bytes:
    """Return what the client writes of a file."""
    sink = io.BytesIO()
    client.view(file, sink, max_bytes=max_bytes)
    return sink.getvalue()
