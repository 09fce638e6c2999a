"""The only place that speaks HTTP to ComfyUI. It says what is known; whether to try again, the caller decides.

Every answer is read whole, up to a size and within a time, before anything is made of it.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import IO, Any, Final, Self
from urllib.parse import quote

import requests
from requests.auth import HTTPBasicAuth
from urllib3.exceptions import HTTPError
from urllib3.filepost import encode_multipart_formdata

from comfy.address import Address
from comfy.classify import refusal
from comfy.errors import (
    AccessDenied,
    BadAnswer,
    ComfyError,
    GraphRefused,
    NoAnswer,
    NotConnected,
    OutputMissing,
    OutputTooLarge,
    ServerTrouble,
    TooLarge,
)
from comfy.history import OutputFile, Run, extra_data_of, parse_run
from comfy.text import clean_text
from comfy.wire import Call, DeadlineAdapter, deadline

JSON_MAX_BYTES: Final = 64 * 2**20  # /queue holds every queued graph
PIECE_BYTES: Final = 64 * 1024
TRANSFER_SECONDS: Final = 600.0  # for a whole upload or download
RETRY_AFTER_MAX_SECONDS: Final = 3600.0


class Place(StrEnum):
    """Where a prompt is. UNKNOWN: the server has no trace of it."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Sighting:
    """What the server knew of a prompt at one moment."""

    place: Place
    run: Run | None = None  # when FINISHED
    copies: int = 0  # entries with this id in the queue; two mean that it was sent twice
    ahead: int = 0  # entries that come before the first of ours
    running: tuple[str, ...] = ()  # the prompt ids that run
    signature: str = ""  # changes whenever the part of the queue before ours moves, and only then
    extra_data: dict[str, Any] = field(default_factory=dict)  # of the entry that was found


@dataclass(frozen=True)
class QueueEntry:
    """One item of /queue; the lowest number runs first."""

    number: float
    prompt_id: str
    extra_data: dict[str, Any]


@dataclass(frozen=True)
class SystemStats:
    """The server's version ("" if it does not say), its devices, and the whole answer."""

    version: str
    devices: list[dict[str, Any]]
    raw: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    request: str  # "GET /queue"
    status: int
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> dict[str, Any]:
        """The JSON object in the body (NaN becomes None), or raise BadAnswer."""
        try:
            body = json.loads(self.content, parse_constant=lambda _: None)
        except (ValueError, RecursionError) as exc:
            raise self.unfit(f"not JSON ({exc})") from exc
        if not isinstance(body, dict):
            raise self.unfit("not a JSON object")
        return body

    def unfit(self, why: str) -> BadAnswer:
        return BadAnswer(f"{self.request}: {self.status} with {why}: {self.excerpt!r}")

    @property
    def excerpt(self) -> str:
        return clean_text(self.content[:200].decode("utf-8", "replace"), 200).strip()


