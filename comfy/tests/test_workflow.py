from __future__ import annotations

from typing import Any

import pytest

from comfy.catalog import NodeInfo, parse_object_info
from comfy.workflow import faults_of, is_ui_format, lacking


def catalog(**changes: Any) -> dict[str, NodeInfo]:
    """A server with a loader, a sampler of it and a node that saves."""
    told: dict[str, Any] = {
        "Loader": {"input": {"required": {"name": [["a.safetensors", "b.safetensors"]]}}},
        "Sampler": {"input": {"required": {"model": ["MODEL"]}, "optional": {"mask": ["MASK"]}}},
        "Saver": {"input": {"required": {"images": ["IMAGE"]}}, "output_node": True},
    }
    return parse_object_info(told | changes)


def graph(**changes: Any) -> dict[str, Any]:
    sound = {
        "1": {"class_type": "Loader", "inputs": {"name": "a.safetensors"}},
        "2": {"class_type": "Sampler", "inputs": {"model": ["1", 0]}},
        "3": {"class_type": "Saver", "inputs": {"images": ["2", 0], "filename_prefix": "x"}},
    }
    return sound | changes


def told(faults: Any) -> list[tuple[str | None, str, str | None]]:
    return [(fault.node_id, fault.reason, fault.field) for fault in faults]


def test_a_sound_graph_has_no_faults() -> None:
    assert faults_of(graph()) == []
    assert lacking(graph(), catalog()) == []


@pytest.mark.parametrize(
    ("node", "reason", "field"),
    [
        (1, "not_a_node", None),
        ([], "not_a_node", None),
        ({"inputs": {}}, "missing_class_type", "class_type"),
        ({"class_type": 3, "inputs": {}}, "missing_class_type", "class_type"),
        ({"class_type": "", "inputs": {}}, "missing_class_type", "class_type"),
        ({"class_type": "x" * 201, "inputs": {}}, "name_too_long", None),
        ({"class_type": "Saver"}, "no_inputs", "inputs"),
        ({"class_type": "Saver", "inputs": []}, "no_inputs", "inputs"),
        ({"class_type": "Saver", "inputs": {"images": ["9", 0]}}, "broken_link", "images"),
    ],
)
def test_what_is_wrong_with_a_node_is_told_by_its_id(
    node: Any, reason: str, field: str | None
) -> None:
    (fault,) = faults_of(graph(**{"7": node}))

    assert (fault.node_id, fault.reason, fault.field) == ("7", reason, field)
    assert fault.message.startswith("Node 7")


def test_a_list_that_is_no_link_is_nobodys_business_where_the_class_is_not_known() -> None:
    assert faults_of(graph(**{"7": {"class_type": "X", "inputs": {"flags": [False, True]}}})) == []


@pytest.mark.parametrize("workflow", [{"nodes": [], "links": []}, {"nodes": [{}], "links": {}}])
def test_the_editors_own_format_is_seen(workflow: Any) -> None:
    assert is_ui_format(workflow)
    assert not is_ui_format(graph(nodes={"class_type": "X", "inputs": {}}))


def test_a_class_that_the_server_has_not_is_named() -> None:
    (fault,) = lacking(graph(**{"5": {"class_type": "Rare", "inputs": {}}}), catalog())

    assert (fault.node_id, fault.reason) == ("5", "unknown_class")
    assert fault.message == "Node 5 (Rare): no image server has this class."


def test_a_value_that_the_server_has_not_is_named_with_those_it_has() -> None:
    asked = graph(**{"1": {"class_type": "Loader", "inputs": {"name": "c.safetensors"}}})

    (fault,) = lacking(asked, catalog())

    assert (fault.node_id, fault.reason, fault.field) == ("1", "value_not_in_list", "name")
    assert fault.message == (
        "Node 1 (Loader): no image server has 'c.safetensors' for 'name'."
        " On offer: a.safetensors, b.safetensors."
    )


def test_of_many_choices_a_dozen_is_named() -> None:
    many = {"Loader": {"input": {"required": {"name": [[f"{n}.pt" for n in range(100)]]}}}}

    (fault,) = lacking(graph(), catalog(**many))

    assert fault.message.endswith("10.pt, 11.pt and 88 more.")


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({}, "missing_input"),
        ({"model": ["1", 0, 0]}, "broken_link"),
        ({"model": [1, 0]}, "broken_link"),
        ({"model": []}, "broken_link"),
    ],
)
def test_an_input_that_is_not_connected_is_named(inputs: Any, reason: str) -> None:
    asked = graph(**{"2": {"class_type": "Sampler", "inputs": inputs}})

    assert told(lacking(asked, catalog())) == [("2", reason, "model")]


def test_what_no_output_needs_is_not_looked_at() -> None:
    aside = {"7": {"class_type": "Loader", "inputs": {"name": "gone.safetensors"}}}

    assert lacking(graph(**aside), catalog()) == []


def test_inputs_that_the_class_has_not_are_not_looked_at() -> None:
    asked = graph(**{"1": {"class_type": "Loader", "inputs": {"name": "a.safetensors", "x": [1]}}})

    assert lacking(asked, catalog()) == []


def test_a_graph_without_an_output_node_is_at_fault_as_a_whole() -> None:
    without = {node_id: node for node_id, node in graph().items() if node_id != "3"}

    assert told(lacking(without, catalog())) == [(None, "no_outputs", None)]


def test_a_circle_is_left_to_the_server() -> None:
    circle = graph(**{"2": {"class_type": "Sampler", "inputs": {"model": ["2", 0]}}})

    assert lacking(circle, catalog()) == []
