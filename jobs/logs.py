from __future__ import annotations

import logging

# What a LogRecord has by itself; the rest came in by `extra`.
STANDARD_KEYS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TerminalFormatter(logging.Formatter):
    """One short line per record for people: time, level, event, then the facts as key=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = {k: v for k, v in vars(record).items() if k not in STANDARD_KEYS}
        return " ".join([super().formatMessage(record), *(f"{k}={v}" for k, v in facts.items())])
