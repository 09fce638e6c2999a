"""What one owner may take: as the settings say, unless a row of their own says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser


@dataclass(frozen=True)
class Limits:
    queued_jobs: int
    requests_per_minute: int
    streams: int
    storage_bytes: int


DEFAULTS: Final = {
    "queued_jobs": "GENFLOW_QUEUE_LIMIT_PER_OWNER",
    "requests_per_minute": "GENFLOW_REQUESTS_PER_MINUTE",
    "streams": "GENFLOW_STREAMS_PER_OWNER",
    "storage_bytes": "GENFLOW_STORAGE_PER_OWNER_BYTES",
}


def limits_of(owner: AbstractBaseUser) -> Limits:
    """Return the limits of an owner. No query if they came by a token, which brings the row along."""
    row = getattr(owner, "limits", None)
    own = {field.name: getattr(row, field.name, None) for field in fields(Limits)}
    return Limits(
        **{
            name: getattr(settings, DEFAULTS[name]) if value is None else value
            for name, value in own.items()
        }
    )
