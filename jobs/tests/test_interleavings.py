"""Claims and writes in any order, by holders old and new, against the model of ownership."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import hypothesis.strategies as st
import pytest
from django.db import transaction
from django.db.models.functions import Now
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

from jobs.models import Backend, Job
from jobs.tests.helpers import let_lease_expire, make_backend, make_user, queue_job
from jobs.tests.ownership import FOLLOWING, TERMS, UNFINISHED, WRITES, Claim, Row, load, read_rows

# After these the holder has the job still.
KEEPING: Final = ["checkpoint", "resubmit", "show_progress"]
LETTING_GO: Final = [name for name in WRITES if name not in KEEPING]


class Ownership(RuleBasedStateMachine):
    """Each rule does one thing to the database and says how all the rows must look after it.

    holders: what claims gave out, most of it long stale.
    """

    holders = Bundle("holders")
    backends = st.integers(0, 1)
    workers = st.sampled_from(["w1", "w2"])

    def __init__(self) -> None:
        super().__init__()
        self.example = transaction.atomic()
        self.example.__enter__()
        self.owner = make_user()
        self.fleet = [make_backend(f"http://{name}.test") for name in "ab"]
        self.before: Mapping[UUID, Row] = {}
        self.rows: Mapping[UUID, Row] = {}
        self.given: dict[tuple[UUID, int], Job] = {}
        for _ in range(3):
            self.submit(priority=0)
        # One of them has got somewhere.
        held = self.claim("w1")
        for name in ("checkpoint", "hand back"):
            self.anybody_writes(held, name)

    def teardown(self) -> None:
        transaction.set_rollback(True)
        self.example.__exit__(None, None, None)

    # --- what is always true ---

    @invariant()
    def no_backend_has_more_prompts_than_its_limit(self) -> None:
        for backend in self.fleet:
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

    @precondition(lambda self: sum(row.status == "queued" for row in self.rows.values()) < 3)
    @rule(priority=st.integers(0, 1))
    def submit(self, priority: int) -> None:
        pk = queue_job(self.owner, photo=b"a photo", priority=priority).pk
        self.before, self.rows = self.rows, read_rows()
        assert self.rows.keys() - self.before.keys() == {pk}

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), delete=st.booleans())
    def ask_for_the_end(self, data: st.DataObject, delete: bool) -> None:
        pk = data.draw(st.sampled_from(list(self.rows)))
        row = self.rows[pk]
        would = row.status in {"queued", "running"}
        changed = row.asked_to_end() if would else row

        if delete:
            Job.objects.delete_for_owner(pk)
            self.expect({pk: None if changed.has_end else replace(changed, is_deleted=True)})
        else:
            assert Job.objects.cancel(pk, by="owner") == would
            self.expect({pk: changed})

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def let_the_time_be_over(self, data: st.DataObject) -> None:
        pk = data.draw(st.sampled_from(list(self.rows)))
        row = self.rows[pk]
        Job.objects.filter(pk=pk).update(expires_at=Now() - timedelta(seconds=1))

        assert Job.objects.expire(10) == (row.status == "queued")

        Job.objects.filter(pk=pk).update(expires_at=Now() + timedelta(days=1))
        self.expect({pk: row.ended("expired") if row.status == "queued" else row})

    @rule()
    def sweep_and_run_now(self) -> None:
        Job.objects.purge_deleted()
        Job.objects.run_now()

        due = {
            pk: replace(row, is_due=row.is_due or row.status == "queued")
            for pk, row in self.rows.items()
        }
        self.expect(
            {pk: None if row.is_deleted and row.has_end else row for pk, row in due.items()}
        )

    # --- what becomes of backends ---

    @rule(number=backends, reason=st.sampled_from(["refused", "it answers", "a run ended well"]))
    def change_backend(self, number: int, reason: str) -> None:
        backend = self.fleet[number]
        if reason == "refused":
            backend.rest(reason)
        elif reason == "it answers":
            backend.seen("0.26.0")
        else:
            backend.recovered()
        self.expect({})

    # --- claims and leases ---

    @rule(target=holders, worker=workers)
    def claim(self, worker: str) -> Any:
        return self.ask(worker, self.fleet, [])

    @rule(target=holders, worker=workers, drives=backends, unattended=backends)
    def claim_for_one_backend(self, worker: str, drives: int, unattended: int) -> Any:
        return self.ask(worker, [self.fleet[drives]], [self.fleet[unattended]])

    def ask(self, worker: str, drives: Sequence[Backend], unattended: Sequence[Backend]) -> Any:
        question = Claim(
            [backend.pk for backend in drives],
            [backend.pk for backend in unattended],
            {
                b.pk: 1 if b.failures else TERMS.prompts_per_backend
                for b in Backend.objects.usable()
            },
        )
        expected = dict(self.rows)
        pk = question.answer(expected)

        held = Job.objects.claim(worker, question.drives, TERMS, question.unattended)

        assert (held and held.pk) == pk
        if held is not None:
            row = expected[held.pk]
            assert held.backend_id in question.places(row, expected)
            expected[held.pk] = question.taken(row, worker, held.backend_id)
            self.given[held.pk, held.fencing_token] = held
        self.expect({**dict.fromkeys(self.rows), **expected})
        return multiple() if held is None else held

    @rule(holders=st.lists(holders, min_size=1, max_size=3))
    def renew(self, holders: list[Job]) -> None:
        tokens = {job.pk: job.fencing_token for job in holders}

        answer = Job.objects.renew(tokens, TERMS.lease)

        ours = {
            pk: row for pk, row in self.rows.items() if row.is_held and row.token == tokens.get(pk)
        }
        assert answer == {pk: row.status for pk, row in ours.items()}
        self.expect({pk: replace(row, lease=True) for pk, row in ours.items()})

    @precondition(lambda self: self.holding())
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.holding()))

        let_lease_expire(job)

        self.expect({job.pk: replace(self.rows[job.pk], lease=False)})

    @rule(job=holders, name=st.sampled_from(list(WRITES)))
    def anybody_writes(self, job: Job, name: str) -> None:
        write, row = WRITES[name], self.rows.get(job.pk)
        if name == "release" and row and row.status == "running":
            return  # only of canceling jobs
        if refusal := write.refusal(row, job):
            with pytest.raises(refusal):
                write.act(job)
            self.expect({})
        else:
            assert row is not None
            write.act(job)
            self.expect({job.pk: write.result(row)})

    @precondition(lambda self: self.holding())
    @rule(data=st.data(), name=st.sampled_from(KEEPING))
    def a_holder_goes_on(self, data: st.DataObject, name: str) -> None:
        self.anybody_writes(data.draw(st.sampled_from(self.holding())), name)

    @precondition(lambda self: self.holding())
    @rule(data=st.data(), name=st.sampled_from(LETTING_GO))
    def a_holder_lets_go(self, data: st.DataObject, name: str) -> None:
        self.anybody_writes(data.draw(st.sampled_from(self.holding())), name)

    def holding(self) -> list[Job]:
        held = [(pk, row.token) for pk, row in self.rows.items() if row.is_held]
        return [self.given[key] for key in held if key in self.given]


@pytest.mark.django_db
@pytest.mark.timeout(600)
def test_in_any_order_of_claims_and_writes_each_job_has_one_holder_and_one_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "jobs")
    run_state_machine_as_test(
        Ownership,
        settings=settings(
            max_examples=80,
            stateful_step_count=50,
            deadline=None,
            database=None,
            print_blob=True,
        ),
    )
