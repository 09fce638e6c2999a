"""The models and every write to a job row.

A job is held by a lease and a fencing token: `claim` raises the token, and each later write is one UPDATE
guarded by the token and the allowed source statuses. A guard that matches no row raises LeaseLost (someone
else holds the job) or CancelRequested (it is still ours, but the user wants it to end).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Self

import uuid_utils.compat
from blake3 import blake3
from django.conf import settings
from django.core.files.base import ContentFile, File
from django.core.files.storage import default_storage
from django.core.validators import MinValueValidator
from django.db import connection, models, transaction
from django.db.models import Case, Exists, F, Max, Min, OuterRef, Q, Sum, Value, When
from django.db.models.functions import Coalesce, Least, Now
from django.utils import timezone
from knox.models import AbstractAuthToken

from jobs.status import FINAL, HELD, UNFINISHED, JobStatus, Step, sources_of

logger = logging.getLogger(__name__)

# What wakes workers, and what tells of a job (by its id) that something about it has changed.
NOTIFY_CHANNEL = "genflow"
NEWS_CHANNEL = "genflow_news"
KEY_CHANNEL = "genflow_keys"
# A backend silent for longer is not waited for. A restart with many nodes takes minutes.
HEARD_OF_LATELY = timedelta(minutes=10)
# What `expired` says can be read for so long.
EXPIRED_KEPT_FOR = timedelta(days=1)
# One number for all submissions: the key of the advisory lock that makes the queue limits exact.
SUBMISSION_LOCK = 0x67656E66
PRIORITY_MAX = 100
PRIORITY_STEP = 10  # what an operator raises it by at a time
KEY_LIFETIME = timedelta(hours=24)
PURGE_BATCH = 100  # jobs
# The first of two numbers, the second is an owner's: the key of `lock_assets`.
ASSETS_LOCK = 0x67656E68
# Bytes are stored before the row that names them; after this none will come any more.
ORPHAN_AGE = timedelta(days=1)


class LeaseLost(Exception):
    """The job is not ours any more; nothing was written."""

    def __init__(self, job: Job) -> None:
        super().__init__(f"job {job.pk}: fencing token {job.fencing_token} is stale")


class CancelRequested(Exception):
    """The job is ours, but its owner wants it to end; nothing was written."""


class NoRoom(Exception):
    """What the owner asks for is more than fits: an HTTP status, a code, and a sentence that says what to do."""

    status: int
    code: str
    retry_after: int | None = None  # seconds; None: waiting does not help


class AssetGone(Exception):
    """An input of a new job was deleted in the meantime; nothing was written."""


class QueueFull(NoRoom):
    """No room for another job. `code` says whose limit it was."""

    status = 429
    retry_after: int

    def __init__(self, code: str, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class StorageFull(NoRoom):
    status = 422
    code = "storage_full"


@dataclass(frozen=True)
class Once:
    """What tells that a request came before: it makes one thing, however often it comes."""

    owner_id: int
    key: str
    body_hash: str
    # Whether to wait for the end of another like it, or to raise KeyInFlight.
    patient: bool = False


class AlreadyMade(Exception):
    """The same request came before. `pk`: of what it made then."""

    def __init__(self, pk: uuid.UUID) -> None:
        super().__init__(f"{pk} was made before")
        self.pk = pk


class KeyReused(Exception):
    """Another request came with this key before."""


class KeyInFlight(Exception):
    """A request with this key is being worked on."""


@dataclass(frozen=True)
class Failure:
    """Why a job ended or will be tried again: a sentence for its owner, all the rest for the operator."""

    code: str
    message: str
    node_id: str | None = None
    class_type: str | None = None
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": self.message,
            "node_id": self.node_id,
            "class_type": self.class_type,
        }


WORKER_LOST = Failure(
    "worker_lost",
    "The workers drawing this picture stopped unexpectedly too many times. Please send it again.",
)


def new_id() -> uuid.UUID:
    """Return a UUIDv7: in the order of creation, and a prompt id that ComfyUI takes."""
    return uuid_utils.compat.uuid7()


def first_id_of(time: datetime) -> uuid.UUID:
    """Return the least id that a row made at this time or later can have."""
    return uuid.UUID(int=(int(time.timestamp() * 1000) << 80) | (7 << 76) | (2 << 62))


def notify(message: str, channel: str = NOTIFY_CHANNEL) -> None:
    """Tell whoever listens when the current transaction commits. They poll as well: never needed, only faster."""
    if settings.GENFLOW_NOTIFY:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [channel, message])


def lock_assets(*owner_ids: int) -> None:
    """Keep others from minting, using and deleting assets of these owners until the transaction ends.

    Which asset is used and which bytes are shared is known to whoever has looked after this. Of the locks that
    are waited for it comes after those on a job's row and a key, and before the submission's.
    """
    with connection.cursor() as cursor:
        for owner_id in sorted(owner_ids):
            cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", [ASSETS_LOCK, owner_id])


class BackendQuerySet(models.QuerySet["Backend"]):
    def register(self, url: str) -> Backend:
        """Return the backend of this address, new or known."""
        name = url.split("://", 1)[-1].rsplit("@", 1)[-1].rstrip("/")
        return self.get_or_create(url=url, defaults={"name": name})[0]

    def unattended(self, since: timedelta) -> Self:
        """Those that no worker has heard of for so long: their jobs may move elsewhere."""
        return self.filter(Q(last_seen_at=None) | Q(last_seen_at__lt=Now() - since))

    def usable(self) -> Self:
        return self.filter(status=Backend.Status.UP)

    def with_prompts(self) -> BackendQuerySet:
        """Count the `prompts` of ours on each. A queued job with a backend counts: its prompt may be there."""
        on_it = Job.objects.unfinished().filter(backend=OuterRef("pk")).order_by()
        count = on_it.values("backend").annotate(n=models.Count("pk")).values("n")
        return self.annotate(prompts=Coalesce(models.Subquery(count), 0))

    def rest(self, reason: str, pause: timedelta = timedelta()) -> int:
        """Give those in use no more jobs for so long, and until they answer a probe. Return how many."""
        return self.usable().update(
            status=Backend.Status.RESTING,
            reason=reason[:2000],
            failures=F("failures") + 1,
            rest_until=Now() + pause,
        )

    def drain(self) -> int:
        """See the prompts on them to their end, and give them no more, until somebody says so."""
        return self.update(status=Backend.Status.DISABLED)

    def use_again(self) -> int:
        return self.update(status=Backend.Status.UP, reason="", failures=0, rest_until=None)

    def begin_reading(self, backend: Backend, every: timedelta) -> bool:
        """Note that the backend's catalog is read now. Return False if that was done lately."""
        due = Q(catalog_read_at=None) | Q(catalog_read_at__lt=Now() - every)
        return self.filter(due, pk=backend.pk).update(catalog_read_at=Now()) == 1

    def heard_of_lately(self) -> Self:
        """Those that may draw, now or after a rest."""
        heard_of = self.filter(last_seen_at__gte=Now() - HEARD_OF_LATELY)
        return heard_of.exclude(status=Backend.Status.DISABLED)


