"""What wakes those who wait: a listener on Postgres' NOTIFY, and a bell for a worker's idle slots."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

import psycopg
from django.conf import settings
from django.db import connection

logger = logging.getLogger(__name__)

# How long a silent connection is trusted before it is tested. Seconds.
PING_EVERY: Final = 10.0
# Between two tries to connect. Seconds.
RECONNECT_PAUSE: Final = 2.0


class Bell:
    """A counter of rings to wait on: whoever read it before looking for work misses no ring."""

    def __init__(self) -> None:
        self.rings = 0
        self._changed = threading.Condition()

    def ring(self) -> None:
        with self._changed:
            self.rings += 1
            self._changed.notify_all()

    def wait(self, since: int, seconds: float) -> None:
        """Wait until the count differs from `since`, for at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.rings != since, seconds)


class Listener:
    """Hears notifications on a connection of its own. Polling runs beside it, so it may fail and come back."""

    def __init__(self, hear: Mapping[str, Callable[[str], None]]) -> None:
        """hear: by channel, what takes each message, and "" when some may have been missed."""
        self._hear = hear
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()

    def run(self) -> None:
        if not settings.GENFLOW_NOTIFY:
            self._closed.wait()
        while not self._closed.is_set():
            try:
                self._listen()
            except psycopg.Error as exc:
                logger.warning("notify.not_listening", extra={"reason": str(exc).strip()})
                self._closed.wait(RECONNECT_PAUSE)

    def _listen(self) -> None:
        with psycopg.connect(**connection.get_connection_params(), autocommit=True) as listening:
            for channel, hear in self._hear.items():
                listening.execute(f"LISTEN {channel}")
                hear("")
            silent = 0.0
            while not self._closed.is_set():
                heard = list(listening.notifies(timeout=0.5, stop_after=1))
                silent = 0.0 if heard else silent + 0.5
                for notification in heard:
                    self._hear[notification.channel](notification.payload)
                if silent >= PING_EVERY:
                    listening.execute("SELECT 1")
                    silent = 0.0
