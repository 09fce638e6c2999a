"""The pretended server without its HTTP: what it holds, what it forgets, and the tasks that run in it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from fake_comfy.door import Door
from fake_comfy.execution import Engine
from fake_comfy.faults import Fault, Faults
from fake_comfy.files import FOLDERS, Files
from fake_comfy.queue import PromptQueue, Stats
from fake_comfy.sockets import Sockets

REFUSE_SECONDS: Final = 5.0


class Machine:
    def __init__(self, root: Path, *, seconds: float) -> None:
        self.files = Files(root)
        self.faults = Faults()
        self.stats = Stats()
        self.sockets = Sockets()
        self.queue = PromptQueue(self.stats, self.tell_status)
        self.engine = Engine(
            files=self.files,
            faults=self.faults,
            queue=self.queue,
            sockets=self.sockets,
            stats=self.stats,
            seconds=seconds,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self.files.wipe("temp")
        self._run_tasks()

    def stop(self) -> None:
        """End all tasks at once: nothing that they were about to do happens any more."""
        for task in [*self._tasks, *self.engine.late]:
            task.cancel()

    @property
    def status(self) -> dict[str, Any]:
        return {"status": {"exec_info": {"queue_remaining": self.queue.remaining}}}

    def tell_status(self) -> None:
        self.sockets.send("status", self.status)

    async def restart(self, door: Door, *, keep_files: bool, down_seconds: float) -> None:
        """Lose all that a restart loses, and be away for a while; else the port is open again on return."""
        await door.close()
        self.stop()
        self.sockets.cut()
        self.queue.reset()
        self.engine.reset()
        if not keep_files:
            self.files.wipe(*FOLDERS)
        self.stats.restarts += 1
        self.start()
        if self.faults.active("refuse"):
            return
        if down_seconds:
            door.open_after(down_seconds)
        else:
            await door.open()

    async def add_fault(self, door: Door, fault: Fault) -> None:
        """Let a fault strike: some at once if there is something to hit."""
        if fault.name == "refuse":
            await self._refuse(door, fault)
            return
        self.faults.add(fault)
        strike = {
            "forget_queue": self._forget_queue,
            "forget_history": self._forget_history,
            "ws_silent": self.sockets.silence,
        }.get(fault.name)
        if strike is not None and strike():
            self.faults.take(fault.name)

    async def clear_faults(self, door: Door) -> None:
        self.faults.clear()
        await door.open()

    def after_submit(self) -> None:
        """A prompt has been queued: the moment for a fault that waited for one."""
        if self.faults.take("forget_queue"):
            self._forget_queue()

    def _run_tasks(self) -> None:
        self._tasks = [
            asyncio.create_task(self.engine.work()),
            asyncio.create_task(self.sockets.publish()),
        ]

    async def _refuse(self, door: Door, fault: Fault) -> None:
        seconds = fault.seconds
        if seconds is None and fault.times is not None:
            seconds = REFUSE_SECONDS
        await door.close()
        if seconds is None:
            self.faults.add(fault)  # to be seen among the active ones
        else:
            door.open_after(seconds)

    def _forget_queue(self) -> bool:
        if not self.queue.remaining:
            return False
        self.stop()
        self.queue.running = None
        self.engine.current = None
        self.queue.pending.clear()
        self.tell_status()
        self._run_tasks()
        return True

    def _forget_history(self) -> bool:
        found = bool(self.queue.history)
        self.queue.history.clear()
        return found