class Backend(models.Model):
    """One ComfyUI server."""

    class Status(models.TextChoices):
        UP = "up"
        RESTING = "resting", "resting: it does not answer"
        DISABLED = "disabled", "disabled by an operator"

    name = models.CharField(max_length=200)
    url = models.CharField(max_length=500, unique=True)
    status = models.CharField(max_length=10, choices=Status, default=Status.UP)
    reason = models.TextField(blank=True, help_text="Why it rests, in the words of the last error.")
    failures = models.PositiveSmallIntegerField(
        default=0, help_text="Rests since its last good run; above 0 it gets one job at a time."
    )
    rest_until = models.DateTimeField(null=True, blank=True)
    prompt_limit = models.PositiveSmallIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        help_text="Prompts of ours on it at once; empty: GENFLOW_PROMPTS_PER_BACKEND.",
    )
    last_seen_at = models.DateTimeField(null=True, blank=True)
    version = models.CharField(max_length=50, blank=True)
    catalog_read_at = models.DateTimeField(null=True, blank=True)
    catalog_digest = models.CharField(
        max_length=64, blank=True, help_text="Of its node classes; empty: they are not known."
    )

    objects = BackendQuerySet.as_manager()

    class Meta:
        ordering: ClassVar = ["pk"]

    def __str__(self) -> str:
        return self.name

    def places(self, limit: int) -> int:
        """Return how many prompts of ours may be on it; `limit` if the row does not say."""
        if self.status != Backend.Status.UP:
            return 0  # the prompts that are there are seen to their end
        return 1 if self.failures else self.prompt_limit or limit

    def seen(self, version: str, *, came_up: bool = False) -> None:
        """Note that it answered: a backend that has rested long enough gets jobs again, at first one.

        came_up: it did not answer before. It may have other models now.
        """
        ours = Backend.objects.filter(pk=self.pk)
        version = version[:50]
        (ours if came_up else ours.exclude(version=version)).update(catalog_read_at=None)
        ours.update(last_seen_at=Now(), version=version)
        ours.filter(status=Backend.Status.RESTING, rest_until__lte=Now()).update(
            status=Backend.Status.UP
        )

    def rest(self, reason: str, pause: timedelta = timedelta()) -> None:
        """Give it no more jobs for so long, and until it answers a probe."""
        Backend.objects.filter(pk=self.pk).rest(reason, pause)
        self.refresh_from_db(fields=["failures"])

    def recovered(self) -> None:
        """Note that a run came to an end on it: it is trusted with its full share again."""
        Backend.objects.filter(pk=self.pk, failures__gt=0).usable().update(failures=0, reason="")


class NodeClassQuerySet(models.QuerySet["NodeClass"]):
    def replace(self, backend: Backend, rows: Sequence[NodeClass], digest: str) -> None:
        """Make these the backend's classes, if they differ from those that are there."""
        changed = Backend.objects.filter(pk=backend.pk).exclude(catalog_digest=digest)
        with transaction.atomic():
            if changed.update(catalog_digest=digest):
                self.filter(backend=backend).delete()
                self.bulk_create(rows, batch_size=500)


class NodeClass(models.Model):
    """A node class that a backend has, with what a graph can be checked by (`comfy.catalog.NodeInfo`)."""

    backend = models.ForeignKey(
        Backend, on_delete=models.CASCADE, related_name="node_classes", db_index=False
    )
    name = models.CharField(max_length=200)
    inputs = models.JSONField()
    is_output = models.BooleanField()

    objects = NodeClassQuerySet.as_manager()

    class Meta:
        verbose_name_plural = "node classes"
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["backend", "name"], name="node_class_once_per_backend")
        ]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Terms:
    """The rules of a claim."""

    lease: timedelta
    prompts_per_backend: int
    max_lost_workers: int


