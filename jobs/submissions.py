"""The last steps of every submission, whatever is to be drawn."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from django.conf import settings

from jobs.limits import limits_of
from jobs.models import Asset, Job, Once


def submit(job: Job, inputs: Iterable[Asset], once: Once | None = None) -> Job:
    """Queue a job, or raise NoRoom. once: of the request, if it may come again; see `JobQuerySet.submit`."""
    limits = limits_of(job.owner)
    Asset.objects.check_room(job.owner_id, limits.storage_bytes)
    job.max_attempts = settings.GENFLOW_MAX_ATTEMPTS
    return Job.objects.submit(
        job,
        inputs=inputs,
        queue_limit=settings.GENFLOW_QUEUE_LIMIT,
        queue_limit_per_owner=limits.queued_jobs,
        retention=timedelta(days=settings.GENFLOW_JOB_RETENTION_DAYS),
        once=once,
    )
