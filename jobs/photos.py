"""Photos as users send them, checked and made ready before anything is stored."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import Any, Final, Protocol

from django.conf import settings
from django.core.files.uploadedfile import UploadedFile
from django.core.files.uploadhandler import FileUploadHandler, TemporaryFileUploadHandler

from jobs.darkroom import Darkroom
from jobs.developing import BadPhoto, Photo, Rules

# Of one web process. Each may take a core for seconds, and a gigabyte: the rest wait.
DEVELOPED_AT_ONCE: Final = threading.BoundedSemaphore(2)
WAIT_SECONDS: Final = 30  # for one of these places; who waits holds a thread and a connection
DARKROOM: Final = Darkroom()
atexit.register(DARKROOM.close)


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class NamelessUploadHandler(TemporaryFileUploadHandler):
    """Writes to files without a name on the disk.

    The system takes them away however the process ends, and a user's file name, in which a long ending or a NUL
    is an error, is no part of theirs.
    """

    def new_file(self, *args: Any, **kwargs: Any) -> None:
        FileUploadHandler.new_file(self, *args, **kwargs)
        file = TemporaryFile()  # noqa: SIM115 (closed by the request)
        self.file = UploadedFile(file, "upload", self.content_type)  # type: ignore[assignment]

    def upload_interrupted(self) -> None:
        if hasattr(self, "file"):  # else the file is one in memory
            self.file.close()


def photo_rules() -> Rules:
    """Return what the settings ask of a photo."""
    return Rules(
        max_bytes=settings.GENFLOW_PHOTO_MAX_BYTES,
        max_pixels=settings.GENFLOW_PHOTO_MAX_PIXELS,
        max_side=settings.GENFLOW_PHOTO_MAX_SIDE,
        face_check=settings.GENFLOW_FACE_CHECK,
    )


def read_photo(file: Readable, rules: Rules) -> Photo:
    """Return the photo in `file` or raise BadPhoto. All bytes count against `max_bytes`, a film behind it too."""
    with _place():
        content = file.read(rules.max_bytes + 1)
        if len(content) > rules.max_bytes:
            raise BadPhoto(
                413,
                "photo_too_large",
                f"The photo is larger than {rules.max_bytes:,} bytes. Make it smaller.",
            )
        if not content:
            raise BadPhoto(422, "bad_photo", "The photo is empty. Choose another file.")
        try:
            return DARKROOM.develop(content, rules)
        except OSError as exc:
            raise PhotosBusy from exc


class PhotosBusy(BadPhoto):
    retry_after = 15

    def __init__(self) -> None:
        super().__init__(
            503, "photos_busy", "Many photos are arriving just now. Send yours again soon."
        )


@contextmanager
def _place() -> Iterator[None]:
    if not DEVELOPED_AT_ONCE.acquire(timeout=WAIT_SECONDS):
        raise PhotosBusy
    try:
        yield
    finally:
        DEVELOPED_AT_ONCE.release()
