"""Answers that are held back until there is something new to tell: `?wait=seconds`, `Prefer: wait=seconds`."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from rest_framework.request import Request
from rest_framework.response import Response

from jobs.hub import Hub
from jobs.serializers import WAIT, WaitSerializer

# RFC 7240: what cannot be read or is not known is not an error, only a wish that is not granted.
PREFER_WAIT: Final = re.compile(r'(?:^|,)\s*wait\s*=\s*"?(\d{1,9})"?\s*(?:[;,]|$)', re.IGNORECASE)


class Held(Response):
    """An answer for now. A server that can wait without a thread waits for `until` first, and asks anew."""

    def __init__(
        self, *args: Any, until: Callable[[], Awaitable[None]] | None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.until = until


def hub_of(request: Request) -> Hub | None:
    """Return what a request can wait with. A server that runs each on a thread to its end has none."""
    hub: Hub | None = getattr(request, "hub", None)
    return hub


def asked_wait(request: Request) -> tuple[float, dict[str, str]]:
    """Return for how many seconds the answer may be held back, and the headers that say so."""
    query = WaitSerializer(data=request.query_params)
    query.is_valid(raise_exception=True)
    if "wait" in query.validated_data:
        return query.validated_data["wait"], {}
    if wish := PREFER_WAIT.search(request.headers.get("Prefer", "")):
        seconds = min(int(wish[1]), int(WAIT.high))
        return seconds, {"Preference-Applied": f"wait={seconds}"}
    return 0, {}
