"""The four steps of a job: upload, submit, wait, download.

Each is a function of the job, its checkpoints and a client, and returns what its checkpoint holds. None holds
a transaction across HTTP, and each may be repeated: after a crash the next worker runs the step again that
has no checkpoint yet.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Final

from django.core.files.base import File

from comfy.classify import refusal
from comfy.client import ComfyClient, Place, Sighting
from comfy.errors import (
    BackendStuck,
    BadAnswer,
    BadPhoto,
    BadPicture,
    ComfyError,
    ErrorKind,
    NoAnswer,
    OutputMissing,
    PromptLost,
    RunStuck,
    ServerTrouble,
)
from comfy.events import EventStream, ProgressTracker
from comfy.filetypes import content_type_of, ending_of
from comfy.graph import NAME_LENGTH, OUTPUT_NODE
from comfy.history import Output, OutputFile, Run
from comfy.pictures import read_picture
from comfy.previews import PreviewImage
from jobs.assets import forget
from jobs.leases import Lease
from jobs.models import Asset, Backend, Job, Preview
from jobs.status import Step
from jobs.wire import (
    MARKER,
    SUBFOLDER,
    expected_files,
    is_ours,
    on_the_wire,
    shown_name,
    usable_prefixes,
)

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
# Failed looks in a row before the attempt is given up.
PATIENCE: Final = 5
# Downloads of one picture before the run is taken for spoiled.
FETCHES: Final = 3
# Larger files wait on the disk for their way into the storage. Bytes.
SPOOL_BYTES: Final = 16 * 2**20
NAME_MAX_LENGTH: Final = 255  # of an asset
ENDING: Final = re.compile("[a-z0-9]{1,10}")
# Decoded to the last pixel, and stripped of the graph that ComfyUI writes into them.
PICTURES: Final = ("image/png", "image/jpeg", "image/webp", "image/gif")
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
    # What goes beside the graph and is in memory only. Raises KeyLost.
    secrets: Callable[[], Mapping[str, str]]
    poll_seconds: float
    stall_seconds: float
    preview_method: str
    output_max_bytes: int

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
        filename = f"{work.job.pk}-{number}.{ending(asset)}"
        files[str(asset.pk)] = work.client.upload_image(
            read_input(asset),
            filename=filename,
            subfolder=SUBFOLDER,
            content_type=content_type_of(filename),
        )
    return {"files": files}


def ending(asset: Asset) -> str:
    """Return a plain ending for the file's name, as some nodes go by it: the owner's own, or that of its kind."""
    endings = (ending_of(asset.name), asset.content_type.rpartition("/")[2])
    return next(filter(ENDING.fullmatch, endings), "bin")


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
    beside = {
        MARKER: work.job.drawing,
        "preview_method": work.preview_method,
        **work.secrets(),
    }
    # A frozen worker may wake up here with its lease gone: renewed now, the answer cannot come after its end.
    work.renew()
    work.lease.check_wanted()
    try:
        dropped = work.client.submit(
            graph,
            prompt_id=work.job.prompt_id,
            client_id=work.job.prompt_id,
            extra_data=beside,
            timeout=min(SUBMIT_TIMEOUT, SUBMIT_SHARE * work.lease.remaining()),
        )
    except UNKNOWN_OUTCOME:
        work.lease.check_wanted()
        if found := find(work):
            return found
        raise
    if is_missed(work.job, dropped):
        with suppress(ComfyError):  # the rest of it is of no use, and costs the GPU's time
            work.client.delete_pending(work.job.prompt_id)
            work.client.interrupt(work.job.prompt_id)
        raise refusal({"error": {"message": "outputs were left out"}, "node_errors": dropped})
    return {"how": "sent"}


def is_missed(job: Job, dropped: Mapping[str, Any]) -> bool:
    """Whether what a backend left out is asked for: of a workflow all, of a portrait its one output node."""
    return bool(dropped) if job.kind == Job.Kind.WORKFLOW else OUTPUT_NODE in dropped


def find(work: Work) -> dict[str, Any] | None:
    """Look for this job's prompt or its pictures on the backend."""
    sighting = work.client.look_up(work.job.prompt_id)
    if sighting.place != Place.UNKNOWN and is_ours(work.job, sighting.extra_data):
        return {"how": "attached"}
    return {"how": "on_disk"} if files_on_disk(work) else None


def files_on_disk(work: Work) -> list[OutputFile]:
    """Return the pictures of a run that the backend forgot when it restarted: all of them, or none."""
    if work.job.kind == Job.Kind.WORKFLOW:  # what files it leaves is not known beforehand
        return []
    count = work.job.params.get("count", 1)
    for prefix in usable_prefixes(work.job):
        files = expected_files(prefix, count)
        if all(work.client.exists(file) for file in files):
            return files
    return []


