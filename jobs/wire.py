"""What of a job's graph differs on the wire: the names of its input files and where its outputs go."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from typing import Any, Final
from uuid import UUID

from comfy.errors import BadPhoto
from comfy.graph import Graph
from comfy.history import OutputFile
from jobs.models import Job

SUBFOLDER: Final = "genflow"
PREFIX_INPUT: Final = "filename_prefix"
ASSET_TYPE: Final = "core/ASSET"
# Stands beside the graph in ComfyUI's queue and history, and says which drawing of the job it is.
MARKER: Final = "genflow_drawing"
# What a picture is called whose prefix another node was to make.
UNKNOWN_PREFIX: Final = "ComfyUI"


def asset_reference(asset_id: object) -> dict[str, Any]:
    """Return what stands in a graph for an input file (`AssetReference` of the Comfy API v2)."""
    return {"__type": ASSET_TYPE, "info": {"id": str(asset_id)}}


def is_reference(value: Any) -> bool:
    return isinstance(value, dict) and value.get("__type") == ASSET_TYPE


def prefix_of(job: Job, drawing: int) -> str:
    """Return the output prefix of a drawing: never used before, so the cache cannot answer with old files."""
    return f"{SUBFOLDER}/{job.pk}" + (f"-r{drawing}" if drawing else "")


def usable_prefixes(job: Job) -> list[str]:
    """Return the prefixes whose pictures are good to take, newest first."""
    return [prefix_of(job, n) for n in range(job.drawing, job.spoiled_drawings - 1, -1)]


def on_the_wire(job: Job, files: Mapping[str, str]) -> Graph:
    """Return the job's graph with uploaded names (by asset id) and output prefixes of ours put in."""
    prefix = prefix_of(job, job.drawing)
    prefixes = {theirs: variant(prefix, n) for n, theirs in enumerate(caller_prefixes(job.graph))}
    named_files = job.params.get("files", {})

    def fill(node_id: str, name: str, value: Any) -> Any:
        if name == PREFIX_INPUT:
            return prefixes[json.dumps(value)]
        if asset_id := named_files.get(node_id, {}).get(name):
            return name_of(asset_id, files)
        return with_names(value, files)

    return {
        node_id: node
        | {"inputs": {name: fill(node_id, name, value) for name, value in node["inputs"].items()}}
        for node_id, node in job.graph.items()
    }


def with_names(value: Any, files: Mapping[str, str]) -> Any:
    """Return an input's value with each asset reference in it replaced by the file's name."""
    if is_reference(value):
        return name_of(str(UUID(value["info"]["id"])), files)
    if isinstance(value, dict):
        return {key: with_names(part, files) for key, part in value.items()}
    return [with_names(part, files) for part in value] if isinstance(value, list) else value


def name_of(asset_id: str, files: Mapping[str, str]) -> str:
    if asset_id not in files:
        raise BadPhoto(f"asset {asset_id} is gone")
    return files[asset_id]


def caller_prefixes(graph: Graph) -> list[str]:
    """Return, as JSON, the prefixes that the graph itself names, each once: nodes of one prefix count together."""
    named = (
        node["inputs"][PREFIX_INPUT] for node in graph.values() if PREFIX_INPUT in node["inputs"]
    )
    return list(dict.fromkeys(map(json.dumps, named)))


def variant(prefix: str, number: int) -> str:
    """Return the prefix of ours for the one of this number that the graph names."""
    return f"{prefix}-{number}" if number else prefix


def shown_name(job: Job, filename: str) -> str:
    """Return the name of an output as its owner knows it: with the prefix of the job's own graph."""
    filename = without_folder(filename)
    for prefix, (number, theirs) in product(
        usable_prefixes(job), enumerate(caller_prefixes(job.graph))
    ):
        stem = without_folder(variant(prefix, number)) + "_"
        if filename.startswith(stem):
            own = json.loads(theirs)
            shown = without_folder(own) if isinstance(own, str) else UNKNOWN_PREFIX
            return f"{shown}_{filename.removeprefix(stem)}"
    return filename


def without_folder(name: str) -> str:
    return name.replace("\\", "/").rpartition("/")[2]


def is_ours(job: Job, extra_data: Mapping[str, Any]) -> bool:
    """Whether a prompt with our id, found on a backend, is a drawing we can still use."""
    drawing = extra_data.get(MARKER)
    return isinstance(drawing, int) and job.spoiled_drawings <= drawing <= job.drawing


def expected_files(prefix: str, count: int) -> list[OutputFile]:
    """Return the names that SaveImage gives to the first `count` pictures under a fresh prefix."""
    subfolder, _, stem = prefix.rpartition("/")
    return [OutputFile(f"{stem}_{n:05}_.png", subfolder, "output") for n in range(1, count + 1)]
