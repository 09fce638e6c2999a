"""Checks a graph as POST /prompt does, in the real server's words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from fake_comfy.files import Files
from fake_comfy.node_class import Input, Json, NodeClass
from fake_comfy.nodes import Catalog

LISTED_CHOICES: Final = 20  # a longer list is not written out
CONVERTERS: Final = {"INT": int, "FLOAT": float, "STRING": str, "BOOLEAN": bool}


@dataclass
class Verdict:
    """`error`: None if at least one output can run; `node_errors` may tell of others that cannot."""

    error: Json | None
    outputs: list[str] = field(default_factory=list)
    node_errors: Json = field(default_factory=dict)


class Refused(Exception):
    """A fault that stops the whole graph."""

    def __init__(self, error: Json) -> None:
        super().__init__(error["message"])
        self.error = error


def refusal(kind: str, message: str, details: str = "", **extra_info: Any) -> Json:
    return {"type": kind, "message": message, "details": details, "extra_info": extra_info}


def validate(graph: Json, nodes: Catalog, files: Files, only: list[str] | None = None) -> Verdict:
    """Check what the outputs need (`only`: those outputs). Values are converted in place, as the real one does."""
    try:
        outputs = _output_nodes(graph, nodes, only)
    except Refused as exc:
        return Verdict(exc.error)
    checker = Checker(graph, nodes, files)
    good = [node_id for node_id in outputs if checker.check_output(node_id)]
    error = (
        None
        if good
        else refusal("prompt_outputs_failed_validation", "Prompt outputs failed validation")
    )
    return Verdict(error, good, checker.node_errors)


def is_link(value: Any) -> bool:
    return isinstance(value, list)


def _output_nodes(graph: Json, nodes: Catalog, only: list[str] | None) -> list[str]:
    outputs = []
    for node_id, node in graph.items():
        cls = _class_of(node_id, node, nodes)
        if cls.is_output and (only is None or node_id in only):
            outputs.append(node_id)
    if not outputs:
        raise Refused(refusal("prompt_no_outputs", "Prompt has no outputs"))
    return outputs


def _class_of(node_id: str, node: Json, nodes: Catalog) -> NodeClass:
    class_type = node.get("class_type")
    title = node.get("_meta", {}).get("title", class_type)
    about = {"node_id": node_id, "class_type": class_type, "node_title": title}
    details = f"Node ID '#{node_id}'"
    if class_type is None:
        message = (
            f"Node 'ID #{node_id}' has no class_type. The workflow may be corrupted or a custom node "
            "is missing."
        )
        raise Refused(refusal("missing_node_type", message, details, **about))
    if class_type not in nodes:
        message = f"Node '{title}' not found. The custom node may not be installed."
        raise Refused(refusal("missing_node_type", message, details, **about))
    return nodes[class_type]


class Checker:
    """Checks nodes from the outputs up, each once."""

    def __init__(self, graph: Json, nodes: Catalog, files: Files) -> None:
        self._graph, self._nodes, self._files = graph, nodes, files
        self._errors: dict[str, list[Json]] = {}
        self._valid: dict[str, bool] = {}
        self._path: list[str] = []
        self.node_errors: Json = {}

    def check_output(self, node_id: str) -> bool:
        try:
            valid = self._check(node_id)
        except (KeyError, IndexError, TypeError) as exc:
            self._complain(node_id, _broken("exception_during_validation", "node", exc))
            self._valid[node_id] = valid = False
        if not valid:
            self._blame(node_id)
        return valid

    def _blame(self, output: str) -> None:
        """Say of each faulty node that this output depends on it."""
        for node_id in self._ancestors(output):
            if node_id not in self._errors:
                continue
            known = {
                "errors": self._errors[node_id],
                "dependent_outputs": [],
                "class_type": self._graph[node_id]["class_type"],
            }
            self.node_errors.setdefault(node_id, known)["dependent_outputs"].append(output)

    def _ancestors(self, node_id: str) -> list[str]:
        found, waiting = [], [node_id]
        while waiting:
            current = waiting.pop()
            if current in found or current not in self._graph:
                continue
            found.append(current)
            values = self._graph[current].get("inputs", {}).values()
            waiting += [v[0] for v in values if is_link(v) and v and isinstance(v[0], str)]
        return found

    def _check(self, node_id: str) -> bool:
        if node_id in self._path:
            self._complain_of_cycle(node_id)
            return False
        if node_id not in self._valid:
            self._path.append(node_id)
            try:
                self._valid[node_id] = self._check_inputs(node_id)
            finally:
                self._path.pop()
        return self._valid[node_id] and node_id not in self._errors

    def _check_inputs(self, node_id: str) -> bool:
        node = self._graph[node_id]
        cls = self._nodes[node["class_type"]]
        found: list[Json] = []
        sound = True
        for name, config in (cls.required | cls.optional).items():
            if name not in node["inputs"]:
                if name in cls.required:
                    text = "Required input is missing"
                    found.append(refusal("required_input_missing", text, name, input_name=name))
            elif is_link(node["inputs"][name]):
                sound &= self._check_link(name, config, node["inputs"][name], found)
            else:
                self._check_value(node, name, config, found)
        if not found and sound and cls.file_input:
            found += self._check_file(cls.file_input, node["inputs"][cls.file_input])
        self._complain(node_id, *found)
        return sound and not found

    def _check_link(self, name: str, config: Input, link: list[Any], found: list[Json]) -> bool:
        """Whether the node behind the link is sound; what is wrong with the link itself goes to `found`."""
        about: Json = {"input_name": name, "input_config": _shown(config)}
        if len(link) != 2:
            text = "Bad linked input, must be a length-2 list of [node_id, slot_index]"
            found.append(refusal("bad_linked_input", text, name, **about, received_value=link))
            return True
        source, slot = link
        # An id or slot that is not there raises here, and is laid at the door of the node that we are in.
        given = self._nodes[self._graph[source]["class_type"]].outputs[slot][0]
        if given != config[0] != "*":
            details = f"{name}, received_type({given}) mismatch input_type({config[0]})"
            text = "Return type mismatch between linked nodes"
            about |= {"received_type": given, "linked_node": link}
            found.append(refusal("return_type_mismatch", text, details, **about))
            return True
        try:
            return self._check(source)
        except (KeyError, IndexError, TypeError) as exc:
            error = _broken("exception_during_inner_validation", "inner node", exc, **about)
            error["extra_info"]["linked_node"] = link
            self._complain(source, error)
            self._valid[source] = False
            return False

    def _check_value(self, node: Json, name: str, config: Input, found: list[Json]) -> None:
        value = node["inputs"][name]
        choices = config[1].get("options") if config[0] == "COMBO" else config[0]
        if isinstance(choices, list):
            checks_itself = self._nodes[node["class_type"]].file_input == name
            if not checks_itself and value not in choices:
                found.append(_not_in_list(name, choices, config, value))
            return
        about: Json = {"input_name": name, "input_config": _shown(config)}
        try:
            value = node["inputs"][name] = CONVERTERS.get(config[0], lambda v: v)(value)
        except (TypeError, ValueError) as exc:
            text = f"Failed to convert an input value to a {config[0]} value"
            about |= {"received_value": value, "exception_message": str(exc)}
            found.append(refusal("invalid_input_type", text, f"{name}, {value}, {exc}", **about))
            return
        found += _out_of_range(name, config, value, about | {"received_value": value})

    def _check_file(self, input_name: str, name: str) -> list[Json]:
        if self._files.locate_input(str(name)):
            return []
        details = f"{input_name} - Invalid {input_name} file: {name}"
        text = "Custom validation failed for node"
        return [refusal("custom_validation_failed", text, details, input_name=input_name)]

    def _complain(self, node_id: str, *found: Json) -> None:
        if found:
            self._errors.setdefault(node_id, []).extend(found)

    def _complain_of_cycle(self, node_id: str) -> None:
        cycle = self._path[self._path.index(node_id) :]
        classes = {each: self._graph[each]["class_type"] for each in cycle}
        details = " -> ".join(f"{each} ({classes[each]})" for each in [*cycle, node_id])
        for each in cycle:
            about = {"node_id": each, "cycle_nodes": cycle}
            error = refusal("dependency_cycle", "Dependency cycle detected", details, **about)
            self._complain(each, error)


def _not_in_list(name: str, choices: list[Any], config: Input, value: Any) -> Json:
    long = len(choices) > LISTED_CHOICES
    listed = f"(list of length {len(choices)})" if long else str(choices)
    return refusal(
        "value_not_in_list",
        "Value not in list",
        f"{name}: '{value}' not in {listed}",
        input_name=name,
        input_config=None if long else [choices, config[1] if len(config) > 1 else {}],
        received_value=value,
    )


def _out_of_range(name: str, config: Input, value: Any, about: Json) -> list[Json]:
    limits = config[1] if len(config) > 1 else {}
    if "min" in limits and value < limits["min"]:
        text = f"Value {value} smaller than min of {limits['min']}"
        return [refusal("value_smaller_than_min", text, name, **about)]
    if "max" in limits and value > limits["max"]:
        text = f"Value {value} bigger than max of {limits['max']}"
        return [refusal("value_bigger_than_max", text, name, **about)]
    return []


def _broken(kind: str, what: str, exc: Exception, **about: Any) -> Json:
    return refusal(
        kind,
        f"Exception when validating {what}",
        str(exc),
        **about,
        exception_message=str(exc),
        exception_type=type(exc).__name__,
        traceback=['  File "execution.py", in validate_inputs\n'],
    )


def _shown(config: Input) -> Input:
    """The config as errors show it: [type, {...}]."""
    return config if len(config) > 1 else [config[0], {}]
