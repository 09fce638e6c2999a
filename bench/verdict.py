"""What became of the jobs of a chaos run."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Final

from bench.trouble import House
from jobs.models import Job, JobEvent
from jobs.status import JobStatus

# How long after the last line of a diary something may have to do with it. Seconds.
TELL_AFTER: Final = 5.0


@dataclass(frozen=True)
class Recovery:
    """From the kill of a worker to the next claim of the job it held."""

    seconds: float
    job: uuid.UUID
    meanwhile: Sequence[str]


@dataclass(frozen=True)
class Verdict:
    text: str
    good: bool


def judge(house: House, jobs: Sequence[uuid.UUID]) -> Verdict:
    rows = list(Job.objects.filter(pk__in=jobs).prefetch_related("events", "outputs"))
    lost = len(jobs) - sum(is_well_ended(row) for row in rows)
    failed = Counter(row.error["code"] for row in rows if row.status == "failed" and row.error)
    executed = [row for row in rows if is_double(house, row, "executed")]
    sent = [row for row in rows if is_double(house, row, "submitted")]
    unexplained = [row for row in sent if not met_the_gap(house, row)]
    recoveries = sorted(find_recoveries(house, rows), key=lambda r: r.seconds)
    errors = Counter(read_errors(house))
    lines = [
        ("jobs in", len(jobs), ""),
        ("succeeded", sum(row.status == JobStatus.SUCCEEDED for row in rows), ""),
        ("failed", failed.total(), listed(failed)),
        ("lost", lost, ""),
        ("executed twice", len(executed), ""),
        ("sent twice", len(sent), f"{len(unexplained)} of them unexplained"),
        ("sent again", sum(row.resubmits for row in rows), "ComfyUI had forgotten them"),
        ("taken over", sum(row.lost_workers for row in rows), "from workers that fell silent"),
        ("other attempts", sum(row.attempt - 1 for row in rows), ""),
        ("workers that gave up", len(house.deserters), "; ".join(house.deserters)),
        ("errors in the logs", errors.total(), listed(errors)),
        ("recoveries", len(recoveries), "of jobs whose worker was killed"),
    ]
    text = [f"{name:22}{number:6}  {remark}".rstrip() for name, number, remark in lines]
    at = {h.what: h.at for h in house.happenings}
    text.append(
        f"from the end of the trouble to that of the last job: {at['end'] - at['calm']:.1f} s"
    )
    if recoveries:
        text.append(described(recoveries))
    text.append("trouble: " + listed(house.trouble()))
    text += [told(house, row) for row in rows if not is_well_ended(row)]
    slow = {r.job for r in recoveries if r.seconds > 2 * house.plan.lease}
    text += [f"slow to recover: {told(house, row)}" for row in rows if row.pk in slow]
    text += [f"sent twice: {told(house, row)}" for row in sent]
    return Verdict("\n".join(text), not (lost or unexplained or house.deserters or errors))


def is_well_ended(row: Job) -> bool:
    """Ended with a picture whose bytes are there, or with an error."""
    if row.status != JobStatus.SUCCEEDED:
        return row.is_final
    return (
        [output.file.size for output in row.outputs.all()]
        == [output.size for output in row.outputs.all()]
        != []
    )


def is_double(house: House, row: Job, what: str) -> bool:
    """Whether it was sent or executed twice in one life of ComfyUI, though the first picture was good."""
    spoiled = row.drawing - row.resubmits
    return sum(n - 1 for n in in_each_life(house, row, what) if n) > spoiled


def in_each_life(house: House, row: Job, what: str) -> list[int]:
    """Return how often the job was "submitted" or "executed" in each life of ComfyUI."""
    totals = [0, *(life.get(str(row.pk), {what: 0})[what] for life in house.lives)]
    return [after - before for before, after in pairwise(totals)]


def met_the_gap(house: House, row: Job) -> bool:
    """Whether the job was taken from a worker that was frozen then, and woke up later."""
    for event in row.events.all():
        of_loser = [h for h in house.happenings if h.pid == lost_pid(event)]
        taken_at = event.created_at.timestamp()
        before = [h.what for h in of_loser if h.at < taken_at]
        after = [h.what for h in of_loser if h.at >= taken_at]
        if before[-1:] == ["freeze"] and after[:1] == ["thaw"]:
            return True
    return False


def lost_pid(event: JobEvent) -> int:
    """Return the pid of the worker that the job was taken from; 0: of none."""
    worker_id = event.facts.get("lost_worker", "--0-")
    return int(worker_id.split("-")[-2])


def find_recoveries(house: House, rows: Sequence[Job]) -> Iterator[Recovery]:
    kills = {h.pid: h.at for h in house.happenings if h.what == "kill"}
    for row in rows:
        for event in row.events.all():
            killed_at = kills.get(lost_pid(event))
            if killed_at is not None:
                claimed_at = event.created_at.timestamp()
                meanwhile = [h.what for h in house.happenings if killed_at < h.at < claimed_at]
                yield Recovery(claimed_at - killed_at, row.pk, meanwhile)


def described(recoveries: Sequence[Recovery]) -> str:
    median, longest = recoveries[len(recoveries) // 2], recoveries[-1]
    return (
        f"recovery: median {median.seconds:.1f} s, longest {longest.seconds:.1f} s, of {longest.job}; meanwhile: "
        + (listed(Counter(longest.meanwhile)) or "nothing")
    )


def read_errors(house: House) -> Iterator[str]:
    """Yield what workers logged as an error: nothing that befalls them here is one."""
    for log in house.logs.iterdir():
        for line in log.read_text(errors="replace").splitlines():
            if not line.startswith("{"):
                yield line[:100]
            elif '"ERROR"' in line:
                yield json.loads(line)["message"]


def listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def told(house: House, row: Job) -> str:
    """Tell a job's life, with what happened around it."""
    diary = [
        (e.created_at.timestamp(), f"{e.kind} {e.worker_id} {e.facts or ''}")
        for e in row.events.all()
    ]
    around = [(h.at, f"  [{h.what} {h.pid or ''}]") for h in house.happenings]
    begin, end = diary[:2][-1][0], diary[-1][0] + TELL_AFTER  # from its first claim
    story = sorted(diary + [line for line in around if begin < line[0] < end])
    head = f"{row.pk} {row.status} executed {in_each_life(house, row, 'executed')} drawing {row.drawing}"
    return "\n".join([head, *(f"  {clock(at)} {what}" for at, what in story)])


def clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%H:%M:%S.%f")[:-3]  # noqa: DTZ006 (for people here)
