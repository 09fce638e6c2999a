"""A server of bare sockets, for what HTTP servers never do on purpose, and helpers to wait for it."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Behaviour = Callable[[socket.socket], None]


@contextmanager
def raw_server(behave: Behaviour, *, reads: bool = True) -> Iterator[str]:
    """Run `behave` on each connection, after reading its whole request if `reads`; yield the base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=_serve, args=(listener, behave, reads))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _serve(listener: socket.socket, behave: Behaviour, reads: bool) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                if reads:
                    read_request(connection)
                behave(connection)


def read_request(connection: socket.socket) -> bytes:
    """Head and body of one request."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += receive(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    while length and len(body) < int(length[1]):
        body += receive(connection)
    return head + b"\r\n\r\n" + body


def receive(connection: socket.socket) -> bytes:
    received = connection.recv(65536)
    if not received:
        raise ConnectionError("the client went away")
    return received


def trickle(start: bytes) -> Behaviour:
    """Send `start`, then a byte every 20 ms until the client goes away."""

    def behave(connection: socket.socket) -> None:
        connection.sendall(start)
        while not hung_up(connection, seconds=0.02):
            connection.sendall(b"x")

    return behave


def hold(connection: socket.socket) -> None:
    """Say nothing until the client goes away."""
    while not hung_up(connection, seconds=1.0):
        pass


def hung_up(connection: socket.socket, *, seconds: float) -> bool:
    """Whether the other side closes within `seconds`."""
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until(condition: Callable[[], bool], *, seconds: float = 10.0) -> None:
    """Return as soon as the condition holds; fail when the time is up."""
    end = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        pause.wait(0.01)
