"""The /fake routes, by which tests make trouble. They work on the control port even while the public one is closed."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from fake_comfy.door import Door
from fake_comfy.faults import FAULTS, Fault, UnknownFault
from fake_comfy.machine import Machine
from fake_comfy.trouble import Handler, is_control


class Control:
    def __init__(self, machine: Machine, door: Door) -> None:
        self._machine, self._door = machine, door
        self.url = ""  # of the control port

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/fake/faults", self.get_faults)
        app.router.add_post("/fake/faults", self.post_fault)
        app.router.add_delete("/fake/faults", self.delete_faults)
        app.router.add_post("/fake/restart", self.post_restart)
        app.router.add_get("/fake/stats", self.get_stats)

    async def get_faults(self, request: web.Request) -> web.Response:
        return web.json_response({"active": self._machine.faults.as_json(), "control": self.url})

    async def post_fault(self, request: web.Request) -> web.Response:
        body = await _read(request)
        try:
            fault = Fault(str(body.pop("name", "")), **body)
        except (UnknownFault, TypeError) as exc:
            known = {name: meaning.does for name, meaning in FAULTS.items()}
            return web.json_response({"error": str(exc), "known": known}, status=400)
        await self._machine.add_fault(self._door, fault)
        return await self.get_faults(request)

    async def delete_faults(self, request: web.Request) -> web.Response:
        await self._machine.clear_faults(self._door)
        return await self.get_faults(request)

    async def post_restart(self, request: web.Request) -> web.Response:
        body = await _read(request)
        await self._machine.restart(
            self._door,
            keep_files=bool(body.get("keep_files", True)),
            down_seconds=float(body.get("down_seconds", 0)),
        )
        return await self.get_stats(request)

    async def get_stats(self, request: web.Request) -> web.Response:
        return web.json_response(self._machine.stats.as_json())

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keep the two ports apart, and let a control request be answered although it closes its own port."""
        if not is_control(request):
            return await handler(request) if self._is_public(request) else web.Response(status=404)
        transport = request.transport
        if transport is None:
            return await handler(request)
        self._door.spared.add(transport)
        try:
            answer = await handler(request)
        finally:
            self._door.spared.discard(transport)
        answer.force_close()
        return answer

    def _is_public(self, request: web.Request) -> bool:
        transport = request.transport
        return transport is None or transport.get_extra_info("sockname")[1] == self._door.port


async def _read(request: web.Request) -> dict[str, Any]:
    """The JSON body; an empty one is {}."""
    return dict(await request.json()) if await request.read() else {}
