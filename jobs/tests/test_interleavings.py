"""Claims and writes in any order, by holders old and new, against the model of ownership."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import hypothesis.strategies as st
import pytest
from django.db import transaction
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jobs.models import Asset, Backend, Failure, Job
from jobs.status import Step
from jobs.tests.helpers import TERMS, let_lease_expire, make_backend, make_user, queue_job
from jobs.tests.ownership import FOLLOWING, UNFINISHED, Claim, Row, load, read_rows, refusal

FAILURE: Final = Failure("unknown", "It went wrong.")
# Longer than any example takes: only a rule lets it run out.
LEASE: Final = timedelta(hours=1)
MOST_JOBS: Final = 5

some_backends = st.sampled_from([(0,), (1,), (0, 1)])
one_or_none = st.sampled_from([(), (0,), (1,)])
delays = st.sampled_from([timedelta(), timedelta(hours=1)])


class Ownership(RuleBasedStateMachine):
    """Each rule does one thing to the database and says how all the rows must look after it.

    jobs: the ids of all that were ever queued; holders: what claims gave out, most of it long stale.
    """

    jobs = Bundle("jobs")
    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.example = transaction.atomic()
        self.example.__enter__()
        self.owner = make_user()
        self.backends = [make_backend(f"http://{name}.test") for name in "ab"]
        self.before: Mapping[UUID, Row] = {}
        self.rows: Mapping[UUID, Row] = {}

    def teardown(self) -> None:
        transaction.set_rollback(True)
        self.example.__exit__(None, None, None)

    # --- what is always true ---

    @invariant()
    def no_backend_has_more_prompts_than_its_limit(self) -> None:
        for backend in self.backends:
            assert load(self.rows, backend.pk) <= TERMS.prompts_per_backend

    @invariant()
    def every_held_job_has_a_lease_and_no_other_has_one(self) -> None:
        assert all(row.is_held == (row.lease is not None) for row in self.rows.values())

    @invariant()
    def a_job_only_goes_on(self) -> None:
        for pk in self.before.keys() & self.rows.keys():
            before, row = self.before[pk], self.rows[pk]
            if before.status not in UNFINISHED:
                assert row == replace(before, is_deleted=row.is_deleted)
            assert row.status in {before.status, *FOLLOWING.get(before.status, ())}
            assert row.token >= before.token
            assert row.attempt == 1 + row.diary.count("retry")
            assert row.resubmits == row.diary.count("resubmitted")

    def expect(self, changed: Mapping[UUID, Row | None]) -> None:
        """All rows are as before but for these. None: gone."""
        expected = {**self.rows, **changed}
        self.before, self.rows = self.rows, read_rows()
        assert self.rows == {pk: row for pk, row in expected.items() if row is not None}

    # --- what owners and operators do ---

    @precondition(lambda self: len(self.rows) < MOST_JOBS)
    @rule(target=jobs, priority=st.integers(0, 1))
    def submit(self, priority: int) -> UUID:
        job = queue_job(self.owner, photo=b"a photo", priority=priority)
        self.before, self.rows = self.rows, read_rows()
        assert self.rows.keys() - self.before.keys() == {job.pk}
        return job.pk

    @rule(pk=jobs)
    def cancel(self, pk: UUID) -> None:
        row = self.rows.get(pk)

        asked = Job.objects.cancel(pk, by="owner")

        assert asked == (row is not None and row.status in {"queued", "running"})
        self.expect({pk: row.asked_to_end()} if row and asked else {})

    @rule(pk=jobs)
    def delete(self, pk: UUID) -> None:
        row = self.rows.get(pk)

        Job.objects.delete_for_owner(pk)

        if row is not None and row.status in {"queued", "running"}:
            row = row.asked_to_end()
        is_unfinished = row is not None and row.status in UNFINISHED
        self.expect({pk: replace(row, is_deleted=True) if row and is_unfinished else None})

    @rule()
    def sweep(self) -> None:
        Job.objects.purge_deleted()

        swept = [pk for pk, row in self.rows.items() if row.is_deleted and row.has_end]
        self.expect(dict.fromkeys(swept))

    @rule()
    def run_now(self) -> None:
        Job.objects.run_now()

        queued = {pk: row for pk, row in self.rows.items() if row.status == "queued"}
        self.expect({pk: replace(row, is_due=True) for pk, row in queued.items()})

    # --- what backends do ---

    @rule(number=st.integers(0, 1))
    def rest(self, number: int) -> None:
        self.backends[number].rest("refused")
        self.expect({})

    @rule(number=st.integers(0, 1))
    def come_back(self, number: int) -> None:
        self.backends[number].seen("0.26.0")
        self.expect({})

    @rule(number=st.integers(0, 1))
    def recover(self, number: int) -> None:
        self.backends[number].recovered()
        self.expect({})

    # --- claims and leases ---

    @rule(
        target=holders,
        worker=st.sampled_from(["w1", "w2", "w3"]),
        drives=some_backends,
        unattended=one_or_none,
    )
    def claim(self, worker: str, drives: tuple[int, ...], unattended: tuple[int, ...]) -> Any:
        question = Claim(
            [self.backends[number].pk for number in drives],
            [self.backends[number].pk for number in unattended],
            {b.pk: 1 if b.failures else TERMS.prompts_per_backend for b in Backend.objects.usable()},
        )
        expected = dict(self.rows)
        pk = question.answer(expected)

        held = Job.objects.claim(
            worker, question.drives, replace(TERMS, lease=LEASE), question.unattended
        )

        assert (held and held.pk) == pk
        if held is not None:
            row = expected[held.pk]
            assert held.backend_id in question.places(row, expected)
            expected[held.pk] = question.taken(row, worker, held.backend_id)
        self.expect(dict.fromkeys(self.rows) | expected)
        return multiple() if held is None else held

    @rule(held=st.lists(holders, min_size=1, max_size=3))
    def renew(self, held: list[Job]) -> None:
        tokens = {job.pk: job.fencing_token for job in held}

        answer = Job.objects.renew(tokens, LEASE)

        ours = {
            pk: row
            for pk, row in self.rows.items()
            if row.is_held and row.token == tokens.get(pk)
        }
        assert answer == {pk: row.status for pk, row in ours.items()}
        self.expect({pk: replace(row, lease=True) for pk, row in ours.items()})

    @rule(job=holders)
    def expire(self, job: Job) -> None:
        row = self.rows.get(job.pk)
        if row is not None and row.is_held:
            let_lease_expire(job)
            self.expect({job.pk: replace(row, lease=False)})

    # --- what holders write ---

    def write(
        self,
        job: Job,
        to: str,
        act: Callable[[], object],
        result: Callable[[Row], Row | None],
    ) -> None:
        """Write as this holder: the row becomes the result or, if it has no right to that, stays as it is."""
        row = self.rows.get(job.pk)
        if error := refusal(row, job.fencing_token, to):
            with pytest.raises(error):
                act()
            self.expect({})
        else:
            assert row is not None
            act()
            self.expect({job.pk: result(row)})

    @rule(job=holders)
    def checkpoint(self, job: Job) -> None:
        step = Step.WAIT if job.step == Step.DOWNLOAD else Step(job.step)  # that one: once more
        self.write(
            job,
            "running",
            lambda: Job.objects.checkpoint(job, step, {}, LEASE),
            lambda row: row.telling(
                "step_finished",
                step=step.following,
                lease=True,
                checkpoints=row.checkpoints | {step},
            ),
        )

    @rule(job=holders)
    def show_progress(self, job: Job) -> None:
        self.write(
            job, "running", lambda: Job.objects.show_progress(job, {"value": 0.5}), lambda row: row
        )

    @rule(job=holders)
    def resubmit(self, job: Job) -> None:
        self.write(
            job,
            "running",
            lambda: Job.objects.resubmit(job, LEASE),
            lambda row: row.begun_anew().telling(
                "resubmitted",
                resubmits=row.resubmits + 1,
                drawing=row.drawing + 1,
                lease=True,
            ),
        )

    @rule(job=holders, delay=delays, redraw=st.booleans())
    def retry(self, job: Job, delay: timedelta, redraw: bool) -> None:
        def result(row: Row) -> Row:
            if redraw or row.step == "upload":
                row = replace(row, backend=None)
            if redraw:
                drawing = row.drawing + 1
                row = replace(row.begun_anew(), drawing=drawing, spoiled=drawing)
            return row.let_go("retry", attempt=row.attempt + 1, is_due=not delay)

        self.write(
            job,
            "queued",
            lambda: Job.objects.retry(job, FAILURE, delay, redraw=redraw),
            result,
        )

    @rule(job=holders, keep_backend=st.booleans(), refused=st.booleans())
    def hand_back(self, job: Job, keep_backend: bool, refused: bool) -> None:
        def result(row: Row) -> Row:
            refused_by = row.refused_by
            if refused and row.backend is not None:
                refused_by += (row.backend,)
            if not keep_backend:
                row = replace(row.begun_anew(), backend=None)
            return row.let_go("handed_back", refused_by=refused_by)

        self.write(
            job,
            "queued",
            lambda: Job.objects.hand_back(job, "test", keep_backend=keep_backend, refused=refused),
            result,
        )

    @rule(job=holders)
    def release(self, job: Job) -> None:
        row = self.rows.get(job.pk)
        if row is not None and row.status == "running":
            return  # so only canceling jobs are let go of
        self.write(
            job,
            "canceling",
            lambda: Job.objects.release(job),
            lambda row: replace(row, worker="", lease=False, token=row.token + 1),
        )

    @rule(job=holders)
    def finish_cancel(self, job: Job) -> None:
        self.write(
            job,
            "canceled",
            lambda: Job.objects.finish_cancel(job),
            lambda row: None if row.is_deleted else row.ended("canceled"),
        )

    @rule(job=holders)
    def succeed(self, job: Job) -> None:
        picture = Asset(owner=self.owner, job=job, size=1, content_type="image/png")
        self.write(
            job,
            "succeeded",
            lambda: Job.objects.succeed(job, [picture], {}),
            lambda row: row.ended(
                "succeeded",
                "step_finished",
                checkpoints=row.checkpoints | {"download"},
                pictures=row.pictures + 1,
            ),
        )

    @rule(job=holders)
    def fail(self, job: Job) -> None:
        self.write(
            job, "failed", lambda: Job.objects.fail(job, FAILURE), lambda row: row.ended("failed")
        )


@pytest.mark.django_db
@pytest.mark.timeout(600)
def test_in_any_order_of_claims_and_writes_each_job_has_one_holder_and_one_end() -> None:
    run_state_machine_as_test(
        Ownership,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            database=None,
            print_blob=True,
        ),
    )
