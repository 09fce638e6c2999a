"""What a worker does beside its jobs: it probes its backends and sweeps away what is past its time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from django.core.files.storage import default_storage
from django.db import Error as DatabaseError
from django.db import connection, transaction
from django.db.models import Exists, OuterRef, Value
from django.db.models.functions import Now, Replace

from comfy.client import ComfyClient
from comfy.errors import ComfyError, ErrorKind
from jobs.catalog import read_catalog
from jobs.models import Asset, Backend, Blob, IdempotencyKey, Job
from jobs.outage import StorageAway

logger = logging.getLogger(__name__)

# A backend that no worker has heard of for so long may lose its jobs to another.
UNATTENDED_AFTER: Final = timedelta(minutes=1)
SWEEP_EVERY: Final = 60.0  # seconds
SWEEP_BATCH: Final = 100
# The key of the advisory lock: one worker sweeps at a time.
SWEEP_LOCK: Final = 0x67656E67


class Housekeeper:
    def __init__(self, backends: Sequence[Backend], every_seconds: float) -> None:
        self.backends = backends
        self.unattended: Sequence[int] = ()
        self.known: Sequence[int] = ()
        self._silent: set[int] = set()
        self._every = every_seconds
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()

    def run(self) -> None:
        sweep_at = time.monotonic() + SWEEP_EVERY
        try:
            self._try(self.read_catalogs)
            while not self._closed.wait(self._every):
                self._try(self.probe_all)
                self._try(self.read_catalogs)
                if time.monotonic() >= sweep_at:
                    self._try(sweep)
                    sweep_at = time.monotonic() + SWEEP_EVERY
        finally:
            connection.close()

    def _try(self, chore: Callable[[], None]) -> None:
        try:
            chore()
        except (DatabaseError, StorageAway) as exc:
            logger.warning("worker.chore_failed", extra={"reason": str(exc).strip()})
            connection.close()

    def probe_all(self) -> None:
        """Ask each backend whether it lives, and note who does."""
        for backend in self.backends:
            self._probe(backend)
        unattended = Backend.objects.unattended(UNATTENDED_AFTER)
        self.unattended = list(unattended.values_list("pk", flat=True))
        known = Backend.objects.heard_of_lately()
        self.known = list(known.values_list("pk", flat=True))

    def _probe(self, backend: Backend) -> None:
        try:
            with ComfyClient(backend.url, connect_timeout=2, read_timeout=10) as client:
                version = client.system_stats().version
        except ComfyError as error:
            if error.kind == ErrorKind.BACKEND:
                backend.rest(str(error))
            if backend.pk not in self._silent:  # once, however long it takes
                self._silent.add(backend.pk)
                self._warn("backend.no_answer", backend, error)
        else:
            backend.seen(version, came_up=backend.pk in self._silent)
            if backend.pk in self._silent:
                self._silent.remove(backend.pk)
                logger.info("backend.answers_again", extra={"backend": backend.name})

    def read_catalogs(self) -> None:
        """Learn what the backends have that answer, if it is time to."""
        for backend in self.backends:
            if backend.pk not in self._silent:
                try:
                    read_catalog(backend)
                except ComfyError as error:  # graphs are not checked by it, then
                    self._warn("backend.catalog_not_read", backend, error)

    @staticmethod
    def _warn(event: str, backend: Backend, error: ComfyError) -> None:
        logger.warning(event, extra={"backend": backend.name, "reason": str(error)})


def sweep() -> None:
    """End and delete what is past its time, in bounded batches, one worker at a time; then bytes that no row names."""
    while True:
        with transaction.atomic():
            if not take_sweep_lock():
                return
            past = Job.objects.finished().filter(expires_at__lt=Now())
            swept = past[:SWEEP_BATCH].purge() + Job.objects.purge_deleted()
            swept += Job.objects.expire(SWEEP_BATCH) + sweep_uploads() + sweep_keys()
        if swept < SWEEP_BATCH:
            break
    sweep_orphans()


def take_sweep_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [SWEEP_LOCK])
        return bool(cursor.fetchone()[0])


def sweep_uploads() -> int:
    expired = Asset.objects.expired()
    batch = expired.values_list("pk", flat=True)[:SWEEP_BATCH]
    return expired.filter(pk__in=list(batch)).delete_with_files()


def sweep_orphans() -> None:
    # A thumbnail is named after its picture.
    file = Replace("name", Value("thumbnails/"), Value("assets/"))
    named = Asset.objects.filter(file=OuterRef("asset_file"))
    left = Blob.objects.filter(kept_until__lt=Now()).annotate(asset_file=file)
    orphans = left.filter(~Exists(named)).values_list("name", flat=True)
    while names := list(orphans[:SWEEP_BATCH]):
        for name in names:
            default_storage.delete(name)


def sweep_keys() -> int:
    expired = IdempotencyKey.objects.filter(expires_at__lt=Now())
    keys = list(expired.values_list("pk", flat=True)[:SWEEP_BATCH])
    # Asked once more: a request may have renewed one meanwhile.
    expired.filter(pk__in=keys).delete()
    return len(keys)
