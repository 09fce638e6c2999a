"""All that a worker does to the world, one interaction after another, and a hand that may interfere at each.

A worker has two ways to leave a trace: its connection to Postgres and its client of ComfyUI. Whoever leads a
`Life` goes through both as ever, but is watched, and may be killed just before an interaction takes effect or
just after, before its answer is seen.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar
from unittest.mock import patch

from django.db import connection, connections

from comfy.client import ComfyClient

T = TypeVar("T")


@contextmanager
def told_as(which: str) -> Iterator[None]:
    """Say which of many cases it was that failed."""
    try:
        yield
    except BaseException as exc:
        exc.add_note(which)
        raise


class Killed(BaseException):
    """The process is gone. Nothing catches it, and what runs on the way out can do nothing more."""


class Moment(StrEnum):
    BEFORE = "before"
    AFTER = "after"  # it took effect, and the answer was never seen


@dataclass(frozen=True)
class Point:
    """An interaction: the `nth` of this name in one life. So it keeps its name if others come or go."""

    name: str
    nth: int

    def __str__(self) -> str:
        return f"{self.name} #{self.nth}"


Interference = Callable[[Moment, Point], None]


def nothing(moment: Moment, point: Point) -> None:
    """Only watch."""


class KillAt:
    """Kills at one moment of one point. `struck`: it came to that."""

    def __init__(self, moment: Moment, point: Point) -> None:
        self._when = (moment, point)
        self.struck = False

    def __call__(self, moment: Moment, point: Point) -> None:
        if (moment, point) == self._when:
            self.struck = True
            raise Killed


class PauseBefore:
    """Stops before the interaction of this number, from 0, until `go_on` is set. `reached`: it came to that."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, moment: Moment, point: Point) -> None:
        if moment == Moment.BEFORE:
            self._left -= 1
            if self._left == -1:
                self.reached.set()
                assert self.go_on.wait(60)


class Life:
    """The interactions of whatever a thread is made to do by `lead`. `points`: those so far, in their order."""

    def __init__(self, interfere: Interference | None = None) -> None:
        self.points: list[Point] = []
        self.is_over = False
        self._interfere = interfere or nothing
        self._names: Counter[str] = Counter()

    def lead(self, act: Callable[[], object]) -> None:
        """Do it on this thread, whose database connection nobody else may use, to its end or that of the life."""
        wrapper = connections[connection.alias]
        with ExitStack() as stack, suppress(Killed):
            stack.enter_context(connection.execute_wrapper(self._execute))
            for name, method in (
                ("commit", self._met("COMMIT", wrapper.commit)),
                ("rollback", self._met("ROLLBACK", wrapper.rollback)),
                ("set_autocommit", self._if_alive(wrapper.set_autocommit)),
                ("connect", self._if_alive(wrapper.connect)),
            ):
                stack.enter_context(patch.object(wrapper, name, method))
            stack.enter_context(patch.object(ComfyClient, "_request", self._request()))
            act()

    def meet(self, name: str, act: Callable[[], T]) -> T:
        """Let one interaction happen, unless this life is over."""
        if self.is_over:
            raise Killed
        self._names[name] += 1
        point = Point(name, self._names[name])
        self.points.append(point)
        self._let_interfere(Moment.BEFORE, point)
        try:
            return act()
        finally:  # an error is an answer, too
            self._let_interfere(Moment.AFTER, point)

    def _let_interfere(self, moment: Moment, point: Point) -> None:
        try:
            self._interfere(moment, point)
        except Killed:
            self._die()
            raise

    def _die(self) -> None:
        self.is_over = True
        if connection.connection is not None:
            # As when a process dies: its socket is closed, and the server rolls back what was not committed.
            connection.connection.close()

    def _met(self, name: str, act: Callable[..., T]) -> Callable[..., T]:
        return lambda *args, **kwargs: self.meet(name, lambda: act(*args, **kwargs))

    def _if_alive(self, act: Callable[..., T]) -> Callable[..., T]:
        """For what changes nothing in the world, but would raise errors of its own in the dead."""

        def act_if_alive(*args: Any, **kwargs: Any) -> T:
            if self.is_over:
                raise Killed
            return act(*args, **kwargs)

        return act_if_alive

    def _execute(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        return self.meet(statement_name(sql), lambda: execute(sql, params, many, context))

    def _request(self) -> Callable[..., Any]:
        request = ComfyClient._request

        def meet_request(client: ComfyClient, method: str, path: str, **options: Any) -> Any:
            name = f"{method} {re.sub('/[0-9a-f-]{36}', '', path)}"
            return self.meet(name, lambda: request(client, method, path, **options))

        return meet_request


def statement_name(sql: str) -> str:
    """Return its first word and the first of our tables: "UPDATE job"."""
    table = re.search(r"\bjobs_(\w+)", sql)
    return f"{sql.split(maxsplit=1)[0]} {table[1] if table else ''}".strip()
