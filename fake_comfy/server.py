"""The whole pretended server on its ports."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Final, Self

from aiohttp import web

from fake_comfy.control import Control
from fake_comfy.door import Door, bind
from fake_comfy.faults import Fault
from fake_comfy.machine import Machine
from fake_comfy.routes import Routes
from fake_comfy.sockets import FEATURES
from fake_comfy.trouble import SeenRequest, catch_errors, cause_trouble, guard_origin

SHUTDOWN_SECONDS: Final = 0.05
REQUESTS_KEPT: Final = 10_000  # a demo may stay up for days
LOOPBACK: Final = "127.0.0.1"
ANYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - only compared with


class Server:
    """An async context manager: open inside, gone after it. To be used from one event loop."""

    def __init__(self, root: Path, *, host: str = LOOPBACK, port: int = 0, seconds: float) -> None:
        self.machine = Machine(root, seconds=seconds)
        self.requests: deque[SeenRequest] = deque(maxlen=REQUESTS_KEPT)
        app = web.Application(client_max_size=FEATURES["max_upload_size"])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
        self.door = Door(self._runner, host, port)
        self.control = Control(self.machine, self.door)
        app.middlewares.extend(
            [
                self.control.guard,
                catch_errors,
                cause_trouble(self.machine.faults, self.requests),
                guard_origin,
            ]
        )
        self.control.add_to(app)
        Routes(self.machine).add_to(app)
        self._host = host

    @property
    def url(self) -> str:
        host = LOOPBACK if self._host in ANYWHERE else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.door.port}"

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        control = bind(LOOPBACK, 0)
        self.control.url = f"http://{LOOPBACK}:{control.getsockname()[1]}"
        await web.SockSite(self._runner, control).start()
        self.machine.start()
        await self.door.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.machine.stop()
        await self.door.remove()
        await self._runner.cleanup()

    async def add_fault(self, fault: Fault) -> None:
        await self.machine.add_fault(self.door, fault)

    async def clear_faults(self) -> None:
        await self.machine.clear_faults(self.door)

    async def restart(self, *, keep_files: bool, down_seconds: float) -> None:
        await self.machine.restart(self.door, keep_files=keep_files, down_seconds=down_seconds)
