"""What stands between the web server and Django's own handler."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import IO, Any, Final

from django.conf import settings
from django.core.handlers.asgi import ASGIHandler, ASGIRequest
from django.http import HttpResponse

from jobs.errors import CODES, UNREADABLE, refusal

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]

# The photo, and beside it fields of text with twice what their own limit allows. Bytes.
BODY_MAX_BYTES: Final = settings.GENFLOW_PHOTO_MAX_BYTES + 2 * settings.DATA_UPLOAD_MAX_MEMORY_SIZE


class Door(ASGIHandler):
    """Django's handler, which writes a body to the disk before it knows who sent it: here it has a limit.

    It also answers 400 where Django would end in an exception, and takes a body that comes in chunks.
    """

    async def read_body(self, receive: Receive) -> IO[bytes]:
        return await super().read_body(cut_off(receive, BODY_MAX_BYTES))

    def create_request(
        self, scope: Scope, body_file: IO[bytes]
    ) -> tuple[ASGIRequest, None] | tuple[None, HttpResponse]:
        size = body_file.seek(0, os.SEEK_END)
        body_file.seek(0)
        if size > BODY_MAX_BYTES:
            message = f"The request is larger than {BODY_MAX_BYTES:,} bytes."
            return None, refusal(scope["path"], 413, CODES[413], message)
        try:
            if not has_nul(scope):
                return ASGIRequest(with_length(scope, size), body_file), None
        except (LookupError, ValueError):  # a header or a query in a charset that is none
            pass
        return None, refusal(scope["path"], 400, CODES[400], UNREADABLE)


def cut_off(receive: Receive, limit: int) -> Receive:
    """Return a `receive` that ends the body with the piece that goes beyond so many bytes."""
    size = 0

    async def receive_piece() -> Mapping[str, Any]:
        nonlocal size
        message = await receive()
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
