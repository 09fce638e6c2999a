"""The process that photos are developed in, and the web server's line to it.

Hostile bytes can keep a decoder busy for hours, fill the memory or end the process. So each photo has a process of
its own, with limits that the system keeps. These are forks of one that has everything imported: to start Python and
the face detector takes longer than an ordinary photo does. The first photo starts it, and it ends with the web
server. Here and in `jobs.developing` and `jobs.faces` nothing of Django is imported.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from jobs.developing import BadPhoto, Photo, Rules, develop, prepare, too_hard

# The memory that a photo may take. 64 million pixels were seen to take 1.1 GB, and libraries alone 0.2.
BASE_BYTES: Final = 400_000_000
BYTES_PER_PIXEL: Final = 16
CLOCK_SECONDS: Final = 30  # at most, on a busy machine
TRIES: Final = 3  # to find a process
HOME: Final = Path(__file__).parent.parent
READY: Final = b"+"


class Darkroom:
    """Develops photos for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._door: socket.socket | None = None  # what lines go in by

    def develop(self, content: bytes, rules: Rules) -> Photo:
        """Return the photo in these bytes or raise BadPhoto, also if its process dies of it.

        Raises OSError if no process takes it.
        """
        with self._new_line() as line, suppress(OSError):
            line.sendall(json.dumps(asdict(rules)).encode() + b"\n")
            line.sendall(content)
            line.shutdown(socket.SHUT_WR)
            with line.makefile("rb") as answer:
                if head := answer.readline():
                    return _photo(json.loads(head), answer.read())
        raise too_hard()

    def close(self) -> None:
        with self._lock:
            if self._door is not None and self._process is not None:
                self._door.close()
                self._process.wait(CLOCK_SECONDS)
                self._door = self._process = None

    def _new_line(self) -> socket.socket:
        """Return a socket with a fork at its other end."""
        for _ in range(TRIES):
            ours, theirs = socket.socketpair()
            ours.settimeout(CLOCK_SECONDS)
            with theirs, suppress(BrokenPipeError):
                self._hand_in(theirs)
            # Without it the darkroom was killed before it had seen the photo: that is not to blame.
            if ours.recv(len(READY)):
                return ours
            ours.close()
        raise ConnectionError("The darkroom is killed again and again.")

    def _hand_in(self, line: socket.socket) -> None:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._door is not None
            socket.send_fds(self._door, [READY], [line.fileno()])

    def _start(self) -> None:
        if self._door is not None:
            self._door.close()
        self._door, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "jobs.darkroom"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd=HOME,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
                process_group=0,  # with its forks alone: a Ctrl-C is for the web server
            )
        self._door.settimeout(CLOCK_SECONDS)
        if self._door.recv(1) != READY:
            raise ConnectionError("The darkroom does not start; see what it wrote to stderr.")


def _photo(answer: dict[str, Any], jpeg: bytes) -> Photo:
    if "refused" in answer:
        raise BadPhoto(*answer["refused"])
    if len(jpeg) != answer.pop("size"):  # killed in the middle of its answer
        raise too_hard()
    return Photo(content=jpeg, **answer)


def main() -> None:
    """Fork for each line that comes in by the door, our stdin, until the other end is closed."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)  # the web server tells when to end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries the forks
    prepare()
    door = socket.socket(fileno=sys.stdin.fileno())
    door.sendall(READY)
    while received := socket.recv_fds(door, 1, 1)[1]:
        with socket.socket(fileno=received[0]) as line:
            if os.fork() == 0:
                _answer(line)
                return
    os.killpg(0, signal.SIGKILL)  # nobody waits for the photos under way; nor for us


def _answer(line: socket.socket) -> None:
    """Develop what comes down the line: a line of JSON with the rules, then the photo."""
    line.sendall(READY)
    with line.makefile("rwb") as file:
        rules = Rules(**json.loads(file.readline()))
        _limit(rules)
        try:
            photo = asdict(develop(file.read(), rules))
        except BadPhoto as exc:
            file.write(json.dumps({"refused": (exc.status, exc.code, exc.message)}).encode())
        else:
            content = photo.pop("content")
            file.write(json.dumps(photo | {"size": len(content)}).encode() + b"\n" + content)


def _limit(rules: Rules) -> None:
    signal.setitimer(signal.ITIMER_REAL, CLOCK_SECONDS)
    limits = {
        resource.RLIMIT_AS: BASE_BYTES + BYTES_PER_PIXEL * rules.max_pixels,  # not kept on macOS
        resource.RLIMIT_CPU: rules.cpu_seconds,
        resource.RLIMIT_CORE: 0,  # a core file would hold the photo
    }
    for what, most in limits.items():
        with suppress(ValueError, OSError):  # the system's own limit is lower, and holds
            resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    main()
