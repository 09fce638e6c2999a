"""The one place that knows what ComfyUI's error texts mean, in every spelling seen.

`run_error` sorts an `execution_error` message, `refusal` the 400 body of POST /prompt. Both take whatever the
server sent (fields missing, of the wrong type, megabytes long) and always return an error with a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from comfy.errors import (
    DETAIL_LIMIT,
    MESSAGE_LIMIT,
    BadAnswer,
    BadPhoto,
    BrokenContext,
    ComfyError,
    GraphRefused,
    InputMissing,
    ModelMissing,
    NodeMissing,
    NoFace,
    OutOfMemory,
    RunFailed,
)
from comfy.text import clean_text


@dataclass(frozen=True)
class Rule:
    """`error` is meant if each pattern given is found in its field, in whatever case."""

    error: type[ComfyError]
    message: str = ""
    exception: str = ""
    node: str = ""

    def fits(self, message: str, exception_type: str, node: str) -> bool:
        pairs = ((self.message, message), (self.exception, exception_type), (self.node, node))
        return all(re.search(pattern, text, re.IGNORECASE) for pattern, text in pairs)


# The first that fits counts. Memory comes before the broken context: the text of "CUDA error: out of memory"
# goes on to name "device-side assertions", and cuBLAS reports a failed allocation as a CUDA error.
RUN_RULES: Final = (
    Rule(OutOfMemory, exception=r"MemoryError$"),
    Rule(OutOfMemory, message=r"out of memory|^allocation on device|STATUS_ALLOC_FAILED"),
    Rule(OutOfMemory, message=r"can't allocate memory|not enough (gpu video )?memory"),
    Rule(BrokenContext, message=r"\b(CUDA|HIP) error:|illegal memory access|device-side assert"),
    Rule(NoFace, message=r"no face detected"),
    Rule(
        ModelMissing,
        message=r"(ClipVision|IPAdapter|LoRA) model not found|Missing CLIPVision model",
    ),
    Rule(ModelMissing, message=r"insightface model is required|Model in folder .* not found"),
    Rule(NodeMissing, message=r"^No module named "),
    Rule(
        GraphRefused,
        message=r"model is not supported for (SDXL|SD1\.5)|clip input is invalid: None",
    ),
    Rule(GraphRefused, message=r"outside the output folder is not allowed|File name too long"),
    Rule(InputMissing, exception=r"FileNotFoundError$", node=r"^LoadImage"),
    Rule(BadPhoto, message=r"cannot identify image file|image file is truncated"),
    Rule(BadPhoto, exception=r"InvalidDataError$|DecompressionBombError$", node=r"^LoadImage"),
)


def run_error(event: Any) -> ComfyError:
    """The error that an `execution_error` message (the same in history and WebSocket) stands for."""
    fields = event if isinstance(event, dict) else {}
    message = _field(fields, "exception_message")
    exception_type = _field(fields, "exception_type") or "unknown error"
    node = _field(fields, "node_type")
    error = next((r.error for r in RUN_RULES if r.fits(message, exception_type, node)), RunFailed)
    return error(
        f"{exception_type}: {message or 'no message'}",
        node_id=_field(fields, "node_id") or None,
        class_type=node or None,
        detail=f"{exception_type}: {message}\n{_traceback(fields)}",
    )


def _field(fields: dict[str, Any], key: str) -> str:
    return clean_text(fields.get(key), MESSAGE_LIMIT).strip()


def _traceback(fields: dict[str, Any]) -> str:
    lines = fields.get("traceback")
    return "".join(map(str, lines)) if isinstance(lines, list) else clean_text(lines, DETAIL_LIMIT)


MODEL_FILE: Final = re.compile(r"\.(safetensors|sft|ckpt|pth?|bin|gguf|onnx)$", re.IGNORECASE)
MODEL_INPUT: Final = re.compile(r"(ckpt|lora|vae|clip|unet|control_net|model)_name\d?")


@dataclass(frozen=True)
class Complaint:
    """One thing that a refusal finds wrong, and the error it stands for."""

    means: type[ComfyError]
    node_id: str
    class_type: str
    text: str = ""


def refusal(body: Any) -> ComfyError:
    """The error that a 400 answer of POST /prompt stands for."""
    if not isinstance(body, dict) or "error" not in body:
        return BadAnswer(f"POST /prompt: 400 with {clean_text(body, 200)!r}")
    main = body["error"] if isinstance(body["error"], dict) else {"message": body["error"]}
    complaints = list(_complaints(body.get("node_errors")))
    worst = _worst(complaints) or _graph_complaint(main)
    return worst.means(
        _refusal_message(main, complaints),
        node_id=worst.node_id or None,
        class_type=worst.class_type or None,
        detail=json.dumps(body),
    )


def _worst(complaints: list[Complaint]) -> Complaint | None:
    """The complaint that decides: a wrong graph stays wrong on any server, a lost photo can be sent again."""
    order = (GraphRefused, ModelMissing, InputMissing)
    return min(complaints, key=lambda complaint: order.index(complaint.means), default=None)


def _graph_complaint(main: dict[str, Any]) -> Complaint:
    """The error above all nodes: a class is not installed, or the graph as a whole is wrong."""
    message = _field(main, "message")
    # Before v0.12 the type was `invalid_prompt` for everything.
    missing = main.get("type") == "missing_node_type" or re.search(
        "node .* does not exist", message
    )
    is_class = missing and "has no class_type" not in message
    extra = _extra_info(main)
    error = NodeMissing if is_class else GraphRefused
    return Complaint(error, _field(extra, "node_id"), _field(extra, "class_type"))


def _complaints(node_errors: Any) -> Iterator[Complaint]:
    for node_id, entry in node_errors.items() if isinstance(node_errors, dict) else ():
        errors = entry.get("errors") if isinstance(entry, dict) else None
        for error in errors if isinstance(errors, list) else ():
            if isinstance(error, dict):
                text = f"{_field(error, 'type')} {_field(error, 'details') or _field(error, 'message')}"
                class_type = _field(entry, "class_type")
                yield Complaint(_meaning(error), clean_text(node_id, 100), class_type, text)


def _meaning(error: dict[str, Any]) -> type[ComfyError]:
    """What one error of one node means."""
    extra = _extra_info(error)
    received, name = _field(extra, "received_value"), _field(extra, "input_name")
    if re.search(r"Invalid \w+ file", _field(error, "details")):
        return InputMissing
    names_a_model = MODEL_FILE.search(received) or MODEL_INPUT.fullmatch(name)
    if error.get("type") == "value_not_in_list" and names_a_model:
        return ModelMissing
    return GraphRefused


def _extra_info(error: dict[str, Any]) -> dict[str, Any]:
    extra = error.get("extra_info")
    return extra if isinstance(extra, dict) else {}


def _refusal_message(main: dict[str, Any], complaints: list[Complaint]) -> str:
    head = " ".join(filter(None, (_field(main, "message"), _field(main, "details"))))
    nodes = (f"node {c.node_id} {c.class_type}: {clean_text(c.text, 250)}" for c in complaints[:10])
    return "; ".join((f"graph refused: {head}", *nodes))
