"""A job's events as a stream of Server-Sent Events (Comfy API v2, GET /jobs/{id}/events)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any, Final
from uuid import UUID

from django.conf import settings
from django.contrib.auth.models import User
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request

from jobs.auth import Pass
from jobs.errors import ApiError
from jobs.hub import Hub, News, TooManyStreams
from jobs.limits import limits_of
from jobs.serializers import output_json

# Seconds; about as soon as a client whose stream broke may come again.
RETRY_AFTER: Final = 5
# Milliseconds after which browsers come again.
HELLO: Final = b"retry: 1000\n\n"
HEARTBEAT: Final = b":\n\n"


class Stream:
    """The events of one job for one client: a snapshot, then what changes, and at last its final status."""

    def __init__(self, hub: Hub, job_id: UUID, request: Request) -> None:
        """Raises ApiError if the owner has too many streams. `close` must be called."""
        self._hub, self._job_id, self._request = hub, job_id, request
        self._by = Pass.of(request)
        self._sent: dict[str, Any] = {}
        self._outputs = 0  # sent
        # A client that comes again need not have twice the preview it has.
        self._last_id = request.headers.get("Last-Event-ID")
        self._until_closed = ExitStack()
        assert isinstance(request.user, User)
        limit = limits_of(request.user).streams
        try:
            self._until_closed.enter_context(hub.stream_of(self._by.owner_id, limit))
        except TooManyStreams as exc:
            message = (
                f"You have {limit} event streams open, which is the most allowed. Close one, or poll the"
                " job instead."
            )
            raise ApiError(429, "too_many_streams", message, retry_after=RETRY_AFTER) from exc

    def close(self) -> None:
        self._until_closed.close()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        watcher = self._until_closed.enter_context(self._hub.watching(self._job_id, self._by))
        yield HELLO
        while not watcher.is_over:
            if (news := watcher.news) is not None:
                for frame in self._frames(news):
                    yield frame
                if news.status.is_final:
                    return
            if not await watcher.stir(settings.GENFLOW_HEARTBEAT_SECONDS):
                yield HEARTBEAT

    def _frames(self, news: News) -> Iterator[bytes]:
        """Yield what the client has not been told yet. The final status is the last word."""
        status = {"status": news.status, "queue_position": news.queue_position}
        if not news.status.is_final:
            yield from self._once("status", status)
        if news.progress is not None:
            yield from self._once("progress", news.progress)
        if news.preview is not None and news.preview.id != self._last_id:
            self._last_id = news.preview.id
            yield frame_of("preview", news.preview.payload, id=news.preview.id)
        for asset in news.outputs[self._outputs :]:
            yield frame_of("output", output_json(asset, self._request))
        self._outputs = len(news.outputs)
        if news.status.is_final:
            yield from self._once("status", status)

    def _once(self, event: str, payload: Any) -> Iterator[bytes]:
        if self._sent.get(event) != payload:
            self._sent[event] = payload
            yield frame_of(event, payload)


def frame_of(event: str, payload: Any, id: str = "") -> bytes:
    head = f"id: {id}\n" if id else ""
    return f"{head}event: {event}\ndata: ".encode() + JSONRenderer().render(payload) + b"\n\n"
