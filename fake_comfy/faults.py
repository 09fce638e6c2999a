"""The faults by name, which of them are active, and how often they will still strike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

# Name: what it does. "run" faults strike the next prompt that gets that far, the others the next request.
FAULTS: Final[dict[str, str]] = {
    "refuse": "no connection is accepted for `seconds` (5; with times null: until cleared)",
    "http_500": "500 text, as of a ComfyUI whose code raised",
    "http_503": "503 with Retry-After: `seconds` (1)",
    "http_413": "413 HTML of a proxy",
    "html_502": "502 HTML of a proxy",
    "unauthorized": "401 with WWW-Authenticate",
    "redirect": "302 to a login page",
    "half_json": "the answer is cut in the middle of its JSON, with a length that fits",
    "slow": "the answer comes `seconds` (60) late",
    "drop_after_accept": "POST /prompt: queued, then the connection is closed without an answer",
    "hang_prompt": "POST /prompt: queued, the answer comes `seconds` (60) late",
    "wrong_id": "POST /prompt: queued under an id of the server's own, as before v0.3.45",
    "missing_node": "POST /prompt: the IPAdapter classes are not installed",
    "missing_model": "POST /prompt: the checkpoint is not in the server's list",
    "drop_upload": "POST /upload/image: stored, then the connection is closed without an answer",
    "hang_upload": "POST /upload/image: stored, the answer comes `seconds` (60) late",
    "hang_view": "GET /view: the answer comes `seconds` (60) late",
    "view_404": "GET /view: the file is gone",
    "truncate_view": "GET /view: half the file, then the connection is closed",
    "corrupt_view": "GET /view: the right length, but the end is zeros",
    "lose_interrupt": "an interrupt or cancel of a running prompt is answered, to no effect",
    "forget_queue": "all that is queued and running is lost, as by a crash; if nothing is: the next prompt",
    "forget_history": "the history is lost; if it is empty: the next run leaves no entry",
    "late_history": "run: its history entry appears `seconds` (2) after it left the queue",
    "foreign_interrupt": "run: somebody else interrupts it half-way",
    "oom": "run: out of memory half-way",
    "runtime_error": "run: RuntimeError half-way",
    "no_face": "run: no face found in the photo",
    "model_not_found_at_run": "run: IPAdapter model not found",
    "cuda_broken": "run: device-side assert half-way; then every run fails until /fake/restart",
    "zombie": "run: the worker thread dies half-way; HTTP lives on until /fake/restart",
    "black_picture": "run: the picture is black",
    "empty_outputs": "run: success, but no file and no outputs",
    "ws_silent": "a WebSocket stays open and says nothing more",
    "ws_drop": "run: the sockets are cut half-way, without a close frame",
}


@dataclass
class Fault:
    """`times`: how often it strikes (None: until cleared); `path`: only there, "/queue" or "POST /queue"."""

    name: str
    times: int | None = 1
    seconds: float | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        if self.name not in FAULTS:
            raise UnknownFault(self.name)

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read NAME or NAME:TIMES; TIMES may be null."""
        name, _, times = text.partition(":")
        return cls(name, None if times == "null" else int(times or 1))

    def fits(self, method: str, route: str) -> bool:
        """Whether a request is one that `path` means; a path means all below it, too. /ws must be named."""
        if self.path is None:
            return route != "/ws"
        *methods, path = self.path.split()
        path = without_api(path)
        below = route == path or route.startswith(path.rstrip("/") + "/")
        return below and (not methods or method in methods)


def without_api(path: str) -> str:
    """The path without the /api that every route may have."""
    return path.removeprefix("/api") if path.startswith("/api/") else path


class UnknownFault(ValueError):
    def __str__(self) -> str:
        return f"unknown fault {self.args[0]!r}; known: {', '.join(FAULTS)}"


class Faults:
    """The active faults, the oldest first."""

    def __init__(self) -> None:
        self._active: list[Fault] = []

    def add(self, fault: Fault) -> None:
        if fault.times != 0:
            self._active.append(fault)

    def clear(self) -> None:
        self._active.clear()

    def active(self, name: str) -> bool:
        return any(fault.name == name for fault in self._active)

    def take(self, name: str) -> Fault | None:
        """Use a fault up once and return it, or None if it is not active."""
        return self._strike(fault for fault in self._active if fault.name == name)

    def take_for(self, name: str, method: str, route: str) -> Fault | None:
        """Like `take`, but only a fault that fits the request."""
        named = (fault for fault in self._active if fault.name == name)
        return self._strike(fault for fault in named if fault.fits(method, route))

    def as_json(self) -> list[dict[str, Any]]:
        return [asdict(fault) for fault in self._active]

    def _strike(self, fitting: Iterable[Fault]) -> Fault | None:
        fault = next(iter(fitting), None)
        if fault is not None and fault.times is not None:
            fault.times -= 1
            if fault.times <= 0:
                self._active.remove(fault)
        return fault
