"""Plain functions that the tests of this package share."""

from __future__ import annotations

import io
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from django.contrib.auth.models import User
from django.db import connection
from django.db.models.functions import Now
from PIL import Image

from comfy.graph import FaceRequest, portrait_graph
from jobs.models import Asset, Backend, Job, Terms
from jobs.status import JobStatus
from jobs.wire import asset_reference
from jobs.worker import Options, Worker

T = TypeVar("T")
TERMS = Terms(lease=timedelta(seconds=15), prompts_per_backend=2, max_lost_workers=3)
LEASE = TERMS.lease


def wait_until(condition: Callable[[], T], seconds: float = 50) -> T:
    """Return the condition's first true answer, or fail after so long."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)
    return answer


@contextmanager
def explained(table: str) -> Iterator[list[str]]:
    """Yield a list that gets the plan of each SELECT on this table."""
    plans: list[str] = []

    def explain(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("SELECT") and f'"{table}"' in sql:
            with connection.connection.cursor() as cursor:
                plans.append("\n".join(row[0] for row in cursor.execute(f"EXPLAIN {sql}", params)))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(explain):
        yield plans


def start(target: Callable[[], object]) -> threading.Thread:
    """Run it on a thread that closes its database connection."""

    def run() -> None:
        try:
            target()
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def make_user(name: str = "ann") -> User:
    return User.objects.get_or_create(username=name)[0]


def make_staff(name: str = "boss") -> User:
    return User.objects.get_or_create(username=name, is_staff=True, is_superuser=True)[0]


def make_backend(url: str = "http://comfy.test:8188") -> Backend:
    return Backend.objects.register(url)


def photo_bytes(colour: str = "teal") -> bytes:
    """A small JPEG with some structure: a plain one counts as a photo without a face."""
    image = Image.linear_gradient("L").resize((96, 96)).convert("RGB")
    image.paste(colour, (24, 24, 72, 72))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG")
    return buffer.getvalue()


def queue_job(
    owner: User | None = None, *, photo: bytes | None = None, steps: int = 4, **values: Any
) -> Job:
    """Queue a small portrait, as a submission does."""
    owner = owner or make_user()
    asset = Asset.store(photo or photo_bytes(), owner=owner, content_type="image/jpeg")
    asset.save()
    request = FaceRequest(
        photo=asset_reference(asset.pk),
        prompt="a quiet portrait",
        seed=values.pop("seed", 7),
        width=64,
        height=64,
        steps=steps,
        count=values.pop("count", 1),
        checkpoint="realisticVisionV51_v51VAE.safetensors",
        filename_prefix="portrait",
    )
    job = Job(
        owner=owner,
        params={"prompt": request.prompt, "seed": request.seed, "count": request.count},
        graph=portrait_graph(request),
        **{"max_attempts": 5} | values,
    )
    return Job.objects.submit(
        job,
        inputs=[asset],
        queue_limit=1000,
        queue_limit_per_owner=1000,
        retention=timedelta(days=30),
    )


def claim(worker_id: str = "w1", terms: Terms = TERMS) -> Job | None:
    """Claim as a worker that drives every backend."""
    backends = list(Backend.objects.values_list("pk", flat=True)) or [make_backend().pk]
    return Job.objects.claim(worker_id, backends, terms)


def claim_new_job(worker_id: str = "w1", **values: Any) -> Job:
    job = queue_job(**values)
    held = claim(worker_id)
    assert held is not None
    assert held.pk == job.pk
    return held


def let_lease_expire(job: Job) -> None:
    Job.objects.filter(pk=job.pk).update(lease_expires_at=Now() - timedelta(seconds=1))


def take_over(job: Job, worker: Worker) -> None:
    """Let the worker go on with another's job, even if that had sent a last renewal."""

    def try_it() -> bool:
        let_lease_expire(job)
        return worker.run_once()

    wait_until(try_it)


def fresh(job: Job | uuid.UUID) -> Job:
    return Job.objects.get(pk=job.pk if isinstance(job, Job) else job)


def diary(job: Job) -> list[str]:
    return list(job.events.order_by("pk").values_list("kind", flat=True))


def make_worker(url: str, **options: Any) -> Worker:
    """A worker to step with `run_once`: it polls fast, and its threads do not run."""
    worker = Worker([url], Options.from_settings(**{"poll": 0.05, "retry_base": 0.01} | options))
    worker.meet_backends()
    return worker


def run_until_done(job: Job, worker: Worker, tries: int = 10) -> Job:
    """Step the worker, with no pause between attempts, until the job has ended."""
    for _ in range(tries):
        Job.objects.filter(pk=job.pk, status=JobStatus.QUEUED).update(run_after=Now())
        worker.run_once()
        if fresh(job).is_final:
            break
    row = fresh(job)
    assert row.is_final, f"after {tries} tries {row.status}: {row.error} {row.error_detail}"
    return row
