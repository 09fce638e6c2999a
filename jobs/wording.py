"""A job's status in plain words, for its owner."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from django.utils import timezone

from jobs.models import Job
from jobs.status import JobStatus, Step

WORDS: Final = {
    JobStatus.QUEUED: "Waiting",
    JobStatus.RUNNING: "Drawing",
    JobStatus.CANCELING: "Canceling",
    JobStatus.SUCCEEDED: "Ready",
    JobStatus.FAILED: "Failed",
    JobStatus.CANCELED: "Canceled",
    JobStatus.EXPIRED: "Expired",
}
STEP_WORDS: Final = {
    Step.UPLOAD: "Send",
    Step.SUBMIT: "Hand over",
    Step.WAIT: "Draw",
    Step.DOWNLOAD: "Fetch",
}
NOW: Final = {
    Step.UPLOAD: ("Sending your photo", "It is on its way to the server that draws."),
    Step.SUBMIT: ("Handing it over", "The server takes your photo and your prompt."),
    Step.WAIT: ("Drawing your portrait", "You can close this page: it goes on by itself."),
    Step.DOWNLOAD: ("Fetching your portrait", "It is drawn; the last touch is getting it here."),
}
UNKNOWN_ERROR: Final = "Something went wrong."


class Way(StrEnum):
    """What the page offers after a failure."""

    AGAIN = "again"  # the same with another seed
    CHANGE = "change"
    PHOTO = "photo"  # another one


# By error code: a title, what may help, and the way that is offered first.
FAILURES: Final = {
    "no_face": (
        "No face in the photo",
        "Light from the front, eyes open, the whole head in the picture: that finds most faces.",
        Way.PHOTO,
    ),
    "bad_photo": (
        "The photo did not work",
        "A screenshot of the photo often works when the file itself does not.",
        Way.PHOTO,
    ),
    "out_of_memory": (
        "Too large for the graphics card",
        "The square format, one picture at a time, fits almost every one.",
        Way.CHANGE,
    ),
    "graph_refused": ("These settings were refused", "", Way.CHANGE),
    "model_missing": (
        "Something is missing on the server",
        "If you have chosen a style, try it without.",
        Way.CHANGE,
    ),
}
OTHER_FAILURE: Final = (
    "This did not work",
    "Nothing is wrong with your photo or your words: another try may well succeed.",
    Way.AGAIN,
)


@dataclass(frozen=True)
class Stage:
    """A step of the job's work as the page lists it. place: `done`, `now` or `ahead`."""

    label: str
    place: str


@dataclass(frozen=True)
class Story:
    """What the page tells about a job."""

    title: str
    sentence: str
    stages: tuple[Stage, ...] = ()
    percent: int | None = None
    detail: str = ""
    retry_at: datetime | None = None
    hint: str = ""
    way: Way | None = None

    @property
    def announcement(self) -> str:
        """What a screen reader says when it changes; not each percent."""
        quarter = f" {self.percent // 25 * 25} %" if self.percent else ""
        return f"{self.title}. {self.sentence}{quarter}"


def tell(job: Job) -> Story:
    """Return the story of a job loaded through `jobs.serializers.shown`."""
    match JobStatus(job.status):
        case JobStatus.QUEUED if retry_at(job):
            return _second_try(job)
        case JobStatus.QUEUED:
            return Story("Waiting for its turn", _place_in_queue(job))
        case JobStatus.RUNNING:
            return _under_way(job)
        case JobStatus.CANCELING:
            return Story("Canceling", "The drawing is being stopped.")
        case JobStatus.SUCCEEDED:
            return Story(*_finished(job))
        case JobStatus.FAILED:
            return _failed(job.error)
        case JobStatus.EXPIRED:
            return Story("Expired", "It waited for too long, and was never drawn.")
        case _:
            return Story("Canceled", "This portrait was canceled before it was finished.")


def word_of(job: Job) -> str:
    """Return the status in one or two words."""
    return "Trying again" if retry_at(job) else WORDS[JobStatus(job.status)]


def retry_at(job: Job) -> datetime | None:
    """Return when the job will be tried again, if it waits for that."""
    waits = job.status == JobStatus.QUEUED and job.error and job.run_after > timezone.now()
    return job.run_after if waits else None


def message_of(error: Any) -> str:
    return str(error.get("message") or UNKNOWN_ERROR) if isinstance(error, dict) else UNKNOWN_ERROR


def _failed(error: Any) -> Story:
    code = str(error.get("code")) if isinstance(error, dict) else ""
    title, hint, way = FAILURES.get(code, OTHER_FAILURE)
    return Story(title, message_of(error), hint=hint, way=way)


def _second_try(job: Job) -> Story:
    return Story(
        "Trying again soon",
        message_of(job.error),
        detail=f"Try {job.attempt} of {job.max_attempts}.",
        retry_at=retry_at(job),
    )


def _place_in_queue(job: Job) -> str:
    position: int = job.queue_position  # type: ignore[attr-defined]  # of `shown`
    match position - 1:
        case 0:
            place = "Your portrait is next."
        case 1:
            place = "One portrait is ahead of yours."
        case ahead:
            place = f"{ahead} portraits are ahead of yours."
    pace = Job.objects.measured_seconds_per_job()
    return f"{place} Ready in {_about(position * pace)}." if pace else place


def _about(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return "about a minute" if minutes else "less than a minute"
    return f"about {minutes} minutes" if minutes < 100 else f"about {round(minutes / 60)} hours"


def _under_way(job: Job) -> Story:
    step = Step(job.step)
    title, sentence = NOW[step]
    progress = job.progress if step == Step.WAIT and isinstance(job.progress, dict) else {}
    value, at, of = (progress.get(name) for name in ("value", "step", "steps"))
    return Story(
        title,
        sentence,
        stages=_stages(step),
        percent=round(100 * value) if isinstance(value, (int, float)) else None,
        detail=f"Step {at} of {of}" if at and of else "",
    )


def _stages(current: Step) -> tuple[Stage, ...]:
    steps = list(Step)
    here = steps.index(current)
    return tuple(
        Stage(STEP_WORDS[step], "done" if n < here else "now" if n == here else "ahead")
        for n, step in enumerate(steps)
    )


def _finished(job: Job) -> tuple[str, str]:
    pictures = len(job.outputs.all())
    title = "Your portrait is ready" if pictures == 1 else "Your pictures are ready"
    assert job.started_at is not None  # it was claimed, and it has ended
    assert job.completed_at is not None
    seconds = (job.completed_at - job.started_at).total_seconds()
    return title, f"Drawn in {_duration(seconds)}."


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{max(1, rest)} s"
