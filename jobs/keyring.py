"""API keys that a job brings along for its nodes: handed from web server to workers, never stored and never logged."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Final
from uuid import UUID

import psycopg
from django.db import connection

from comfy.errors import KeyLost
from jobs.models import KEY_CHANNEL, Job

# A notification holds less than 8,000 bytes.
KEY_LENGTH: Final = 4_000  # characters of ASCII
HELD_AT_MOST: Final = 10_000
HELD_FOR: Final = 24 * 3600.0  # seconds
# A job may be claimed before its key is heard of. Seconds.
ARRIVES_WITHIN: Final = 5.0


def hand_over(job_id: UUID, secrets: Mapping[str, str]) -> None:
    """Tell the keys to every worker that listens when the current transaction commits."""
    payload = json.dumps({"job": str(job_id), "secrets": dict(secrets)})
    # Django's cursor would write them into the statement, which pg_stat_activity shows.
    with connection.wrap_database_errors, psycopg.Cursor(connection.connection) as cursor:
        cursor.execute("SELECT pg_notify(%s, %s)", [KEY_CHANNEL, payload])


class Keyring:
    """A worker's memory of the keys that it heard of."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[float, dict[str, str]]] = {}  # oldest first
        self._changed = threading.Condition()

    def put(self, payload: str) -> None:
        """Take a notification; an empty one tells nothing."""
        if not payload:
            return
        told = json.loads(payload)
        with self._changed:
            self._drop_old()
            self._held[told["job"]] = time.monotonic(), told["secrets"]
            self._changed.notify_all()

    def secrets_of(self, job: Job) -> Mapping[str, str]:
        """Return what is to be sent beside the job's graph, or raise KeyLost."""
        if not job.params.get("extra_data"):
            return {}
        with self._changed:
            if not self._changed.wait_for(lambda: job.prompt_id in self._held, ARRIVES_WITHIN):
                raise KeyLost("the job's key came with no notification that this worker heard")
            return self._held[job.prompt_id][1]

    def forget(self, job: Job) -> None:
        with self._changed:
            self._held.pop(job.prompt_id, None)

    def _drop_old(self) -> None:
        old = time.monotonic() - HELD_FOR
        while self._held:
            oldest = next(iter(self._held))
            if len(self._held) < HELD_AT_MOST and self._held[oldest][0] > old:
                return
            del self._held[oldest]
