"""Reads the JSON of a request: strictly, as what is odd in it would be an error of ours later."""

from __future__ import annotations

import json
import math
from typing import Any, Final

from django.conf import settings
from rest_framework.parsers import BaseParser

from comfy.text import is_storable
from jobs.errors import CODES, ApiError

# Of objects and lists. A library that writes JSON can go no deeper than its stack.
MAX_DEPTH: Final = 100


class StrictJSONParser(BaseParser):
    """JSON in UTF-8, up to a size: no NaN, no name twice in an object, and no text that Postgres cannot keep."""

    media_type = "application/json"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        limit = settings.GENFLOW_WORKFLOW_MAX_BYTES
        content: bytes = stream.read(limit + 1)
        if len(content) > limit:
            raise ApiError(413, CODES[413], f"The JSON is larger than {limit:,} bytes.")
        try:
            return read_json(content)
        except ValueError as exc:
            raise ApiError(400, CODES[400], f"The JSON cannot be read: {exc}.") from exc


def read_json(content: bytes) -> Any:
    """Return what the JSON says, or raise ValueError."""
    try:
        value = json.loads(
            content.decode(),
            object_pairs_hook=_object,
            parse_constant=_no_number,
            parse_int=_whole,
            parse_float=_finite,
        )
    except RecursionError as exc:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from exc
    _check_parts(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object has a name twice")
    return fields


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as exc:  # more digits than Python reads
        raise ValueError("it has a number that is too large") from exc


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("it has a number that is too large")
    return number


def _check_parts(value: Any) -> None:
    waiting = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if isinstance(part, str) and not is_storable(part):
            raise ValueError("it has a text with NUL or half a surrogate pair")
        if isinstance(part, dict):
            waiting += [(inner, depth + 1) for inner in (*part, *part.values())]
        elif isinstance(part, list):
            waiting += [(inner, depth + 1) for inner in part]
