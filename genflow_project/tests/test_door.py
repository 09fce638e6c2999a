from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BufferedRandom
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.files.base import File
from pytest_django import Settings

from genflow_project import door
from genflow_project.asgi import application
from jobs.models import Job, hash_of
from jobs.tests.helpers import make_user, photo_bytes
from jobs.tests.helpers_api import API, token_of

MEGABYTE = bytes(2**20)
FORM = "multipart/form-data; boundary=XX"


def scope_of(path: str, method: str = "POST", query: bytes = b"", **headers: str) -> dict[str, Any]:
    names = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query,
        "headers": [*({b"host": b"localhost"} | names).items()],
    }


def post(path: str, body: Iterable[bytes] = (), **details: Any) -> tuple[int, bytes]:
    """Send a request the way a web server hands it over, its body in these pieces."""
    scope = scope_of(path, **details)
    messages: Iterator[dict[str, Any]] = chain(
        ({"type": "http.request", "body": piece, "more_body": True} for piece in body),
        [{"type": "http.request", "body": b""}],
    )
    answer: list[Any] = []
    answered = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if (message := next(messages, None)) is not None:
            return message
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answer.append(message)
        if len(answer) > 1 and not message.get("more_body"):
            answered.set()

    async_to_sync(application)(scope, receive, send)
    return answer[0]["status"], b"".join(piece.get("body", b"") for piece in answer[1:])


def part(name: str, parameters: bytes, content: bytes) -> bytes:
    head = b'--XX\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n'
    return head % (name.encode(), parameters) + content + b"\r\n"


def code_of(body: bytes) -> str:
    code: str = json.loads(body)["error"]["code"]
    return code


def test_a_body_beyond_all_limits_is_refused_whoever_sends_it() -> None:
    status, body = post(f"{API}/portraits", [MEGABYTE] * 30)

    assert (status, code_of(body)) == (413, "request_too_large")


def test_a_body_beyond_all_limits_is_not_read_to_its_end() -> None:
    pieces = iter([MEGABYTE] * 30)

    post("/healthz", pieces)

    assert next(pieces, None) is not None


def test_a_form_beyond_all_limits_has_a_page() -> None:
    status, body = post("/new/send/", [MEGABYTE] * 30)

    assert (status, b"too large" in body) == (413, True)


def test_an_upload_may_be_larger_but_not_without_end(settings: Settings) -> None:
    settings.GENFLOW_ASSET_MAX_BYTES = 40 * 2**20

    assert post(f"{API}/assets", [MEGABYTE] * 30)[0] == 401
    assert post(f"{API}/assets", [MEGABYTE] * 50)[0] == 413


def test_a_body_that_stops_half_way_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    asked, answered = iter([True] * 5), []

    async def receive() -> dict[str, Any]:
        if next(asked, False):
            return {"type": "http.request", "body": MEGABYTE, "more_body": True}
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answered.append(message)

    scope = {"type": "http", "method": "POST", "path": f"{API}/assets", "headers": []}
    async_to_sync(application)(scope, receive, send)

    assert answered == list(tmp_path.iterdir()) == []


def test_a_client_that_keeps_the_rest_of_its_body_back_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "PIECE_SECONDS", 0.05)
    messages = [{"type": "http.request", "body": b"{", "more_body": True}]
    answer: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Any) -> None:
        answer.append(message)

    async_to_sync(application)(scope_of(f"{API}/jobs"), receive, send)

    assert (b"Connection", b"close") in answer[0]["headers"]
    assert (answer[0]["status"], code_of(answer[1]["body"])) == (400, "bad_request")


def test_a_socket_is_refused() -> None:
    answer: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        answer.append(message)

    async_to_sync(application)({**scope_of(f"{API}/jobs"), "type": "websocket"}, receive, send)

    assert answer == [{"type": "websocket.close"}]


