"""The worker: claims jobs, keeps their leases, drives their steps and records what comes of them."""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, ParamSpec, Self, TypeVar

from django.conf import settings
from django.db import Error as DatabaseError
from django.db import connection

from comfy.client import ComfyClient, Place
from comfy.errors import (
    DETAIL_LIMIT,
    BackendStuck,
    BadPicture,
    BrokenContext,
    ComfyError,
    ErrorKind,
    Interrupted,
    ModelMissing,
    NodeMissing,
    NotConnected,
    OutOfMemory,
    OutputMissing,
    RunFailed,
    RunStuck,
)
from comfy.events import Progress
from comfy.text import clean_text
from jobs.assets import forget
from jobs.backoff import backoff
from jobs.bell import Bell, Listener
from jobs.housekeeping import Housekeeper
from jobs.keyring import Keyring
from jobs.leases import Lease, Renewer
from jobs.models import (
    KEY_CHANNEL,
    NOTIFY_CHANNEL,
    Backend,
    CancelRequested,
    Failure,
    Job,
    LeaseLost,
    Terms,
)
from jobs.outage import StorageAway, is_outage
from jobs.status import JobStatus, Step
from jobs.steps import STEPS, Stopping, Work, download

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

# After these another backend may do better.
LACKING: Final = (ModelMissing, NodeMissing)
# After these the drawing itself is of no use.
SPOILED: Final = (RunFailed, Interrupted, OutputMissing, BadPicture)
# After these a workflow's nodes are not to answer from ComfyUI's cache once more: some have no prefix of ours.
LOST_OUTPUT: Final = (OutputMissing, BadPicture)
# Between two looks whether ComfyUI has obeyed a cancel. Seconds.
CANCEL_POLL: Final = 0.2
# A look at a slow ComfyUI that is to be left alone soon. Seconds.
SHORTEST_LOOK: Final = 1.0
# Between two tries to write to a database that is away. Seconds.
DATABASE_PAUSE: Final = 0.5
UNEXPECTED: Final = "Something went wrong while drawing. Please try again."


@dataclass(frozen=True)
class Options:
    """What a worker goes by; durations in seconds."""

    concurrency: int
    lease: float
    poll: float
    prompts_per_backend: int
    max_resubmits: int
    max_lost_workers: int
    retry_base: float
    retry_max: float
    stall: float
    cancel: float
    shutdown: float
    preview_method: str
    output_max_bytes: int
    drain: bool = False

    @classmethod
    def from_settings(cls, **changed: Any) -> Self:
        values: dict[str, Any] = {
            "concurrency": settings.GENFLOW_CONCURRENCY,
            "lease": settings.GENFLOW_LEASE_SECONDS,
            "poll": settings.GENFLOW_POLL_SECONDS,
            "prompts_per_backend": settings.GENFLOW_PROMPTS_PER_BACKEND,
            "max_resubmits": settings.GENFLOW_MAX_RESUBMITS,
            "max_lost_workers": settings.GENFLOW_MAX_LOST_WORKERS,
            "retry_base": settings.GENFLOW_RETRY_BASE_SECONDS,
            "retry_max": settings.GENFLOW_RETRY_MAX_SECONDS,
            "stall": settings.GENFLOW_STALL_SECONDS,
            "cancel": settings.GENFLOW_CANCEL_SECONDS,
            "shutdown": settings.GENFLOW_SHUTDOWN_SECONDS,
            "output_max_bytes": settings.GENFLOW_OUTPUT_MAX_BYTES,
            "preview_method": settings.GENFLOW_PREVIEW_METHOD,
        }
        return cls(**values | changed)

    @property
    def terms(self) -> Terms:
        return Terms(timedelta(seconds=self.lease), self.prompts_per_backend, self.max_lost_workers)


