"""Databases that a test may break: connections cut, a server of its own, the same database by another door."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

from django.core.management import call_command
from django.db import connection

from genflow_project.embedded_postgres import NAME, PORT, Server

OTHERS: Final = """FROM pg_stat_activity WHERE datname = current_database()
    AND pid <> pg_backend_pid() AND backend_type = 'client backend'"""


def other_connections() -> set[int]:
    """Return the server's process ids of all connections to this database but ours."""
    return {pid for (pid,) in fetch(f"SELECT pid {OTHERS}")}


def age_of_oldest_transaction() -> float:
    """Seconds, of those of the other connections."""
    age = "coalesce(max(extract(epoch FROM now() - xact_start)), 0)"
    [(seconds,)] = fetch(f"SELECT {age} {OTHERS}")
    return float(seconds)


def cut_connections() -> int:
    """End all those, as an operator or a failover does. Return how many they were."""
    return len(fetch(f"SELECT pg_terminate_backend(pid) {OTHERS}"))


@contextmanager
def database_default(name: str, value: str) -> Iterator[None]:
    """Let new connections to the test database start with this setting; the present ones but ours are cut."""
    alter = f'ALTER DATABASE "{connection.settings_dict["NAME"]}"'
    try:
        execute(f"{alter} SET {name} = '{value}'")
        cut_connections()
        yield
    finally:
        execute(f"{alter} RESET {name}")


def execute(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def fetch(sql: str) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall())


@contextmanager
def connected_to(**where: Any) -> Iterator[None]:
    """Let the connections of this process, and of those that it starts, lead elsewhere."""
    config = connection.settings_dict  # of all threads
    before = dict(config)
    connection.close()
    config.update(where)
    try:
        yield
    finally:
        connection.close()
        config.clear()
        config.update(before)


class OwnPostgres:
    """A server to stop and start at will: the embedded one in a passing folder, `with` to its end."""

    def __init__(self) -> None:
        # Not below pytest's own folder: its path is long, and closed to other users.
        self.folder = Path(tempfile.mkdtemp(prefix="genflow-own-"))
        self.folder.chmod(0o755)
        self.server = Server.of(self.folder / "var")

    def __enter__(self) -> Self:
        # While we count as a user its watcher leaves the server alone; should we be killed, it stops it.
        self._users = self.server.lock_users()
        self.server.ensure_started()
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._users)
        self.server.stop()
        if (link := self.server.socket_folder()).is_symlink():
            link.unlink()
        if self.server.home != self.server.folder:
            shutil.rmtree(self.server.home)
        shutil.rmtree(self.folder)

    def address(self) -> dict[str, str]:
        """Return what Django's settings say of it."""
        host = str(self.server.socket_folder())
        return {"NAME": NAME, "USER": NAME, "PASSWORD": "", "HOST": host, "PORT": str(PORT)}

    def stop(self, mode: str) -> None:
        """mode: "fast" ends all connections, "immediate" is a crash."""
        self.server.pg_ctl("stop", "-m", mode)

    def start(self) -> None:
        self.server.start()

    def log(self) -> str:
        return self.server.log.read_text(errors="replace")


@contextmanager
def own_database() -> Iterator[OwnPostgres]:
    """Give this process, and those that it starts, a migrated database on a server of its own."""
    with OwnPostgres() as server, connected_to(**server.address()):
        call_command("migrate", verbosity=0)
        yield server
