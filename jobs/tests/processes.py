"""Real worker and web processes on the test database."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.db import connection

from jobs.tests.helpers import wait_until

ADDRESS: Final = re.compile(r"running on (http://127\.0\.0\.1:\d+)")


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
        # The static files are collected where it is deployed, and not here.
        "PYTHONWARNINGS": "error,ignore:No directory at",
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


class WebProcess:
    """A web server on a free port, with its log in a file."""

    def __init__(self, log: Path, **changed: Any) -> None:
        self._log = log
        command = ["-m", "uvicorn", "genflow_project.asgi:application", "--port", "0"]
        where = {
            "ALLOWED_HOSTS": "127.0.0.1",
            "SECRET_KEY": settings.SECRET_KEY,
            # Nobody has collected static files here.
            "PYTHONWARNINGS": "error,ignore:No directory at",
        }
        with log.open("wb") as file:
            self.process = subprocess.Popen(  # noqa: S603 (our own interpreter)
                [sys.executable, *command],
                cwd=settings.BASE_DIR,
                env=environment(**where | changed),
                stdout=file,
                stderr=file,
            )
        wait_until(lambda: self.process.poll() is not None or ADDRESS.search(self.log()))
        found = ADDRESS.search(self.log())
        assert found, self.log()
        self.url = found[1]

    def log(self) -> str:
        return self._log.read_text()


@contextmanager
def web_process(**changed: Any) -> Iterator[WebProcess]:
    with tempfile.TemporaryDirectory(prefix="genflow-web-") as folder:
        web = WebProcess(Path(folder) / "log", **changed)
        try:
            yield web
        finally:
            web.process.kill()
            web.process.wait()
