"""The WebSockets: one for each client id, events in order, nothing twice."""

from __future__ import annotations

import asyncio
import json
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

Json = dict[str, Any]

FEATURES: Final[Json] = {
    "supports_preview_metadata": True,
    "max_upload_size": 100 * 2**20,
    "extension": {"manager": {"supports_v4": True}},
    "node_replacements": True,
    "assets": False,
}
PREVIEW, PREVIEW_WITH_METADATA, JPEG = 1, 4, 1


@dataclass(eq=False)
class Socket:
    socket: web.WebSocketResponse
    request: web.BaseRequest
    wants_metadata: bool = False
    silent: bool = False

    def cut(self) -> None:
        """Close the connection without a close frame."""
        if self.request.transport is not None:
            self.request.transport.abort()

    async def send_event(self, event: str, about: Json) -> None:
        await self.send(_event(event, about))

    async def send(self, message: str | bytes) -> None:
        if self.silent or self.socket.closed:
            return
        # It may have gone away; its handler is about to notice.
        with suppress(ConnectionError):
            if isinstance(message, str):
                await self.socket.send_str(message)
            else:
                await self.socket.send_bytes(message)


class Sockets:
    """Who hears what. A second socket with a client id takes the place of the first; when the first closes, the
    second is forgotten as well: it stays open, but hears nothing more."""

    def __init__(self) -> None:
        self._open: dict[str, Socket] = {}
        self._all: set[Socket] = set()
        self._events: asyncio.Queue[tuple[str | bytes, str | None]] = asyncio.Queue()

    def add(self, client_id: str, socket: Socket) -> None:
        self._open[client_id] = socket
        self._all.add(socket)

    def remove(self, client_id: str, socket: Socket) -> None:
        if socket in self._all:  # not one that a restart has cut
            self._open.pop(client_id, None)
            self._all.discard(socket)

    def send(self, event: str, about: Json, client_id: str | None = None) -> None:
        """Queue an event for one client (None: for all)."""
        self._events.put_nowait((_event(event, about), client_id))

    def send_preview(self, image: bytes, client_id: str | None, metadata: Json) -> None:
        """Queue a JPEG preview, in the form that the client understands.

        Both were recorded of v0.26.0 with `extra_data.preview_method`. By its sources v0.3.64 knows no such wish, and
        sends previews only if it was started with --preview-method.
        """
        socket = self._open.get(client_id) if client_id else None
        if socket is not None and socket.wants_metadata:
            extra = json.dumps({**metadata, "image_type": "image/jpeg"}).encode()
            head = struct.pack(">II", PREVIEW_WITH_METADATA, len(extra)) + extra
        else:
            head = struct.pack(">II", PREVIEW, JPEG)
        self._events.put_nowait((head + image, client_id))

    async def publish(self) -> None:
        """Send the queued events, for ever."""
        while True:
            message, client_id = await self._events.get()
            for name, socket in list(self._open.items()):
                if client_id is None or client_id == name:
                    await socket.send(message)

    def silence(self) -> bool:
        """Let all sockets fall silent. Return False if there is none."""
        for socket in self._all:
            socket.silent = True
        return bool(self._all)

    def cut(self) -> None:
        """Cut all connections, and forget what they have not heard yet."""
        for socket in self._all:
            socket.cut()
        self._open.clear()
        self._all.clear()
        while not self._events.empty():
            self._events.get_nowait()


def _event(event: str, about: Json) -> str:
    return json.dumps({"type": event, "data": about})
