"""A worker is killed wherever a job's life touches the world, and another goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count, product
from typing import Final

import pytest
from django.db import OperationalError, connection
from django.db.models.functions import Now
from PIL import Image

from comfy.client import ComfyClient, Place
from fake_comfy import FakeComfy
from jobs.housekeeping import sweep
from jobs.models import Asset, Blob, Job
from jobs.status import JobStatus, Step
from jobs.tests.helpers import (
    claim_new_job,
    diary,
    fresh,
    let_lease_expire,
    make_user,
    make_worker,
    queue_job,
    run_until_done,
    start,
    wait_until,
)
from jobs.tests.interactions import KillAt, Life, Moment, Point, told_as
from jobs.tests.test_assets import uploaded
from jobs.tests.test_worker import runs
from jobs.tests.test_workflow_runs import preview, sampled, save
from jobs.worker import Worker
from jobs.workflows import submit_workflow

# Hundreds of jobs: on a busy machine that takes its time.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(600)]

# How often a worker has to look or to ask again depends on the clock, so not every life comes to each of these.
REPEATED: Final = {"GET /queue", "POST /interrupt"}
POSTS: Final = [Point("POST /prompt", n) for n in (1, 2)]
seeds = count()  # equal pictures would come from the cache


@dataclass(frozen=True)
class Story:
    """What happens in a job's life if nobody dies, and what is true at its end whoever dies."""

    submitted: int = 1
    executed: int = 1
    attempts: int = 1
    outputs: int = 1
    fault: str | None = None
    queue: Callable[[int], Job] = lambda seed: queue_job(seed=seed)


def queue_workflow(seed: int) -> Job:
    """Queue a workflow of two output nodes, one of which has no prefix and leaves its file among the previews."""
    graph = sampled(seed=seed, steps=4) | {"9": save("8"), "10": preview("8")}
    return submit_workflow(make_user(), graph)


GOES_WELL: Final = Story()
AS_A_WORKFLOW: Final = Story(outputs=2, queue=queue_workflow)
WITH_TROUBLE: Final = {
    "its run fails and it is drawn again": Story(2, 2, 2, fault="runtime_error"),
    # Lost before the sampler starts. It counts as a resubmission only if the submission had been saved.
    "its prompt is lost and sent again": Story(2, 1, 1, fault="forget_queue"),
}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.ERROR, "jobs")
    # Progress is written by the clock: never, so that all lives have the same points. It is one more UPDATE.
    monkeypatch.setattr("jobs.steps.PROGRESS_EVERY", 3600)


def test_a_job_is_done_once_wherever_its_worker_is_killed(fake: FakeComfy) -> None:
    points = live_out(fake, begin(fake, GOES_WELL)).points

    kill_at_each(fake, GOES_WELL, list(product(Moment, points)))


def test_a_workflow_is_done_once_wherever_its_worker_is_killed(fake: FakeComfy) -> None:
    points = live_out(fake, begin(fake, AS_A_WORKFLOW)).points

    kill_at_each(fake, AS_A_WORKFLOW, list(product(Moment, points)))


@pytest.mark.parametrize("trouble", WITH_TROUBLE)
def test_a_job_in_trouble_is_done_once_wherever_its_worker_is_killed(
    fake: FakeComfy, trouble: str
) -> None:
    story = WITH_TROUBLE[trouble]
    points = live_out(fake, begin(fake, story)).points
    first, second = map(points.index, POSTS)

    # The rest is as when all goes well. After a point is before the next.
    kill_at_each(fake, story, list(product([Moment.BEFORE], points[first : second + 2])))


def kill_at_each(fake: FakeComfy, story: Story, moments: Sequence[tuple[Moment, Point]]) -> None:
    for moment, point in moments:
        with told_as(f"killed {moment} {point}"):
            job = begin(fake, story)
            kill = KillAt(moment, point)
            live_out(fake, job, kill)
            at_death = fresh(job).step
            take_over(fake, job)

            assert kill.struck or point.name in REPEATED
            assert_done_once(fake, job, story)
            left = story.outputs if at_death == Step.DOWNLOAD else 0
            assert_only_named_bytes_are_left(or_at_most=left)
    print(f"{len(moments)} kills")  # noqa: T201


