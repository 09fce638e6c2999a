"""The house of a chaos run (Postgres, ComfyUI and workers, all real processes) and what befalls it."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self

import requests
from django.conf import settings
from django.db import Error, connection

from jobs.models import Job
from jobs.status import HELD
from jobs.tests.databases import OwnPostgres, fetch, other_connections
from jobs.tests.processes import environment

# Until the last job has ended and the workers have left, beside what the drawings take. Seconds.
PATIENCE: Final = 120.0
LEAVING_SECONDS: Final = 30.0

# How a worker may leave: SIGTERM simply ends one that has hardly begun.
POLITE: Final = (0, -signal.SIGTERM)

# Faults of ComfyUI: how often among the others, and the longest time each takes, in leases. None is a reason to
# draw a picture twice.
FAULTS: Final = {
    "http_500": (2, 0.0),
    "http_503": (2, 0.2),
    "html_502": (2, 0.0),
    "half_json": (2, 0.0),
    "slow": (2, 1.5),
    "refuse": (2, 0.5),
    "drop_after_accept": (4, 0.0),
    "hang_prompt": (8, 1.5),
    "drop_upload": (1, 0.0),
    "hang_upload": (2, 1.5),
    "hang_view": (2, 1.5),
    "truncate_view": (1, 0.0),
    "corrupt_view": (1, 0.0),
    "late_history": (2, 0.5),
    "forget_history": (2, 0.0),
    "ws_drop": (1, 0.0),
    "ws_silent": (1, 0.0),
}
# How likely a worker that is picked for trouble is one that holds a job.
AIM: Final = 0.7


class Plan(Protocol):
    @property
    def workers(self) -> int: ...
    @property
    def lease(self) -> float: ...
    @property
    def run_seconds(self) -> float: ...


@dataclass(frozen=True)
class Happening:
    at: float
    what: str
    pid: int = 0


@dataclass
class Worker:
    process: subprocess.Popen[bytes]
    thaw_at: float | None = None
    leaving: bool = False


@dataclass
class House:
    """`with` to its end: all its processes."""

    plan: Plan
    server: OwnPostgres
    logs: Path
    workers: list[Worker] = field(default_factory=list)
    happenings: list[Happening] = field(default_factory=list)
    # What ComfyUI had counted by the end of each of its lives.
    lives: list[dict[str, dict[str, int]]] = field(default_factory=list)
    deserters: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "fake_comfy", "--port", "0"]
        self.comfy = subprocess.Popen(  # noqa: S603 (our own)
            [*command, "--seconds", str(self.plan.run_seconds)],
            cwd=settings.BASE_DIR,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.comfy.stdout is not None
        self.url, self.control = (self.comfy.stdout.readline().split()[1] for _ in range(2))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
        self.comfy.terminate()
        self.comfy.wait()
        assert self.comfy.stdout is not None
        self.comfy.stdout.close()

    def trouble(self) -> Counter[str]:
        return Counter(h.what for h in self.happenings if h.what not in ("calm", "end"))

    def note(self, what: str, pid: int = 0) -> None:
        self.happenings.append(Happening(time.time(), what, pid))

    # --- workers ---

    def open(self) -> None:
        """Start workers until there are as many as planned."""
        while sum(not worker.leaving for worker in self.workers) < self.plan.workers:
            self.workers.append(Worker(self._start_worker()))

    def wait_for_work(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not Job.objects.filter(status__in=HELD).exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _start_worker(self) -> subprocess.Popen[bytes]:
        options = environment(
            GENFLOW_LEASE_SECONDS=self.plan.lease,
            GENFLOW_POLL_SECONDS=0.2,
            GENFLOW_CONCURRENCY=1,
            GENFLOW_PROMPTS_PER_BACKEND=4,
            GENFLOW_RETRY_BASE_SECONDS=0.2,
            GENFLOW_RETRY_MAX_SECONDS=2,
            # Trouble never ends a job here: all must succeed.
            GENFLOW_MAX_LOST_WORKERS=1000,
            GENFLOW_MAX_RESUBMITS=1000,
            # A helper thread that hangs when its worker leaves takes its connection with it.
            PYTHONWARNINGS="error,ignore::ResourceWarning",
        )
        with tempfile.NamedTemporaryFile(dir=self.logs, delete=False) as log:
            return subprocess.Popen(  # noqa: S603 (our own)
                [sys.executable, "manage.py", "runworkers", "--comfy-url", self.url],
                cwd=settings.BASE_DIR,
                env=options,
                stderr=log,
            )

    def look_after_workers(self) -> None:
        """Thaw whose time has come, and put new ones in the place of those that are gone."""
        for worker in self.workers:
            if worker.thaw_at is not None and time.monotonic() >= worker.thaw_at:
                self.thaw(worker)
        for worker in [w for w in self.workers if w.process.poll() is not None]:
            self.workers.remove(worker)
            if not (worker.leaving and worker.process.returncode in POLITE):
                self.deserters.append(f"pid {worker.process.pid}: {worker.process.returncode}")
        self.open()

    def thaw(self, worker: Worker) -> None:
        worker.process.send_signal(signal.SIGCONT)
        worker.thaw_at = None
        self.note("thaw", worker.process.pid)

    # --- the end ---

    def calm_down(self) -> None:
        requests.delete(f"{self.control}/fake/faults", timeout=30).raise_for_status()
        for worker in self.workers:
            if worker.thaw_at is not None:
                self.thaw(worker)
        self.note("calm")

    def wait_for(self, jobs: Sequence[uuid.UUID]) -> None:
        deadline = time.monotonic() + PATIENCE + len(jobs) * self.plan.run_seconds
        while Job.objects.unfinished().filter(pk__in=jobs).exists():
            if time.monotonic() > deadline:
                return
            self.look_after_workers()
            time.sleep(0.2)
        self.note("end")

    def close(self) -> None:
        """Send the workers away politely, and take the last count."""
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            if (status := worker.process.wait(LEAVING_SECONDS)) not in POLITE:
                self.deserters.append(f"pid {worker.process.pid} at the end: {status}")
        self.lives.append(self.counts())

    def counts(self) -> dict[str, dict[str, int]]:
        answer = requests.get(f"{self.control}/fake/stats", timeout=30)
        counts: dict[str, dict[str, int]] = answer.json()["prompts"]
        return counts

    def command_comfy(self, path: str, **body: Any) -> None:
        requests.post(f"{self.control}{path}", json=body, timeout=30).raise_for_status()


# --- trouble ---


def pick(house: House, rng: random.Random) -> Worker:
    held = Job.objects.filter(status__in=HELD).values_list("worker_id", flat=True)
    holders = {int(worker_id.split("-")[-2]) for worker_id in held if worker_id}
    busy = [worker for worker in house.workers if worker.process.pid in holders]
    return rng.choice(busy if busy and rng.random() < AIM else house.workers)


def kill(house: House, rng: random.Random) -> None:
    worker = pick(house, rng)
    worker.process.kill()
    house.note("kill", worker.process.pid)
    worker.process.wait()
    house.workers.remove(worker)


def freeze(house: House, rng: random.Random) -> None:
    """Stop a worker for up to two leases."""
    worker, seconds = pick(house, rng), rng.uniform(0.2, 2 * house.plan.lease)
    if worker.thaw_at is None and not worker.leaving:
        worker.process.send_signal(signal.SIGSTOP)
        worker.thaw_at = time.monotonic() + seconds
        house.note("freeze", worker.process.pid)


def deploy(house: House, rng: random.Random) -> None:
    """Send a worker away politely; another takes its place."""
    worker = pick(house, rng)
    if worker.thaw_at is None and not worker.leaving:
        worker.leaving = True
        worker.process.terminate()
        house.note("deploy", worker.process.pid)


def restart_comfy(house: House, rng: random.Random) -> None:
    house.note("restart of ComfyUI")
    # Down for a moment: what is counted until then belongs to the life that ended.
    house.command_comfy("/fake/restart", down_seconds=rng.uniform(0.5, 1.5))
    house.lives.append(house.counts())


def spoil_answers(house: House, rng: random.Random) -> None:
    [name] = rng.choices(list(FAULTS), [weight for weight, _ in FAULTS.values()])
    seconds = rng.uniform(0.1, 1) * FAULTS[name][1] * house.plan.lease
    house.command_comfy("/fake/faults", name=name, times=rng.choice([1, 1, 2, 3]), seconds=seconds)
    house.note(name)


def cut_connections(house: House, rng: random.Random) -> None:
    some = [pid for pid in other_connections() if rng.random() < 0.5]
    fetch(f"SELECT pg_terminate_backend(pid) FROM unnest(ARRAY{some}::int[]) AS pid")  # noqa: S608 (numbers)
    house.note("cut connections")


def restart_postgres(house: House, rng: random.Random) -> None:
    mode = rng.choice(["fast", "immediate"])
    house.note(f"{mode} restart of Postgres")
    house.server.stop(mode)
    time.sleep(rng.uniform(0, house.plan.lease / 2))
    house.server.start()


TROUBLE: Final[dict[Callable[[House, random.Random], None], int]] = {
    kill: 4,
    freeze: 3,
    deploy: 2,
    restart_comfy: 1,
    spoil_answers: 5,
    cut_connections: 2,
    restart_postgres: 1,
}


def make_trouble(house: House, rng: random.Random, until: float) -> None:
    while time.monotonic() < until:
        [trouble] = rng.choices(list(TROUBLE), list(TROUBLE.values()))
        try:
            trouble(house, rng)
        except Error:
            connection.close()  # ours can be lost, too
        house.look_after_workers()
        time.sleep(rng.uniform(0.1, 0.8))
    connection.close()
