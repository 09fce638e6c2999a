from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from comfy.client import ComfyClient
from comfy.errors import NoAnswer, NotConnected
from comfy.history import OutputFile
from comfy.tests.captures import view
from comfy.tests.raw_server import Behaviour, free_port, hold, raw_server, trickle

PICTURE = OutputFile("job_00001_.png", "genflow", "output")
OK = b"HTTP/1.1 200 OK\r\n"


def submit(client: ComfyClient, *, timeout: float | None = None) -> None:
    client.submit({}, prompt_id="a", client_id="a", timeout=timeout)


@contextmanager
def client_of(behave: Behaviour, *, reads: bool = True, **timeouts: float) -> Iterator[ComfyClient]:
    with raw_server(behave, reads=reads) as url, ComfyClient(url, **timeouts) as client:
        yield client


def answer_with(content: bytes) -> Behaviour:
    return lambda connection: connection.sendall(content)


def reset(connection: socket.socket) -> None:
    # With a linger of zero, closing sends RST.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def test_a_refused_connection_means_that_nothing_was_sent() -> None:
    client = ComfyClient(f"http://127.0.0.1:{free_port()}")

    with client, pytest.raises(NotConnected):
        submit(client)


def test_a_server_that_does_not_answer_in_tls_was_never_connected() -> None:
    with raw_server(hold) as url:
        client = ComfyClient(url.replace("http", "https"), connect_timeout=0.1)

        with client, pytest.raises(NotConnected):
            submit(client)


def test_no_time_left_means_that_nothing_was_sent() -> None:
    with client_of(hold) as client, pytest.raises(NotConnected):
        submit(client, timeout=0)


@pytest.mark.parametrize(
    "behave", [answer_with(b""), reset, answer_with(b"HTTP/1.1 2")], ids=["closed", "reset", "cut"]
)
def test_a_request_that_was_sent_and_not_answered_has_no_answer(behave: Behaviour) -> None:
    with client_of(behave) as client, pytest.raises(NoAnswer):
        submit(client)


def test_silence_ends_at_the_read_timeout() -> None:
    with client_of(hold, read_timeout=0.1) as client, pytest.raises(NoAnswer):
        submit(client)


@pytest.mark.parametrize(
    "start",
    [
        b"",
        OK + b"X-Slow: ",
        OK + b"Content-Length: 100000\r\n\r\n",
        OK + b"Connection: close\r\n\r\n",
    ],
)
def test_a_trickling_server_cannot_hold_a_submit_longer_than_its_timeout(start: bytes) -> None:
    with client_of(trickle(start)) as client:
        began = time.monotonic()
        with pytest.raises(NoAnswer):
            submit(client, timeout=0.3)

        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 900\r\n\r\n" + b"x" * 300,
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n9\r\nabc",
    ],
)
def test_a_download_cut_on_the_way_is_never_taken_for_whole(answer: bytes) -> None:
    with client_of(answer_with(answer)) as client, pytest.raises(NoAnswer):
        view(client, PICTURE)


def test_an_answer_without_a_length_is_read_to_its_end() -> None:
    with client_of(answer_with(OK + b"\r\nall of it")) as client:
        assert view(client, PICTURE) == b"all of it"


def test_nothing_is_sent_once_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[bytes] = []
    resolve, late = socket.getaddrinfo, threading.Event()

    def resolve_late(*args: Any, **kwargs: Any) -> Any:
        late.wait(0.3)
        return resolve(*args, **kwargs)

    with client_of(lambda _: reached.append(b"request")) as client:
        monkeypatch.setattr(socket, "getaddrinfo", resolve_late)
        with pytest.raises(NotConnected):
            submit(client, timeout=0.1)

    assert reached == []


def test_a_slow_upload_goes_through_though_it_takes_longer_than_any_single_wait() -> None:
    pace = threading.Event()

    def read_slowly(connection: socket.socket) -> None:
        received = 0
        while received < 8_000_000:
            received += len(connection.recv(64 * 1024))
            pace.wait(0.01)
        connection.sendall(OK + b'Content-Length: 17\r\n\r\n{"name": "a.png"}')

    with client_of(read_slowly, reads=False, connect_timeout=0.1) as client:
        name = client.upload_image(bytes(8_000_000), filename="a.png", content_type="image/png")

    assert name == "a.png"


def test_the_client_works_on_after_a_call_that_timed_out() -> None:
    behaviours = iter([hold, answer_with(OK + b"Content-Length: 2\r\n\r\nok")])

    with client_of(lambda wire: next(behaviours)(wire), read_timeout=0.1) as client:
        with pytest.raises(NoAnswer):
            view(client, PICTURE)

        assert view(client, PICTURE) == b"ok"


def test_a_call_can_be_given_up_from_another_thread_and_the_client_works_on() -> None:
    calls: list[ComfyClient] = []

    def give_up_the_first(connection: socket.socket) -> None:
        if calls:
            calls.pop().abort()
            hold(connection)
        connection.sendall(OK + b"\r\nall of it")

    with client_of(give_up_the_first) as client:
        calls.append(client)
        with pytest.raises(NoAnswer):
            view(client, PICTURE)

        client.abort()  # nothing is under way
        assert view(client, PICTURE) == b"all of it"


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")

    with client_of(answer_with(OK + b"Content-Length: 2\r\n\r\nok")) as client:
        assert view(client, PICTURE) == b"ok"
