"""What a run left behind, as its entry in the history tells it, however much of that is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from comfy.classify import run_error
from comfy.errors import ComfyError, Interrupted, RunFailed
from comfy.graph import NAME_LENGTH
from comfy.text import clean_text

TEXT_MAX_LENGTH: Final = 1_000_000  # characters of one text that a node shows


@dataclass(frozen=True)
class OutputFile:
    """A file that a run left on the server; `type` is output, temp or input."""

    filename: str
    subfolder: str
    type: str


Output = OutputFile | str  # a file, or a text that a node shows


@dataclass(frozen=True)
class Run:
    """A finished run. `outputs` has only the nodes that left something, by their ids in the graph that was sent.

    A success may have none: some versions say so of a graph that was wholly cached and had no client_id.
    """

    prompt_id: str
    outputs: dict[str, list[Output]]
    error: ComfyError | None  # None: success
    extra_data: dict[str, Any] = field(default_factory=dict)  # what was sent beside the graph
    from_cache: bool = False  # a node with outputs did not run, as its result was there


def parse_run(prompt_id: str, entry: dict[str, Any]) -> Run:
    """Return the run that an entry of the history is about."""
    status, item = _object(entry.get("status")), entry.get("prompt")
    messages = [m for m in _list(status.get("messages")) if isinstance(m, list) and m]
    outputs = _outputs(_object(entry.get("outputs")), _object(entry.get("meta")))
    return Run(
        prompt_id,
        outputs,
        _outcome(status, messages, bool(outputs)),
        extra_data_of(item),
        not _cached(messages).isdisjoint(_strings(_part(item, 4))),
    )


def extra_data_of(item: Any) -> dict[str, Any]:
    """What was sent beside the graph of a queue item: [number, prompt id, graph, extra data, output nodes]."""
    return _object(_part(item, 3))


def _outputs(outputs: dict[str, Any], meta: dict[str, Any]) -> dict[str, list[Output]]:
    found: dict[str, list[Output]] = {}
    for node_id, output in outputs.items():
        # A node that was made at run time has an id of its own; what it stands for is one of the graph's.
        shown_as = _object(meta.get(node_id)).get("display_node") or node_id
        if items := list(dict.fromkeys(_items(_object(output)))):
            found.setdefault(clean_text(shown_as, NAME_LENGTH), []).extend(items)
    return found


def _items(output: dict[str, Any]) -> Iterator[Output]:
    """What one node left: files, whatever it calls them (images, gifs, audio...), and texts."""
    for name, items in output.items():
        for item in _list(items):
            if isinstance(item, dict) and item.get("filename"):
                yield OutputFile(
                    filename=clean_text(item["filename"], 1_000),
                    subfolder=clean_text(item.get("subfolder"), 1_000),
                    type=clean_text(item.get("type"), 100) or "output",
                )
            elif name == "text":
                yield from (
                    clean_text(text, TEXT_MAX_LENGTH) for text in _strings([item, *_list(item)])
                )


def _outcome(status: dict[str, Any], messages: list[Any], has_outputs: bool) -> ComfyError | None:
    # The messages first: some versions call an interrupted run a success.
    for name, *rest in reversed(messages):
        if name == "execution_interrupted":
            return Interrupted("the run was interrupted on the server")
        if name == "execution_error":
            return run_error(rest[0] if rest else None)
    status_word = clean_text(status.get("status_str"), 100)
    if status_word == "success" or (not status_word and has_outputs):
        return None
    return RunFailed(f"the run ended as {status_word or 'unknown'!r}, without a reason")


def _cached(messages: list[Any]) -> set[str]:
    """The nodes that did not run."""
    told = [_object(_part(m, 1)) for m in messages if m[0] == "execution_cached"]
    return {node_id for fields in told for node_id in _strings(fields.get("nodes"))}


def _part(item: Any, index: int) -> Any:
    return item[index] if isinstance(item, list) and len(item) > index else None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _strings(value: Any) -> list[str]:
    return [item for item in _list(value) if isinstance(item, str)]
