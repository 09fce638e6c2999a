"""The server in a thread of its own, for tests."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

from fake_comfy.faults import Fault
from fake_comfy.queue import Json
from fake_comfy.server import Server
from fake_comfy.trouble import SeenRequest

T = TypeVar("T")


class FakeComfy:
    """A ComfyUI on a real port, from `with` to its end. Any thread may use it.

    `seconds`: what a sampler takes. `data`: the folder for input, output and temp; None: one that is deleted.
    `faults`: names, or "name:times" (times null: until cleared).
    """

    def __init__(
        self,
        *,
        seconds: float = 0.05,
        data: Path | str | None = None,
        faults: Iterable[str] = (),
        port: int = 0,
    ) -> None:
        self._own_folder = data is None
        self.data = Path(tempfile.mkdtemp(prefix="fake_comfy-") if data is None else data)
        self._server = Server(self.data, port=port, seconds=seconds)
        self._faults = [Fault.parse(text) for text in faults]
        self._started: Future[None] = Future()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fake_comfy", daemon=True)

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        self._started.result()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        if self._own_folder:
            shutil.rmtree(self.data)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def control_url(self) -> str:
        """Where the /fake routes are even while connections are refused."""
        return self._server.control.url

    @property
    def seconds(self) -> float:
        return self._server.machine.engine.seconds

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._server.machine.engine.seconds = value

    @property
    def requests(self) -> list[SeenRequest]:
        """The latest requests (10,000 of them), but for those to /fake."""
        return list(self._server.requests)

    @property
    def prompts(self) -> dict[str, dict[str, int]]:
        """What happened to each prompt id that was ever accepted."""
        prompts: dict[str, dict[str, int]] = self.stats()["prompts"]
        return prompts

    def stats(self) -> Json:
        return self._call(self._server.machine.stats.as_json)

    def fault(
        self,
        name: str,
        times: int | None = 1,
        seconds: float | None = None,
        path: str | None = None,
    ) -> None:
        """Let a fault strike `times` times (None: until cleared), where `path` says ("/queue", "POST /queue")."""
        self._await(self._server.add_fault(Fault(name, times, seconds, path)))

    def clear_faults(self) -> None:
        self._await(self._server.clear_faults())

    def restart(self, keep_files: bool = True, down_seconds: float = 0) -> None:
        """Return when all is lost; the port is open again `down_seconds` later."""
        self._await(self._server.restart(keep_files=keep_files, down_seconds=down_seconds))

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        try:
            async with self._server as server:
                for fault in self._faults:
                    await server.add_fault(fault)
                self._started.set_result(None)
                await self._end.wait()
        except OSError as exc:
            self._started.set_exception(exc)

    def _call(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return self._await(call())

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
