"""What node classes a server has and what they take, as `GET /object_info` tells it, in a few words.

A real server tells megabytes: kept is what a graph can be checked by before it is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from comfy.graph import NAME_LENGTH
from comfy.text import is_storable

# Inputs that take the name of an uploaded file, beside those that say so themselves.
LOADERS: Final = frozenset(
    {
        ("LoadImage", "image"),
        ("LoadImageMask", "image"),
        ("LoadImageOutput", "image"),
        ("LoadAudio", "audio"),
        ("LoadVideo", "file"),
        ("LoadLatent", "latent"),
        ("Load3D", "model_file"),
        ("Load3DAnimation", "model_file"),
        ("VHS_LoadAudioUpload", "audio"),
        ("VHS_LoadVideo", "video"),
        ("VHS_LoadVideoFFmpeg", "video"),
    }
)


@dataclass(frozen=True)
class InputInfo:
    """What an input takes. choices: None if it is no choice, or one that the server does not tell."""

    required: bool = False
    choices: list[Any] | None = None
    takes_file: bool = False

    def takes(self, value: Any) -> bool:
        """Whether a value that is no link may be one for it, as far as is known."""
        # An object stands for something else: an asset, or a list that is no link.
        return self.choices is None or isinstance(value, dict) or value in self.choices

    def as_json(self) -> dict[str, Any]:
        """Only what differs from the default: most inputs are plain."""
        return {name: value for name, value in vars(self).items() if value not in (False, None)}


@dataclass(frozen=True)
class NodeInfo:
    inputs: dict[str, InputInfo]
    is_output: bool = False

    def as_json(self) -> dict[str, Any]:
        return {name: about.as_json() for name, about in self.inputs.items()}

    @classmethod
    def from_json(cls, inputs: Mapping[str, Mapping[str, Any]], *, is_output: bool) -> Self:
        return cls({name: InputInfo(**about) for name, about in inputs.items()}, is_output)


def parse_object_info(answer: Mapping[str, Any]) -> dict[str, NodeInfo]:
    """Return the node classes by name; what makes no sense is left out."""
    return {
        name: NodeInfo(dict(_inputs(name, definition)), definition.get("output_node") is True)
        for name, definition in answer.items()
        if isinstance(definition, dict) and len(name) <= NAME_LENGTH and is_storable(name)
    }


def takes_file(class_type: str, name: str, options: Mapping[str, Any]) -> bool:
    flagged = any(key.endswith("_upload") and value is True for key, value in options.items())
    return flagged or (class_type, name) in LOADERS


def _inputs(class_type: str, definition: dict[str, Any]) -> Iterator[tuple[str, InputInfo]]:
    groups = definition.get("input")
    for group in ("optional", "required"):
        inputs = groups.get(group) if isinstance(groups, dict) else None
        for name, told in inputs.items() if isinstance(inputs, dict) else ():
            if isinstance(told, list) and told and is_storable(name):
                yield name, _input(class_type, name, told, is_required=group == "required")


def _input(class_type: str, name: str, told: list[Any], *, is_required: bool) -> InputInfo:
    kind, options = told[0], told[1] if len(told) > 1 and isinstance(told[1], dict) else {}
    of_file = takes_file(class_type, name, options)
    # What the types of this name stand for are inputs of other names.
    is_plain = not str(kind).startswith("COMFY_")
    return InputInfo(
        is_required and is_plain, None if of_file else _choices(kind, options), of_file
    )


def _choices(kind: Any, options: Mapping[str, Any]) -> list[Any] | None:
    """The values of a choice, in both ways of telling them: [values, options] and ["COMBO", {"options": values}]."""
    values = options.get("options") if kind == "COMBO" else kind
    if not isinstance(values, list) or options.get("remote") or options.get("multiselect"):
        return None
    return [value for value in values if not isinstance(value, str) or is_storable(value)]
