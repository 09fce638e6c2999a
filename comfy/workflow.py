"""Checks a workflow that somebody sent: is it a graph in API format, and does a server have what it needs?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from comfy.catalog import NodeInfo
from comfy.graph import NAME_LENGTH, Graph
from comfy.text import clean_text

MAX_NODES: Final = 10_000
NAMED_CHOICES: Final = 12  # in a sentence


@dataclass(frozen=True)
class Fault:
    """What is wrong with one input of a node (field) or, without one, with the node."""

    node_id: str | None
    reason: str
    message: str
    field: str | None = None


def is_ui_format(workflow: Mapping[str, Any]) -> bool:
    """Whether it is what the editor saves: nodes and links, instead of nodes by their ids."""
    return isinstance(workflow.get("nodes"), list) and "links" in workflow


def faults_of(graph: Mapping[str, Any]) -> list[Fault]:
    """Return what is wrong with the graph whoever is to run it."""
    return [fault for node_id, node in graph.items() for fault in _faults_of(node_id, node, graph)]


def lacking(graph: Graph, catalog: Mapping[str, NodeInfo]) -> list[Fault]:
    """Return what keeps a server with this catalog from running the graph, which is sound."""
    unknown = [
        Fault(node_id, "unknown_class", f"{_title(node_id, node)}: no image server has this class.")
        for node_id, node in graph.items()
        if node["class_type"] not in catalog
    ]
    if unknown:
        return unknown
    # What no output needs is not looked at.
    needed = _needed(
        graph, [n for n, node in graph.items() if catalog[node["class_type"]].is_output]
    )
    if not needed:
        return [
            Fault(None, "no_outputs", "No node of the workflow gives an output, such as SaveImage.")
        ]
    return [
        fault
        for node_id in needed
        for fault in _input_faults(node_id, graph[node_id], graph, catalog)
    ]


def is_link(value: Any) -> bool:
    """Whether it is another node's output: [node id, slot]."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], int)
    )


def _faults_of(node_id: str, node: Any, graph: Mapping[str, Any]) -> Iterator[Fault]:
    if not isinstance(node, dict):
        yield Fault(node_id, "not_a_node", f"Node {_cut(node_id)} is not an object.")
        return
    class_type = node.get("class_type")
    if not isinstance(class_type, str) or not class_type:
        message = f"Node {_cut(node_id)} has no class_type."
        yield Fault(node_id, "missing_class_type", message, "class_type")
    elif max(len(node_id), len(class_type)) > NAME_LENGTH:
        message = f"{_title(node_id, node)}: its id or its class has over {NAME_LENGTH} characters."
        yield Fault(node_id, "name_too_long", message)
    inputs = node.get("inputs")
    if not isinstance(inputs, dict):
        message = f"{_title(node_id, node)}: inputs must be an object."
        yield Fault(node_id, "no_inputs", message, "inputs")
        return
    for name, value in inputs.items():
        if is_link(value) and value[0] not in graph:
            yield _broken_link(node_id, node, name, f"node {_cut(value[0])} is not in the workflow")


def _needed(graph: Graph, waiting: list[str]) -> list[str]:
    """Return these nodes and those that they depend on."""
    found: dict[str, None] = {}
    while waiting:
        node_id = waiting.pop()
        if node_id not in found:
            found[node_id] = None
            waiting += [value[0] for value in graph[node_id]["inputs"].values() if is_link(value)]
    return list(found)


def _input_faults(
    node_id: str, node: dict[str, Any], graph: Graph, catalog: Mapping[str, NodeInfo]
) -> Iterator[Fault]:
    given = node["inputs"]
    for name, about in catalog[node["class_type"]].inputs.items():
        if name not in given:
            if about.required:
                message = f"{_title(node_id, node)}: required input {name!r} is missing."
                yield Fault(node_id, "missing_input", message, name)
        elif isinstance(given[name], list):
            if not is_link(given[name]):
                yield _broken_link(node_id, node, name, "a list here must be [node id, slot]")
        elif not about.takes(given[name]):
            yield _not_in_list(node_id, node, name, about.choices or [])


def _not_in_list(node_id: str, node: dict[str, Any], name: str, choices: list[Any]) -> Fault:
    message = (
        f"{_title(node_id, node)}: no image server has {_cut(node['inputs'][name])!r} for {name!r}."
        f" {named(choices)}"
    )
    return Fault(node_id, "value_not_in_list", message, name)


def named(choices: list[Any]) -> str:
    """Return a sentence of what there is instead."""
    some = ", ".join(map(_cut, choices[:NAMED_CHOICES]))
    more = len(choices) - NAMED_CHOICES
    return (
        f"On offer: {some}{f' and {more} more' if more > 0 else ''}."
        if some
        else "None is on offer."
    )


def _broken_link(node_id: str, node: dict[str, Any], name: str, why: str) -> Fault:
    return Fault(
        node_id, "broken_link", f"{_title(node_id, node)}: link {_cut(name)!r}: {why}.", name
    )


def _title(node_id: str, node: dict[str, Any]) -> str:
    return f"Node {_cut(node_id)} ({_cut(node.get('class_type'))})"


def _cut(value: Any) -> str:
    return clean_text(value, 100)
