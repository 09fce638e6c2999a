"""Hears what becomes of jobs, for all clients of a web process that wait for it.

A Hub lives on the server's event loop, with one thread that asks the database and one that listens to it. A
client that waits costs neither thread nor connection, and as it is told the newest news alone, one that is
slow costs no memory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, Self, TypeVar
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import close_old_connections, connections

from jobs.auth import Pass, still_good
from jobs.bell import Listener
from jobs.models import NEWS_CHANNEL, Asset, Job, Preview
from jobs.serializers import version_of
from jobs.status import JobStatus

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

# All watched jobs, and their watchers' rights, are looked at so often, whatever is heard.
ROUND_SECONDS: Final = 2.0
# Between two looks: what is heard meanwhile makes one query.
PAUSE_SECONDS: Final = 0.02
# Between two tries to ask a database that is away.
RETRY_SECONDS: Final = 1.0


class TooManyStreams(Exception):
    """An owner has as many streams as may be."""


@dataclass(frozen=True)
class PreviewNews:
    """A preview as clients read it. `id` tells it from the others of its job."""

    id: str
    payload: Mapping[str, str]

    @classmethod
    def of(cls, preview: Preview) -> Self:
        payload = {
            "node_id": preview.node_id,
            "content_type": preview.content_type,
            "data_base64": b64encode(preview.image).decode(),
        }
        return cls(id_of(preview), payload)


def id_of(preview: Preview) -> str:
    return preview.saved_at.isoformat()


@dataclass(frozen=True)
class News:
    """What there is to tell of a job."""

    status: JobStatus
    queue_position: int | None
    progress: Mapping[str, Any] | None
    preview: PreviewNews | None
    outputs: tuple[Asset, ...]
    version: str


def look(ids: Collection[UUID], seen: Mapping[UUID, PreviewNews]) -> dict[UUID, News]:
    """Return what there is to tell of those of these jobs that are not deleted, in at most four queries.

    seen: previews that need not be loaded again.
    """
    jobs = list(
        Job.objects.filter(pk__in=ids, deleted_at=None)
        .select_related("preview")
        .defer("graph", "params", "metadata", "error_detail", "preview__image")
        .with_outputs()
    )
    queued = [job.pk for job in jobs if job.status == JobStatus.QUEUED]
    places = Job.objects.places_in_queue(queued) if queued else {}
    latest = {job.pk: id_of(job.preview) for job in jobs if hasattr(job, "preview")}
    previews = {pk: seen[pk] for pk, id in latest.items() if pk in seen and seen[pk].id == id}
    for preview in Preview.objects.filter(pk__in=latest.keys() - previews.keys()):
        previews[preview.job_id] = PreviewNews.of(preview)
    return {
        job.pk: News(
            status=JobStatus(job.status),
            queue_position=places.get(job.pk),
            progress=job.progress,
            preview=previews.get(job.pk),
            outputs=tuple(job.outputs.all()),
            version=version_of(job),
        )
        for job in jobs
    }


@dataclass(eq=False)
class Watcher:
    """A client that waits for news of a job."""

    job_id: UUID
    by: Pass
    # No more will come: the job is deleted, the client may not see it any more, or the server stops.
    is_over: bool
    news: News | None = None

    def __post_init__(self) -> None:
        self._stirred = asyncio.Event()

    def tell(self, news: News | None) -> None:
        if news != self.news or news is None:
            self.news = news
            self.is_over |= news is None
            self._stirred.set()

    async def stir(self, seconds: float | None = None) -> bool:
        """Wait until there is something new (True) or for so long (False)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stirred.wait()
        stirred = self._stirred.is_set()
        self._stirred.clear()
        return stirred


