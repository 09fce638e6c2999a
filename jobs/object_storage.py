"""Files kept in an object store that speaks S3. Postgres has a note of each, so that none is forgotten there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from django.core.files.base import File
from django.db.models.functions import Now
from storages.backends.s3 import S3Storage

from jobs.models import Blob
from jobs.outage import StorageAway
from jobs.storage import CHUNK_BYTES, chunked_file

CLIENT: Final = Config(
    connect_timeout=5,
    read_timeout=30,
    retries={"mode": "standard", "max_attempts": 2},
    # Checksums of AWS's own are unknown to some other stores.
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
)


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except (Boto3Error, BotoCoreError, ClientError) as exc:
        raise StorageAway(str(exc)) from exc


class ObjectStorage(S3Storage):  # type: ignore[misc]  # it ships no types
    """Django's storage interface over a bucket. A file is never in memory as a whole."""

    def get_default_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = super().get_default_settings()
        # In threads of its own it would hold ten parts of a file in memory.
        transfer = TransferConfig(use_threads=False)
        return settings | {"client_config": CLIENT, "transfer_config": transfer}

    @translated()
    def _open(self, name: str, mode: str = "rb") -> File[bytes]:
        stored = super()._open(name, mode).obj

        @translated()
        def fetch(number: int) -> bytes:
            start = number * CHUNK_BYTES
            part = stored.get(Range=f"bytes={start}-{start + CHUNK_BYTES - 1}")
            content: bytes = part["Body"].read()
            return content

        return chunked_file(name, stored.content_length, fetch)

    @translated()
    def _save(self, name: str, content: File[Any]) -> str:
        Blob.objects.create(
            name=name, size=content.size
        )  # before the bytes: whoever dies between leaves none
        saved: str = super()._save(name, content)
        return saved

    @translated()
    def delete(self, name: str) -> None:
        super().delete(name)
        Blob.objects.filter(name=name).delete()

    @translated()
    def exists(self, name: str) -> bool:
        return bool(super().exists(name))

    def discard(self, names: Iterable[str]) -> None:
        """Leave them to the next sweep: no transaction waits for a store that may be slow, or away."""
        Blob.objects.filter(name__in=names).update(kept_until=Now())