class ComfyClient:
    """A connection to one ComfyUI server, for one thread at a time.

    Any method may raise NotConnected, AccessDenied, NoAnswer, ServerTrouble and BadAnswer. `base_url` may have
    a user and password for basic auth; they are never shown. `read_timeout` (seconds) bounds a silence; no call
    takes longer than its share, however the server trickles.
    """

    def __init__(
        self, base_url: str, *, connect_timeout: float = 5.0, read_timeout: float = 30.0
    ) -> None:
        self.address = Address.parse(base_url)
        self.connect_timeout = connect_timeout
        self.read_timeout = read_timeout
        self._call: Call | None = None
        self._session = requests.Session()
        self._session.trust_env = False  # no proxies, no .netrc
        self._session.mount("http://", DeadlineAdapter())
        self._session.mount("https://", DeadlineAdapter())
        # So that Content-Length counts the bytes that we keep.
        self._session.headers["Accept-Encoding"] = "identity"
        if self.address.credentials:
            user, password = self.address.credentials
            # Bytes, as requests would write text as Latin-1.
            self._session.auth = HTTPBasicAuth(user.encode(), password.encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()

    def abort(self) -> None:
        """End the request under way, if there is one, as if its time were up. Any thread may call it."""
        if call := self._call:
            call.expire()

    def upload_image(
        self, content: bytes, *, filename: str, subfolder: str = "genflow", content_type: str
    ) -> str:
        """Upload a photo; return the value that LoadImage takes. Raises TooLarge.

        The name is the server's choice: other bytes under a name that is taken become "name (1).png".
        """
        image = (filename, content, content_type)
        fields: dict[str, Any] = {"image": image, "subfolder": subfolder, "type": "input"}
        body, form_type = encode_multipart_formdata(fields)
        answer = self._request(
            "POST",
            "/upload/image",
            # As a file it goes out in pieces: bytes would have to be sent whole within one socket timeout.
            data=io.BytesIO(body),
            headers={"Content-Type": form_type},
            seconds=TRANSFER_SECONDS,
        )
        return _load_image_value(answer)

    def look_up(self, prompt_id: str) -> Sighting:
        """Find a prompt. The queue comes first: between two looks a prompt only moves on, to the history."""
        running, pending = self._queue()
        entries = [*running, *pending]
        ids = [entry.prompt_id for entry in entries]
        if prompt_id not in ids:
            return self._finished(prompt_id)
        ahead = ids.index(prompt_id)
        return Sighting(
            place=Place.RUNNING if ahead < len(running) else Place.PENDING,
            copies=ids.count(prompt_id),
            ahead=ahead,
            running=tuple(ids[: len(running)]),
            signature=f"{ids[: len(running)]} {ahead}",
            extra_data=entries[ahead].extra_data,
        )

    def submit(
        self,
        graph: dict[str, Any],
        *,
        prompt_id: str,
        client_id: str,
        extra_data: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Queue `graph` under an id of the caller's; return the node errors of outputs that were left out.

        extra_data: shown again by the queue and the history, but for the keys of comfy.org that a node may need.

        Raises GraphRefused, NodeMissing, ModelMissing or InputMissing if nothing was queued; after NoAnswer,
        ServerTrouble or BadAnswer it may be queued or not. ComfyUI has no dedupe: look before sending again.
        `number` is never sent: two equal ones kill the server's worker thread (seen on v0.26).
        """
        body = {"prompt": graph, "prompt_id": prompt_id, "client_id": client_id}
        body |= {"extra_data": dict(extra_data)} if extra_data else {}
        answer = self._post("/prompt", body, expect=(200, 400), seconds=timeout)
        queued = answer.json()
        if answer.status == 400:
            raise refusal(queued)
        if queued.get("prompt_id") != prompt_id:
            # Before v0.3.45 a server makes its own id, under which we would never find the run again.
            raise answer.unfit(f"another prompt_id than {prompt_id}")
        node_errors = queued.get("node_errors")
        return node_errors if isinstance(node_errors, dict) else {}

    def view(self, file: OutputFile, sink: IO[bytes], *, max_bytes: int) -> None:
        """Write the whole file to `sink`.

        Raises OutputMissing, OutputTooLarge, and NoAnswer if it was cut on the way; something may be written then.
        """
        answer = self._request(
            "GET",
            "/view",
            params=_view_params(file),
            expect=(200, 404),
            seconds=TRANSFER_SECONDS,
            max_bytes=max_bytes,
            sink=sink,
        )
        if answer.status == 404:
            raise OutputMissing(f"GET /view: 404 for {file}")
        if not sink.tell() or answer.headers.get("Content-Type", "").startswith("text/html"):
            raise answer.unfit(f"no file for {file}")

    def exists(self, file: OutputFile) -> bool:
        """Whether the file is there (it may still be being written)."""
        answer = self._request("HEAD", "/view", params=_view_params(file), expect=(200, 404))
        return answer.status == 200

    def delete_pending(self, prompt_id: str) -> None:
        """Take one entry of this prompt from the queue. No effect, and no error, if it runs or is unknown."""
        self._post("/queue", {"delete": [prompt_id]})

    def interrupt(self, prompt_id: str) -> None:
        """Stop this prompt if it runs. It may be lost (3 of 60 were): look, and repeat.

        Before v0.3.58 the server ignores the id and stops whatever runs.
        """
        if not prompt_id:
            raise ValueError("an interrupt without a prompt_id stops whatever runs")
        self._post("/interrupt", {"prompt_id": prompt_id})

    def free_memory(self) -> None:
        """Unload the models and free the GPU's memory."""
        self._post("/free", {"unload_models": True, "free_memory": True})

    def system_stats(self) -> SystemStats:
        answer = self._request("GET", "/system_stats")
        raw = answer.json()
        system, devices = raw.get("system"), raw.get("devices")
        if not isinstance(system, dict) or not isinstance(devices, list):
            raise answer.unfit("no system or devices")
        version = clean_text(system.get("comfyui_version"), 100)
        return SystemStats(version, [d for d in devices if isinstance(d, dict)], raw)

    def object_info(self) -> dict[str, Any]:
        """What node classes there are and what they take: up to several megabytes."""
        return self._request("GET", "/object_info").json()

    def _queue(self) -> tuple[list[QueueEntry], list[QueueEntry]]:
        """The running and, in the order they will run, the pending entries."""
        answer = self._request("GET", "/queue")
        queue = answer.json()
        try:
            return (
                list(map(_entry, queue["queue_running"])),
                sorted(map(_entry, queue["queue_pending"]), key=lambda e: (e.number, e.prompt_id)),
            )
        except (KeyError, TypeError, IndexError, ValueError) as exc:
            raise answer.unfit("no queue in it") from exc

    def _finished(self, prompt_id: str) -> Sighting:
        answer = self._request("GET", f"/history/{quote(prompt_id, safe='')}")
        history = answer.json()
        if not history:
            return Sighting(Place.UNKNOWN)
        if not isinstance(history.get(prompt_id), dict):
            raise answer.unfit(f"no entry of {prompt_id}")
        run = parse_run(prompt_id, history[prompt_id])
        return Sighting(Place.FINISHED, run=run, extra_data=run.extra_data)

    def _post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        expect: tuple[int, ...] = (200,),
        seconds: float | None = None,
    ) -> Answer:
        try:
            content = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as exc:
            raise GraphRefused(f"POST {path}: cannot be written as JSON: {exc}") from exc
        headers = {"Content-Type": "application/json"}
        return self._request(
            "POST", path, data=content, headers=headers, expect=expect, seconds=seconds
        )

    def _request(
        self,
        method: str,
        path: str,
        *,
        expect: tuple[int, ...] = (200,),
        seconds: float | None = None,
        max_bytes: int = JSON_MAX_BYTES,
        sink: IO[bytes] | None = None,
        **options: Any,
    ) -> Answer:
        """Send one request and read its answer; raise for a status that is not in `expect`.

        sink: where the body of a 200 goes, instead of into the answer.
        """
        if seconds is None:
            seconds = self.connect_timeout + 2 * self.read_timeout
        if seconds <= 0:
            raise NotConnected(f"{method} {path}: no time left to send it")
        answer = self._exchange(method, path, seconds, max_bytes, sink, options)
        if answer.status not in expect:
            raise _status_error(answer)
        return answer

    def _exchange(
        self,
        method: str,
        path: str,
        seconds: float,
        max_bytes: int,
        sink: IO[bytes] | None,
        options: dict[str, Any],
    ) -> Answer:
        """The one place where bytes go over the wire: the whole answer, or an error, within `seconds`."""
        name = f"{method} {path}"
        options |= {
            "timeout": (min(self.connect_timeout, seconds), min(self.read_timeout, seconds)),
            "allow_redirects": False,
            "stream": True,
        }
        with deadline(seconds) as call:
            self._call = call
            try:
                response = self._session.request(method, self.address.url + path, **options)
                with response:
                    if sink is not None and response.status_code == 200:
                        content = b""
                        _pour(response, sink, max_bytes, name)
                    else:
                        content = _read(response, max_bytes, name)
            except (OSError, HTTPError) as exc:  # every error of `requests` is an OSError
                error = NoAnswer if call.connected else NotConnected
                raise error(f"{name}: {_reason(exc)}") from exc
        if call.expired:
            # An answer without a length ends when the socket is shut down, as if it were whole.
            raise NoAnswer(
                f"{name}: given up before the whole answer was there ({seconds:g} s at most)"
            )
        return Answer(name, response.status_code, response.headers, content)


def parse_retry_after(value: str | None) -> float | None:
    """Seconds to wait from a Retry-After header, at most an hour; None if it is absent, past or rubbish."""
    if value is None:
        return None
    if re.fullmatch(r"[0-9]{1,20}(\.[0-9]+)?", value.strip()):
        return min(float(value), RETRY_AFTER_MAX_SECONDS)
    try:
        date = parsedate_to_datetime(value)
    except (TypeError, ValueError, OverflowError):
        return None
    wait = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(wait, RETRY_AFTER_MAX_SECONDS) if wait > 0 else None


def _read(response: requests.Response, max_bytes: int, name: str) -> bytes:
    content = bytearray()
    for piece in response.iter_content(PIECE_BYTES):
        content += piece
        if len(content) > max_bytes:
            raise BadAnswer(f"{name}: more than {max_bytes} bytes")
    return bytes(content)


def _pour(response: requests.Response, sink: IO[bytes], max_bytes: int, name: str) -> None:
    for piece in response.iter_content(PIECE_BYTES):
        sink.write(piece)
        if sink.tell() > max_bytes:
            raise OutputTooLarge(f"{name}: more than {max_bytes} bytes")


def _reason(exc: Exception) -> object:
    """What happened, without the layers that `requests` puts around it."""
    cause = exc.args[0] if exc.args else exc
    return getattr(cause, "reason", None) or cause


def _status_error(answer: Answer) -> ComfyError:
    message = f"{answer.request}: {answer.status} {answer.excerpt}"
    if answer.status in (401, 403, 407) or 300 <= answer.status < 400:
        location = answer.headers.get("Location")
        return AccessDenied(f"{message} -> {location}" if location else message)
    if answer.status == 413:
        return TooLarge(message)
    if answer.status in (408, 429) or answer.status >= 500:
        return ServerTrouble(
            message, retry_after=parse_retry_after(answer.headers.get("Retry-After"))
        )
    return BadAnswer(message)


def _load_image_value(answer: Answer) -> str:
    body = answer.json()
    name, subfolder = body.get("name"), body.get("subfolder", "")
    if not name or not _is_plain(name) or not _is_plain(subfolder):
        raise answer.unfit("no name of the uploaded file")
    # A Windows server may say "genflow\\sub"; LoadImage takes forward slashes everywhere.
    folder = subfolder.replace("\\", "/").strip("/")
    return f"{folder}/{name}" if folder else name


def _is_plain(name: Any) -> bool:
    """Whether it is text that can be stored as it is: a cleaned name would be another file's."""
    return isinstance(name, str) and clean_text(name, len(name)) == name


def _entry(item: Any) -> QueueEntry:
    return QueueEntry(float(item[0]), str(item[1]), extra_data_of(item))


def _view_params(file: OutputFile) -> dict[str, str]:
    return {"filename": file.filename, "subfolder": file.subfolder, "type": file.type}
