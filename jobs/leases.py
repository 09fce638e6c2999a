"""Leases as the holding process sees them, and the one thread that renews them all."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Final

from django.db import Error as DatabaseError
from django.db import connection

from jobs.models import CancelRequested, Job, LeaseLost
from jobs.status import JobStatus

logger = logging.getLogger(__name__)

# The part of a lease in which we act no more, as an act takes time too.
MARGIN: Final = 0.1
# Between two looks at a lease in doubt. Seconds.
DOUBT_POLL: Final = 0.1
# A cancel reaches a running job within this and a little, without any notification. Seconds.
LONGEST_SILENCE: Final = 1.0


class Lease:
    """Our right to one job. `wake` is set whenever whoever drives the job should look up."""

    def __init__(
        self, job: Job, seconds: float, asked_at: float, stopping: threading.Event
    ) -> None:
        """asked_at: the monotonic time right before the lease was asked for, so never later than its start."""
        self.job = job
        self.seconds = seconds
        self.wake = threading.Event()
        self.cancel_requested = False
        # Ends a request to the backend that is under way: its answer is of no use any more.
        self.abort: Callable[[], None] = lambda: None
        self._stopping = stopping
        self._lost = False
        self._ends_at = 0.0
        self.extend(asked_at)

    def extend(self, asked_at: float) -> None:
        # Counted from before the question: this clock runs out before the database's does.
        self._ends_at = max(self._ends_at, asked_at + self.seconds * (1 - MARGIN))

    def remaining(self) -> float:
        """Seconds in which the job is ours beyond doubt."""
        return 0.0 if self._lost else self._ends_at - time.monotonic()

    def lose(self) -> None:
        self._lost = True
        self.wake.set()
        self.abort()

    def request_cancel(self) -> None:
        if not self.cancel_requested:
            self.cancel_requested = True
            self.wake.set()
            self.abort()

    def check(self) -> None:
        """Return when the job is ours beyond doubt, or raise LeaseLost.

        A lease that could not be renewed in time is in doubt: nothing is done until the database says whether
        somebody else took the job meanwhile.
        """
        while self.remaining() <= 0:
            if self._lost or self._stopping.wait(DOUBT_POLL):
                raise LeaseLost(self.job)

    def check_wanted(self) -> None:
        """Raise LeaseLost, or CancelRequested if the picture is not wanted any more."""
        self.check()
        if self.cancel_requested:
            raise CancelRequested


class Renewer:
    """Renews the leases of a process in one statement, on its own thread and connection, to the last write."""

    def __init__(
        self, lease_seconds: float, every_seconds: float, stopping: threading.Event
    ) -> None:
        self.lease_seconds = lease_seconds
        self._stopping = stopping
        self.every_seconds = min(every_seconds, lease_seconds / 3, LONGEST_SILENCE)
        self._held: dict[object, Lease] = {}
        self._lock = threading.Lock()
        self._nudge = threading.Event()
        self._closed = False

    def hold(self, job: Job, asked_at: float) -> Lease:
        lease = Lease(job, self.lease_seconds, asked_at, self._stopping)
        with self._lock:
            self._held[job.pk] = lease
        return lease

    def let_go(self, lease: Lease) -> None:
        with self._lock:
            # A job taken over by another slot of this process has a newer lease here.
            if self._held.get(lease.job.pk) is lease:
                del self._held[lease.job.pk]

    def held(self) -> list[Lease]:
        with self._lock:
            return list(self._held.values())

    def nudge(self) -> None:
        """Renew now: somebody asked for a cancel."""
        self._nudge.set()

    def close(self) -> None:
        self._closed = True
        self._nudge.set()

    def run(self) -> None:
        try:
            while not self._closed:
                self._nudge.wait(self.every_seconds)
                self._nudge.clear()
                self._try_to_renew()
        finally:
            connection.close()

    def _try_to_renew(self) -> None:
        try:
            self.renew_all()
        except DatabaseError as exc:
            # Not renewed: the leases run out here before they do in the database.
            logger.warning("worker.renewal_failed", extra={"reason": str(exc).strip()})
            connection.close()

    def renew_all(self) -> None:
        leases = {lease.job.pk: lease for lease in self.held()}
        if leases:
            self.renew(leases.values())

    def renew(self, leases: Collection[Lease]) -> None:
        """Renew on the calling thread's connection and pass on what the answer says."""
        asked_at = time.monotonic()
        ours = Job.objects.renew(
            {lease.job.pk: lease.job.fencing_token for lease in leases},
            timedelta(seconds=self.lease_seconds),
        )
        for lease in leases:
            status = ours.get(lease.job.pk)
            if status is None:
                lease.lose()
                continue
            lease.extend(asked_at)
            if status == JobStatus.CANCELING:
                lease.request_cancel()
