"""What stands between the web server and Django's own handler."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from types import FrameType
from typing import IO, Any, Final, cast

from django.conf import settings
from django.core import signals
from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, ASGIRequest, get_script_prefix
from django.db import close_old_connections, connection
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import set_script_prefix

from jobs import health
from jobs.errors import CODES, UNREADABLE, busy, refusal
from jobs.hub import Hub
from jobs.waits import Held

Scope = Mapping[str, Any]
Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

logger = logging.getLogger(__name__)

# Whether the process lives must not depend on a thread that gets free.
LIVE: Final = "/healthz"
# Where the largest bodies go.
UPLOADS: Final = "/api/v2/assets"
# A request waits for a thread, and for a client to send a piece of its body or take in one of the answer, for at
# most so long.
THREAD_SECONDS: Final = 10.0
PIECE_SECONDS: Final = 30.0
# The age at which a connection to the database is replaced. Seconds.
CONNECTION_MAX_AGE: Final = 600


class Request(ASGIRequest):
    hub: Hub | None = None


class Door(ASGIHandler):
    """Django's handler, with limits.

    A body is written to the disk before anybody knows who sent it: here it may not be longer than any that is
    allowed. Requests run on a few threads, each from end to end as under WSGI: with as many connections to the
    database, and twice as fast as from coroutine to thread and back for each middleware. What waits for news of a
    job (an event stream, an answer held back) waits on the event loop, and has neither.

    It also answers 400 where Django would end in an exception, and takes a body that comes in chunks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hub: Hub | None = None
        self.threads = ThreadPoolExecutor(settings.GENFLOW_WEB_CONNECTIONS, "request")

    def load_middleware(self, is_async: bool = False) -> None:
        super().load_middleware(is_async=False)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # there is none here: 403
        else:
            await super().__call__(scope, receive, send)

    # --- the server's life ---

    async def live(self, receive: Receive, send: Send) -> None:
        """Keep what requests share from the server's start to its end."""
        await receive()
        # One for each thread, and looked at before each request: it may have been cut meanwhile.
        connection.settings_dict.update(CONN_MAX_AGE=CONNECTION_MAX_AGE, CONN_HEALTH_CHECKS=True)
        async with Hub() as self.hub:
            on_stop(self.hub.close)
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    # --- a request's life ---

    async def handle(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        give_up = partial(self.give_up, scope["path"], send)
        try:
            body = await self.read_body(cut_off(receive, max_bytes(scope), give_up))
        except RequestAborted:
            return
        set_script_prefix(get_script_prefix(scope))
        with body:
            answering = asyncio.ensure_future(self.answer(scope, body, send))
            leaving = asyncio.ensure_future(receive())  # nothing else can follow a body
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering

    async def give_up(self, path: str, send: Send) -> None:
        late = refusal(path, 400, CODES[400], "The rest of the request did not come.")
        late["Connection"] = "close"
        await self.send_response(late, send)

    async def answer(self, scope: Scope, body: IO[bytes], send: Send) -> None:
        request, refused = self.create_request(scope, body)
        response = await self.respond(request) if request is not None else refused
        if isinstance(response, Held) and response.until is not None:
            response.close()
            await response.until()
            response = await self.respond(Request(scope, io.BytesIO()))
        assert response is not None
        try:
            await self.send_response(response, partial(send_in_time, send))
        except TimeoutError:
            logger.info("client.too_slow", extra={"path": scope["path"]})
        finally:
            response.close()

    async def respond(self, request: Request) -> HttpResponseBase:
        """Have the request answered on a thread. Returns when that has no more use for its body."""
        if request.path_info == LIVE:
            return health.live(request)
        work = self.threads.submit(copy_context().run, self.respond_here, request)
        patience = asyncio.get_running_loop().call_later(THREAD_SECONDS, work.cancel)
        answer = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if work.cancelled():
                return busy(request.path)
            if not work.cancel():  # the client is gone, but a thread goes on to its end
                (await answer).close()
            raise
        finally:
            patience.cancel()

    def respond_here(self, request: Request) -> HttpResponseBase:
        signals.request_started.send(self.__class__, scope=request.scope)
        try:
            return self.get_response(request)
        finally:
            close_old_connections()

    async def send_response(self, response: HttpResponseBase, send: Send) -> None:
        if isinstance(response, StreamingHttpResponse) and not response.is_async:
            content = cast("Iterator[bytes]", response.streaming_content)
            response.streaming_content = self.pieces(content)
        await super().send_response(response, send)

    async def pieces(self, content: Iterator[bytes]) -> AsyncIterator[bytes]:
        """Read a file, or what a view makes piece by piece, on our threads."""
        loop = asyncio.get_running_loop()
        while piece := await loop.run_in_executor(self.threads, next, content, b""):
            yield piece

    def create_request(
        self, scope: Scope, body_file: IO[bytes]
    ) -> tuple[Request, None] | tuple[None, HttpResponse]:
        size = body_file.seek(0, os.SEEK_END)
        body_file.seek(0)
        if size > (most := max_bytes(scope)):
            message = f"The request is larger than {most:,} bytes."
            return None, refusal(scope["path"], 413, CODES[413], message)
        try:
            if not has_nul(scope):
                request = Request(with_length(scope, size), body_file)
                request.hub = self.hub
                return request, None
        except (LookupError, ValueError):  # a header or a query in a charset that is none
            pass
        return None, refusal(scope["path"], 400, CODES[400], UNREADABLE)


def on_stop(act: Callable[[], None]) -> None:
    """Do it at the signal that stops the server: that would wait for its clients, and they for it."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        then = signal.getsignal(number)

        def stop(signum: int, frame: FrameType | None, then: Any = then) -> None:
            loop.call_soon_threadsafe(act)
            then(signum, frame)

        if callable(then):
            signal.signal(number, stop)


async def send_in_time(send: Send, message: Message) -> None:
    async with asyncio.timeout(PIECE_SECONDS):
        await send(message)


def max_bytes(scope: Scope) -> int:
    """Return the most for a body: the file, and fields of text with twice what their own limit allows."""
    files = [settings.GENFLOW_PHOTO_MAX_BYTES, settings.GENFLOW_WORKFLOW_MAX_BYTES]
    is_upload = scope["path"].endswith(UPLOADS)
    file = settings.GENFLOW_ASSET_MAX_BYTES if is_upload else max(files)
    return file + 2 * settings.DATA_UPLOAD_MAX_MEMORY_SIZE


def cut_off(receive: Receive, limit: int, give_up: Callable[[], Awaitable[None]]) -> Receive:
    """Return a `receive` that ends the body with the piece that goes beyond so many bytes.

    It gives up, and is left, when a piece does not come.
    """
    size = 0

    async def receive_piece() -> Mapping[str, Any]:
        nonlocal size
        try:
            async with asyncio.timeout(PIECE_SECONDS):
                message = await receive()
        except TimeoutError:
            await give_up()
            return {"type": "http.disconnect"}
        size += len(message.get("body", b""))
        return {**message, "more_body": False} if size > limit else message

    return receive_piece


def has_nul(scope: Scope) -> bool:
    """Whether it asks for a name with a NUL: nothing has one, and Postgres would refuse to look."""
    return "\0" in scope["path"] or b"%00" in scope.get("query_string", b"")


def with_length(scope: Scope, size: int) -> Scope:
    """Return the scope of a body in chunks with the length that Django's parsers go by."""
    if size == 0 or any(name == b"content-length" for name, _value in scope["headers"]):
        return scope
    return {**scope, "headers": [*scope["headers"], (b"content-length", b"%d" % size)]}