@pytest.mark.django_db(transaction=True)
def test_an_upload_on_its_way_has_no_name_on_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[Any] = []

    def look(file: File[Any]) -> str:
        seen.extend([type(file.file), list(tmp_path.iterdir())])
        return hash_of(file)

    monkeypatch.setattr("jobs.asset_views.hash_of", look)
    fields = {"content_type": b"image/png", "file_path": b"me.png"}
    form = [part(name, b"", value) for name, value in fields.items()]
    form.append(part("file", b'; filename="me.jpg"', 6 * MEGABYTE))

    status, _body = post(
        f"{API}/assets",
        [*form, b"--XX--\r\n"],
        content_type=FORM,
        authorization=f"Bearer {token_of(make_user())}",
    )

    assert (status, seen) == (201, [BufferedRandom, []])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data; boundary*=nosuch''XX",
        "text/plain; charset*=utf-8''%00",
        "text/plain; charset*=idna''%ff",
        "text/plain; charset*=undefined''x",
    ],
)
@pytest.mark.parametrize("path", [f"{API}/portraits", "/healthz", "/nowhere"])
def test_a_charset_that_is_none_is_a_bad_request(path: str, content_type: str) -> None:
    assert post(path, content_type=content_type)[0] == 400


@pytest.mark.parametrize(
    ("path", "query"),
    [(f"{API}/jobs", b"status=\xff"), (f"{API}/jobs", b"status=%00"), (f"{API}/\0", b"")],
)
def test_a_request_that_cannot_be_read_is_told_in_the_envelope(path: str, query: bytes) -> None:
    status, body = post(path, query=query)

    assert (status, code_of(body)) == (400, "bad_request")


def test_a_host_that_is_not_ours_is_told_in_the_envelope() -> None:
    status, body = post(f"{API}/jobs", host="evil.test")

    assert (status, code_of(body)) == (400, "bad_request")


@pytest.mark.django_db(transaction=True)
def test_a_form_may_come_in_chunks_without_a_length() -> None:
    token = token_of(make_user())
    form = [
        part("prompt", b"", b"a quiet portrait"),
        part("photo", b'; filename="me.jpg"', photo_bytes()),
        b"--XX--\r\n",
    ]

    status, _body = post(
        f"{API}/portraits", form, content_type=FORM, authorization=f"Bearer {token}"
    )

    assert (status, Job.objects.count()) == (201, 1)


def test_a_file_is_sent_whole() -> None:
    status, body = post("/static/genflow.css", method="GET")

    assert (status, body) == (200, (settings.BASE_DIR / "static/genflow.css").read_bytes())


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All threads are taken, for longer than anybody waits."""
    done = threading.Event()
    with ThreadPoolExecutor(1) as threads, monkeypatch.context() as patch:
        threads.submit(done.wait)
        patch.setattr(application, "threads", threads)
        patch.setattr(door, "THREAD_SECONDS", 0.05)
        yield
        done.set()


@pytest.mark.usefixtures("crowd")
def test_who_would_wait_too_long_is_asked_to_come_again() -> None:
    status, body = post(f"{API}/portraits")

    assert (status, code_of(body)) == (503, "server_busy")


@pytest.mark.usefixtures("crowd")
def test_the_process_lives_however_busy_it_is() -> None:
    assert post("/healthz") == (200, b'{"status": "ok"}')


async def call(scope: dict[str, Any], receive: Any, send: Any) -> None:
    async with asyncio.timeout(10):
        await application(scope, receive, send)


@pytest.mark.usefixtures("crowd")
def test_a_client_that_has_left_is_not_answered() -> None:
    messages: Iterator[dict[str, Any]] = iter(
        [{"type": "http.request", "body": b""}, {"type": "http.disconnect"}]
    )
    answer: list[Any] = []

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def send(message: Any) -> None:
        answer.append(message)

    asyncio.run(call(scope_of("/login/"), receive, send))

    assert answer == []


def test_a_client_that_takes_nothing_in_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "PIECE_SECONDS", 0.05)
    messages = [{"type": "http.request", "body": b""}]

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    asyncio.run(call(scope_of("/nowhere"), receive, send))


def test_pieces_are_read_as_they_are_sent() -> None:
    pieces = iter([b"1", b"2", b"3"])

    async def first_piece() -> bytes:
        return await anext(application.pieces(pieces))

    assert async_to_sync(first_piece)() == b"1"
    assert list(pieces) == [b"2", b"3"]
