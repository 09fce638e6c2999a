"""The four steps of a job: upload, submit, wait, download.

Each is a function of the job, its checkpoints and a client, and returns what its checkpoint holds. None holds
a transaction across HTTP, and each may be repeated: after a crash the next worker runs the step again that
has no checkpoint yet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from comfy.client import ComfyClient, OutputFile, Place, Run, Sighting
from comfy.errors import (
    BackendStuck,
    BadAnswer,
    BadPhoto,
    BadPicture,
    ComfyError,
    ErrorKind,
    GraphRefused,
    NoAnswer,
    OutputMissing,
    PromptLost,
    RunStuck,
    ServerTrouble,
)
from comfy.events import EventStream, ProgressTracker
from comfy.graph import OUTPUT_NODE
from comfy.pictures import Picture, read_picture
from comfy.previews import PreviewImage
from jobs.assets import forget
from jobs.leases import Lease
from jobs.models import Asset, Backend, Job, Preview
from jobs.status import Step
from jobs.wire import SUBFOLDER, expected_files, is_ours, on_the_wire, usable_prefixes

logger = logging.getLogger(__name__)

# POST /prompt answers in milliseconds; a server loading a model can need longer (FACTS section 8). Seconds.
SUBMIT_TIMEOUT: Final = 30.0
# The part of what is left of the lease in which its answer must be there; the rest is for acting on it.
SUBMIT_SHARE: Final = 0.9
# Progress and previews are written at most so often. Seconds.
PROGRESS_EVERY: Final = 0.5
PREVIEW_EVERY: Final = 1.0
# The word for "none", in ComfyUI's language.
NO_PREVIEWS: Final = "none"
# Characters, of a node's id in our rows.
NODE_ID_LENGTH: Final = 200
# Failed looks in a row before the attempt is given up.
PATIENCE: Final = 5
# Downloads of one picture before the run is taken for spoiled.
FETCHES: Final = 3
# After these from POST /prompt nobody knows whether the prompt was queued.
UNKNOWN_OUTCOME: Final = (NoAnswer, ServerTrouble, BadAnswer)


class Stopping(Exception):
    """The worker was asked to stop: give the job back at its last checkpoint."""


@dataclass
class Work:
    """A held job and what its steps need to do it."""

    job: Job
    backend: Backend
    client: ComfyClient
    lease: Lease
    done: dict[str, dict[str, Any]]
    is_stopping: Callable[[], bool]
    renew: Callable[[], None]
    show_progress: Callable[[dict[str, Any] | None, Preview | None], None]
    # The prompt ids of ours on this backend that somebody watches.
    under_way: Callable[[], Collection[str]]
    poll_seconds: float
    stall_seconds: float
    preview_method: str

    def check(self) -> None:
        """Raise LeaseLost, CancelRequested or Stopping if the job is not to go on here."""
        self.lease.check_wanted()
        if self.is_stopping():
            raise Stopping

    def pause(self, seconds: float) -> bool:
        """Wait, but no longer than until something happens to the job: True. Raises what `check` raises."""
        self.check()
        woken = self.lease.wake.wait(seconds)
        self.lease.wake.clear()
        self.check()
        return woken


def upload(work: Work) -> dict[str, Any]:
    """Send the input files under names of our own. Result: files {asset id: the name LoadImage takes}."""
    files = {}
    for number, asset in enumerate(work.job.inputs.order_by("pk")):
        work.lease.check_wanted()
        kind = asset.content_type.rpartition("/")[2]
        files[str(asset.pk)] = work.client.upload_image(
            read_input(asset),
            filename=f"{work.job.pk}-{number}.{kind}",
            subfolder=SUBFOLDER,
            content_type=asset.content_type,
        )
    return {"files": files}


def read_input(asset: Asset) -> bytes:
    try:
        with asset.file.open() as file:
            content: bytes = file.read()
            return content
    except FileNotFoundError as exc:
        raise BadPhoto(f"the bytes of asset {asset.pk} are gone") from exc


def submit(work: Work) -> dict[str, Any]:
    """Make sure that the backend has the prompt: look first, then post. Result: how {sent, attached, on_disk}."""
    if found := find(work):
        return found
    graph = on_the_wire(work.job, work.done[Step.UPLOAD]["files"])
    # A frozen worker may wake up here with its lease gone: renewed now, the answer cannot come after its end.
    work.renew()
    work.lease.check_wanted()
    try:
        dropped = work.client.submit(
            graph,
            prompt_id=work.job.prompt_id,
            client_id=work.job.prompt_id,
            extra_data={"preview_method": work.preview_method},
            timeout=min(SUBMIT_TIMEOUT, SUBMIT_SHARE * work.lease.remaining()),
        )
    except UNKNOWN_OUTCOME:
        work.lease.check_wanted()
        if found := find(work):
            return found
        raise
    if OUTPUT_NODE in dropped and work.job.kind == Job.Kind.PORTRAIT:
        raise GraphRefused(
            f"the backend left out node {OUTPUT_NODE}", node_id=OUTPUT_NODE, detail=str(dropped)
        )
    return {"how": "sent"}


def find(work: Work) -> dict[str, Any] | None:
    """Look for this job's prompt or its pictures on the backend."""
    sighting = work.client.look_up(work.job.prompt_id)
    if sighting.place != Place.UNKNOWN and is_ours(work.job, sighting.graph):
        return {"how": "attached"}
    return {"how": "on_disk"} if files_on_disk(work) else None


