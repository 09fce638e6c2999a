"""Real worker and web processes on the test database."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.conf import settings
from django.db import connection

ADDRESS: Final = re.compile(r"http://127\.0\.0\.1:\d+")


def database_url() -> str:
    """Return the address of the test database for another process."""
    config = connection.settings_dict
    user = f"{config['USER']}:{config['PASSWORD']}"
    if str(config["HOST"]).startswith("/"):
        return f"postgres://{user}@/{config['HOST']}/{config['NAME']}"
    return f"postgres://{user}@{config['HOST']}:{config['PORT']}/{config['NAME']}"


def environment(**changed: Any) -> dict[str, str]:
    """Return a production environment; a short poll keeps the tests fast."""
    return {
        "PATH": os.environ["PATH"],
        "DATABASE_URL": database_url(),
        "SECRET_KEY": "the tests'",
        "ALLOWED_HOSTS": "localhost",
        "GENFLOW_POLL_SECONDS": "0.1",
        "PYTHONWARNINGS": "error",
    } | {name: str(value) for name, value in changed.items()}


class WorkerProcess:
    """A `manage.py runworkers`, with its log."""

    def __init__(self, url: str, *arguments: str, **changed: Any) -> None:
        self.process = subprocess.Popen(  # noqa: S603 (our own interpreter)
            [sys.executable, "manage.py", "runworkers", "--comfy-url", url, *arguments],
            cwd=settings.BASE_DIR,
            env=environment(**changed),
            stderr=subprocess.PIPE,
            text=True,
        )

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def freeze(self) -> None:
        """Stop it in its tracks, and return when it has stopped."""
        self.send(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def wait(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def log(self) -> str:
        """Return what it logged; it must have ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def worker_process(url: str, *arguments: str, **changed: Any) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(url, *arguments, **changed)
    try:
        yield worker
    finally:
        worker.kill()
        assert worker.process.stderr is not None
        worker.process.stderr.close()


@contextmanager
def web_process(**changed: Any) -> Iterator[str]:
    """A web server on a free port. Yields its address."""
    command = [
        "-m",
        "uvicorn",
        "genflow_project.asgi:application",
        "--port",
        "0",
        "--no-access-log",
    ]
    process = subprocess.Popen(  # noqa: S603 (our own interpreter)
        [sys.executable, *command],
        cwd=settings.BASE_DIR,
        env=environment(ALLOWED_HOSTS="127.0.0.1", PYTHONWARNINGS="default", **changed),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        yield next(found[0] for line in process.stderr if (found := ADDRESS.search(line)))
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