class JobQuerySet(models.QuerySet["Job"]):
    # --- sets ---

    def visible_to(self, user: Any) -> Self:
        """What this user may know of: own jobs that were not deleted."""
        return self.filter(owner=user, deleted_at=None)

    def unfinished(self) -> Self:
        return self.filter(status__in=UNFINISHED)

    def finished(self) -> Self:
        return self.filter(status__in=FINAL)

    def places_in_queue(self, ids: Collection[uuid.UUID]) -> dict[uuid.UUID, int]:
        """Return which place (1: the next) those of these jobs have that are queued, in one pass over the queue."""
        with connection.cursor() as cursor:
            cursor.execute(
                f"""SELECT id, place FROM (
                    SELECT id, row_number() OVER (ORDER BY priority DESC, turn, id) AS place
                    FROM {self.model._meta.db_table} WHERE status = 'queued'
                ) AS queue WHERE id = ANY(%s)""",  # noqa: S608 (a table's name of our own)
                [list(ids)],
            )
            return dict(cursor.fetchall())

    def with_outputs(self) -> Self:
        """Load the outputs too, and their owner, by whom links to them are signed."""
        outputs = Asset.objects.select_related("owner")
        return self.prefetch_related(models.Prefetch("outputs", outputs))

    def under_way_on(self, backend: Backend) -> list[str]:
        """Return the prompt ids of the jobs that a worker holds on this backend."""
        held = self.filter(backend=backend, status__in=HELD)
        return [str(pk) for pk in held.values_list("pk", flat=True)]

    # --- submission ---

    def submit(
        self,
        job: Job,
        *,
        inputs: Iterable[Asset],
        queue_limit: int,
        queue_limit_per_owner: int,
        retention: timedelta,
        once: Once | None = None,
    ) -> Job:
        """Queue a new job and wake the workers, or raise QueueFull or AssetGone and store nothing.

        once: of the request that asks for it. Raises what `IdempotencyKey.objects.spend` does.
        """
        wanted = {asset.pk for asset in inputs}
        with transaction.atomic():
            if once is not None:
                IdempotencyKey.objects.spend(once, job.pk)
            lock_assets(job.owner_id)
            found = list(Asset.objects.filter(pk__in=wanted))
            if len(found) < len(wanted):
                raise AssetGone
            self._check_room(job.owner_id, queue_limit, queue_limit_per_owner)
            job.turn = self._next_turn(job)
            job.save(force_insert=True)
            job.inputs.set(found)
            self.filter(pk=job.pk).update(expires_at=Now() + retention)
            job.record(JobEvent.Kind.SUBMITTED)
            notify("queued")
        job.refresh_from_db()
        return job

    def _check_room(self, owner_id: int, limit: int, limit_per_owner: int) -> None:
        # Counting and inserting must not interleave with another submission, or both find the last place.
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [SUBMISSION_LOCK])
        queued = self.filter(status=JobStatus.QUEUED)
        if queued.count() >= limit:
            raise QueueFull(
                "queue_full",
                f"The queue is full ({limit} jobs are waiting). Try again later.",
                self.seconds_per_job(),
            )
        if queued.filter(owner_id=owner_id).count() >= limit_per_owner:
            raise QueueFull(
                "owner_queue_full",
                f"You have {limit_per_owner} jobs waiting, which is the most allowed."
                " Try again when some are done.",
                self.seconds_per_job(),
            )

    def seconds_canceling(self, job: Job) -> float:
        """Return how long ago a cancel was asked for, by the database's clock."""
        waited = (
            self.filter(pk=job.pk).values_list(Now() - F("cancel_requested_at"), flat=True).first()
        )
        return waited.total_seconds() if waited is not None else 0.0

    def seconds_per_job(self) -> int:
        """Return how long one place in the queue takes to get free: 1 to 300, or 30 if nothing tells."""
        return max(1, min(300, round(self.measured_seconds_per_job() or 30)))

    def measured_seconds_per_job(self) -> float | None:
        """Return after how long one job ended after another in the last five minutes; None if none ended.

        Counted from when the first of them was begun: before that nobody may have asked for any.
        """
        done = self.filter(completed_at__gt=Now() - timedelta(minutes=5)).aggregate(
            jobs=models.Count("pk"), began=Min("started_at"), ended=Max("completed_at")
        )
        if done["began"] is None:
            return None
        window = min(done["ended"] - done["began"], timedelta(minutes=5))
        return float(window.total_seconds() / done["jobs"])

    def _next_turn(self, job: Job) -> int:
        """Return the job's turn: after those of its owner that wait, and not before the turn being served.

        So owners take turns in the queue's order (priority, turn, id) with no counting in the claim. What has
        been drawn or canceled counts for nothing: who comes back is as good as who comes for the first time.
        """
        queued = self.filter(status=JobStatus.QUEUED, priority=job.priority)
        last = _first_turn(queued.filter(owner_id=job.owner_id).order_by("-turn"))
        return max(0 if last is None else last + 1, self._turn_served(queued, job.priority))

    def _turn_served(self, queued: Self, priority: int) -> int:
        """Return the turn that a newcomer of this priority shares."""
        # Not the first of the queue: what comes back to it keeps its old turn, and may wait there for an hour.
        looks = (
            queued.filter(started_at=None).order_by("turn"),
            self.filter(status__in=HELD, priority=priority).order_by("-turn"),
            queued.order_by("turn"),
        )
        turns = (_first_turn(jobs) for jobs in looks)
        return next((turn for turn in turns if turn is not None), 0)

    # --- claiming: the only door into RUNNING ---

    def claim(
        self,
        worker_id: str,
        backends: Sequence[int],
        terms: Terms,
        unattended: Sequence[int] = (),
        known: Sequence[int] = (),
    ) -> Job | None:
        """Take a job whose holder fell silent or, failing that, the next in the queue. None: nothing to do.

        backends: ids of those this worker drives; unattended: ids of those that no worker hears of any more;
        known: ids of those that were heard of lately. A job stays with the backend that may hold its prompt;
        only from an unattended one it moves elsewhere.
        """
        while True:
            with transaction.atomic():
                usable, free = self._places(backends, terms.prompts_per_backend)
                movable = unattended if free else ()
                job = self._abandoned([*backends, *movable]) or self._next_in_queue(
                    [*usable, *movable], free, known
                )
                if job is None:
                    return None
                if job.is_abandoned and job.lost_workers >= terms.max_lost_workers:
                    self._give_up(job)
                    continue
                if job.backend_id not in (backends if job.status in HELD else usable):
                    self._place(job, free)
                return self._take(job, worker_id, terms.lease)

    def _places(self, backends: Sequence[int], limit: int) -> tuple[Sequence[int], Sequence[int]]:
        """Lock those of these backends that do not rest; return them, and those with a place, least busy first."""
        # Two statements: the count must not be older than the lock.
        usable = {
            backend.pk: backend.places(limit)
            for backend in Backend.objects.exclude(status=Backend.Status.RESTING)
            .filter(pk__in=backends)
            .order_by("pk")  # one order for all, so that no two claims deadlock
            .select_for_update(no_key=True)
        }
        # A queued job with a backend counts: its prompt may be there.
        busy = dict(
            self.unfinished()
            .filter(backend__in=usable)
            .order_by()
            .values_list("backend")
            .annotate(models.Count("pk"))
        )
        free = [pk for pk in usable if busy.get(pk, 0) < usable[pk]]
        return list(usable), sorted(free, key=lambda pk: busy.get(pk, 0))

    @staticmethod
    def _place(job: Job, free: Sequence[int]) -> None:
        """Give a job that has no backend, or must leave it, a free one that has not refused it."""
        if job.backend_id is not None:
            job.forget_drawing()
            job.step = Step.UPLOAD
        job.backend_id = next((pk for pk in free if pk not in job.refused_by), free[0])

    def _abandoned(self, backends: Sequence[int]) -> Job | None:
        return (
            self.filter(status__in=HELD, lease_expires_at__lt=Now(), backend__in=backends)
            .order_by("lease_expires_at")
            .select_for_update(skip_locked=True, no_key=True)
            .first()
        )

    def _next_in_queue(
        self, placed: Sequence[int], free: Sequence[int], known: Sequence[int]
    ) -> Job | None:
        """Return the first that is due: on one of the `placed` backends, or new to one of the `free` ones.

        Refused by every known one it waits for nothing any more: asked once again, it fails.
        """
        startable = Q(backend__in=placed)
        if free:
            new = ~Q(refused_by__contains=free)
            startable |= Q(backend=None) & (new | Q(refused_by__contains=known) if known else new)
        in_time = Q(expires_at=None) | Q(expires_at__gt=Now())  # the others `expire`
        return (
            self.filter(startable, in_time, status=JobStatus.QUEUED, run_after__lte=Now())
            .order_by("-priority", "turn", "pk")
            .select_for_update(skip_locked=True, no_key=True)
            .first()
        )

    def _take(self, job: Job, worker_id: str, lease: timedelta) -> Job:
        """Make the locked job ours."""
        lost = {"lost_worker": job.worker_id} if job.is_abandoned else {}
        if job.status == JobStatus.QUEUED:
            job.status = JobStatus.RUNNING
        job.fencing_token += 1
        job.worker_id = worker_id
        job.lost_workers += len(lost)
        self.filter(pk=job.pk).update(
            status=job.status,
            step=job.step,
            fencing_token=job.fencing_token,
            worker_id=worker_id,
            lost_workers=job.lost_workers,
            backend_id=job.backend_id,
            lease_expires_at=Now() + lease,
            started_at=Coalesce("started_at", Now()),
        )
        assert job.backend is not None
        job.record(JobEvent.Kind.CLAIMED, backend=job.backend.name, **lost)
        return job

    def _give_up(self, job: Job) -> None:
        """End a locked job that has outlived too many workers."""
        if job.status == JobStatus.CANCELING:
            self.finish_cancel(job)
        else:
            self.fail(job, WORKER_LOST)

    # --- what a holder writes ---

    def _write(self, job: Job, to: JobStatus, **values: Any) -> None:
        """Write to a job we hold on its way to `to`, or raise LeaseLost or CancelRequested."""
        held = [status for status in sources_of(to) if status in HELD]
        ours = self.filter(pk=job.pk, fencing_token=job.fencing_token)
        if ours.filter(status__in=held).update(status=to, **values) == 1:
            job.status = to
        elif ours.filter(status=JobStatus.CANCELING).exists():
            raise CancelRequested
        else:
            raise LeaseLost(job)

    def renew(self, held: Mapping[uuid.UUID, int], lease: timedelta) -> dict[uuid.UUID, JobStatus]:
        """Renew the leases of these jobs (id: fencing token) and return the status of those still ours."""
        with connection.cursor() as cursor:
            cursor.execute(
                f"""UPDATE {self.model._meta.db_table} AS job SET lease_expires_at = now() + make_interval(secs => %s)
                FROM unnest(%s::uuid[], %s::bigint[]) AS held (id, token)
                WHERE job.id = held.id AND job.fencing_token = held.token
                    AND job.status IN ('running', 'canceling')
                RETURNING job.id, job.status""",  # noqa: S608 (a table's name of our own)
                [lease.total_seconds(), list(held), list(held.values())],
            )
            return {pk: JobStatus(status) for pk, status in cursor.fetchall()}

    def checkpoint(self, job: Job, step: Step, result: dict[str, Any], lease: timedelta) -> None:
        """Save a finished step's result, renew the lease and go on to the next step."""
        then = step.following
        with transaction.atomic():
            self._write(job, JobStatus.RUNNING, step=then, lease_expires_at=Now() + lease)
            self._save_checkpoint(job, step, result)
        job.step = then

    def _save_checkpoint(self, job: Job, step: Step, result: dict[str, Any]) -> None:
        # One already there means the step is done.
        Checkpoint.objects.bulk_create(
            [Checkpoint(job=job, step=step, result=result, fencing_token=job.fencing_token)],
            ignore_conflicts=True,
        )
        how = {"how": result["how"]} if "how" in result else {}
        job.record(JobEvent.Kind.STEP_FINISHED, step=step, **how)

    def show_progress(
        self, job: Job, progress: dict[str, Any] | None, preview: Preview | None = None
    ) -> None:
        """Save how far a run is and, if there is a new one, its preview in place of the last."""
        with transaction.atomic():
            self._write(job, JobStatus.RUNNING, progress=progress)
            if preview is not None:
                preview.replace_last()
            notify(str(job.pk), NEWS_CHANNEL)

    def succeed(
        self,
        job: Job,
        outputs: Sequence[Asset],
        result: dict[str, Any],
        progress: dict[str, Any] | None = None,
    ) -> None:
        """Finish: output rows, the last checkpoint and `succeeded` together, or none of them."""
        with transaction.atomic():
            self._end(job, JobStatus.SUCCEEDED, error=None, error_detail="", progress=progress)
            Asset.objects.bulk_create(outputs)
            self._save_checkpoint(job, Step.DOWNLOAD, result)
            job.record(JobEvent.Kind.SUCCEEDED)

    def fail(self, job: Job, failure: Failure) -> None:
        with transaction.atomic():
            self._end(job, JobStatus.FAILED, error=failure.as_json(), error_detail=failure.detail)
            job.record(JobEvent.Kind.FAILED, code=failure.code)

    def finish_cancel(self, job: Job, **note: Any) -> None:
        """Write `canceled`; a deleted job is gone then. note: what the diary should say beside it."""
        with transaction.atomic():
            self._end(job, JobStatus.CANCELED)
            job.record(JobEvent.Kind.CANCELED, **note)
        self.filter(pk=job.pk).purge_deleted()

    def _end(self, job: Job, to: JobStatus, **values: Any) -> None:
        self._write(job, to, step="", lease_expires_at=None, completed_at=Now(), **values)
        Preview.drop(job)

    def retry(self, job: Job, failure: Failure, delay: timedelta, *, redraw: bool) -> None:
        """Send a job back for another attempt, after `delay`.

        redraw: what the backend drew, if anything, is of no use: draw anew, anywhere, under a new prefix.
        """
        afresh: dict[str, Any] = {}
        if redraw or job.step == Step.UPLOAD:
            # Nothing of use is there: it keeps no place on the backend while it waits.
            afresh["backend"] = None
        if redraw:
            afresh["step"] = Step.UPLOAD
            afresh["drawing"] = afresh["spoiled_drawings"] = job.drawing + 1
        with transaction.atomic():
            self._let_go(
                job,
                JobStatus.QUEUED,
                lease_expires_at=None,
                run_after=Now() + delay,
                attempt=F("attempt") + 1,
                error=failure.as_json(),
                error_detail=failure.detail,
                **afresh,
            )
            if redraw:
                job.forget_drawing()
            job.record(
                JobEvent.Kind.RETRY, code=failure.code, seconds=round(delay.total_seconds(), 3)
            )

    def hand_back(
        self,
        job: Job,
        reason: str,
        *,
        keep_backend: bool = True,
        refused: bool = False,
        resubmit: bool = False,
    ) -> None:
        """Put a job back at its last checkpoint without charge.

        keep_backend: its prompt may be there, so whoever goes on must look there first. refused: its backend
        lacks something that the job needs and is not to be asked again. resubmit: count it as one of those.
        """
        moved: dict[str, Any] = {} if keep_backend else {"backend": None, "step": Step.UPLOAD}
        if resubmit:
            moved["resubmits"] = F("resubmits") + 1
        if refused:
            moved["refused_by"] = [*job.refused_by, job.backend_id]
        with transaction.atomic():
            self._let_go(job, JobStatus.QUEUED, lease_expires_at=None, run_after=Now(), **moved)
            if not keep_backend:
                job.forget_drawing()
            job.record(JobEvent.Kind.HANDED_BACK, reason=reason)
            notify("queued")

    def release(self, job: Job) -> None:
        """Let go of a canceling job on a polite stop: the next worker ends it, at once and without charge."""
        self._let_go(job, JobStatus.CANCELING, lease_expires_at=Now())

    def _let_go(self, job: Job, to: JobStatus, **values: Any) -> None:
        # The token goes with the job: else a last renewal could keep one that is canceled from its next worker.
        self._write(job, to, worker_id="", fencing_token=F("fencing_token") + 1, **values)

    def resubmit(self, job: Job, lease: timedelta) -> None:
        """Go back to the upload: the backend has lost the prompt. The job stays ours."""
        again: dict[str, Any] = {
            "step": Step.UPLOAD,
            "resubmits": job.resubmits + 1,
            "drawing": job.drawing + 1,
        }
        with transaction.atomic():
            self._write(job, JobStatus.RUNNING, lease_expires_at=Now() + lease, **again)
            job.forget_drawing()
            job.record(JobEvent.Kind.RESUBMITTED)
        vars(job).update(again)

    # --- what an owner or an operator asks for ---

    def cancel(self, job_id: uuid.UUID, by: str) -> bool:
        """Ask for a job to be canceled. Return False if it had already ended or been asked to."""
        # One UPDATE: between two, the job could be handed back and match neither. A running job keeps its
        # token: only its holder may tell ComfyUI, then write `canceled`. A queued one whose prompt may be
        # with a backend goes to the next worker, as if its lease had run out.
        alone = Q(status=JobStatus.QUEUED, backend=None)
        with transaction.atomic():
            asked = self.filter(pk=job_id, status__in=[JobStatus.QUEUED, JobStatus.RUNNING]).update(
                status=Case(
                    When(alone, then=Value(JobStatus.CANCELED)), default=Value(JobStatus.CANCELING)
                ),
                completed_at=Case(When(alone, then=Now()), default=None),
                lease_expires_at=Case(
                    When(status=JobStatus.RUNNING, then=F("lease_expires_at")),
                    When(alone, then=None),
                    default=Now(),
                ),
                cancel_requested_at=Now(),
            )
            if asked:
                JobEvent.objects.create(
                    job_id=job_id, kind=JobEvent.Kind.CANCEL_ASKED, facts={"by": by}
                )
                notify("cancel")
                notify(str(job_id), NEWS_CHANNEL)
        return asked == 1

    def delete_for_owner(self, job_id: uuid.UUID) -> None:
        """Remove a job, its photo and its pictures: at once if it has ended, else as soon as it has."""
        with transaction.atomic():
            self.filter(pk=job_id).update(deleted_at=Now())
            self.cancel(job_id, by="owner")
        self.filter(pk=job_id).purge_deleted()

    def delete_all_for_owner(self, owner: Any) -> None:
        """Remove all jobs, photos and pictures of an owner. They are hidden at once; the sweep ends what takes longer."""
        with transaction.atomic():
            jobs = self.filter(owner=owner, deleted_at=None)
            under_way = list(jobs.unfinished().values_list("pk", flat=True))
            jobs.update(deleted_at=Now())
            for job_id in under_way:
                self.cancel(job_id, by="owner")
            lock_assets(owner.pk)
            Asset.objects.filter(owner=owner).uploads().update(expires_at=Now())
        self.filter(owner=owner).purge_deleted()
        Asset.objects.filter(owner=owner, job=None, used_by=None).delete_with_files()

    def run_now(self) -> int:
        """Let jobs that wait for their next attempt run at once. Return how many."""
        with transaction.atomic():
            count = self.filter(status=JobStatus.QUEUED, run_after__gt=Now()).update(
                run_after=Now()
            )
            notify("queued")
        return count

    def rewind(self, job_id: uuid.UUID, step: Step, by: str) -> bool:
        """Let a waiting job go on from an earlier step, at once. Return False if it does not wait, or is not so far.

        From the upload it is drawn anew, anywhere; from a later one on the backend that it is with.
        """
        afresh: dict[str, Any] = {}
        if step == Step.UPLOAD:
            next_drawing = F("drawing") + 1
            afresh = {"backend": None, "drawing": next_drawing, "spoiled_drawings": next_drawing}
        steps = list(Step)
        later = steps[steps.index(step) :]
        with transaction.atomic():
            waiting = self.filter(pk=job_id, status=JobStatus.QUEUED, step__in=later)
            if waiting.update(step=step, run_after=Now(), **afresh) != 1:
                return False
            Checkpoint.objects.filter(job=job_id, step__in=later).delete()
            self._record_for_operator(job_id, by, did=f"rewound to {step}")
            notify("queued")
        return True

    def raise_priority(self, job_id: uuid.UUID, by: str) -> bool:
        """Move a job that has not ended up by PRIORITY_STEP. Return False if it has ended or is at the top."""
        with transaction.atomic():
            lower = self.unfinished().filter(pk=job_id, priority__lt=PRIORITY_MAX)
            raised = Least(F("priority") + PRIORITY_STEP, PRIORITY_MAX)
            if lower.update(priority=raised) != 1:
                return False
            self._record_for_operator(job_id, by, did="raised its priority")
        return True

    @staticmethod
    def _record_for_operator(job_id: uuid.UUID, by: str, **facts: Any) -> None:
        JobEvent.objects.create(
            job_id=job_id, kind=JobEvent.Kind.OPERATOR, facts={"by": by, **facts}
        )

    # --- the end of a row ---

    def expire(self, limit: int) -> int:
        """End up to so many jobs that no worker took in their time. Return how many.

        They are kept for a while, for their owners to see what became of them.
        """
        over = self.filter(status=JobStatus.QUEUED, expires_at__lt=Now())
        with transaction.atomic():
            jobs = list(over.select_for_update(skip_locked=True, no_key=True)[:limit])
            self.filter(pk__in=[job.pk for job in jobs]).update(
                status=JobStatus.EXPIRED,
                step="",
                completed_at=Now(),
                expires_at=Now() + EXPIRED_KEPT_FOR,
            )
            for job in jobs:
                Preview.drop(job)
                job.record(JobEvent.Kind.EXPIRED)
        return len(jobs)

    def purge_deleted(self) -> int:
        """Purge what its owners deleted, so many at once. Return how many."""
        return self.filter(status__in=FINAL).exclude(deleted_at=None)[:PURGE_BATCH].purge()

    def purge(self) -> int:
        """Purge these jobs. Return how many were."""
        return sum(job.purge() for job in self)


