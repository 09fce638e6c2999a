"""Files kept in Postgres, so that web servers and workers need nothing in common but DATABASE_URL."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from django.core.files.base import File
from django.core.files.storage import Storage
from django.db import connection, transaction
from django.utils.deconstruct import deconstructible

from jobs.models import Blob, BlobChunk

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Of every stored file: to change it would be a migration of what is there.
CHUNK_BYTES: Final = 1024 * 1024
# As parameters of an INSERT the bytes would be written out in hex: four times as slow, and seen by logs.
INTO_CHUNKS: Final = (
    f"COPY {BlobChunk._meta.db_table} (blob_id, number, content) FROM STDIN (FORMAT BINARY)"
)


@deconstructible
class PostgresStorage(Storage):
    """Django's storage interface over two tables. A file is never in memory as a whole."""

    def _open(self, name: str, mode: str = "rb") -> File[bytes]:
        if "w" in mode or "a" in mode or "+" in mode:
            raise ValueError(f"{name}: files in Postgres are written by save() alone")
        blob = self._blob(name)
        return chunked_file(name, blob.size, partial(self._chunk, blob))

    def _save(self, name: str, content: File[Any]) -> str:
        content.seek(0)
        with transaction.atomic(), connection.cursor() as cursor:
            blob = Blob.objects.create(name=name, size=content.size)
            for number, chunk in enumerate(iter(partial(content.read, CHUNK_BYTES), b"")):
                with cursor.copy(INTO_CHUNKS) as copy:
                    copy.set_types(["int8", "int4", "bytea"])
                    copy.write_row((blob.pk, number, chunk))
        return name

    def _blob(self, name: str) -> Blob:
        try:
            return Blob.objects.get(name=name)
        except Blob.DoesNotExist as exc:
            raise FileNotFoundError(name) from exc

    @staticmethod
    def _chunk(blob: Blob, number: int) -> bytes:
        try:
            return bytes(blob.chunks.get(number=number).content)
        except BlobChunk.DoesNotExist as exc:  # deleted while it was read
            raise FileNotFoundError(blob.name) from exc

    def delete(self, name: str) -> None:
        self.discard([name])

    def discard(self, names: Iterable[str]) -> None:
        Blob.objects.filter(name__in=names).delete()

    def exists(self, name: str) -> bool:
        return Blob.objects.filter(name=name).exists()

    def size(self, name: str) -> int:
        return self._blob(name).size


def chunked_file(name: str, size: int, fetch: Callable[[int], bytes]) -> File[bytes]:
    """Return a file to read and to seek in. fetch: returns its nth CHUNK_BYTES, of the last what is left."""
    return File(io.BufferedReader(Chunks(size, fetch)), name)


class Chunks(io.RawIOBase):
    """A file fetched piece by piece: one chunk of it is in memory."""

    def __init__(self, size: int, fetch: Callable[[int], bytes]) -> None:
        self._size = size
        self._fetch = fetch
        self._at = 0
        self._number, self._chunk = -1, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"there is nothing at {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        if self._at >= self._size:
            return 0
        number, offset = divmod(self._at, CHUNK_BYTES)
        if number != self._number:
            self._chunk, self._number = self._fetch(number), number
        target = memoryview(buffer)
        piece = self._chunk[offset : offset + len(target)]
        target[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)