def wait(work: Work) -> dict[str, Any]:
    """Wait for the run to end. Result: outputs [{node_id, and filename, subfolder, type, or text}].

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
        return {"outputs": list(chosen_outputs(work.job, run))}
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
        if not is_ours(self.work.job, sighting.extra_data):
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
            return Run(self.work.job.prompt_id, {OUTPUT_NODE: [*files]}, None)
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
            node_id=node_id[:NAME_LENGTH],
            content_type=content_type,
            image=image.content,
        )


def chosen_outputs(job: Job, run: Run) -> Iterator[dict[str, Any]]:
    """Yield what the run left for the job; OutputMissing if it should have left something."""
    chosen = [
        (node_id, output)
        for node_id, outputs in run.outputs.items()
        for output in outputs
        if is_asked_for(job, node_id, output)
    ]
    # Without files it is a success all the same for a workflow that saves none, but not when they may be lost:
    # some versions do not tell what the nodes left that are in their cache (FACTS section 0, rule 5).
    if not chosen and (job.kind == Job.Kind.PORTRAIT or run.from_cache):
        found = sum(map(len, run.outputs.values()))
        raise OutputMissing(f"the run succeeded and left nothing of ours, of {found} outputs")
    for node_id, output in chosen:
        told = {"text": output} if isinstance(output, str) else asdict(output)
        yield {"node_id": node_id, **told}


def is_asked_for(job: Job, node_id: str, output: Output) -> bool:
    """Whether it is one of a portrait's pictures or, for a workflow, anything but a file that it was given."""
    if job.kind == Job.Kind.WORKFLOW:
        return isinstance(output, str) or output.type != "input"
    # A cached run names the files of an earlier one, which may be another's (FACTS section 0, rule 5).
    prefixes = tuple(f"{prefix}_" for prefix in usable_prefixes(job))
    return (
        node_id == OUTPUT_NODE
        and isinstance(output, OutputFile)
        and f"{output.subfolder}/{output.filename}".replace("\\", "/").startswith(prefixes)
    )


def download(work: Work) -> list[Asset]:
    """Fetch the outputs, check and clean them, and store their bytes. Return the rows for them, unsaved."""
    outputs: list[Asset] = []
    try:
        for number, output in enumerate(work.done[Step.WAIT]["outputs"], 1):
            outputs.append(store_output(work, number, **output))
    except BaseException:
        forget(outputs)
        raise
    return outputs


def store_output(work: Work, number: int, *, node_id: str, **output: str) -> Asset:
    """Store a text that a node shows, or a file that it left."""
    common = {
        "owner_id": work.job.owner_id,
        "job": work.job,
        "node_id": node_id,
        "expires_at": work.job.expires_at,
    }
    if "text" in output:
        content = output["text"].encode()
        name = f"text_{number:05}.txt"
        return Asset.store(content, name=name, content_type="text/plain", **common)
    return fetch(work, OutputFile(**output), number, common)


def fetch(work: Work, file: OutputFile, number: int, common: Mapping[str, Any]) -> Asset:
    """Download one whole file and store it; a cut one is fetched again, as the run itself is good."""
    for fetches_left in reversed(range(FETCHES)):
        work.lease.check_wanted()
        with SpooledTemporaryFile(SPOOL_BYTES) as sink:
            try:
                work.client.view(file, sink, max_bytes=work.output_max_bytes)
                return Asset.store(**checked(work.job, file, number, sink), **common)
            except (*UNKNOWN_OUTCOME, BadPicture, OutputMissing):
                if not fetches_left:
                    raise
        work.pause(work.poll_seconds)
    raise AssertionError("unreachable")


def checked(job: Job, file: OutputFile, number: int, content: IO[bytes]) -> dict[str, Any]:
    """Return what is to be stored of a file, and how it is called. Raises BadPicture and OutputTooLarge."""
    content_type = content_type_of(file.filename)
    name = shown_name(job, file.filename)[-NAME_MAX_LENGTH:]
    if job.kind == Job.Kind.WORKFLOW and content_type not in PICTURES:
        return {"content": File(content), "content_type": content_type, "name": name}
    content.seek(0)
    picture = read_picture(content.read(), allow_flat=job.kind == Job.Kind.WORKFLOW)
    if job.kind == Job.Kind.PORTRAIT:
        name = f"portrait_{number:05}.{picture.content_type.rpartition('/')[2]}"
    return asdict(picture) | {"name": name}


STEPS: Final[Mapping[Step, Callable[[Work], dict[str, Any]]]] = {
    Step.UPLOAD: upload,
    Step.SUBMIT: submit,
    Step.WAIT: wait,
}
