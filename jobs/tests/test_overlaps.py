"""Two acts on one job at once end as one after the other, wherever the one overtakes the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import count, product
from typing import Any, Final, Self, TypeVar

import pytest
from django.db import connection
from django.db.models.functions import Now

from jobs.models import CancelRequested, Job, LeaseLost
from jobs.status import JobStatus
from jobs.tests.helpers import fresh, make_backend, make_user, queue_job, wait_until
from jobs.tests.interactions import Life, PauseBefore, told_as
from jobs.tests.ownership import TERMS, WRITES, Row, read_rows

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(600)]

T = TypeVar("T")


def claim(job: Job) -> object:
    held = Job.objects.claim("w2", [make_backend().pk], TERMS)
    return held and held.fencing_token


def renew(job: Job) -> object:
    return list(Job.objects.renew({job.pk: job.fencing_token}, TERMS.lease).values())


# What may come at any time, whatever the holder's slot is about to write. Its renewals come on another thread.
OTHERS: Final[dict[str, Callable[[Job], object]]] = {
    "claim": claim,
    "renew": renew,
    "cancel": lambda job: Job.objects.cancel(job.pk, by="owner"),
    "delete": lambda job: Job.objects.delete_for_owner(job.pk),
}
ACTS: Final = {name: write.act for name, write in WRITES.items()} | OTHERS


@dataclass(frozen=True)
class Situation:
    """A job whose lease ran out, and what is done to it at once: two of the others' acts, or one and a slot's.

    slot: what the slot may be about to write, one thing at a time.
    """

    slot: tuple[str, ...] = ()
    others: tuple[str, ...] = tuple(OTHERS)
    values: dict[str, Any] = field(default_factory=dict)

    def pairs(self) -> list[tuple[str, str]]:
        acts = [*self.slot, *self.others]
        return [pair for pair in product(acts, acts) if not {*pair} <= {*self.slot}]


SITUATIONS: Final = {
    "running": Situation(
        slot=("checkpoint", "resubmit", "draw again", "succeed", "fail"),
        # A worker that stops does so for a slot that does not in time.
        others=(*OTHERS, "hand back"),
    ),
    "canceling": Situation(
        slot=("succeed", "fail", "finish_cancel", "release"),
        values={"status": JobStatus.CANCELING},
    ),
    "handed back": Situation(
        values={
            "status": JobStatus.QUEUED,
            "worker_id": "",
            "fencing_token": 2,
            "lease_expires_at": None,
        },
    ),
    "given up by the next claim": Situation(
        slot=("checkpoint", "succeed", "renew", "cancel", "delete"),
        others=("claim",),
        values={"lost_workers": TERMS.max_lost_workers},
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What became of the job (None: gone), and what the two were told."""

    row: Row | None
    answers: tuple[object, object]

    def turned(self) -> Self:
        return replace(self, answers=self.answers[::-1])


class Couple:
    """Two threads, each with a database connection."""

    def __enter__(self) -> Self:
        self._first, self._second = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._second_pid = self._second.submit(backend_pid).result()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pool in (self._first, self._second):
            pool.submit(lambda: connection.close()).result()
            pool.shutdown()

    def overlap(
        self, first: Callable[[], T], second: Callable[[], T], number: int
    ) -> tuple[T, T] | None:
        """Do the second before the first's interaction of this number, as far as the database lets it.

        None: the first has not so many.
        """
        pause = PauseBefore(number)
        answers: list[T] = []
        ahead = self._first.submit(Life(pause).lead, lambda: answers.append(first()))
        wait_until(lambda: pause.reached.is_set() or ahead.done())
        if not pause.reached.is_set():
            ahead.result()
            return None
        behind = self._second.submit(second)
        wait_until(lambda: wait([behind], 0.005).done or is_blocked(self._second_pid))
        pause.go_on.set()
        ahead.result()
        return answers[0], behind.result()


def backend_pid() -> int:
    connection.ensure_connection()
    pid: int = connection.connection.info.backend_pid
    return pid


def is_blocked(pid: int) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", [pid])
        return bool(cursor.fetchone()[0])


@pytest.mark.parametrize("name", SITUATIONS)
def test_two_acts_at_once_end_as_one_after_the_other(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "jobs")
    situation = SITUATIONS[name]
    in_turn = {pair: one_by_one(situation, *pair) for pair in situation.pairs()}
    overlaps = 0

    with Couple() as couple:
        for first, second in in_turn:
            allowed = [in_turn[first, second], in_turn[second, first].turned()]
            for number in count(1):  # before 0 is one by one
                with told_as(f"{second} overtakes {first} before interaction {number}"):
                    outcome = at_once(couple, situation, first, second, number)
                    if outcome is None:
                        break
                    assert outcome in allowed
                    overlaps += 1
    print(f"{overlaps} overlaps")  # noqa: T201


def test_two_claims_at_once_keep_to_the_limit_of_the_backend() -> None:
    one_place = replace(TERMS, prompts_per_backend=1)
    backend = make_backend()

    with Couple() as couple:
        for number in count(1):
            Job.objects.all().delete()
            jobs = {queue_job().pk for _ in range(2)}
            ask = partial(Job.objects.claim, "w1", [backend.pk], one_place)
            if (answers := couple.overlap(ask, ask, number)) is None:
                break
            assert len(jobs & {job.pk for job in answers if job}) == 1


def at_once(
    couple: Couple, situation: Situation, first: str, second: str, number: int
) -> Outcome | None:
    job = make_job(situation)
    answers = couple.overlap(act(first, job), act(second, job), number)
    return outcome_of(job, (first, second), answers) if answers else None


def one_by_one(situation: Situation, first: str, second: str) -> Outcome:
    job = make_job(situation)
    acts = act(first, job), act(second, job)
    return outcome_of(job, (first, second), (acts[0](), acts[1]()))


def make_job(situation: Situation) -> Job:
    """Make the only job."""
    Job.objects.all().delete()
    values = {
        "status": JobStatus.RUNNING,
        "step": "submit",
        "worker_id": "w1",
        "fencing_token": 1,
        "lease_expires_at": Now() - timedelta(seconds=1),
        "backend": make_backend(),
        "max_attempts": 5,
    }
    job = Job.objects.create(owner=make_user(), **values | situation.values)
    job.checkpoints.create(step="upload", result={}, fencing_token=1)
    return job


def act(name: str, job: Job) -> Callable[[], object]:
    """Return the act of somebody who has known the job since its first claim, to be done later."""
    known = fresh(job)
    known.fencing_token = 1

    def done_by_now() -> object:
        try:
            return ACTS[name](known)
        except (LeaseLost, CancelRequested) as exc:
            return type(exc)

    return done_by_now


def outcome_of(job: Job, names: tuple[str, str], answers: tuple[object, object]) -> Outcome:
    # A claim passes over what is locked at the moment, and is tried again soon.
    one, other = (
        claim(job) if (name, answer) == ("claim", None) else answer
        for name, answer in zip(names, answers, strict=True)
    )
    row = read_rows().get(job.pk)
    # Nobody cares which of two lines of the diary came first.
    return Outcome(row and replace(row, diary=sorted(row.diary)), (one, other))
