"""Clients of a real web process."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import httpx
from django.contrib.auth.models import User

from jobs.models import Job
from jobs.tests.helpers_api import API, token_of
from jobs.tests.processes import WebProcess

# Making one takes longer than most answers.
NO_TLS: Final = ssl.create_default_context()


def get(web: WebProcess, path: str, **headers: str) -> httpx.Response:
    return httpx.get(
        f"{web.url}{API}{path}", headers=headers, timeout=60, verify=NO_TLS, trust_env=False
    )


def bearer(user: User) -> dict[str, str]:
    return {"Authorization": f"Bearer {token_of(user)}"}


@dataclass(frozen=True)
class Event:
    name: str
    payload: dict[str, Any]
    id: str | None = None


@contextmanager
def listening(web: WebProcess, job: Job, **headers: str) -> Iterator[EventClient]:
    client = EventClient(web.url, job, bearer(job.owner) | headers)
    try:
        yield client
    finally:
        client.close()


class EventClient:
    """Listens to a job's events on a thread of its own."""

    def __init__(self, url: str, job: Job, headers: dict[str, str]) -> None:
        self.events: list[Event] = []
        self.lines: list[str] = []
        self._http = httpx.Client(headers=headers, timeout=60, verify=NO_TLS)
        request = self._http.build_request("GET", f"{url}{API}/jobs/{job.pk}/events")
        self.response = self._http.send(request, stream=True)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        fields: dict[str, str] = {}
        try:
            for line in self.response.iter_lines():
                self.lines.append(line)
                name, _, value = line.partition(": ")
                if line:
                    fields[name] = value
                else:
                    self._take(fields)
                    fields = {}
        except (httpx.HTTPError, httpx.StreamError):  # it was cut, perhaps by us
            pass

    def _take(self, fields: dict[str, str]) -> None:
        if "event" in fields:
            payload = json.loads(fields["data"])
            self.events.append(Event(fields["event"], payload, fields.get("id")))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event.payload for event in self.events if event.name == name]

    def statuses(self) -> list[str]:
        """Return the statuses in their order, each once."""
        return list(dict.fromkeys(payload["status"] for payload in self.of("status")))

    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        """Go away without a word."""
        stream = self.response.extensions["network_stream"]
        with suppress(OSError):  # the server went first
            stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._http.close()
