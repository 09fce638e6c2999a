"""The faults by name, which of them are active, and how often they will still strike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple


class Meaning(NamedTuple):
    """What a fault does, and whether a real server was seen to do it: as in [a recorded answer], or as told."""

    does: str
    origin: str


# "run" faults strike the next prompt that gets that far, the others the next request.
FAULTS: Final[dict[str, Meaning]] = {
    "refuse": Meaning(
        "no connection is accepted for `seconds` (5; with times null: until cleared)",
        "seen on v0.26.0: the port opens only when all nodes are loaded",
    ),
    "http_500": Meaning(
        "500 text, as of a ComfyUI whose code raised",
        "seen on v0.26.0: [prompt-invalid-json]",
    ),
    "http_503": Meaning(
        "503 with Retry-After: `seconds` (1)",
        "imagined: a proxy in front",
    ),
    "http_413": Meaning(
        "413 HTML of a proxy",
        "imagined after nathannlu/ComfyUI-Cloud#32; seen on v0.26.0: 413 as plain text",
    ),
    "html_502": Meaning(
        "502 HTML of a proxy",
        "imagined: a proxy in front of a server that restarts",
    ),
    "unauthorized": Meaning(
        "401 with WWW-Authenticate",
        "imagined: a proxy with a password; v0.26.0 has none of its own [auth-header-ignored]",
    ),
    "redirect": Meaning(
        "302 to a login page",
        "imagined: a proxy with a login",
    ),
    "half_json": Meaning(
        "the answer is cut in the middle of its JSON, with a length that fits",
        "imagined",
    ),
    "slow": Meaning(
        "the answer comes `seconds` (60) late",
        "imagined: a server that loads a model",
    ),
    "drop_after_accept": Meaning(
        "POST /prompt: queued, then the connection is closed without an answer",
        "seen on v0.26.0: 20 of 20 prompts ran whose sender had hung up before the answer",
    ),
    "hang_prompt": Meaning(
        "POST /prompt: queued, the answer comes `seconds` (60) late",
        "imagined after Comfy-Org/comfy-api-proxy#7",
    ),
    "wrong_id": Meaning(
        "POST /prompt: queued under an id of the server's own, as before v0.3.45",
        "imagined: read in the sources of those versions",
    ),
    "missing_node": Meaning(
        "POST /prompt: the IPAdapter classes are not installed",
        "seen on v0.26.0: [prompt-missing-node-class]",
    ),
    "missing_model": Meaning(
        "POST /prompt: the checkpoint is not in the server's list",
        "seen on v0.26.0: [prompt-missing-model]",
    ),
    "drop_upload": Meaning(
        "POST /upload/image: stored, then the connection is closed without an answer",
        "imagined: as drop_after_accept",
    ),
    "hang_upload": Meaning(
        "POST /upload/image: stored, the answer comes `seconds` (60) late",
        "imagined: as slow",
    ),
    "hang_view": Meaning(
        "GET /view: the answer comes `seconds` (60) late",
        "imagined: as slow",
    ),
    "view_404": Meaning(
        "GET /view: the file is gone",
        "seen on v0.26.0: [view-missing-file]; replicate/cog-comfyui#79",
    ),
    "truncate_view": Meaning(
        "GET /view: half the file, then the connection is closed",
        "imagined after runpod-workers/worker-comfyui#137",
    ),
    "corrupt_view": Meaning(
        "GET /view: the right length, but the end is zeros",
        "imagined: pictures are written in place, as the sources of v0.26.0 say",
    ),
    "lose_interrupt": Meaning(
        "an interrupt or cancel of a running prompt is answered, to no effect",
        "seen on v0.26.0: 3 of 60 prompts interrupted right after the post ran to their end",
    ),
    "forget_queue": Meaning(
        "all that is queued and running is lost, as by a crash; if nothing is: the next prompt",
        "seen on v0.26.0: queue and history do not outlive the process",
    ),
    "forget_history": Meaning(
        "the history is lost; if it is empty: the next run leaves no entry",
        "seen on v0.26.0: [history-after-delete]; the oldest go beyond 10,001 entries",
    ),
    "late_history": Meaning(
        "run: its history entry appears `seconds` (2) after it left the queue",
        "imagined after artokun/comfyui-mcp-panel#224; never so in 11,831 looks at v0.26.0",
    ),
    "foreign_interrupt": Meaning(
        "run: somebody else interrupts it half-way",
        "seen on v0.26.0: [interrupt-global-no-body], [history-interrupted]",
    ),
    "oom": Meaning(
        "run: out of memory half-way",
        "seen on v0.26.0: [history-error-oom], raised by a stand-in node without a GPU",
    ),
    "runtime_error": Meaning(
        "run: RuntimeError half-way",
        "seen on v0.26.0: [history-error-runtime-error], raised by a stand-in node",
    ),
    "no_face": Meaning(
        "run: no face found in the photo",
        "seen on v0.26.0: [history-error-noface]",
    ),
    "model_not_found_at_run": Meaning(
        "run: IPAdapter model not found",
        "seen on v0.26.0: [history-error-missing-ipadapter]",
    ),
    "cuda_broken": Meaning(
        "run: device-side assert half-way; then every run fails until /fake/restart",
        "imagined after Comfy-Org/ComfyUI#13142 and #12524",
    ),
    "zombie": Meaning(
        "run: the worker thread dies half-way; HTTP lives on until /fake/restart",
        "seen on v0.26.0: its prompt stays in queue_running, interrupts are answered to no effect",
    ),
    "black_picture": Meaning(
        "run: the picture is black",
        "seen on v0.26.0: [history-nan-black]",
    ),
    "empty_outputs": Meaning(
        "run: success, but no file and no outputs",
        "seen on v0.26.0: [history-cached-no-client], a run that came from the cache",
    ),
    "ws_silent": Meaning(
        "a WebSocket stays open and says nothing more",
        "imagined after Comfy-Org/ComfyUI#9393 and #3128",
    ),
    "ws_drop": Meaning(
        "run: the sockets are cut half-way, without a close frame",
        "imagined: a proxy in front; seen on v0.26.0 only when the server ends",
    ),
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
