"""The status words of a job (those of the Comfy API v2) and the one table of allowed transitions."""

from __future__ import annotations

from typing import Final

from django.db import models


class JobStatus(models.TextChoices):
    QUEUED = "queued"
    RUNNING = "running"
    CANCELING = "canceling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"
    EXPIRED = "expired"  # its time was over before a worker could take it

    @property
    def is_final(self) -> bool:
        return not TRANSITIONS[self]


class Step(models.TextChoices):
    """The pieces of a job's work, in their order."""

    UPLOAD = "upload"
    SUBMIT = "submit"
    WAIT = "wait"
    DOWNLOAD = "download"

    @property
    def following(self) -> Step:
        """The step after this one; the last has none (IndexError)."""
        steps = list(Step)
        return steps[steps.index(self) + 1]


TRANSITIONS: Final[dict[JobStatus, frozenset[JobStatus]]] = {
    JobStatus.QUEUED: frozenset(
        # CANCELING: handed back while its prompt is still with a backend, so a worker must end that first.
        {JobStatus.RUNNING, JobStatus.CANCELED, JobStatus.CANCELING, JobStatus.EXPIRED}
    ),
    # RUNNING again: a step was finished, or the lease ran out and another worker took over.
    JobStatus.RUNNING: frozenset(
        {
            JobStatus.RUNNING,
            JobStatus.QUEUED,
            JobStatus.SUCCEEDED,
            JobStatus.FAILED,
            JobStatus.CANCELING,
        }
    ),
    # Never back to QUEUED, never SUCCEEDED: whichever of cancel and finish commits first wins.
    JobStatus.CANCELING: frozenset({JobStatus.CANCELING, JobStatus.CANCELED, JobStatus.FAILED}),
    JobStatus.SUCCEEDED: frozenset(),
    JobStatus.FAILED: frozenset(),
    JobStatus.CANCELED: frozenset(),
    JobStatus.EXPIRED: frozenset(),
}

HELD: Final = (JobStatus.RUNNING, JobStatus.CANCELING)
UNFINISHED: Final = (JobStatus.QUEUED, *HELD)
FINAL: Final = tuple(status for status in JobStatus if status.is_final)


def sources_of(to: JobStatus) -> list[JobStatus]:
    """Return the statuses a job may come from on its way to `to`."""
    return [status for status, targets in TRANSITIONS.items() if to in targets]
