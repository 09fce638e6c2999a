"""Files kept in Postgres, so that web servers and workers need nothing in common but DATABASE_URL."""

from __future__ import annotations

from typing import Any

from django.core.files.base import ContentFile, File
from django.core.files.storage import Storage
from django.db import transaction
from django.utils.deconstruct import deconstructible

from jobs.models import Blob, BlobChunk

CHUNK_BYTES = 1024 * 1024


@deconstructible
class PostgresStorage(Storage):
    """Django's storage interface over two tables; a file is read whole."""

    def _open(self, name: str, mode: str = "rb") -> File[bytes]:
        if "w" in mode or "a" in mode or "+" in mode:
            raise ValueError(f"{name}: files in Postgres are written by save() alone")
        blob = self._blob(name)
        chunks = blob.chunks.order_by("number").values_list("content", flat=True)
        return ContentFile(b"".join(bytes(chunk) for chunk in chunks), name=name)

    def _save(self, name: str, content: File[Any]) -> str:
        with transaction.atomic():
            blob = Blob.objects.create(name=name, size=content.size)
            for number, chunk in enumerate(content.chunks(CHUNK_BYTES)):
                BlobChunk.objects.create(blob=blob, number=number, content=chunk)
        return name

    def _blob(self, name: str) -> Blob:
        try:
            return Blob.objects.get(name=name)
        except Blob.DoesNotExist as exc:
            raise FileNotFoundError(name) from exc

    def delete(self, name: str) -> None:
        Blob.objects.filter(name=name).delete()

    def exists(self, name: str) -> bool:
        return Blob.objects.filter(name=name).exists()

    def size(self, name: str) -> int:
        return self._blob(name).size