def begin(fake: FakeComfy, story: Story) -> Job:
    fake.seconds = 0.02
    fake.clear_faults()
    if story.fault:
        fake.fault(story.fault)
    return story.queue(next(seeds))


def worker_for(fake: FakeComfy, poll: float = 0.02) -> Worker:
    """Its lease ends when a test says so."""
    return make_worker(fake.url, poll=poll, lease=600)


def live_out(fake: FakeComfy, job: Job, kill: KillAt | None = None) -> Life:
    """Let one worker go on with the job until it is done or the worker is dead."""
    life, worker = Life(kill), worker_for(fake)
    while not (life.is_over or fresh(job).is_final):
        Job.objects.filter(pk=job.pk, status=JobStatus.QUEUED).update(run_after=Now())
        start(partial(life.lead, worker.run_once)).join()
    return life


def take_over(fake: FakeComfy, job: Job) -> None:
    if not fresh(job).is_final:
        let_lease_expire(job)
        run_until_done(job, worker_for(fake))


def assert_done_once(fake: FakeComfy, job: Job, story: Story) -> None:
    row = fresh(job)
    assert (row.status, row.attempt, row.error) == ("succeeded", story.attempts, None)
    assert row.outputs.count() == story.outputs
    for output in row.outputs.all():
        with output.file.open() as file:
            assert Image.open(file).size == (64, 64)
    assert runs(fake, job) == (story.submitted, story.executed)
    assert set(row.checkpoints.values_list("step", flat=True)) == set(Step)
    assert_the_diary_agrees(row)


def assert_the_diary_agrees(row: Job) -> None:
    """Each line was written together with what it tells of."""
    kinds = diary(row)
    lost = row.events.filter(kind="claimed", facts__has_key="lost_worker")
    assert [kind for kind in kinds if kind in JobStatus.values] == [kinds[-1]] == [row.status]
    assert kinds.count("claimed") + kinds.count("retry") == row.fencing_token
    assert lost.count() == row.lost_workers
    assert kinds.count("retry") == row.attempt - 1
    assert kinds.count("resubmitted") == row.resubmits
    assert_steps_in_order(row)


def assert_steps_in_order(row: Job) -> None:
    """No step was saved twice, but after the drawing began anew."""
    expected = list(Step)
    for event in row.events.order_by("pk"):
        if event.kind == "step_finished":
            assert event.facts["step"] == expected.pop(0)
        elif event.kind in {"retry", "resubmitted"}:
            expected = list(Step)
    assert row.status != JobStatus.SUCCEEDED or not expected


def assert_only_named_bytes_are_left(*, or_at_most: int = 0) -> None:
    """or_at_most: so many files without a row who dies on the way may leave to the sweep."""
    assert not Asset.objects.filter(job=None, used_by=None, expires_at=None).exists()
    assert Blob.objects.count() - Asset.objects.count() <= or_at_most
    Blob.objects.update(kept_until=Now() - timedelta(seconds=1))

    sweep()

    names = set(Asset.objects.values_list("file", flat=True))
    assert set(Blob.objects.values_list("name", flat=True)) == names


# --- cancel ---


def test_a_canceled_job_ends_once_wherever_its_worker_is_killed(fake: FakeComfy) -> None:
    points = live_until_canceled(fake, begin_long(fake)).points

    for point in points:
        with told_as(f"killed before {point}"):
            job = begin_long(fake)
            kill = KillAt(Moment.BEFORE, point)
            live_until_canceled(fake, job, kill)
            take_over(fake, job)

            assert kill.struck or point.name in REPEATED
            assert_canceled(fake, job)
            assert_only_named_bytes_are_left()
    print(f"{len(points)} kills")  # noqa: T201


def begin_long(fake: FakeComfy) -> Job:
    fake.seconds = 10  # nothing ends before it is canceled
    return queue_job(seed=next(seeds), steps=150)


def live_until_canceled(fake: FakeComfy, job: Job, kill: KillAt | None = None) -> Life:
    """Let a worker go on with the job, which is canceled when it is being drawn or the worker is dead."""
    # So slow a poll leaves one look at the run, and those after the cancel.
    life, worker = Life(kill), worker_for(fake, poll=600)
    thread = start(partial(life.lead, worker.run_once))
    # Being drawn, as the row says too: a slow worker may not have saved yet that it sent the prompt.
    wait_until(lambda: life.is_over or (runs(fake, job)[1] and fresh(job).step == Step.WAIT))
    Job.objects.cancel(job.pk, by="owner")
    worker.renewer.renew_all()
    thread.join()
    return life


