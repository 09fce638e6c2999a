"""Where news of jobs comes from: notifications, and a look at all of them now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from jobs import hub
from jobs.auth import Pass
from jobs.hub import Hub, News, Watcher, look
from jobs.models import ApiToken, Job, Preview
from jobs.status import JobStatus
from jobs.tests.databases import cut_connections
from jobs.tests.helpers import claim, claim_new_job, queue_job
from jobs.tests.helpers_api import finish, picture_bytes, token_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(60)]


@pytest.fixture
def no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave it all to the notifications."""
    monkeypatch.setattr(hub, "ROUND_SECONDS", 1000.0)


def watch(act: Callable[[list[Watcher]], Awaitable[None]], *jobs: Job) -> None:
    """Let a client of a hub watch each job, and do something when they know how things stand."""
    token_of(jobs[0].owner)
    by = Pass(jobs[0].owner_id, ApiToken.objects.get().pk)
    connection.close()  # some of the tests cut all there are

    async def main() -> None:
        async with Hub() as hub, asyncio.timeout(40):
            with ExitStack() as stack:
                watchers = [stack.enter_context(hub.watching(job.pk, by)) for job in jobs]
                for watcher in watchers:
                    await hears(watcher, JobStatus.QUEUED)
                await act(watchers)

    asyncio.run(main())


async def hears(watcher: Watcher, status: JobStatus) -> None:
    while watcher.news is None or watcher.news.status != status:
        await watcher.stir()


async def elsewhere(act: Callable[[], object]) -> None:
    """Do it on a thread, with a connection that ends with it."""

    def do() -> None:
        try:
            act()
        finally:
            connection.close()

    await asyncio.to_thread(do)


async def is_claimed(watchers: list[Watcher]) -> None:
    await elsewhere(claim)
    await hears(watchers[0], JobStatus.RUNNING)


@pytest.mark.usefixtures("no_rounds")
def test_news_comes_by_notification() -> None:
    watch(is_claimed, queue_job())


def test_news_is_found_without_notifications(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    settings.GENFLOW_NOTIFY = False
    monkeypatch.setattr(hub, "ROUND_SECONDS", 0.1)

    watch(is_claimed, queue_job())


@pytest.mark.usefixtures("no_rounds")
def test_a_listener_that_was_cut_off_comes_back_and_misses_nothing() -> None:
    async def act(watchers: list[Watcher]) -> None:
        await elsewhere(lambda: (cut_connections(), claim()))
        await hears(watchers[0], JobStatus.RUNNING)

    watch(act, queue_job())


def test_a_database_that_breaks_off_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ROUND_SECONDS", 0.1)
    monkeypatch.setattr(hub, "RETRY_SECONDS", 0.1)

    async def act(watchers: list[Watcher]) -> None:
        for _ in range(20):
            await elsewhere(cut_connections)
        await is_claimed(watchers)

    watch(act, queue_job())


@pytest.mark.usefixtures("no_rounds")
def test_what_happens_at_once_to_many_jobs_takes_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def counted(ids: Any, seen: Any) -> dict[Any, News]:
        looks.append(len(ids))
        return look(ids, seen)

    monkeypatch.setattr(hub, "look", counted)
    jobs = [queue_job() for _ in range(30)]

    def cancel_all() -> None:
        with transaction.atomic():
            for job in jobs:
                Job.objects.cancel(job.pk, by="owner")

    async def act(watchers: list[Watcher]) -> None:
        looks.clear()
        await elsewhere(cancel_all)
        for watcher in watchers:
            await hears(watcher, JobStatus.CANCELED)

    watch(act, *jobs)

    assert len(looks) <= 3


def test_a_look_takes_the_same_few_queries_however_many_jobs_it_is_for() -> None:
    jobs = []
    for _ in range(3):
        jobs += [claim_new_job(), claim_new_job()]
        Job.objects.filter(pk__in=[job.pk for job in jobs]).update(backend=None)
        show_preview(jobs[-1])
    jobs.append(queue_job())

    with CaptureQueriesContext(connection) as one:
        look([jobs[1].pk, jobs[-1].pk], {})
    with CaptureQueriesContext(connection) as all_:
        look([job.pk for job in jobs], {})

    assert len(one) == len(all_) == 4


def show_preview(job: Job) -> None:
    preview = Preview(job=job, node_id="3", content_type="image/png", image=picture_bytes())
    Job.objects.show_progress(job, {"value": 0.5}, preview)


def test_a_preview_that_is_known_is_not_loaded_again() -> None:
    job = claim_new_job()
    show_preview(job)
    news = look([job.pk], {})[job.pk]
    assert news.preview is not None

    with CaptureQueriesContext(connection) as queries:
        again = look([job.pk], {job.pk: news.preview})[job.pk]

    assert again == news
    assert len(queries) == 2


def test_places_in_the_queue_are_those_of_the_claim() -> None:
    later, first, second = queue_job(priority=-1), queue_job(priority=5), queue_job()
    finish(first, picture_bytes())

    news = look([later.pk, second.pk, first.pk], {})

    assert [news[job.pk].queue_position for job in (first, second, later)] == [None, 1, 2]


def test_of_a_deleted_job_there_is_no_news() -> None:
    job = claim_new_job()
    Job.objects.delete_for_owner(job.pk)

    assert look([job.pk], {}) == {}
