from __future__ import annotations

import logging

from django.http import HttpRequest

# What a LogRecord has by itself; the rest came in by `extra`.
STANDARD_KEYS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TerminalFormatter(logging.Formatter):
    """One short line per record for people: time, level, event, then the facts as key=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = {k: v for k, v in vars(record).items() if k not in STANDARD_KEYS}
        return " ".join([super().formatMessage(record), *(f"{k}={v}" for k, v in facts.items())])


class WithoutQuery(logging.Filter):
    """Cuts the query off addresses: it may hold the signature of a link, which opens a picture."""

    def filter(self, record: logging.LogRecord) -> bool:
        request = getattr(record, "request", None)
        if isinstance(request, HttpRequest):
            record.request = f"{request.method} {request.path}"
        if record.name == "uvicorn.access" and isinstance(record.args, tuple):
            client, method, address, *rest = record.args
            record.args = (client, method, str(address).partition("?")[0], *rest)
        return True
