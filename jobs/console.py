"""The admin's front page: what an operator looks at first. Each table is one query, bounded by an index."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

from django.contrib import admin
from django.db.models import Avg, Count, F, Min, Q
from django.db.models.fields.json import KT
from django.db.models.functions import Now
from django.http import HttpRequest
from django.template.response import TemplateResponse

from jobs.models import Backend, Job
from jobs.status import HELD, JobStatus

WINDOWS: Final = {
    "5 minutes": timedelta(minutes=5),
    "hour": timedelta(hours=1),
    "day": timedelta(days=1),
}
FAILURES_SHOWN: Final = 10
WORKERS_SHOWN: Final = 50
BACKENDS_SHOWN: Final = 50


class Console(admin.AdminSite):
    site_header = "genflow"
    index_title = "Operations"
    index_template = "admin/console.html"
    enable_nav_sidebar = False  # the lists need the room

    def index(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> TemplateResponse:
        shown = overview() if request.user.has_perm("jobs.view_job") else {}
        if not request.user.has_perm("jobs.view_backend"):
            shown.pop("backends", None)
        return super().index(request, (extra_context or {}) | shown)


def overview() -> dict[str, Any]:
    return {
        "queue": queue(),
        "rates": rates(),
        "failures": failures(),
        "workers": workers(),
        "backends": backends(),
    }


def queue() -> dict[str, Any]:
    """Return how many jobs wait {due, later, held} and since when the oldest due one does."""
    due = Q(run_after__lte=Now())
    waiting = Job.objects.filter(status=JobStatus.QUEUED)
    return waiting.aggregate(
        due=Count("pk", filter=due),
        later=Count("pk", filter=~due),
        oldest=Min("run_after", filter=due),
    ) | {"held": Job.objects.filter(status__in=HELD).count()}


def rates() -> list[dict[str, Any]]:
    """Return for each window how the jobs in it ended, and the mean seconds from claim to picture."""
    succeeded = Q(status=JobStatus.SUCCEEDED)
    return [
        Job.objects.filter(completed_at__gt=Now() - window).aggregate(
            succeeded=Count("pk", filter=succeeded),
            failed=Count("pk", filter=Q(status=JobStatus.FAILED)),
            canceled=Count("pk", filter=Q(status=JobStatus.CANCELED)),
            took=Avg(F("completed_at") - F("started_at"), filter=succeeded),
        )
        | {"window": name}
        for name, window in WINDOWS.items()
    ]


def failures() -> Iterable[Any]:
    """Return the codes that the past day's jobs failed with, the most frequent first."""
    failed = Job.objects.filter(status=JobStatus.FAILED, completed_at__gt=Now() - WINDOWS["day"])
    by_code = failed.annotate(code=KT("error__code")).order_by().values("code")
    return by_code.annotate(jobs=Count("pk")).order_by("-jobs")[:FAILURES_SHOWN]


def workers() -> Iterable[Any]:
    """Return who holds jobs, how many, and when the first of the leases runs out. Idle workers hold none."""
    held = Job.objects.filter(status__in=HELD).exclude(worker_id="").order_by()
    by_worker = held.values("worker_id").annotate(
        jobs=Count("pk"), lease=Min("lease_expires_at"), overdue=Q(lease__lt=Now())
    )
    return by_worker.order_by("worker_id")[:WORKERS_SHOWN]


def backends() -> Iterable[Backend]:
    return Backend.objects.with_prompts().order_by("name")[:BACKENDS_SHOWN]
