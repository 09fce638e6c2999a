"""Hears of a run's progress over ComfyUI's WebSocket, and sees its previews.

Events are news, never proof: they may be late, doubled or missing, so whoever waits polls beside it.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from comfy.address import Address
from comfy.graph import Graph
from comfy.previews import FEATURE_FLAGS, PreviewImage, read_preview

T = TypeVar("T")
logger = logging.getLogger(__name__)
# The library's own log would show the password in the Authorization header at level DEBUG.
_quiet = logging.getLogger(f"{__name__}.websocket")
_quiet.setLevel(logging.WARNING)

STEP_WEIGHT: Final = 4.0  # one sampler step weighs as much as four other nodes
UNKNOWN_STEPS: Final = 20  # of a sampler that takes its steps from another node
OPEN_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 1.0
RECONNECT_SECONDS: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
MESSAGE_MAX_BYTES: Final = 64 * 2**20
ENDINGS: Final = ("execution_success", "execution_error", "execution_interrupted")


@dataclass(frozen=True)
class Progress:
    """How far a run is: a whole snapshot each time. `step` of `steps` is within the current node."""

    value: float  # 0 to 1, of the whole run
    nodes_done: int
    nodes_total: int
    current_node: str | None = None
    current_node_class: str | None = None
    step: int | None = None
    steps: int | None = None

    @classmethod
    def done(cls, graph: Graph) -> Self:
        return cls(1.0, len(graph), len(graph))

    def as_json(self) -> dict[str, Any]:
        """As the Progress of the Comfy API v2."""
        return {**asdict(self), "message": self._message()}

    def _message(self) -> str | None:
        if self.step is None:
            return self.current_node_class
        return f"{self.current_node_class} {self.step}/{self.steps}"


class ProgressTracker:
    """Adds up the events of one prompt. The value never goes back, whatever the server sends."""

    def __init__(self, graph: Graph, prompt_id: str) -> None:
        self._prompt_id = prompt_id
        self._classes = {node_id: str(node.get("class_type")) for node_id, node in graph.items()}
        self._weights = {node_id: _weight(node) for node_id, node in graph.items()}
        # Nodes that other nodes made at run time, and which of the graph's each is shown as.
        self._shown_as: dict[str, str] = {}
        self._fractions: dict[str, float] = {}
        self._current: str | None = None
        self._step: tuple[int, int] | None = None
        self._latest: Progress | None = None
        self._is_running = False

    def feed(self, message: dict[str, Any]) -> Progress | None:
        """Take a message in; return the new progress, or None if it tells nothing new about this prompt."""
        event, fields = message.get("type"), message.get("data")
        if not isinstance(fields, dict) or fields.get("prompt_id") != self._prompt_id:
            return None
        # Told before the next prompt starts: a server runs one at a time.
        self._is_running = event not in ENDINGS
        match event:
            case "execution_cached":
                self._finish(*_strings(fields.get("nodes")))
            case "progress_state":
                self._take_states(fields.get("nodes"))
            case "executing":
                self._learn(fields.get("node"), fields.get("display_node"))
                self._enter(fields.get("node"))
            case "progress":
                self._advance(fields.get("node"), fields.get("value"), fields.get("max"))
            case "executed":
                self._finish(*_strings([fields.get("node")]))
            case "execution_success":
                self._finish(*self._classes)
        return self._news()

    def node_of(self, preview: PreviewImage) -> str | None:
        """Return the node that a preview shows the work of, or None if it may be another prompt's.

        A prompt that was sent without a client id shows its previews to everybody.
        """
        if preview.prompt_id is None:
            return (self._current or "") if self._is_running else None
        return preview.node_id if preview.prompt_id == self._prompt_id else None

    def _take_states(self, nodes: Any) -> None:
        for node_id, state in nodes.items() if isinstance(nodes, dict) else ():
            if not isinstance(state, dict):
                continue
            self._learn(node_id, state.get("display_node_id"))
            if state.get("state") == "finished":
                self._finish(node_id)
            elif state.get("state") == "running":
                self._advance(node_id, state.get("value"), state.get("max"))

    def _learn(self, node_id: Any, shown_as: Any) -> None:
        if isinstance(node_id, str) and not self._knows(node_id) and self._knows(shown_as):
            self._shown_as[node_id] = shown_as

    def _enter(self, node_id: Any) -> None:
        """A node starts, so the one before it has ended. None means that the run is over, well or not."""
        self._is_running = node_id is not None
        node_id = self._shown(node_id)
        if self._knows(node_id) and node_id != self._current:
            if self._current is not None:
                self._finish(self._current)
            self._current, self._step = node_id, None

    def _advance(self, node_id: Any, value: Any, maximum: Any) -> None:
        shown_as = self._shown(node_id)
        if not (self._knows(shown_as) and _is_number(value) and _is_number(maximum)):
            return
        if maximum <= 0 or self._fractions.get(shown_as) == 1.0:
            return
        self._current = shown_as
        value = min(max(value, 0), maximum)
        if shown_as == node_id:  # nobody knows what part of it another is
            self._fractions[node_id] = value / maximum
        # 0 of 1 is what a node without steps of its own reports.
        self._step = (int(value), int(maximum)) if maximum > 1 else None

    def _finish(self, *node_ids: str) -> None:
        self._fractions.update((node_id, 1.0) for node_id in node_ids if node_id in self._classes)
        if self._current in node_ids:
            self._current, self._step = None, None

    def _shown(self, node_id: Any) -> Any:
        return self._shown_as.get(node_id, node_id) if isinstance(node_id, str) else None

    def _knows(self, node_id: Any) -> bool:
        return isinstance(node_id, str) and node_id in self._classes

    def _news(self) -> Progress | None:
        step, steps = self._step or (None, None)
        progress = Progress(
            value=max(self._latest.value if self._latest else 0.0, self._value()),
            nodes_done=sum(fraction == 1.0 for fraction in self._fractions.values()),
            nodes_total=len(self._classes),
            current_node=self._current,
            current_node_class=self._classes[self._current] if self._current else None,
            step=step,
            steps=steps,
        )
        if progress == self._latest:
            return None
        self._latest = progress
        return progress

    def _value(self) -> float:
        done = sum(self._weights[node_id] * part for node_id, part in self._fractions.items())
        return min(done / sum(self._weights.values()), 1.0) if self._weights else 0.0


class EventStream:
    """Listens for one client id in a thread of its own, and connects again whenever the line drops.

    `on_message` gets every text message and `on_preview` every preview, in that thread. Never open two with one
    client id: ComfyUI serves only the newer, and when the older one closes, neither.
    """

    def __init__(
        self,
        base_url: str,
        *,
        client_id: str,
        on_message: Callable[[dict[str, Any]], None],
        on_preview: Callable[[PreviewImage], None] | None = None,
    ) -> None:
        address = Address.parse(base_url)
        self._url = f"{address.websocket_url}/ws?clientId={quote(client_id, safe='')}"
        self._headers = _authorization(address)
        self._on_message = on_message
        self._on_preview = on_preview
        self._closing = threading.Event()
        self._connection: ClientConnection | None = None
        self._thread = threading.Thread(target=self._run, name="comfy-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Returns within a few seconds; a thread still connecting then ends by itself."""
        self._closing.set()
        if connection := self._connection:
            connection.close()
        if self._thread.is_alive():
            self._thread.join(2 * CLOSE_SECONDS)

    def _run(self) -> None:
        failures = 0
        while not self._closing.is_set():
            try:
                with self._connect() as self._connection:
                    failures = 0
                    self._listen(self._connection)
            except (OSError, WebSocketException, EOFError) as exc:
                logger.debug("events.disconnected", extra={"reason": str(exc)})
            self._connection = None
            self._closing.wait(RECONNECT_SECONDS[min(failures, len(RECONNECT_SECONDS) - 1)])
            failures += 1

    def _connect(self) -> ClientConnection:
        return connect(
            self._url,
            additional_headers=self._headers,
            proxy=None,
            compression=None,
            open_timeout=OPEN_SECONDS,
            close_timeout=CLOSE_SECONDS,
            max_size=MESSAGE_MAX_BYTES,
            logger=_quiet,
        )

    def _listen(self, connection: ClientConnection) -> None:
        """Pass on what comes until the connection ends."""
        if self._on_preview is not None:
            connection.send(FEATURE_FLAGS)
        # close() may have looked for a connection just before there was one.
        while not self._closing.is_set():
            received = connection.recv()
            if isinstance(received, str):
                self._pass_on(self._on_message, _parse(received))
            elif self._on_preview is not None:
                self._pass_on(self._on_preview, read_preview(received))

    def _pass_on(self, listener: Callable[[T], None], message: T | None) -> None:
        if message is None:
            return
        try:
            listener(message)
        except Exception:
            # Progress is a comfort: a message that chokes its reader must not end the stream.
            logger.exception("events.message_failed")


def _weight(node: dict[str, Any]) -> float:
    """What a node counts in the whole; only samplers take a `latent_image`."""
    inputs = node.get("inputs")
    if not isinstance(inputs, dict) or "latent_image" not in inputs:
        return 1.0
    steps = inputs.get("steps")
    return STEP_WEIGHT * (steps if isinstance(steps, int) and steps > 0 else UNKNOWN_STEPS)


def _is_number(value: Any) -> bool:
    """Whether it is a number that can be divided: JSON has NaN and integers of a thousand digits."""
    return isinstance(value, int | float) and abs(value) < 1e15


def _strings(values: Any) -> list[str]:
    return [v for v in values if isinstance(v, str)] if isinstance(values, list) else []


def _authorization(address: Address) -> dict[str, str]:
    if address.credentials is None:
        return {}
    token = base64.b64encode(":".join(address.credentials).encode()).decode()
    return {"Authorization": f"Basic {token}"}


def _parse(text: str) -> dict[str, Any] | None:
    try:
        message = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
