"""The public port, which can be closed so that connections are really refused."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web


class Door:
    """While closed, the port stays bound, so that nobody else takes it, but nothing listens on it."""

    def __init__(self, runner: web.AppRunner, host: str, port: int) -> None:
        self._runner, self._host, self.port = runner, host, port
        self._site: web.SockSite | None = None
        self._holder: socket.socket | None = None
        self._reopening: asyncio.Task[None] | None = None
        # Connections that asked for the closing, and are still to be answered.
        self.spared: set[asyncio.BaseTransport] = set()

    async def open(self) -> None:
        if self._site is not None:
            return
        self._let_go()
        listener = bind(self._host, self.port)
        self.port = listener.getsockname()[1]
        self._site = web.SockSite(self._runner, listener)
        await self._site.start()

    async def close(self) -> None:
        """Refuse connections, and cut those that are there."""
        self._cancel_reopening()
        if self._site is not None:
            await self._site.stop()
            self._site = None
            self._holder = bind(self._host, self.port)
        self._cut_connections()

    def open_after(self, seconds: float) -> None:
        self._reopening = asyncio.create_task(self._reopen(seconds))

    async def remove(self) -> None:
        """Close for good and give the port away."""
        await self.close()
        self._let_go()

    async def _reopen(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.open()

    def _cancel_reopening(self) -> None:
        if self._reopening is not None:
            self._reopening.cancel()
            self._reopening = None

    def _cut_connections(self) -> None:
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            transport = connection.transport
            if transport is None or transport in self.spared:
                continue
            if transport.get_extra_info("sockname")[1] == self.port:
                transport.abort()

    def _let_go(self) -> None:
        if self._holder is not None:
            self._holder.close()
            self._holder = None


def bind(host: str, port: int) -> socket.socket:
    """A socket on an address (port 0: any free one), not yet listening."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # Connections of the port's last opening may still be lingering.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