class Worker:
    """One process' worth of work: slots that take jobs, and three helper threads."""

    def __init__(self, urls: Sequence[str], options: Options, name: str = "") -> None:
        self.options = options
        # The name need not be unique: the token proves ownership, this is for people.
        host = name or socket.gethostname()
        self.worker_id = f"{host[:150]}-{os.getpid()}-{secrets.token_hex(3)}"
        self.urls = urls
        self.backends: list[Backend] = []
        self._stopping = threading.Event()
        self._broken = False
        self.renewer = Renewer(options.lease, options.poll, self._stopping)
        self.bell = Bell()
        self.keyring = Keyring()
        self.listener = Listener({NOTIFY_CHANNEL: self.heard, KEY_CHANNEL: self.keyring.put})
        self.housekeeper = Housekeeper(self.backends, every_seconds=min(5.0, options.lease / 3))

    # --- the process ---

    def run(self) -> bool:
        """Work until told to stop or, draining, until nothing is left. Return False if a thread died."""
        try:
            return self._run()
        finally:
            connection.close()

    def _run(self) -> bool:
        while not self._stopping.is_set() and not self._try(self.meet_backends):
            pass
        connection.close()  # this thread needs none from here to the end
        helpers = [
            self._thread(target)
            for target in (self.renewer.run, self.listener.run, self.housekeeper.run)
        ]
        slots = [self._thread(self._work_on) for _ in range(self.options.concurrency)]
        names = [backend.name for backend in self.backends]
        logger.info("worker.started", extra={"worker_id": self.worker_id, "backends": names})
        while not self._stopping.wait(0.2) and any(slot.is_alive() for slot in slots):
            pass
        self._wind_up(slots)
        for helper in (self.renewer, self.listener, self.housekeeper):
            helper.close()
        for thread in helpers:
            thread.join(1.0)
        logger.info("worker.stopped", extra={"worker_id": self.worker_id})
        return not self._broken

    def meet_backends(self) -> bool:
        """Look up or make the backends' rows, and see which of them answer."""
        self.backends[:] = [Backend.objects.register(url) for url in self.urls]
        self.housekeeper.probe_all()
        return True

    def stop(self) -> None:
        """Ask for a polite stop. Only sets events, so a signal handler may call it."""
        self._stopping.set()
        self.bell.ring()
        for lease in self.renewer.held():
            lease.wake.set()

    def heard(self, message: str) -> None:
        """Take a notification: a job is there, or a cancel was asked for."""
        if message == "cancel":
            self.renewer.nudge()
        else:
            self.bell.ring()

    def _thread(self, target: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                target()
            except Exception:
                # A dead helper thread is worse than a dead worker: leases run out unseen.
                logger.exception("worker.thread_died", extra={"worker_id": self.worker_id})
                self._broken = True
                self.stop()
                raise

        thread = threading.Thread(target=guarded, name=target.__qualname__, daemon=True)
        thread.start()
        return thread

    def _wind_up(self, slots: Sequence[threading.Thread]) -> None:
        """Let the slots give back what they hold; give back the rest for them when time is up."""
        deadline = time.monotonic() + self.options.shutdown * 0.8
        for slot in slots:
            slot.join(max(0.0, deadline - time.monotonic()))
        for lease in self.renewer.held():
            try:
                self._give_back(lease.job)
            except (LeaseLost, CancelRequested, DatabaseError):
                logger.warning("worker.not_given_back", extra=lease.job.log_context())

    # --- a slot ---

    def _work_on(self) -> None:
        try:
            while not self._stopping.is_set():
                rings = self.bell.rings
                if self._try(self.run_once) or self._stopping.is_set():
                    continue
                if self.options.drain and self._try(self._is_drained):
                    return
                # Jitter, so that many workers do not ask in step.
                self.bell.wait(rings, self.options.poll * random.uniform(0.75, 1.25))  # noqa: S311
        finally:
            connection.close()

    def _try(self, act: Callable[[], bool]) -> bool:
        """Do what needs the database; if that is away, pause and return False."""
        try:
            return act()
        except DatabaseError as exc:
            disconnect(exc)
            self._stopping.wait(DATABASE_PAUSE)
            return False

    def _is_drained(self) -> bool:
        return not Job.objects.unfinished().exists()

    def run_once(self) -> bool:
        """Claim one job and take it as far as it goes. Return False if there was nothing to do."""
        asked_at = time.monotonic()
        job = Job.objects.claim(
            self.worker_id,
            [backend.pk for backend in self.backends],
            self.options.terms,
            self.housekeeper.unattended,
            self.housekeeper.known,
        )
        if job is None:
            return False
        lease = self.renewer.hold(job, asked_at)
        try:
            self._drive(job, lease)
        except LeaseLost as exc:
            logger.warning("job.lease_lost", extra=job.log_context() | {"reason": str(exc)})
        finally:
            self.renewer.let_go(lease)
            if job.is_final:
                self.keyring.forget(job)
        return True

    # --- one job ---

    def _drive(self, job: Job, lease: Lease) -> None:
        backend, done = self._save(lease, read_up_on, job)
        with ComfyClient(backend.url) as client:
            lease.abort = client.abort
            work = Work(
                job=job,
                backend=backend,
                client=client,
                lease=lease,
                done=done,
                is_stopping=self._stopping.is_set,
                renew=lambda: self._save(lease, self.renewer.renew, [lease]),
                show_progress=lambda progress, preview: self._save(
                    lease, Job.objects.show_progress, job, progress, preview
                ),
                under_way=lambda: self._save(lease, Job.objects.under_way_on, work.backend),
                secrets=lambda: self.keyring.secrets_of(job),
                poll_seconds=self.options.poll,
                stall_seconds=self.options.stall,
                preview_method=self.options.preview_method,
                output_max_bytes=self.options.output_max_bytes,
            )
            try:
                self._attempt(work)
            except LeaseLost:
                self._stop_unwanted(work)
                raise

    def _stop_unwanted(self, work: Work) -> None:
        """If the job was deleted or ended by hand, nobody else will stop its prompt."""
        try:
            if not Job.objects.unfinished().filter(pk=work.job.pk).exists():
                self._is_gone(work)
        except (DatabaseError, ComfyError) as exc:
            logger.warning("job.not_stopped", extra=work.job.log_context() | {"reason": str(exc)})
            connection.close()

    def _attempt(self, work: Work) -> None:
        try:
            if work.job.status == JobStatus.CANCELING:
                raise CancelRequested
            self._try_steps(work)
        except CancelRequested:
            self._cancel(work)

    def _try_steps(self, work: Work) -> None:
        """Take the steps that are left; whatever stops them is written to the job's row."""
        try:
            while not self._try_step(work):
                pass
        except Stopping:
            self._save(work.lease, self._give_back, work.job)
        except (LeaseLost, CancelRequested):
            raise
        except Exception:  # the one place that catches all: the worker lives
            logger.exception("job.unexpected_error", extra=work.job.log_context())
            connection.close()
            detail = clean_text(traceback.format_exc(), DETAIL_LIMIT)
            failure = Failure("unknown", UNEXPECTED, detail=detail)
            self._retry_or_fail(work, failure, redraw=False)

    def _try_step(self, work: Work) -> bool:
        """Do the next step and save it. Return whether the job has left our hands."""
        work.check()
        step = next(step for step in Step if step not in work.done)
        try:
            if step == Step.DOWNLOAD:
                return self._finish(work)
            result = STEPS[step](work)
        except ComfyError as error:
            work.lease.check_wanted()  # it may be of our own making: see Lease.abort
            return self._settle(work, error)
        except (DatabaseError, StorageAway) as exc:
            # No fault of the job's: the step is taken again, and looks before it acts.
            disconnect(exc)
            time.sleep(DATABASE_PAUSE)
            return False
        self._save(
            work.lease, Job.objects.checkpoint, work.job, step, result, self.options.terms.lease
        )
        work.done[step] = result
        if step == Step.WAIT and work.backend.failures:
            self._save(work.lease, work.backend.recovered)
        return False

    def _finish(self, work: Work) -> bool:
        outputs = download(work)
        try:
            self._save(
                work.lease,
                Job.objects.succeed,
                work.job,
                outputs,
                {"pictures": len(outputs)},
                Progress.done(work.job.graph).as_json(),
            )
        except (LeaseLost, CancelRequested):
            forget(outputs)
            raise
        return True

    # --- what becomes of a failure ---

    def _settle(self, work: Work, error: ComfyError) -> bool:
        """Do what an error of this kind asks for. Return whether the job has left our hands."""
        job, lease = work.job, work.lease
        facts = {"code": error.code, "kind": error.kind.value, "reason": str(error)}
        logger.info("job.error", extra=job.log_context() | facts)
        failure = failure_of(error)
        if error.kind == ErrorKind.LOST and job.resubmits < self.options.max_resubmits:
            self._save(lease, Job.objects.resubmit, job, self.options.terms.lease)
            work.done.clear()
            return False
        if isinstance(error, LACKING) and self._has_alternative(job):
            self._save(
                lease, Job.objects.hand_back, job, error.code, keep_backend=False, refused=True
            )
        elif error.kind in (ErrorKind.LOST, ErrorKind.PERMANENT):
            if isinstance(error, OutOfMemory):
                self._free_memory(work)
            self._save(lease, Job.objects.fail, job, failure)
        elif error.kind == ErrorKind.BACKEND:
            self._rest_backend(work, error, failure)
        else:
            redraw = isinstance(error, SPOILED)
            if isinstance(error, LOST_OUTPUT) and job.kind == Job.Kind.WORKFLOW:
                self._free_memory(work)
            self._retry_or_fail(work, failure, redraw=redraw, at_least=error.retry_after)
        return True

    def _has_alternative(self, job: Job) -> bool:
        refused = [*job.refused_by, job.backend_id]
        return Backend.objects.heard_of_lately().exclude(pk__in=refused).exists()

    def _rest_backend(self, work: Work, error: ComfyError, failure: Failure) -> None:
        """The backend is at fault: it rests, and the job goes back without charge."""
        job, backend = work.job, work.backend
        # One that refuses connections is probed cheaply; what else is wrong only the next job can find out.
        refuses = isinstance(error, NotConnected)
        longest = 0.0 if refuses else self.options.retry_max
        pause = backoff(backend.failures + 1, self.options.retry_base, longest)
        self._save(work.lease, backend.rest, str(error), pause)
        if isinstance(error, BrokenContext):
            # This job may be what breaks it.
            self._retry_or_fail(work, failure, redraw=True)
            return
        is_stuck = isinstance(error, BackendStuck)  # it may never draw this
        is_suspect = isinstance(error, RunStuck)  # nor may any other
        if is_stuck:
            self._try_to_drop(work)
        if is_suspect and job.resubmits >= self.options.max_resubmits:
            self._save(work.lease, Job.objects.fail, job, failure)
            return
        self._save(
            work.lease,
            Job.objects.hand_back,
            job,
            error.code,
            keep_backend=job.step != Step.UPLOAD and not is_stuck,
            resubmit=is_suspect,
        )

    def _retry_or_fail(
        self, work: Work, failure: Failure, *, redraw: bool, at_least: float | None = None
    ) -> None:
        job = work.job
        if job.attempt >= job.max_attempts:
            self._save(work.lease, Job.objects.fail, job, failure)
            return
        delay = backoff(job.attempt, self.options.retry_base, self.options.retry_max, at_least)
        self._save(work.lease, Job.objects.retry, job, failure, delay, redraw=redraw)

    def _try_to_drop(self, work: Work) -> None:
        """Take the prompt from a stuck backend, if it lets us: another will draw it."""
        try:
            self._is_gone(work)
        except ComfyError as error:
            logger.warning("backend.stuck", extra=work.job.log_context() | {"reason": str(error)})

    def _free_memory(self, work: Work) -> None:
        """Let ComfyUI empty its memory and its cache; it is no matter for this job whether it does."""
        try:
            work.client.free_memory()
        except ComfyError as error:
            logger.warning(
                "backend.not_freed", extra=work.job.log_context() | {"reason": str(error)}
            )

    # --- ways to let go ---

    def _give_back(self, job: Job) -> None:
        """Put a job back for the next worker, at its last checkpoint and without charge."""
        try:
            Job.objects.hand_back(job, "worker_stopped", keep_backend=job.step != Step.UPLOAD)
        except CancelRequested:
            Job.objects.release(job)

    def _cancel(self, work: Work) -> None:
        """End the job's prompt on the backend, then write `canceled`."""
        try:
            note = self._end_prompt(work)
        except Stopping:
            self._save(work.lease, Job.objects.release, work.job)
            return
        self._save(work.lease, Job.objects.finish_cancel, work.job, **note)

    def _end_prompt(self, work: Work) -> dict[str, str]:
        """Ask until the prompt is seen to be gone. Return what the diary should say if it never was."""
        if work.job.step == Step.UPLOAD:  # it was never sent
            return {}
        waited = self._save(work.lease, Job.objects.seconds_canceling, work.job)
        deadline = time.monotonic() + self.options.cancel - waited
        reason = "it did not stop"
        while True:
            work.lease.check()
            if self._stopping.is_set():
                raise Stopping
            # A server that does not answer cannot keep the user waiting for much longer than that.
            left = max(deadline - time.monotonic(), SHORTEST_LOOK)
            work.client.read_timeout = min(work.client.read_timeout, left)
            try:
                if self._is_gone(work):
                    return {}
            except ComfyError as error:
                reason = str(error)
            if time.monotonic() > deadline:
                return {"note": "the GPU may still draw it", "reason": reason}
            work.lease.wake.wait(CANCEL_POLL)
            work.lease.wake.clear()

    def _is_gone(self, work: Work) -> bool:
        """Tell the backend to drop the prompt. Return whether it had no such prompt left."""
        prompt_id = work.job.prompt_id
        sighting = work.client.look_up(prompt_id)
        if sighting.place == Place.PENDING:
            work.client.delete_pending(prompt_id)
        elif sighting.place == Place.RUNNING:
            work.client.interrupt(prompt_id)
        else:
            return True
        return False

    def _save(self, lease: Lease, write: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Write to the database, again and again while it is away and the lease holds.

        Each write is guarded by the token and the status, so one whose answer got lost changes nothing when
        it is repeated.
        """
        while True:
            lease.check()
            try:
                return write(*args, **kwargs)
            except DatabaseError as exc:
                disconnect(exc)
                time.sleep(DATABASE_PAUSE)


def read_up_on(job: Job) -> tuple[Backend, dict[str, dict[str, Any]]]:
    """Return where a claimed job is to be done, and the results of the steps that are."""
    assert job.backend is not None  # claim sets it
    return job.backend, dict(job.checkpoints.values_list("step", "result"))


def disconnect(exc: Exception) -> None:
    """Let go of a connection that failed, or raise what no new connection would mend."""
    if not is_outage(exc):
        raise exc
    logger.warning("worker.database_away", extra={"reason": str(exc).strip()})
    connection.close()


def failure_of(error: ComfyError) -> Failure:
    return Failure(
        error.code,
        error.user_message,
        error.node_id,
        error.class_type,
        f"{type(error).__name__}: {error}\n{error.detail}".strip(),
    )
