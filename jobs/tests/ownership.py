"""Who may hold a job, and what each write makes of it: a small model to compare the database with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, Self
from uuid import UUID

from django.db import connection

from jobs.models import Asset, CancelRequested, Failure, Job, LeaseLost
from jobs.status import Step
from jobs.tests import helpers

# A lease longer than any test: it ends when that says so.
TERMS: Final = replace(helpers.TERMS, lease=timedelta(hours=1), max_lost_workers=1)
FAILURE: Final = Failure("unknown", "It went wrong.")

UNFINISHED: Final = {"queued", "running", "canceling"}
# What a holder may make of its job: canceled only if that was asked for, and then nothing else but failed.
HOLDER_MAY: Final = {
    "running": {"running", "queued", "succeeded", "failed"},
    "canceling": {"canceling", "canceled", "failed"},
}
# What may become of a job, whoever writes.
FOLLOWING: Final = {
    "queued": {"running", "canceling", "canceled", "expired"},
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
    refused_by: list[int]
    is_due: bool
    has_end: bool
    is_deleted: bool
    checkpoints: list[str]  # by name
    pictures: int
    diary: list[str]
    place: int = field(compare=False)  # in the queue
    lease_expires_at: datetime | None = field(compare=False)

    @property
    def is_held(self) -> bool:
        return self.status in HOLDER_MAY

    @property
    def kills_workers(self) -> bool:
        """Its lease ran out once more, after as many lost workers as it may have."""
        return self.worker != "" and self.lost_workers >= TERMS.max_lost_workers

    def after(self, *kinds: str, **changes: Any) -> Self:
        """Return the row after changes that the diary tells of."""
        return replace(self, diary=[*self.diary, *kinds], **changes)

    def begun_anew(self, **changes: Any) -> Self:
        return replace(self, step="upload", checkpoints=[], **changes)

    def back_in_the_queue(self, kind: str, **changes: Any) -> Self:
        """Return the row with no holder: whoever had it has no right to it any more."""
        free = {"status": "queued", "worker": "", "token": self.token + 1, "lease": None}
        return self.after(kind, **free, **changes)

    def asked_to_end(self) -> Self:
        """Return the row after a cancel of an unfinished job."""
        if self.status == "queued" and self.backend is None:
            return self.after("cancel_asked", status="canceled", has_end=True)
        lease = self.lease if self.status == "running" else False
        return self.after("cancel_asked", status="canceling", lease=lease)

    def ended(self, status: str, **changes: Any) -> Self:
        return self.after(status, status=status, step="", lease=None, has_end=True, **changes)

    def canceled(self) -> Self | None:
        """Return the row after its cancel; a deleted one is gone."""
        return None if self.is_deleted else self.ended("canceled")


Rows = Mapping[UUID, Row]


def read_rows() -> dict[UUID, Row]:
    with connection.cursor() as cursor:
        cursor.execute(
            """SELECT id, status, step, worker_id, fencing_token,
                lease_expires_at >= statement_timestamp(),
                attempt, lost_workers, resubmits, drawing, spoiled_drawings, backend_id,
                ARRAY(SELECT jsonb_array_elements(refused_by)::int),
                run_after <= statement_timestamp(), completed_at IS NOT NULL, deleted_at IS NOT NULL,
                ARRAY(SELECT step FROM jobs_checkpoint WHERE job_id = job.id ORDER BY step),
                (SELECT count(*) FROM jobs_asset WHERE job_id = job.id),
                ARRAY(SELECT kind FROM jobs_jobevent WHERE job_id = job.id ORDER BY id),
                row_number() OVER (ORDER BY priority DESC, turn, id),
                lease_expires_at
            FROM jobs_job AS job"""
        )
        return {pk: Row(*values) for pk, *values in cursor.fetchall()}


# --- what a holder writes ---


@dataclass(frozen=True)
class Write:
    """to: the status it leads to; result: what becomes of the row (None: it is gone)."""

    to: str
    act: Callable[[Job], object]
    result: Callable[[Row], Row | None]

    def refusal(self, row: Row | None, job: Job) -> type[Exception] | None:
        """Return what meets a holder who has no right to it. None: it is done."""
        if row is None or row.token != job.fencing_token or not row.is_held:
            return LeaseLost
        if self.to in HOLDER_MAY[row.status]:
            return None
        return CancelRequested if row.status == "canceling" else LeaseLost


def next_step(job: Job | Row) -> Step:
    """Return the step to be saved. The last is not saved alone: the one before once more."""
    return Step.WAIT if job.step == Step.DOWNLOAD else Step(job.step)


def after_checkpoint(row: Row) -> Row:
    step = next_step(row)
    saved = sorted({*row.checkpoints, step})
    return row.after("step_finished", step=step.following, lease=True, checkpoints=saved)


def after_resubmission(row: Row) -> Row:
    again = row.begun_anew(drawing=row.drawing + 1)
    return again.after("resubmitted", resubmits=row.resubmits + 1, lease=True)


def after_retry(row: Row, *, delay: timedelta, redraw: bool) -> Row:
    if redraw or row.step == "upload":
        row = replace(row, backend=None)
    if redraw:
        row = row.begun_anew(drawing=row.drawing + 1, spoiled=row.drawing + 1)
    return row.back_in_the_queue("retry", attempt=row.attempt + 1, is_due=not delay)


def after_hand_back(row: Row, *, keep_backend: bool, refused: bool) -> Row:
    refused_by = [*row.refused_by, row.backend] if refused else row.refused_by
    if not keep_backend:
        row = row.begun_anew(backend=None)
    return row.back_in_the_queue("handed_back", is_due=True, refused_by=refused_by)


def after_success(row: Row) -> Row:
    saved = sorted({*row.checkpoints, "download"})
    done = row.after("step_finished", checkpoints=saved, pictures=row.pictures + 1)
    return done.ended("succeeded")


def succeed(job: Job) -> None:
    picture = Asset(owner_id=job.owner_id, job=job, size=1, content_type="image/png")
    Job.objects.succeed(job, [picture], {})


def retry(*, delay: timedelta = timedelta(), redraw: bool = False) -> Write:
    return Write(
        "queued",
        lambda job: Job.objects.retry(job, FAILURE, delay, redraw=redraw),
        lambda row: after_retry(row, delay=delay, redraw=redraw),
    )


def hand_back(*, keep_backend: bool = True, refused: bool = False) -> Write:
    return Write(
        "queued",
        lambda job: Job.objects.hand_back(job, "", keep_backend=keep_backend, refused=refused),
        lambda row: after_hand_back(row, keep_backend=keep_backend, refused=refused),
    )


WRITES: Final[dict[str, Write]] = {
    "checkpoint": Write(
        "running",
        lambda job: Job.objects.checkpoint(job, next_step(job), {}, TERMS.lease),
        after_checkpoint,
    ),
    "show_progress": Write(
        "running", lambda job: Job.objects.show_progress(job, {"value": 0.5}), lambda row: row
    ),
    "resubmit": Write(
        "running", lambda job: Job.objects.resubmit(job, TERMS.lease), after_resubmission
    ),
    "retry": retry(),
    "retry later": retry(delay=timedelta(hours=1)),
    "draw again": retry(redraw=True),
    "hand back": hand_back(),
    "hand on": hand_back(keep_backend=False),
    "refuse": hand_back(keep_backend=False, refused=True),
    "succeed": Write("succeeded", succeed, after_success),
    "fail": Write(
        "failed", lambda job: Job.objects.fail(job, FAILURE), lambda row: row.ended("failed")
    ),
    "finish_cancel": Write("canceled", Job.objects.finish_cancel, Row.canceled),
    "release": Write(
        "canceling",
        Job.objects.release,
        lambda row: replace(row, worker="", token=row.token + 1, lease=False),
    ),
}


# --- claims ---


def load(rows: Rows, backend: int) -> int:
    """Return how many prompts of ours may be there."""
    return sum(row.backend == backend and row.status in UNFINISHED for row in rows.values())


@dataclass(frozen=True)
class Claim:
    """A worker's question for a job. limits: of the backends that are up, how many prompts each may have."""

    drives: Sequence[int]
    unattended: Sequence[int]
    limits: Mapping[int, int]

    def answer(self, rows: dict[UUID, Row]) -> UUID | None:
        """Return the job to be taken. Those that come first and kill their workers are ended in `rows`."""
        while (pk := self._abandoned(rows)) and rows[pk].kills_workers:
            row = rows.pop(pk)
            if row.status == "running":
                rows[pk] = row.ended("failed")
            elif ended := row.canceled():
                rows[pk] = ended
        return pk or self._next_in_queue(rows)

    def places(self, row: Row, rows: Rows) -> Sequence[int | None]:
        """Return the backends on which this job may be taken."""
        if row.backend in (self.drives if row.is_held else self._up):
            return [row.backend]
        free = self._free(rows)
        return [pk for pk in free if pk not in row.refused_by] or free

    @staticmethod
    def taken(row: Row, worker: str, backend: int | None) -> Row:
        """Return the job in the hands of this worker."""
        if row.backend not in {None, backend}:
            row = row.begun_anew()
        return row.after(
            "claimed",
            status="running" if row.status == "queued" else row.status,
            worker=worker,
            token=row.token + 1,
            lease=True,
            lost_workers=row.lost_workers + (row.is_held and row.worker != ""),
            backend=backend,
        )

    @property
    def _up(self) -> list[int]:
        return [pk for pk in self.drives if pk in self.limits]

    def _free(self, rows: Rows) -> list[int]:
        return [pk for pk in self._up if load(rows, pk) < self.limits[pk]]

    def _abandoned(self, rows: Rows) -> UUID | None:
        within = {*self.drives, *(self.unattended if self._free(rows) else ())}
        found = [
            (row.lease_expires_at, pk)
            for pk, row in rows.items()
            if row.is_held and not row.lease and row.backend in within
        ]
        return min(found)[1] if found else None

    def _next_in_queue(self, rows: Rows) -> UUID | None:
        free = set(self._free(rows))
        within = {*self._up, *(self.unattended if free else ())}
        found = [
            (row.place, pk)
            for pk, row in rows.items()
            if row.status == "queued"
            and row.is_due
            and (row.backend in within or (row.backend is None and free - set(row.refused_by)))
        ]
        return min(found)[1] if found else None
