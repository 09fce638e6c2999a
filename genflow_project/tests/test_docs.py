"""The page of guarantees against the code: what it names must exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = (ROOT / "docs/guarantees.md").read_text()
TESTS: Final = re.findall(r"^(?:\w\d+)? +(\S+\.py)::(\w+)$", PAGE, re.MULTILINE)
ROWS: Final = [
    [cell.strip() for cell in row.strip("|").split("|")]
    for row in re.findall(r"^\| \w\d+ \|.*$", PAGE, re.MULTILINE)
]


def nodes_of(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def texts_of_the_code() -> set[str]:
    """Return all string constants of the packages that decide what a user reads."""
    modules = (path for package in ("comfy", "jobs") for path in (ROOT / package).glob("*.py"))
    return {
        node.value
        for path in modules
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_every_test_that_is_named_exists() -> None:
    there = {
        (file, node.name)
        for file in {file for file, _ in TESTS}
        for node in nodes_of(ROOT / file)
        if isinstance(node, ast.FunctionDef)
    }

    assert [f"{file}::{name}" for file, name in TESTS if (file, name) not in there] == []
    assert len(TESTS) == PAGE.count(".py::")


def test_every_promise_and_every_failure_has_a_test() -> None:
    promises = re.findall(r"^\*\*(\w\d+)\.", PAGE, re.MULTILINE)
    shown = re.findall(r"^(\w\d+) +\S+::", PAGE, re.MULTILINE)

    assert sorted(shown) == sorted([*promises, *(row[0] for row in ROWS)])


def test_every_code_and_sentence_for_the_user_is_in_the_code() -> None:
    told = " ".join(row[2] for row in ROWS)
    quoted = re.findall(r"`(.+?)`|\"(.+?)\"", told)

    assert {code or sentence for code, sentence in quoted} - texts_of_the_code() == set()


def test_every_setting_has_the_default_that_is_named() -> None:
    defaults = dict(re.findall(r"^#(GENFLOW_\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.M))
    named = re.findall(r"`(GENFLOW_\w+)`(?:,| \()? ?(\d+)?", PAGE)

    assert [name for name, value in named if defaults[name] != (value or defaults[name])] == []
