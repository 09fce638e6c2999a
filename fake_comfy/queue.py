"""The prompts: a heap of pending ones, the running one, the history. All of it in memory, gone after a restart."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from fake_comfy.errors import WorkerDied

Json = dict[str, Any]
# Number, prompt id, graph, extra data, outputs: in /queue and /history as well. Two items with the same number
# and id are compared by their graphs, which raises, as in the real server.
Item = tuple[float, str, Json, Json, list[str]]

HISTORY_LIMIT: Final = 10_000  # one more is kept


@dataclass
class Counters:
    """What happened to one prompt id. They survive a restart."""

    submitted: int = 0
    executed: int = 0  # runs whose sampler started
    finished: int = 0  # runs that came to an end of their own, well or not
    cached: int = 0  # runs whose sampler was skipped, as its result was in the cache
    interrupted: int = 0
    deleted: int = 0  # entries taken from the queue before they ran


@dataclass
class Stats:
    prompts: dict[str, Counters] = field(default_factory=dict)
    restarts: int = 0

    def of(self, prompt_id: str) -> Counters:
        return self.prompts.setdefault(prompt_id, Counters())

    def as_json(self) -> Json:
        prompts = {prompt_id: vars(counters).copy() for prompt_id, counters in self.prompts.items()}
        return {"prompts": prompts, "restarts": self.restarts}


class PromptQueue:
    def __init__(self, stats: Stats, on_change: Callable[[], None]) -> None:
        self._stats = stats
        self._on_change = on_change
        self.reset()

    def reset(self) -> None:
        """Lose everything, as a restart does."""
        self.pending: list[Item] = []
        self.running: Item | None = None
        self.history: dict[str, Json] = {}
        self._counter = 0
        self._filled = asyncio.Event()

    @property
    def remaining(self) -> int:
        return len(self.pending) + (self.running is not None)

    def next_number(self, *, front: bool) -> float:
        number = -self._counter if front else self._counter
        self._counter += 1
        return number

    def put(self, item: Item) -> None:
        """Queue an item. Raises TypeError for a second one with the same number and id, which is queued all the same."""
        self._stats.of(item[1]).submitted += 1
        self._filled.set()
        heapq.heappush(self.pending, item)
        self._on_change()

    async def take(self) -> Item:
        """Wait for the next item; it is then the running one. Raises WorkerDied if two cannot be compared."""
        while not self.pending:
            self._filled.clear()
            await self._filled.wait()
        try:
            self.running = heapq.heappop(self.pending)
        except TypeError as exc:
            raise WorkerDied(str(exc)) from exc
        self._on_change()
        return self.running

    def end(self, entry: Json | None) -> None:
        """Move the running item into the history (None: without a trace)."""
        assert self.running is not None
        prompt_id = self.running[1]
        self.running = None
        if entry is not None:
            self.remember(prompt_id, entry)
        self._on_change()

    def remember(self, prompt_id: str, entry: Json) -> None:
        if len(self.history) > HISTORY_LIMIT:
            del self.history[next(iter(self.history))]
        self.history.pop(prompt_id, None)  # a second run goes to the end
        self.history[prompt_id] = entry

    def delete(self, prompt_id: str) -> bool:
        """Take one pending entry of this id away. Return False if there is none."""
        for item in self.pending:
            if item[1] == prompt_id:
                self.pending.remove(item)
                heapq.heapify(self.pending)
                self._stats.of(prompt_id).deleted += 1
                self._on_change()
                return True
        return False

    def clear(self) -> None:
        for item in self.pending:
            self._stats.of(item[1]).deleted += 1
        self.pending = []
        self._on_change()

    def forget(self, prompt_ids: Iterable[str]) -> None:
        for prompt_id in prompt_ids:
            self.history.pop(prompt_id, None)

    def is_running(self, prompt_id: str) -> bool:
        return self.running is not None and self.running[1] == prompt_id


def milliseconds() -> int:
    return int(time.time() * 1000)