class Hub:
    """`async with` from the server's start to its end."""

    def __init__(self) -> None:
        self._watchers: dict[UUID, set[Watcher]] = {}  # by job
        self._heard: set[UUID] = set()
        self._stirred = asyncio.Event()
        self._is_closing = False
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "hub")
        self._listener = Listener({NEWS_CHANNEL: self._listen})
        self._streams: Counter[int] = Counter()  # by owner
        self._lock = threading.Lock()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        self._ear = threading.Thread(target=self._listener.run, name="listener", daemon=True)
        self._ear.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()
        self._listener.close()
        self._task.cancel()
        self._thread.submit(connections.close_all)
        self._thread.shutdown(wait=False)
        await asyncio.to_thread(self._ear.join, 1.0)

    def close(self) -> None:
        """Let all watchers go: the server stops."""
        self._is_closing = True
        for watcher in self._all():
            watcher.tell(None)

    # --- what clients do ---

    @contextmanager
    def watching(self, job_id: UUID, by: Pass) -> Iterator[Watcher]:
        """On the event loop: tell of a job until the end of the block, from its present state on."""
        watcher = Watcher(job_id, by, is_over=self._is_closing)
        self._watchers.setdefault(job_id, set()).add(watcher)
        self._hear(str(job_id))
        try:
            yield watcher
        finally:
            self._watchers[job_id].remove(watcher)
            if not self._watchers[job_id]:
                del self._watchers[job_id]

    async def change(self, job_id: UUID, by: Pass, version: str, seconds: float) -> None:
        """Return when the job's version is another one or the job is gone, or after so long."""
        with self.watching(job_id, by) as watcher, suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not watcher.is_over and (
                    watcher.news is None or watcher.news.version == version
                ):
                    await watcher.stir()

    @contextmanager
    def stream_of(self, owner_id: int, limit: int) -> Iterator[None]:
        """On any thread: count a stream until the end of the block, or raise TooManyStreams."""
        with self._lock:
            if self._streams[owner_id] >= limit:
                raise TooManyStreams
            self._streams[owner_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams[owner_id] -= 1

    # --- where the news comes from ---

    def _listen(self, message: str) -> None:
        """On the listener's thread."""
        with suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._hear, message)

    def _hear(self, message: str) -> None:
        """Take the id of a job of which there may be news, or "" after some may have been missed."""
        heard = {UUID(message)} if message else set(self._watchers)
        if heard := heard & self._watchers.keys():
            self._heard |= heard
            self._stirred.set()

    async def _run(self) -> None:
        next_round = 0.0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(next_round):
                    await self._stirred.wait()
            is_round = self._loop.time() >= next_round
            try:
                if is_round:
                    next_round = self._loop.time() + ROUND_SECONDS
                    await self._tell(self._watchers)
                    await self._check_passes()
                else:
                    await self._tell(self._heard)
            except DatabaseError as exc:
                logger.warning("hub.database_away", extra={"reason": str(exc).strip()})
                next_round = self._loop.time() + RETRY_SECONDS
            except Exception:  # whatever it is, nobody is to wait for ever
                logger.exception("hub.look_failed")
                next_round = self._loop.time() + RETRY_SECONDS
            await asyncio.sleep(PAUSE_SECONDS)

    async def _tell(self, job_ids: Collection[UUID]) -> None:
        ids = list(job_ids)
        self._stirred.clear()
        self._heard.clear()
        if not ids:
            return
        seen = {
            job_id: watcher.news.preview
            for job_id in ids
            for watcher in self._watchers.get(job_id, ())
            if watcher.news and watcher.news.preview
        }
        found = await self._ask(look, ids, seen)
        for job_id in ids:
            for watcher in self._watchers.get(job_id, ()):
                watcher.tell(found.get(job_id))

    async def _check_passes(self) -> None:
        passes = {watcher.by for watcher in self._all()}
        bad = passes - await self._ask(still_good, passes) if passes else passes
        for watcher in self._all():
            if watcher.by in bad:
                watcher.tell(None)

    def _all(self) -> Iterator[Watcher]:
        for watchers in self._watchers.values():
            yield from watchers

    async def _ask(self, question: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        def ask() -> R:
            close_old_connections()  # it may have been cut since the last time
            return question(*args, **kwargs)

        return await self._loop.run_in_executor(self._thread, ask)
