"""What the image servers have: read by the workers, and looked up where a graph is submitted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from blake3 import blake3

from comfy.catalog import LOADERS, InputInfo, NodeInfo, parse_object_info
from comfy.client import ComfyClient
from comfy.graph import Graph
from comfy.workflow import Fault, lacking
from jobs.models import Backend, NodeClass

READ_EVERY: Final = timedelta(minutes=5)


def read_catalog(backend: Backend) -> None:
    """Read what the backend has, unless some worker did so lately."""
    if not Backend.objects.begin_reading(backend, READ_EVERY):
        return
    with ComfyClient(backend.url, connect_timeout=2, read_timeout=10) as client:
        classes = parse_object_info(client.object_info())
    rows = [
        NodeClass(backend=backend, name=name, inputs=info.as_json(), is_output=info.is_output)
        for name, info in sorted(classes.items())
    ]
    told = json.dumps([(row.name, row.inputs, row.is_output) for row in rows])
    NodeClass.objects.replace(backend, rows, blake3(told.encode()).hexdigest())


@dataclass(frozen=True)
class Offers:
    """What the backends that were heard of lately have of some classes. None: it is not known of that backend."""

    by_backend: Mapping[int, Mapping[str, NodeInfo] | None]

    def compare(self, graph: Graph) -> tuple[list[Fault], list[int]]:
        """Return why no backend can run the graph, if none can, and the ids of those that cannot."""
        known = {pk: classes for pk, classes in self.by_backend.items() if classes is not None}
        faults = {pk: found for pk in known if (found := lacking(graph, known[pk]))}
        if not faults or len(faults) < len(self.by_backend):
            return [], list(faults)
        return min(faults.values(), key=len), list(faults)

    def inputs(self, class_type: str, name: str) -> list[InputInfo]:
        """Return what is told of an input, by each backend that has it."""
        infos = [
            classes[class_type]
            for classes in self.by_backend.values()
            if classes and class_type in classes
        ]
        return [info.inputs[name] for info in infos if name in info.inputs]

    def takes_file(self, class_type: str, name: str) -> bool:
        """Whether an input names an uploaded file."""
        told = any(about.takes_file for about in self.inputs(class_type, name))
        return told or (class_type, name) in LOADERS


def offers_of(classes: Iterable[str]) -> Offers:
    heard_of = Backend.objects.heard_of_lately().values_list("pk", "catalog_digest")
    found: dict[int, dict[str, NodeInfo] | None] = {
        pk: {} if digest else None for pk, digest in heard_of
    }
    rows = NodeClass.objects.filter(backend__in=found, name__in=set(classes))
    for pk, name, inputs, is_output in rows.values_list("backend", "name", "inputs", "is_output"):
        # None: its first reading came between the two queries.
        if (known := found[pk]) is not None:
            known[name] = NodeInfo.from_json(inputs, is_output=is_output)
    return Offers(found)


def loras_on_offer() -> list[str]:
    """Return the names of the LoRAs that a portrait may ask for, as the image servers list them."""
    told = offers_of(["LoraLoader"]).inputs("LoraLoader", "lora_name")
    return sorted({str(name) for about in told for name in about.choices or ()})
