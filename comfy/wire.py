"""A transport for `requests` that ends every call at its deadline and knows whether it got through.

The timeouts of `requests` bound each single wait on the socket: a server that sends a byte now and then, in
its headers or its body, would hold the caller for ever. Here the socket is shut down under the reader when
the time is up, and nothing is sent once it is: a name server may answer long after the connect timeout.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError


class Call:
    """One request under way: whether it was ever connected, and whether its time ran out."""

    def __init__(self) -> None:
        self.connected = False
        self.expired = False
        self._over = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def use(self, connection: HTTPConnection) -> None:
        """Note the connection (open or not) that carries this call, unless its time is already up."""
        with self._lock:
            if self.expired:
                raise ConnectTimeoutError(connection, "no time left to send the request")
            self._socket = connection.sock
            self.connected = connection.sock is not None

    def expire(self) -> None:
        # The lock: a late timer must not shut down a socket that already serves the next call.
        with self._lock:
            if self._over:
                return
            self.expired = True
            if self._socket is not None:
                with suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def end(self) -> None:
        with self._lock:
            self._over = True


_current: ContextVar[Call | None] = ContextVar("current_call", default=None)


@contextmanager
def deadline(seconds: float) -> Iterator[Call]:
    """Let the one request that this thread makes inside take `seconds` at most, from name to last byte."""
    call = Call()
    timer = threading.Timer(seconds, call.expire)
    timer.daemon = True
    token = _current.set(call)
    timer.start()
    try:
        yield call
    finally:
        timer.cancel()
        call.end()
        _current.reset(token)


class _Connection(HTTPConnection):
    def connect(self) -> None:
        super().connect()
        if call := _current.get():
            call.use(self)

    def request(self, *args: Any, **kwargs: Any) -> None:
        if call := _current.get():
            call.use(self)
        super().request(*args, **kwargs)


class _TLSConnection(_Connection, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TLSPool(HTTPSConnectionPool):
    ConnectionCls = _TLSConnection


class DeadlineAdapter(HTTPAdapter):
    """Mount it on a session to make `deadline` hold for the session's requests."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TLSPool}