def assert_canceled(fake: FakeComfy, job: Job) -> None:
    row = fresh(job)
    assert row.status == JobStatus.CANCELED
    assert not row.outputs.exists()
    with ComfyClient(fake.url) as client:
        assert client.look_up(job.prompt_id).place in {Place.FINISHED, Place.UNKNOWN}
    assert diary(row).count("cancel_asked") == 1
    if row.fencing_token:  # else nobody had it yet, and the asking was the end
        assert_the_diary_agrees(row)


@pytest.mark.parametrize("heard", [True, False])
def test_a_job_is_canceled_or_done_and_never_both_whenever_the_cancel_comes(
    fake: FakeComfy, heard: bool
) -> None:
    points = points_outside_transactions(fake)

    for point in points:
        with told_as(f"canceled before {point}"):
            job, worker = begin(fake, GOES_WELL), worker_for(fake)
            cancel = CancelAt(job, worker, point, heard=heard)
            start(partial(Life(cancel).lead, worker.run_once)).join()

            if cancel.won:
                assert_canceled(fake, job)
            else:
                assert point.name in REPEATED
                assert_done_once(fake, job, GOES_WELL)
            assert_only_named_bytes_are_left()
    print(f"{len(points)} cancels")  # noqa: T201


class CancelAt:
    """Cancels the job before one point of its worker's life. `won`: it was not done yet."""

    def __init__(self, job: Job, worker: Worker, point: Point, *, heard: bool) -> None:
        self._job, self._worker = job, worker
        self._when = (Moment.BEFORE, point)
        self._heard = heard
        self.won = False

    def __call__(self, moment: Moment, point: Point) -> None:
        if (moment, point) == self._when:
            start(self._cancel).join()

    def _cancel(self) -> None:
        self.won = Job.objects.cancel(self._job.pk, by="owner")
        if self._heard:
            self._worker.renewer.renew_all()


def points_outside_transactions(fake: FakeComfy) -> list[Point]:
    """Return where a cancel can come between: else it waits for the row."""
    outside = []

    def watch(moment: Moment, point: Point) -> None:
        if moment == Moment.BEFORE and connection.autocommit:
            outside.append(point)

    begin(fake, GOES_WELL)
    start(partial(Life(watch).lead, worker_for(fake).run_once)).join()
    return outside


# --- delete ---


@pytest.mark.parametrize("is_done", [False, True])
def test_a_delete_is_done_or_not_wherever_the_web_server_is_killed(is_done: bool) -> None:
    life = Life()
    delete(held_job(is_done=is_done), life)

    for point in life.points:
        with told_as(f"killed before {point}"):
            Job.objects.all().purge()
            job = held_job(is_done=is_done)
            before = Job.objects.values().get(pk=job.pk)
            delete(job, Life(KillAt(Moment.BEFORE, point)))
            assert_only_named_bytes_are_left(or_at_most=2)  # the sweep, too, goes on with a delete

            row = Job.objects.filter(pk=job.pk)
            assert not row or row.values().get() == before or row.get().status == "canceling"
    print(f"{len(life.points)} kills")  # noqa: T201


def test_an_upload_is_done_or_not_wherever_the_web_server_is_killed() -> None:
    life = Life()
    send(life)

    for point in life.points:
        for moment in Moment:
            with told_as(f"killed {moment} {point}"):
                Asset.objects.all().delete_with_files()
                send(Life(KillAt(moment, point)))
                assert_only_named_bytes_are_left(or_at_most=1)
    assert life.points


def send(life: Life) -> None:
    user = make_user()

    def act() -> None:
        with suppress(OperationalError):  # who is dead already would clean up
            uploaded(owner=user)

    start(partial(life.lead, act)).join()


def held_job(*, is_done: bool) -> Job:
    job = claim_new_job()
    if is_done:
        picture = Asset.store(b"png", owner=job.owner, job=job, content_type="image/png")
        Job.objects.succeed(job, [picture], {})
    return job


def delete(job: Job, life: Life) -> None:
    start(partial(life.lead, partial(Job.objects.delete_for_owner, job.pk))).join()
