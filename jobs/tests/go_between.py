"""A proxy between a worker and a ComfyUI: it answers in its place, spoils its answers or holds requests back."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

HOP_BY_HOP = ("connection", "transfer-encoding", "content-length", "date", "server")


@dataclass(frozen=True)
class Seen:
    """A request as it came."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    query: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


# Bytes go out as they are, status line and all; then the connection is closed.
Answer = Reply | bytes
Answering = Callable[[Seen], Answer]
Spoiling = Callable[[Reply], Answer]


def json_reply(value: Any, status: int = 200) -> Reply:
    """NaN and lone surrogates go out as Python's json writes them, which is what ComfyUI does."""
    return Reply(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


def html_reply(status: int, title: str = "nginx", **headers: str) -> Reply:
    page = f"<html><head><title>{title}</title></head><body><h1>{title}</h1></body></html>"
    return Reply(status, page.encode(), {"Content-Type": "text/html"} | headers)


class Hold:
    """A request that is kept on its way until it is released."""

    def __init__(self) -> None:
        self.arrived, self.released, self.answered = (threading.Event() for _ in range(3))

    def release(self) -> None:
        """Let it go on, and return when the ComfyUI has answered."""
        self.released.set()
        assert self.answered.wait(50)


@dataclass
class Rule:
    route: str  # "GET /history", with all below it
    times: int | None  # None: always
    instead: Answering | None = None
    spoil: Spoiling | None = None
    hold: Hold | None = None


class GoBetween:
    """`upstream`: the ComfyUI behind it; without one, what no rule answers is 404."""

    def __init__(self, upstream: str | None = None) -> None:
        self.seen: list[Seen] = []
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._upstream = urlsplit(upstream).netloc if upstream else None
        self._server = _Server(("127.0.0.1", 0), _handler_for(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for rule in self._rules:
            if rule.hold:
                rule.hold.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def instead(self, route: str, answer: Answer | Answering, times: int | None = 1) -> None:
        """Answer in the ComfyUI's place: it never hears of the request."""
        answering = answer if callable(answer) else lambda seen: answer
        self._add(Rule(route, times, instead=answering))

    def spoil(self, route: str, change: Answer | Spoiling, times: int | None = 1) -> None:
        """Let the ComfyUI do its work and answer something else."""
        spoiling = change if callable(change) else lambda reply: change
        self._add(Rule(route, times, spoil=spoiling))

    def hold(self, route: str) -> Hold:
        """Keep the next such request on its way."""
        hold = Hold()
        self._add(Rule(route, 1, hold=hold))
        return hold

    def _add(self, rule: Rule) -> None:
        """The newest rule counts, as long as it has times left."""
        with self._lock:
            self._rules.insert(0, rule)

    def clear(self) -> None:
        self._rules.clear()

    def requests(self, route: str) -> list[Seen]:
        return [seen for seen in self.seen if _is_below(route, seen)]

    def answer(self, seen: Seen, target: str) -> Answer | None:
        """The answer to a request; None: the connection is dropped without one."""
        self.seen.append(seen)
        rule = self._take(seen)
        if rule and rule.instead:
            return rule.instead(seen)
        if rule and rule.hold:
            rule.hold.arrived.set()
            rule.hold.released.wait()
        reply = self._forward(seen, target)
        if rule and rule.hold:
            rule.hold.answered.set()
        return rule.spoil(reply) if rule and rule.spoil and reply else reply

    def _take(self, seen: Seen) -> Rule | None:
        with self._lock:
            rule = next((r for r in self._rules if r.times != 0 and _is_below(r.route, seen)), None)
            if rule and rule.times is not None:
                rule.times -= 1
            return rule

    def _forward(self, seen: Seen, target: str) -> Reply | None:
        # It passes no WebSocket on: polling is enough.
        if self._upstream is None or seen.path == "/ws":
            return Reply(404)
        connection = HTTPConnection(self._upstream, timeout=60)
        headers = {k: v for k, v in seen.headers.items() if k.lower() not in HOP_BY_HOP}
        try:
            connection.request(seen.method, target, seen.body or None, headers)
            answer = connection.getresponse()
            kept = {k: v for k, v in answer.getheaders() if k.lower() not in HOP_BY_HOP}
            return Reply(answer.status, answer.read(), kept)
        except (OSError, HTTPException):
            return None
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


def _is_below(route: str, seen: Seen) -> bool:
    method, path = route.split()
    return seen.method == method and (seen.path == path or seen.path.startswith(path + "/"))


def _handler_for(go_between: GoBetween) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            with suppress(OSError):
                super().handle_one_request()

        def _answer(self) -> None:
            self.close_connection = True
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            seen = Seen(self.command, url.path, dict(self.headers), body, url.query)
            answer = go_between.answer(seen, self.path)
            if isinstance(answer, bytes):
                self.wfile.write(answer)
            elif answer is not None:
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else answer.body)

        do_GET = do_POST = do_HEAD = _answer

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing on stderr."""

    return Handler