def _first_turn(jobs: JobQuerySet) -> int | None:
    return jobs.values_list("turn", flat=True).first()


class Job(models.Model):
    """One request for pictures."""

    class Kind(models.TextChoices):
        PORTRAIT = "portrait"
        WORKFLOW = "workflow"

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="jobs", db_index=False
    )
    kind = models.CharField(max_length=10, choices=Kind, default=Kind.PORTRAIT)
    params = models.JSONField(default=dict)
    inputs: models.ManyToManyField[Asset, Any] = models.ManyToManyField(
        "Asset", related_name="used_by"
    )
    # Built once, so that a resumed job sends the same after an upgrade. Input files are asset references,
    # which the upload's names replace on the wire.
    graph = models.JSONField(default=dict)
    metadata = models.JSONField(default=dict, blank=True)
    # What was doubtful about the photo, as [{"code", "message"}]; they stop nothing.
    warnings = models.JSONField(default=list, blank=True)

    status = models.CharField(max_length=10, choices=JobStatus, default=JobStatus.QUEUED)
    step = models.CharField(max_length=10, choices=Step, default=Step.UPLOAD, blank=True)
    priority = models.SmallIntegerField(default=0)
    turn = models.BigIntegerField(default=0)
    run_after = models.DateTimeField(db_default=Now())

    # The number of the try under way; only the job's own temporary errors raise it.
    attempt = models.PositiveSmallIntegerField(default=1)
    max_attempts = models.PositiveSmallIntegerField()
    lost_workers = models.PositiveSmallIntegerField(default=0)
    resubmits = models.PositiveSmallIntegerField(default=0)
    # The drawing under way names the output files; those below `spoiled_drawings` are not to be used.
    drawing = models.PositiveSmallIntegerField(default=0)
    spoiled_drawings = models.PositiveSmallIntegerField(default=0)

    worker_id = models.CharField(max_length=200, blank=True)
    fencing_token = models.BigIntegerField(default=0)
    lease_expires_at = models.DateTimeField(null=True, blank=True)
    # Set while a prompt of this job may be there.
    backend = models.ForeignKey(
        Backend,
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="jobs",
        db_index=False,
    )

    # Ids of the backends that lack a model or a node of its graph.
    refused_by = models.JSONField(default=list, blank=True)

    progress = models.JSONField(null=True, blank=True)
    error = models.JSONField(null=True, blank=True)
    error_detail = models.TextField(blank=True)

    created_at = models.DateTimeField(db_default=Now())
    started_at = models.DateTimeField(null=True, blank=True)
    completed_at = models.DateTimeField(null=True, blank=True)
    cancel_requested_at = models.DateTimeField(null=True, blank=True)
    deleted_at = models.DateTimeField(null=True, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True)

    objects = JobQuerySet.as_manager()

    class Meta:
        ordering: ClassVar = ["-id"]
        constraints: ClassVar = [
            models.CheckConstraint(
                name="job_held_has_lease",
                condition=~Q(status__in=HELD)
                | Q(lease_expires_at__isnull=False, fencing_token__gt=0),
            ),
            models.CheckConstraint(
                name="job_final_has_end",
                condition=Q(status__in=FINAL, completed_at__isnull=False)
                | (~Q(status__in=FINAL) & Q(completed_at__isnull=True)),
            ),
            models.CheckConstraint(
                name="job_status_known", condition=Q(status__in=JobStatus.values)
            ),
        ]
        indexes: ClassVar = [
            models.Index(  # the claim of the next in the queue, and the count of those waiting
                F("priority").desc(),
                "turn",
                "id",
                name="job_queue",
                condition=Q(status=JobStatus.QUEUED),
            ),
            models.Index(  # the claim of a job whose lease ran out: few rows, and no index on the lease itself
                fields=["id"], name="job_held", condition=Q(status__in=HELD)
            ),
            models.Index(  # how many prompts of ours are with a backend
                fields=["backend"],
                name="job_on_backend",
                condition=Q(status__in=UNFINISHED, backend__isnull=False),
            ),
            models.Index("owner", F("id").desc(), name="job_owner_newest"),  # an owner's list
            models.Index(  # an owner's jobs in the queue: their count, and the last one's turn
                fields=["owner", "priority", "turn"],
                name="job_owner_queue",
                condition=Q(status=JobStatus.QUEUED),
            ),
            models.Index(  # the measured rate, and how jobs ended lately, without a look at the rows
                fields=["completed_at"],
                include=["status", "started_at"],
                name="job_completed",
                condition=Q(completed_at__isnull=False),
            ),
            models.Index(  # the failures of the past day
                fields=["completed_at"], name="job_failed", condition=Q(status=JobStatus.FAILED)
            ),
            models.Index(  # the sweep
                fields=["expires_at"], name="job_expiry", condition=Q(status__in=FINAL)
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.pk}"

    def purge(self) -> bool:
        """Delete it with its pictures and photos, but for what another job uses. False: not now."""
        with transaction.atomic():
            # One that is locked is being drawn from, or purged: the next sweep takes what is left.
            if not Job.objects.select_for_update(skip_locked=True).filter(pk=self.pk):
                return False
            lock_assets(self.owner_id)
            # A picture that another job is drawn from is that one's photo now.
            self.outputs.exclude(used_by=None).update(job=None, expires_at=None)
            inputs = list(self.inputs.values_list("pk", flat=True))
            self.outputs.all().delete_with_files()
            self.delete()
            photos = Asset.objects.filter(pk__in=inputs, expires_at=None)
            photos.filter(used_by=None).delete_with_files()
        return True

    @property
    def prompt_id(self) -> str:
        return str(self.pk)

    @property
    def is_final(self) -> bool:
        return JobStatus(self.status).is_final

    @property
    def is_abandoned(self) -> bool:
        """Held by a worker, as far as the row says: claimed all the same, its worker has fallen silent."""
        return self.status in HELD and self.worker_id != ""

    def log_context(self) -> dict[str, Any]:
        """Return what every log line of a job says; never photos, prompts or addresses."""
        return {
            "job_id": self.prompt_id,
            "attempt": self.attempt,
            "fencing_token": self.fencing_token,
            "worker_id": self.worker_id,
        }

    def forget_drawing(self) -> None:
        """Drop what was saved on the way to a drawing that is of no use any more."""
        self.checkpoints.all().delete()
        Preview.drop(self)

    def record(self, kind: JobEvent.Kind, **facts: Any) -> None:
        """Write a line of the diary and of the log, and tell whoever watches the job."""
        JobEvent.objects.create(
            job=self, kind=kind, attempt=self.attempt, worker_id=self.worker_id, facts=facts
        )
        if kind not in JobEvent.QUIET:
            notify(str(self.pk), NEWS_CHANNEL)
        line = partial(logger.info, "job.%s", kind.value, extra=self.log_context() | facts)
        transaction.on_commit(line)  # what is rolled back did not happen


class Checkpoint(models.Model):
    """The result of a finished step."""

    job = models.ForeignKey(
        Job, on_delete=models.CASCADE, related_name="checkpoints", db_index=False
    )
    step = models.CharField(max_length=10, choices=Step)
    result = models.JSONField()
    fencing_token = models.BigIntegerField()
    saved_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering: ClassVar = ["saved_at"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["job", "step"], name="checkpoint_once_per_step")
        ]

    def __str__(self) -> str:
        return f"{self.step} of {self.job_id}"