def files_on_disk(work: Work) -> list[OutputFile]:
    """Return the pictures of a run that the backend forgot when it restarted: all of them, or none."""
    if (
        work.job.kind != Job.Kind.PORTRAIT
    ):  # how many files a workflow leaves is not known beforehand
        return []
    count = work.job.params.get("count", 1)
    for prefix in usable_prefixes(work.job):
        files = expected_files(prefix, count)
        if all(work.client.exists(file) for file in files):
            return files
    return []


def wait(work: Work) -> dict[str, Any]:
    """Wait for the run to end. Result: files [{node_id, filename, subfolder, type}].

    Raises the run's own error, PromptLost, or BackendStuck after `stall_seconds` without a sign of life.
    """
    watch = Watch(work)
    stream = EventStream(
        work.backend.url,
        client_id=work.job.prompt_id,
        on_message=watch.hear,
        on_preview=watch.see if work.preview_method != NO_PREVIEWS else None,
    )
    stream.start()
    try:
        while (run := watch.look()) is None:
            watch.pause()
        return {"files": list(chosen_files(work.job, run))}
    finally:
        stream.close()


class Watch:
    """What is known of a run under way: by polls, which decide, and by events, which are faster."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.tracker = ProgressTracker(work.job.graph, work.job.prompt_id)
        self.failures = 0
        self.signature: object = None
        self.alive_at = self.shown_at = self.preview_shown_at = time.monotonic()
        self.progress: dict[str, Any] | None = None
        self.preview: tuple[str, PreviewImage] | None = None  # node and image, not shown yet
        self.events = 0

    def hear(self, message: dict[str, Any]) -> None:
        """Take an event (on the stream's thread)."""
        self.events += 1
        if (progress := self.tracker.feed(message)) is not None:
            self.progress = progress.as_json()
        if message.get("type") == "executing" and message.get("data", {}).get("node") is None:
            # The one event that comes after the history entry is written (FACTS section 0, rule 3).
            self.work.lease.wake.set()

    def see(self, image: PreviewImage) -> None:
        """Take a preview (on the stream's thread): the newest counts."""
        if (node_id := self.tracker.node_of(image)) is not None:
            self.preview = node_id, image

    def look(self) -> Run | None:
        """Ask the backend about the run. None: not at an end yet."""
        try:
            sighting = self.work.client.look_up(self.work.job.prompt_id)
        except ComfyError as error:
            if error.kind != ErrorKind.TEMPORARY or self.failures >= PATIENCE:
                raise
            self.failures += 1
            return None
        self.failures = 0
        if not is_ours(self.work.job, sighting.graph):
            return self.recover()
        if sighting.run is not None:
            if sighting.run.error is not None:
                raise sighting.run.error
            return sighting.run
        if sighting.copies > 1:
            # A worker that was frozen on its way to POST /prompt sent it too. One is enough.
            self.work.client.delete_pending(self.work.job.prompt_id)
        self.check_life(sighting)
        return None

    def recover(self) -> Run:
        """The backend does not know the prompt: take its pictures from the disk, or call it lost."""
        if files := files_on_disk(self.work):
            return Run(self.work.job.prompt_id, {OUTPUT_NODE: files}, None, None)
        raise PromptLost(f"prompt {self.work.job.pk} is in neither queue nor history")

    def check_life(self, sighting: Sighting) -> None:
        signs = (sighting.place, sighting.ahead, sighting.signature, self.events)
        if signs != self.signature:
            self.signature, self.alive_at = signs, time.monotonic()
        elif time.monotonic() - self.alive_at <= self.work.stall_seconds:
            return
        elif sighting.place == Place.PENDING and set(sighting.running) & set(self.work.under_way()):
            # It waits for a run of ours, and whether that lives is seen by its own watch.
            self.alive_at = time.monotonic()
        else:
            stuck = RunStuck if sighting.place == Place.RUNNING else BackendStuck
            raise stuck(
                f"no sign of life for {self.work.stall_seconds:g} s, prompt {sighting.place}"
            )

    def pause(self) -> None:
        """Wait for the next look, showing the progress that comes meanwhile."""
        until = time.monotonic() + self.work.poll_seconds * (1 + self.failures)
        while (left := until - time.monotonic()) > 0:
            if self.work.pause(min(left, PROGRESS_EVERY)):
                return
            self.show()

    def show(self) -> None:
        now = time.monotonic()
        if now - self.shown_at < PROGRESS_EVERY:
            return
        preview = self.new_preview() if now - self.preview_shown_at >= PREVIEW_EVERY else None
        if preview is not None:
            self.preview_shown_at = now
        elif self.progress in (None, self.work.job.progress):
            return
        self.shown_at = now
        self.work.job.progress = self.progress or self.work.job.progress
        self.work.show_progress(self.work.job.progress, preview)

    def new_preview(self) -> Preview | None:
        """Return what was seen since the last time, if it is an image."""
        if self.preview is None:
            return None
        (node_id, image), self.preview = self.preview, None
        if (content_type := image.content_type()) is None:
            return None
        return Preview(
            job=self.work.job,
            node_id=node_id[:NODE_ID_LENGTH],
            content_type=content_type,
            image=image.content,
        )


def chosen_files(job: Job, run: Run) -> Iterable[dict[str, Any]]:
    """Yield the output files that are the job's pictures; OutputMissing if the run left none of ours."""
    nodes = [OUTPUT_NODE] if job.kind == Job.Kind.PORTRAIT else list(run.outputs)
    prefixes = tuple(f"{prefix}_" for prefix in usable_prefixes(job))
    files = [(node, file) for node in nodes for file in run.outputs.get(node, [])]
    # A cached run names the files of an earlier one, which may be another's (FACTS section 0, rule 5).
    ours = [
        (n, f)
        for n, f in files
        if f"{f.subfolder}/{f.filename}".replace("\\", "/").startswith(prefixes)
    ]
    if not ours:
        raise OutputMissing(f"the run succeeded and left no picture of ours, of {len(files)} files")
    for node, file in ours:
        yield {
            "node_id": node,
            "filename": file.filename,
            "subfolder": file.subfolder,
            "type": file.type,
        }


def download(work: Work) -> list[Asset]:
    """Fetch the pictures, check and clean them, and store their bytes. Return the rows for them, unsaved."""
    outputs: list[Asset] = []
    try:
        for number, file in enumerate(work.done[Step.WAIT]["files"], 1):
            picture = fetch(work, OutputFile(file["filename"], file["subfolder"], file["type"]))
            outputs.append(store_picture(work.job, picture, file["node_id"], number))
    except BaseException:
        forget(outputs)
        raise
    return outputs


def fetch(work: Work, file: OutputFile) -> Picture:
    """Download one whole picture; a cut one is fetched again, as the run itself is good."""
    for fetches_left in reversed(range(FETCHES)):
        work.lease.check_wanted()
        try:
            content = work.client.view(file)
            return read_picture(content, allow_flat=work.job.kind != Job.Kind.PORTRAIT)
        except (*UNKNOWN_OUTCOME, BadPicture, OutputMissing):
            if not fetches_left:
                raise
        work.pause(work.poll_seconds)
    raise AssertionError("unreachable")


def store_picture(job: Job, picture: Picture, node_id: str, number: int) -> Asset:
    kind = picture.content_type.rpartition("/")[2]
    return Asset.store(
        picture.content,
        owner_id=job.owner_id,
        job=job,
        node_id=node_id,
        name=f"{job.kind}_{number:05}.{kind}",
        content_type=picture.content_type,
        width=picture.width,
        height=picture.height,
        expires_at=job.expires_at,
    )


STEPS: Final[Mapping[Step, Callable[[Work], dict[str, Any]]]] = {
    Step.UPLOAD: upload,
    Step.SUBMIT: submit,
    Step.WAIT: wait,
}
