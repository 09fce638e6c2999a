"""What of a job's graph differs on the wire: the names of its input files and where its pictures go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from comfy.client import OutputFile
from comfy.graph import Graph
from jobs.models import Job

SUBFOLDER: Final = "genflow"
PREFIX_INPUT: Final = "filename_prefix"


def asset_reference(asset_id: object) -> dict[str, Any]:
    """Return what stands in a graph for an input file (`AssetReference` of the Comfy API v2)."""
    return {"__type": "core/ASSET", "info": {"id": str(asset_id)}}


def prefix_of(job: Job, drawing: int) -> str:
    """Return the output prefix of a drawing: never used before, so the cache cannot answer with old files."""
    return f"{SUBFOLDER}/{job.pk}" + (f"-r{drawing}" if drawing else "")


def usable_prefixes(job: Job) -> list[str]:
    """Return the prefixes whose pictures are good to take, newest first."""
    return [prefix_of(job, n) for n in range(job.drawing, job.spoiled_drawings - 1, -1)]


def on_the_wire(job: Job, files: Mapping[str, str]) -> Graph:
    """Return the job's graph with uploaded names (by asset id) and the output prefix put in."""
    prefix = prefix_of(job, job.drawing)

    def fill(name: str, value: Any) -> Any:
        if name == PREFIX_INPUT:
            return prefix
        if isinstance(value, dict) and value.get("__type") == "core/ASSET":
            return files[value["info"]["id"]]
        return value

    return {
        node_id: node | {"inputs": {name: fill(name, v) for name, v in node["inputs"].items()}}
        for node_id, node in job.graph.items()
    }


def is_ours(job: Job, graph: Graph | None) -> bool:
    """Whether a prompt with our id, found on a backend, is a drawing we can still use."""
    if graph is None:
        return False
    usable = usable_prefixes(job)
    return any(inputs_of(node).get(PREFIX_INPUT) in usable for node in graph.values())


def inputs_of(node: Any) -> dict[str, Any]:
    """Return a node's inputs, of whatever a backend says it has in its queue."""
    inputs = node.get("inputs") if isinstance(node, dict) else None
    return inputs if isinstance(inputs, dict) else {}


def expected_files(prefix: str, count: int) -> list[OutputFile]:
    """Return the names that SaveImage gives to the first `count` pictures under a fresh prefix."""
    subfolder, _, stem = prefix.rpartition("/")
    return [OutputFile(f"{stem}_{n:05}_.png", subfolder, "output") for n in range(1, count + 1)]