class Preview(models.Model):
    """The last glimpse of a drawing under way. It goes when the drawing ends."""

    job = models.OneToOneField(
        Job, on_delete=models.CASCADE, primary_key=True, related_name="preview"
    )
    node_id = models.CharField(max_length=200)
    content_type = models.CharField(max_length=20)
    image = models.BinaryField()
    saved_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return f"preview of {self.job_id}"

    @classmethod
    def drop(cls, job: Job) -> None:
        with connection.cursor() as cursor:  # once a job: a third of what delete() takes
            cursor.execute(f"DELETE FROM {cls._meta.db_table} WHERE job_id = %s", [job.pk])  # noqa: S608

    def replace_last(self) -> None:
        """Save it, only in the transaction of a guarded write to the job."""
        Preview.objects.bulk_create(
            [self],
            update_conflicts=True,
            unique_fields=["job"],
            update_fields=["node_id", "content_type", "image", "saved_at"],
        )


class AssetQuerySet(models.QuerySet["Asset"]):
    def available(self) -> Self:
        """Those that may still be seen.

        Pictures and photos go with their job, at once when it is deleted; an upload goes when its time is
        over, but a job that uses it keeps it.
        """
        used = Exists(Job.objects.filter(inputs=OuterRef("pk"), deleted_at=None))
        made = Exists(Job.objects.filter(pk=OuterRef("job"), deleted_at=None))
        return self.filter(made | Q(job=None) & (used | Q(expires_at__gt=Now())))

    def uploads(self) -> Self:
        """Those that their owner brought and that have a time of their own."""
        return self.filter(job=None).exclude(expires_at=None)

    def expired(self) -> Self:
        return self.filter(job=None, expires_at__lt=Now(), used_by=None)

    def bytes_of(self, owner_id: int) -> int:
        """Return how many bytes an owner's photos and pictures take; those that several are over count once."""
        files = self.filter(owner_id=owner_id).order_by().values("file", "size").distinct()
        total: int = files.aggregate(bytes=Sum("size", default=0))["bytes"]
        return total

    def check_room(self, owner_id: int, limit: int) -> None:
        """Raise StorageFull if an owner's bytes, those just stored included, are more than allowed."""
        used = self.bytes_of(owner_id)
        if used > limit:
            raise StorageFull(
                f"Your photos and pictures may take {limit:,} bytes, and this would be {used:,}."
                " Delete some jobs or assets first."
            )

    def delete_with_files(self) -> int:
        """Delete the rows, and with them the bytes that no other row is over. Return how many rows."""
        owners = set(self.order_by().values_list("owner", flat=True))
        with transaction.atomic():
            lock_assets(*owners)
            files = dict(self.filter(owner__in=owners).values_list("pk", "file"))
            Asset.objects.filter(pk__in=files).delete()
            others = Asset.objects.filter(owner__in=owners, file__in=files.values())
            alone = {*files.values()}.difference(others.values_list("file", flat=True))
            discard(alone)
        return len(files)


