"""A workflow that somebody sent made into a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from django.contrib.auth.models import User
from django.db import transaction

from comfy.graph import Graph
from comfy.workflow import MAX_NODES, Fault, faults_of, is_ui_format
from jobs.catalog import Offers, offers_of
from jobs.keyring import hand_over
from jobs.models import Asset, Job, Once
from jobs.submissions import submit
from jobs.wire import is_reference

FAULTS_TOLD: Final = 100
UI_FORMAT: Final = (
    "This is the editor's own format. Export the workflow by `Save (API Format)` and send that."
)
NO_GRAPH: Final = (
    "The workflow must be an object of nodes by their ids, as `Save (API Format)` exports it."
)
NO_ASSET: Final = (
    "Node {node_id} ({class_type}): {name!r} must be a file of yours. Upload one, and put its file_path here,"
    ' or {{"__type": "core/ASSET", "info": {{"id": ...}}}}.'
)


class BadWorkflow(Exception):
    """A workflow we cannot take: a code of the Comfy API v2, a sentence, and what is wrong with which node."""

    def __init__(self, code: str, message: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.node_errors: dict[str, list[dict[str, Any]]] = {}
        for fault in faults[:FAULTS_TOLD]:
            told = {"field": fault.field, "reason": fault.reason, "message": fault.message}
            if fault.node_id is not None:
                self.node_errors.setdefault(fault.node_id, []).append(told)


def submit_workflow(
    owner: User,
    workflow: Any,
    *,
    priority: int = 0,
    metadata: Mapping[str, str] | None = None,
    extra_data: Mapping[str, str] | None = None,
    once: Once | None = None,
) -> Job:
    """Queue a workflow, or raise BadWorkflow, AssetGone or NoRoom and store nothing.

    once: of the request, if it may come again; see `JobQuerySet.submit`.
    workflow: anything that JSON can be. extra_data: keys for its nodes, which only the workers' memory gets.
    """
    graph = read_graph(workflow)
    offers = offers_of(node["class_type"] for node in graph.values())
    faults, unable = offers.compare(graph)
    refuse("invalid_workflow", faults)
    assets, places = find_files(owner, list(mentions(graph, offers)))
    with transaction.atomic():
        job = Job(
            owner=owner,
            kind=Job.Kind.WORKFLOW,
            graph=graph,
            params={"files": places, "extra_data": sorted(extra_data or ())},
            priority=priority,
            metadata=dict(metadata or {}),
            refused_by=unable,
        )
        if extra_data:
            hand_over(job.pk, extra_data)
        return submit(job, assets, once)


def read_graph(workflow: Any) -> Graph:
    """Return the workflow if it is a graph in API format."""
    if not isinstance(workflow, dict) or not workflow:
        raise BadWorkflow("invalid_workflow", NO_GRAPH)
    if is_ui_format(workflow):
        raise BadWorkflow("workflow_format_ui", UI_FORMAT)
    if len(workflow) > MAX_NODES:
        message = (
            f"The workflow has {len(workflow):,} nodes; {MAX_NODES:,} are the most that are taken."
        )
        raise BadWorkflow("invalid_workflow", message)
    refuse("invalid_workflow", faults_of(workflow))
    return workflow


def refuse(code: str, faults: Sequence[Fault]) -> None:
    """Raise BadWorkflow if there are faults."""
    if faults:
        more = f" {len(faults) - 1:,} more: see the details." if len(faults) > 1 else ""
        raise BadWorkflow(code, faults[0].message + more, faults)


@dataclass(frozen=True)
class Mention:
    """A file that an input needs: by an asset's id, or by its file_path. None: by nothing of use."""

    node_id: str
    class_type: str
    name: str
    asset: UUID | str | None


def mentions(graph: Graph, offers: Offers) -> Iterator[Mention]:
    for node_id, node in graph.items():
        class_type = node["class_type"]
        for name, value in node["inputs"].items():
            for reference in references_in(value):
                yield Mention(node_id, class_type, name, asset_id_of(reference))
            if offers.takes_file(class_type, name) and not is_reference(value):
                # Not a link, either: who knows what path comes out of it.
                path = value if isinstance(value, str) else None
                yield Mention(node_id, class_type, name, path)


def references_in(value: Any) -> Iterator[dict[str, Any]]:
    if is_reference(value):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from references_in(part)


def asset_id_of(reference: dict[str, Any]) -> UUID | None:
    info = reference.get("info")
    try:
        return UUID(info["id"]) if isinstance(info, dict) and isinstance(info["id"], str) else None
    except (KeyError, ValueError):
        return None


def find_files(
    owner: User, mentioned: Sequence[Mention]
) -> tuple[list[Asset], dict[str, dict[str, str]]]:
    """Return the owner's assets that are mentioned, and where one is meant by its file_path: its id.

    Raises BadWorkflow if one is not there.
    """
    own = Asset.objects.available().filter(owner=owner)
    paths = {m.asset for m in mentioned if isinstance(m.asset, str)}
    newest = own.uploads().filter(name__in=paths).order_by("name", "-pk").distinct("name")
    ids: dict[UUID | str | None, UUID] = dict(newest.values_list("name", "pk"))
    ids |= {m.asset: m.asset for m in mentioned if isinstance(m.asset, UUID)}
    found = own.in_bulk(ids.values())
    missing = [m for m in mentioned if ids.get(m.asset) not in found]
    refuse("missing_asset", [fault_of(m) for m in missing])
    places: dict[str, dict[str, str]] = {}
    for m in mentioned:
        if isinstance(m.asset, str):
            places.setdefault(m.node_id, {})[m.name] = str(ids[m.asset])
    return list(found.values()), places


def fault_of(missing: Mention) -> Fault:
    named = {"node_id": missing.node_id, "class_type": missing.class_type, "name": missing.name}
    return Fault(missing.node_id, "missing_asset", NO_ASSET.format(**named), missing.name)
