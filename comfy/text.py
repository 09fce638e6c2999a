"""Text from a server, made safe to store."""

from __future__ import annotations

import re
from typing import Final

UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")


def clean_text(value: object, limit: int) -> str:
    """`value` as text that any database can hold, at most `limit` characters (None gives "").

    NUL goes, lone surrogates become "?": PostgreSQL refuses the first and no encoding takes the second.
    """
    text = "" if value is None else str(value)
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")


def is_storable(text: str) -> bool:
    """Whether any database can hold it: no NUL, no lone surrogate."""
    return UNSTORABLE.search(text) is None
