# ruff: noqa: S603, T201 (every command is our own; this is a command's output)
"""The demo itself, inside `.venv`: what it starts, what it sends, and how all of it ends together."""

from __future__ import annotations

import ctypes
import io
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import requests

from genflow_client.api import ENDED, Api, ClientError, Job, Trouble
from genflow_client.progress import Display, ending

ROOT: Final = Path(__file__).resolve().parent.parent
VAR: Final = ROOT / "var"
LOGS: Final = VAR / "log"
USERNAME: Final = "demo"
# So that the login stays the same from demo to demo.
PASSWORD: Final = VAR / "demo-password"
# Where `manage.py runworkers` looks for a ComfyUI, so that a worker started by hand finds this one.
FAKE_PORT: Final = 8188
# The worker may be killed to see what happens; one that dies of its own accord does not get better by it.
WORKERS: Final = 5
START_SECONDS: Final = 60
# More than GENFLOW_SHUTDOWN_SECONDS by default, in which a worker gives its jobs back.
STOP_SECONDS: Final = 25
PR_SET_PDEATHSIG: Final = 1
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
T = TypeVar("T")


class Failed(Exception):
    """The demo cannot go on; the message is for whoever runs it."""

    def __init__(self, message: str, *, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def run(*, photo: Path, prompt: str, out: Path | None, exit: bool, port: int) -> int:
    """Show the demo and return its exit status; Ctrl-C and its like raise SystemExit."""
    for signum in ENDING:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup
            signal.signal(signum, lambda signum, frame: sys.exit(128 + signum))
    children = Children()
    try:
        port = free_port(port)
        children.port = port
        url = f"http://127.0.0.1:{port}"
        password, token = prepare_database()
        start_servers(children, url)
        job = draw(children, url, token, photo, prompt, out or VAR / "portrait.png")
        print(f"page: {url}/jobs/{job}/\nlogin: {USERNAME} / {password}", flush=True)
        if not exit:
            say(f"genflow: the admin is {url}/admin/; another portrait, from another terminal:")
            say(f'  curl -H "Authorization: Bearer {token}" {url}/api/v2/portraits \\')
            say(f'       -F photo=@{photo} -F prompt="{prompt}"')
            say("genflow: press Ctrl-C to end")
            children.wait_for(lambda: False, "")
    except Failed as exc:
        say(f"genflow: {exc}")
        return exc.status
    except Trouble as exc:
        say(f"genflow: {exc}; see {LOGS}")
        return 1
    except (ClientError, OSError) as exc:
        say(f"genflow: {exc}")
        return 1
    finally:
        children.stop()
    return 0


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


# --- What runs ---


class Children:
    """Processes that end when we end. Each writes a log of its own."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.workers = 0
        self.port = 0  # of the web server; two demos at once have logs of their own

    def log_of(self, name: str) -> Path:
        return LOGS / f"{name}-{self.port}.log"

    def start(self, name: str, *arguments: str) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        # In sessions of their own: Ctrl-C in the terminal comes to us, and we end them in good order.
        with self.log_of(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def start_worker(self) -> None:
        self.workers += 1
        self.start("worker", "manage.py", "runworkers", "--name", f"demo-{self.workers}")

    def wait_for(
        self, condition: Callable[[], T | None], what: str, seconds: float | None = None
    ) -> T:
        """Return the condition's first true answer. Raises Failed if a process ends, or after so long.

        A killed worker is replaced: its job goes on.
        """
        deadline = time.monotonic() + (seconds or float("inf"))
        while not (answer := condition()):
            self.check()
            if time.monotonic() > deadline:
                raise Failed(f"{what} did not happen within {seconds:.0f} s; see {LOGS}")
            time.sleep(0.1)
        return answer

    def check(self) -> None:
        for name, process in list(self.processes.items()):
            if process.poll() is None:
                continue
            how = ended(process.returncode)
            if name != "worker" or process.returncode >= 0 or self.workers >= WORKERS:
                raise Failed(f"{name} {how}; {self.log_of(name)} says why")
            say(f"genflow: the worker {how}; starting another, which takes over its job")
            self.start_worker()

    def stop(self) -> None:
        """End all: politely, and by force after a second signal or too long a time."""
        for signum in ENDING:
            signal.signal(signum, lambda signum, frame: self.kill())
        for process in self.processes.values():
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self.processes.values():
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()


def ended(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended by itself with status {status}"


LIBC: Final = ctypes.CDLL(None)
PARENT: Final = os.getpid()


def end_with_parent() -> None:
    """Have the kernel end this process when the demo dies, even by SIGKILL.

    Linux alone can do that; elsewhere a demo that is killed by SIGKILL leaves its processes behind.
    """
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != PARENT:  # it died before we asked
            os._exit(1)


def free_port(port: int) -> int:
    """Return the port, or any free one for 0. Raises Failed if it is taken."""
    with socket.socket() as listener:
        # As the web server will do it: a port on which connections are still closing is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as exc:
            raise Failed(
                f"port {port} cannot be had ({exc.strerror}): choose another with --port, or --port 0 for any free one",
                status=2,
            ) from exc
        return int(listener.getsockname()[1])


def prepare_database() -> tuple[str, str]:
    """Bring the database up to date; return a password and an API token of the demo's user.

    From here on this process is a user of the embedded Postgres, if that is used: it stops after us.
    """
    os.environ |= {"DEBUG": "1", "ALLOWED_HOSTS": "127.0.0.1,localhost"}
    os.environ["DJANGO_SETTINGS_MODULE"] = "genflow_project.settings"
    # A killed worker is missed after this many seconds: nobody wants to watch a demo for longer.
    os.environ.setdefault("GENFLOW_LEASE_SECONDS", "5")
    import django
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import CommandError, call_command
    from django.db import Error, connection

    say("genflow: preparing the database")
    token = io.StringIO()
    try:
        django.setup()
        password = keep_password()
        call_command("migrate", verbosity=0)
        call_command("api_token", USERNAME, "--create-user", stdout=token)
        open_admin(password)
        connection.close()
    except (ImproperlyConfigured, CommandError, Error) as exc:
        raise Failed(str(exc).strip()) from exc
    return password, token.getvalue().strip()


def keep_password() -> str:
    VAR.mkdir(exist_ok=True)
    if not PASSWORD.exists():
        PASSWORD.touch(mode=0o600)
        PASSWORD.write_text(secrets.token_urlsafe(9))
    return PASSWORD.read_text()


def open_admin(password: str) -> None:
    """Let the demo's user log in with this password, to the admin as well."""
    from django.contrib.auth.models import User

    user = User.objects.get(username=USERNAME)
    user.is_staff = user.is_superuser = True
    user.set_password(password)
    user.save()


def start_servers(children: Children, url: str) -> None:
    # Settings have been read, and with them .env.
    if not os.environ.get("COMFY_URL"):
        os.environ["COMFY_URL"] = start_fake(children)
    port = url.rpartition(":")[2]
    listen = ["--host", "127.0.0.1", "--port", port, "--timeout-graceful-shutdown", "3"]
    children.start("web", "-m", "uvicorn", "genflow_project.asgi:application", *listen)
    children.start_worker()
    say(f"genflow: starting on {url}, with ComfyUI on {os.environ['COMFY_URL']}")
    children.wait_for(lambda: is_up(url), "a start of the web server", START_SECONDS)


def start_fake(children: Children, port: int = FAKE_PORT) -> str:
    """Return its address: at the port that `runworkers` asks by default or, if that is taken, any other."""
    children.start("fake_comfy", "-m", "fake_comfy", "--port", str(port), "--seconds", "4")
    try:
        return children.wait_for(lambda: fake_url(children), "a start of fake_comfy", START_SECONDS)
    except Failed:  # looking first would not help: another demo may look at the same moment
        if port == 0:
            raise
        return start_fake(children, 0)


def fake_url(children: Children) -> str | None:
    line, newline, _ = children.log_of("fake_comfy").read_text().partition("\n")
    name, _, url = line.partition(" ")
    return url if newline and name == "fake_comfy" else None


def is_up(url: str) -> bool:
    try:
        return local().get(f"{url}/readyz", timeout=5).ok
    except requests.ConnectionError:
        return False


# --- What a client does ---


def local() -> requests.Session:
    session = requests.Session()
    session.trust_env = False  # no proxy on the way to this machine
    return session


def draw(children: Children, url: str, token: str, photo: Path, prompt: str, out: Path) -> str:
    """Have a portrait drawn and save it; return the job's id."""
    with Display() as display:
        # Without patience: it would not see that a process has died.
        api = Api(url, token, patience=0, note=display.say)
        job = api.submit(photo.read_bytes(), {"prompt": prompt})
        warn_if_silent(os.environ["COMFY_URL"])

        def ended() -> Job | None:
            found = api.look_again(job)
            display.show(found)
            return found if found["status"] in ENDED else None

        found = children.wait_for(ended, "the picture")
    if found["status"] != "succeeded":
        raise Failed(ending(found))
    out.write_bytes(api.picture(found["outputs"][0]))
    print(f"job: {job['id']}\nportrait: {out}", flush=True)
    return str(job["id"])


def warn_if_silent(comfy_urls: str) -> None:
    """A job waits for a ComfyUI that is away, so a wrong address would look like a slow one."""
    for url in comfy_urls.split(","):
        try:
            local().get(f"{url.rstrip('/')}/system_stats", timeout=5).raise_for_status()
        except requests.RequestException as exc:
            say(f"genflow: ComfyUI at {url} does not answer; the job waits for it ({exc})")
