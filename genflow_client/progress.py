"""How far a job is, on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)


class Display:
    """A bar on a terminal, elsewhere a line now and then."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, soft_wrap=True)
        self.bar = Progress(
            SpinnerColumn(),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=self.console,
            disable=not self.console.is_interactive,
            redirect_stdout=False,
        )
        self.task = self.bar.add_task("sending", total=1.0)
        self.shown: object = None

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.bar.stop()

    def say(self, sentence: str) -> None:
        self.console.print(f"genflow: {sentence}", markup=False, highlight=False)

    def show(self, job: Mapping[str, Any]) -> None:
        value = 1.0 if job["status"] == "succeeded" else (job["progress"] or {}).get("value", 0.0)
        words = describe(job)
        self.bar.update(self.task, completed=value, description=words)
        # A long queue: each time that half of it has gone.
        news = (
            job["status"],
            job.get("retry"),
            (job["queue_position"] or 0).bit_length(),
            int(4 * value),
        )
        if self.bar.disable and news != self.shown:
            self.shown = news
            self.say(f"{value:.0%} {words}")


def describe(job: Mapping[str, Any]) -> str:
    """Return what happens to a job now, in a few words."""
    words = str(job["status"])
    if job["queue_position"]:
        words += f", place {job['queue_position']}"
    if retry := job.get("retry"):
        at = datetime.fromisoformat(retry["at"]).astimezone()
        return f"{words}, trying again at {at:%H:%M:%S}: {retry['message']}"
    if words == "running" and job["progress"] and job["progress"].get("message"):
        words += f", {job['progress']['message']}"
    return words


def ending(job: Mapping[str, Any]) -> str:
    """Return how a job ended that has no picture."""
    words = f"job {job['id']}: {job['status']}"
    if error := job["error"]:
        return f"{words}: {error['message']} ({error['code']})"
    return f"{words}, without a picture"
