"""What became of the jobs of a chaos run."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from bench.trouble import House
from jobs.models import Job, JobEvent
from jobs.status import JobStatus


@dataclass(frozen=True)
class Recovery:
    """From the kill of a worker to the next claim of the job it held."""

    seconds: float
    job: uuid.UUID
    meanwhile: Sequence[str]


@dataclass(frozen=True)
class Double:
    """A job drawn twice in one life of ComfyUI, though nothing was wrong with the first picture."""

    job: Job
    explanation: str


@dataclass(frozen=True)
class Verdict:
    text: str
    good: bool


def judge(house: House, jobs: Sequence[uuid.UUID]) -> Verdict:
    rows = list(Job.objects.filter(pk__in=jobs).prefetch_related("events", "outputs"))
    lost = len(jobs) - sum(is_well_ended(row) for row in rows)
    failed = Counter(row.error["code"] for row in rows if row.status == "failed" and row.error)
    doubles = [d for row in rows if (d := double(house, row)) is not None]
    unexplained = [d for d in doubles if not d.explanation]
    recoveries = sorted(find_recoveries(house, rows), key=lambda r: r.seconds)
    errors = Counter(read_errors(house))
    lines = [
        ("jobs in", len(jobs), ""),
        ("succeeded", sum(row.status == JobStatus.SUCCEEDED for row in rows), ""),
        ("failed", failed.total(), listed(failed)),
        ("lost", lost, ""),
        ("executed twice", len(doubles), f"{len(unexplained)} of them unexplained"),
        ("sent again", sum(row.resubmits for row in rows), "ComfyUI had forgotten them"),
        ("taken over", sum(row.lost_workers for row in rows), "from workers that fell silent"),
        ("other attempts", sum(row.attempt - 1 for row in rows), ""),
        ("workers that gave up", len(house.deserters), "; ".join(house.deserters)),
        ("errors in the logs", errors.total(), listed(errors)),
        ("recoveries", len(recoveries), "of jobs whose worker was killed"),
    ]
    text = [f"{name:22}{number:6}  {remark}".rstrip() for name, number, remark in lines]
    at = {h.what: h.at for h in house.happenings}
    text.append(f"from the end of the trouble to that of the last job: {at['end'] - at['calm']:.1f} s")
    if recoveries:
        text.append(described(recoveries))
    text.append("trouble: " + listed(Counter(h.what for h in house.happenings)))
    text += [told(house, row) for row in rows if not is_well_ended(row)]
    slow = {r.job for r in recoveries if r.seconds > 2 * house.plan.lease}
    text += [f"slow to recover: {told(house, row)}" for row in rows if row.pk in slow]
    text += [
        f"executed twice, {d.explanation or 'unexplained'}: {told(house, d.job)}" for d in doubles
    ]
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


def double(house: House, row: Job) -> Double | None:
    spoiled = row.drawing - row.resubmits
    if sum(n - 1 for n in drawings(house, row) if n) <= spoiled:
        return None
    return Double(row, "in the known gap" if met_the_gap(house, row) else "")


def drawings(house: House, row: Job) -> Iterator[int]:
    """Yield how often the job was drawn in each life of ComfyUI."""
    before = 0
    for life in house.lives:
        count = life.get(str(row.pk), {"executed": 0})["executed"]
        yield count - before
        before = count


def met_the_gap(house: House, row: Job) -> bool:
    """Whether the job was taken from a worker that was frozen, and not killed meanwhile."""
    frozen = {h.pid for h in house.happenings if h.what == "freeze"}
    return any(lost_pid(event) in frozen for event in row.events.all())


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
    story = [line for line in sorted(diary + around) if diary[0][0] <= line[0] <= diary[-1][0] + 5]
    head = f"{row.pk} {row.status} drawn {list(drawings(house, row))} drawing {row.drawing}"
    return "\n".join([head, *(f"  {clock(at)} {what}" for at, what in story)])


def clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%H:%M:%S.%f")[:-3]  # noqa: DTZ006 (for people here)
