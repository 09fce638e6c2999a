"""What a node class is: what it takes and gives, as /object_info tells it, and the work it does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from fake_comfy import pictures
from fake_comfy.faults import Faults
from fake_comfy.files import Files

Json = dict[str, Any]
Input = list[Any]  # [type or list of choices] or [that, {"default": ..., "min": ...}]


@dataclass(frozen=True)
class Result:
    """What a node gives to other nodes, and what it shows (`ui`: in the outputs of the run)."""

    values: tuple[Any, ...] = ()
    ui: Json | None = None


class Run(Protocol):
    """What a node may ask of the run it works in."""

    files: Files
    faults: Faults
    png_chunks: Json

    async def sample(self, steps: int, sitting: pictures.Sitting) -> None: ...


Work = Callable[..., Awaitable[Result]]  # (run, **inputs)


@dataclass(frozen=True)
class NodeClass:
    name: str
    display_name: str
    category: str
    outputs: tuple[tuple[str, str], ...]  # type, name
    work: Work
    required: dict[str, Input] = field(default_factory=dict)
    optional: dict[str, Input] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)
    is_output: bool = False
    file_input: str | None = None  # takes the name of an uploaded file
    module: str = "nodes"

    def definition(self, file_names: list[str]) -> Json:
        """As in /object_info."""
        groups: Json = {
            "required": self.required | self._files(file_names),
            "optional": self.optional,
            "hidden": self.hidden,
        }
        inputs = {name: group for name, group in groups.items() if group or name == "required"}
        return {
            "input": inputs,
            "input_order": {name: [*group] for name, group in inputs.items()},
            "is_input_list": False,
            "output": [kind for kind, _ in self.outputs],
            "output_is_list": [False] * len(self.outputs),
            "output_name": [name for _, name in self.outputs],
            "name": self.name,
            "display_name": self.display_name,
            "description": "",
            "python_module": self.module,
            "category": self.category,
            "output_node": self.is_output,
            "has_intermediate_output": False,
            "search_aliases": [],
        }

    def _files(self, names: list[str]) -> dict[str, Input]:
        if self.file_input is None:
            return {}
        kind, options = self.required[self.file_input]
        of_v3 = kind == "COMBO"
        listed = [kind, options | {"options": names}] if of_v3 else [names, options]
        return {self.file_input: listed}
