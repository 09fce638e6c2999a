"""Who may hold a job and write to it: a small model, to compare the database with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Self
from uuid import UUID

from django.db.models.functions import Now

from jobs.models import CancelRequested, Job, LeaseLost
from jobs.tests.helpers import TERMS

UNFINISHED: Final = {"queued", "running", "canceling"}
# What a holder may make of its job: canceled only if that was asked for, and then nothing else but failed.
HOLDER_MAY: Final = {
    "running": {"running", "queued", "succeeded", "failed"},
    "canceling": {"canceling", "canceled", "failed"},
}
# What may become of a job, whoever writes.
FOLLOWING: Final = {
    "queued": {"running", "canceling", "canceled"},
    "running": {"queued", "canceling", "succeeded", "failed"},
    "canceling": {"canceled", "failed"},
}


@dataclass(frozen=True)
class Row:
    """A job in the database, with what hangs on it."""

    status: str
    step: str
    worker: str
    token: int
    lease: bool | None  # whether it holds; None: there is none
    attempt: int
    lost_workers: int
    resubmits: int
    drawing: int
    spoiled: int
    backend: int | None
    refused_by: tuple[int, ...]
    is_due: bool
    has_end: bool
    is_deleted: bool
    checkpoints: frozenset[str]
    pictures: int
    diary: tuple[str, ...]
    place: tuple[Any, ...] = field(compare=False)  # in the queue
    lease_expires_at: datetime | None = field(compare=False)

    @property
    def is_held(self) -> bool:
        return self.status in HOLDER_MAY

    @property
    def kills_workers(self) -> bool:
        """Its lease ran out once more, after as many lost workers as it may have."""
        return self.worker != "" and self.lost_workers >= TERMS.max_lost_workers

    def telling(self, *kinds: str, **changes: Any) -> Self:
        """Return the row after changes that the diary tells of."""
        return replace(self, diary=(*self.diary, *kinds), **changes)

    def ended(self, status: str, *kinds: str, **changes: Any) -> Self:
        end = {"status": status, "step": "", "lease": None, "has_end": True}
        return self.telling(*kinds, status, **end | changes)

    def asked_to_end(self) -> Self:
        """Return the row after a cancel of an unfinished job."""
        if self.status == "queued" and self.backend is None:
            return self.telling("cancel_asked", status="canceled", has_end=True)
        lease = self.lease if self.status == "running" else False
        return self.telling("cancel_asked", status="canceling", lease=lease)

    def let_go(self, kind: str, **changes: Any) -> Self:
        """Return the row back in the queue; its holder has no right to it any more."""
        free = {"status": "queued", "worker": "", "lease": None, "token": self.token + 1}
        return self.telling(kind, **free | {"is_due": True} | changes)

    def begun_anew(self) -> Self:
        return replace(self, step="upload", checkpoints=frozenset())


Rows = Mapping[UUID, Row]


def read_rows() -> dict[UUID, Row]:
    jobs = Job.objects.annotate(now=Now()).prefetch_related("checkpoints", "events", "outputs")
    return {job.pk: read_row(job, job.now) for job in jobs}


def read_row(job: Job, now: datetime) -> Row:
    return Row(
        status=job.status,
        step=job.step,
        worker=job.worker_id,
        token=job.fencing_token,
        lease=None if job.lease_expires_at is None else job.lease_expires_at >= now,
        attempt=job.attempt,
        lost_workers=job.lost_workers,
        resubmits=job.resubmits,
        drawing=job.drawing,
        spoiled=job.spoiled_drawings,
        backend=job.backend_id,
        refused_by=tuple(job.refused_by),
        is_due=job.run_after <= now,
        has_end=job.completed_at is not None,
        is_deleted=job.deleted_at is not None,
        checkpoints=frozenset(checkpoint.step for checkpoint in job.checkpoints.all()),
        pictures=len(job.outputs.all()),
        diary=tuple(event.kind for event in job.events.all()),
        place=(-job.priority, job.turn, job.pk),
        lease_expires_at=job.lease_expires_at,
    )


def refusal(row: Row | None, token: int, to: str) -> type[Exception] | None:
    """Return what meets whoever writes with this token. None: it is done."""
    if row is None or row.token != token or not row.is_held:
        return LeaseLost
    if to in HOLDER_MAY[row.status]:
        return None
    return CancelRequested if row.status == "canceling" else LeaseLost


def load(rows: Rows, backend: int) -> int:
    """Return how many prompts of ours may be there."""
    return sum(row.backend == backend and row.status in UNFINISHED for row in rows.values())


@dataclass(frozen=True)
class Claim:
    """One worker's question for a job. limits: of the backends that are up, how many prompts each may have."""

    drives: Sequence[int]
    unattended: Sequence[int]
    limits: Mapping[int, int]

    def free(self, rows: Rows) -> list[int]:
        up = [pk for pk in self.drives if pk in self.limits]
        return [pk for pk in up if load(rows, pk) < self.limits[pk]]

    def answer(self, rows: dict[UUID, Row]) -> UUID | None:
        """Return the job to be taken. Those that came first and kill their workers are ended in `rows`."""
        while (pk := self._abandoned(rows)) and rows[pk].kills_workers:
            row = rows.pop(pk)
            if row.status == "running":
                rows[pk] = row.ended("failed")
            elif not row.is_deleted:
                rows[pk] = row.ended("canceled")
        return pk or self._next_in_queue(rows)

    def taken(self, row: Row, worker: str, backend: int | None) -> Row:
        """Return the job as the worker holds it."""
        if row.backend not in {None, backend}:
            row = row.begun_anew()
        return row.telling(
            "claimed",
            status="canceling" if row.status == "canceling" else "running",
            worker=worker,
            token=row.token + 1,
            lease=True,
            lost_workers=row.lost_workers + (row.is_held and row.worker != ""),
            backend=backend,
        )

    def _abandoned(self, rows: Rows) -> UUID | None:
        within = {*self.drives, *(self.unattended if self.free(rows) else ())}
        found = {
            row.lease_expires_at: pk
            for pk, row in rows.items()
            if row.is_held and not row.lease and row.backend in within
        }
        return min(found.items())[1] if found else None

    def _next_in_queue(self, rows: Rows) -> UUID | None:
        free = self.free(rows)
        startable = {pk for pk in self.drives if pk in self.limits}
        startable |= set(self.unattended if free else ())
        found = {
            row.place: pk
            for pk, row in rows.items()
            if row.status == "queued" and row.is_due
            if row.backend in startable or (row.backend is None and set(free) - set(row.refused_by))
        }
        return min(found.items())[1] if found else None

    def places(self, row: Row, rows: Rows) -> list[int | None]:
        """Return the backends that a claim may put this job on."""
        stays = self.drives if row.is_held else [pk for pk in self.drives if pk in self.limits]
        if row.backend in stays:
            return [row.backend]
        free = self.free(rows)
        return [pk for pk in free if pk not in row.refused_by] or free