class Asset(models.Model):
    """Bytes with an owner: an upload, the photo of a portrait, or what a job made.

    Several of one owner may be over the same file. An upload has an `expires_at` and no job; a photo, which
    goes with the jobs that use it, has neither.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="assets", db_index=False
    )
    job = models.ForeignKey(
        Job, on_delete=models.CASCADE, null=True, blank=True, related_name="outputs"
    )
    node_id = models.CharField(max_length=200, blank=True)
    name = models.CharField(max_length=255, blank=True)
    hash = models.CharField(max_length=80, help_text="blake3:<hex> of the bytes.")
    size = models.PositiveBigIntegerField(help_text="Bytes.")
    content_type = models.CharField(max_length=100)
    width = models.PositiveIntegerField(null=True, blank=True)
    height = models.PositiveIntegerField(null=True, blank=True)
    file = models.FileField(max_length=255)
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField(null=True, blank=True)

    objects = AssetQuerySet.as_manager()

    class Meta:
        ordering: ClassVar = ["pk"]  # a job's outputs in the order in which they were taken
        indexes: ClassVar = [
            # An owner's assets, and the sum of their files' sizes without a look at the rows.
            models.Index(fields=["owner", "file"], include=["size"], name="asset_owner_size"),
            models.Index(fields=["owner", "hash"], name="asset_owner_hash"),  # bytes that are there
            models.Index(fields=["owner", "name"], name="asset_owner_name"),  # files of a workflow
            models.Index(  # the sweep
                fields=["expires_at"], name="asset_expiry", condition=Q(job__isnull=True)
            ),
        ]

    def __str__(self) -> str:
        return f"{self.content_type} {self.pk}"

    @property
    def thumbnail_name(self) -> str:
        """The name, in the storage, of the small picture of this one, if it was made."""
        return thumbnail_of(self.file.name or "")

    @property
    def is_in_use(self) -> bool:
        """Whether a job depends on it: it made it, goes with it, or has still to read it."""
        return (
            self.job_id is not None
            or self.expires_at is None
            or Job.objects.unfinished().filter(inputs=self).exists()
        )

    @classmethod
    def store(cls, content: bytes | File[Any], **values: Any) -> Self:
        """Put the bytes into the storage and return the row for them, not saved yet."""
        file = ContentFile(content) if isinstance(content, bytes) else content
        if "hash" not in values:
            values["hash"] = hash_of(file)
        asset = cls(size=file.size, **values)
        # The name is ours alone: nothing that a user sent becomes part of a path.
        asset.file.save(f"assets/{asset.pk}", file, save=False)
        return asset


def thumbnail_of(file: str) -> str:
    return f"thumbnails/{file.removeprefix('assets/')}"


def discard(files: Collection[str]) -> None:
    """Let go of stored files, and their thumbnails, when the transaction commits.

    No request to an object store is made here.
    """
    names = [*files, *map(thumbnail_of, files)]
    default_storage.discard(names)  # type: ignore[attr-defined]  # both storages of ours have it


def hash_of(file: File[Any]) -> str:
    hasher = blake3()
    for chunk in file.chunks():
        hasher.update(chunk)
    return f"blake3:{hasher.hexdigest()}"


class JobEvent(models.Model):
    """A line of a job's diary. Never photos, prompts or tokens."""

    class Kind(models.TextChoices):
        SUBMITTED = "submitted"
        CLAIMED = "claimed"
        STEP_FINISHED = "step_finished"
        RESUBMITTED = "resubmitted"
        RETRY = "retry"
        HANDED_BACK = "handed_back"
        CANCEL_ASKED = "cancel_asked"
        SUCCEEDED = "succeeded"
        FAILED = "failed"
        CANCELED = "canceled"
        OPERATOR = "operator"
        EXPIRED = "expired"

    # Of these a job's owner sees nothing. NOTIFY has its price: one lock for all commits that use it.
    QUIET: ClassVar = (Kind.SUBMITTED, Kind.STEP_FINISHED)

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="events")
    kind = models.CharField(max_length=20, choices=Kind)
    attempt = models.PositiveSmallIntegerField(null=True)
    worker_id = models.CharField(max_length=200, blank=True)
    facts = models.JSONField(default=dict)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering: ClassVar = ["pk"]

    def __str__(self) -> str:
        return f"{self.kind} at {self.created_at:%H:%M:%S}"


class IdempotencyKeyQuerySet(models.QuerySet["IdempotencyKey"]):
    def expect_new(self, once: Once) -> None:
        """Return if the key is new. Raise AlreadyMade, or KeyReused if it came with something else."""
        known = self.filter(owner_id=once.owner_id, key=once.key, expires_at__gt=Now()).first()
        if known is None:
            return
        if known.body_hash != once.body_hash:
            raise KeyReused
        raise AlreadyMade(known.made)

    def spend(self, once: Once, made: uuid.UUID) -> None:
        """Note what the key makes, in the transaction that makes it: if that fails, the key is as new.

        Raises what `expect_new` does, and KeyInFlight.
        """
        self._lock(once)
        self.expect_new(once)
        self.bulk_create(
            [
                IdempotencyKey(
                    owner_id=once.owner_id,
                    key=once.key,
                    body_hash=once.body_hash,
                    made=made,
                    expires_at=Now() + KEY_LIFETIME,
                )
            ],
            update_conflicts=True,  # with one that has expired
            unique_fields=["owner", "key"],
            update_fields=["body_hash", "made", "expires_at"],
        )

    def _lock(self, once: Once) -> None:
        """Hold the key to the end of the transaction: whoever holds it next sees what was made."""
        # No row says "in flight": whatever dies, nothing is left behind. Two numbers are a space of their own
        # beside the locks of one; two keys of an owner that share a number only take turns.
        function = "pg_advisory_xact_lock" if once.patient else "pg_try_advisory_xact_lock"
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {function}(%s, hashtext(%s))", [once.owner_id, once.key])
            if cursor.fetchone()[0] is False:
                raise KeyInFlight


class IdempotencyKey(models.Model):
    """What a request with this key has made."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+", db_index=False
    )
    key = models.CharField(max_length=255)
    body_hash = models.CharField(max_length=64)
    # The id of a job or an asset. No foreign key: the key outlives what it made, and stays spent.
    made = models.UUIDField()
    expires_at = models.DateTimeField(db_index=True)  # the sweep

    objects = IdempotencyKeyQuerySet.as_manager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["owner", "key"], name="idempotency_key_once_per_owner")
        ]

    def __str__(self) -> str:
        return f"key of {self.made}"


class ApiToken(AbstractAuthToken):  # type: ignore[misc]  # knox ships no types
    """A bearer token, stored hashed."""

    name = models.CharField(max_length=100, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = "API token"

    def __str__(self) -> str:
        return f"{self.name or 'token'} of {self.user}"

    @property
    def is_expired(self) -> bool:
        return self.expiry is not None and self.expiry <= timezone.now()


class OwnerLimits(models.Model):
    """What one owner may take. What is empty is as the settings say."""

    owner = models.OneToOneField(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, primary_key=True, related_name="limits"
    )
    queued_jobs = models.PositiveIntegerField(
        null=True, blank=True, help_text="Jobs that may wait; empty: GENFLOW_QUEUE_LIMIT_PER_OWNER."
    )
    requests_per_minute = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        help_text="That change something; empty: GENFLOW_REQUESTS_PER_MINUTE.",
    )
    streams = models.PositiveIntegerField(
        null=True, blank=True, help_text="Event streams at once; empty: GENFLOW_STREAMS_PER_OWNER."
    )
    storage_bytes = models.PositiveBigIntegerField(
        null=True,
        blank=True,
        help_text="Of photos and pictures; empty: GENFLOW_STORAGE_PER_OWNER_BYTES.",
    )

    class Meta:
        verbose_name = verbose_name_plural = "limits"

    def __str__(self) -> str:
        return f"limits of {self.owner}"


class Blob(models.Model):
    """A stored file. In Postgres its bytes are in chunks; of one in an object store this is all we keep."""

    name = models.CharField(max_length=255, unique=True)
    size = models.PositiveBigIntegerField()
    kept_until = models.DateTimeField(
        db_default=Now() + ORPHAN_AGE, help_text="Even if no asset names it."
    )

    def __str__(self) -> str:
        return self.name


class BlobChunk(models.Model):
    blob = models.ForeignKey(Blob, on_delete=models.CASCADE, related_name="chunks", db_index=False)
    number = models.PositiveIntegerField()
    content = models.BinaryField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["blob", "number"], name="blob_chunk_once")
        ]

    def __str__(self) -> str:
        return f"chunk {self.number} of {self.blob_id}"
