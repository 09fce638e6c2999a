"""Uploads made into assets: bytes that an owner has already are not stored again, and of no use to others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from django.core.files.base import File
from django.db import transaction
from django.db.models import Exists, OuterRef
from django.db.models.functions import Greatest, Now

from jobs.models import (
    Asset,
    AssetQuerySet,
    Blob,
    IdempotencyKey,
    Once,
    discard,
    lock_assets,
)

HASH: Final = re.compile(r"blake3:[0-9a-f]{64}")


@dataclass(frozen=True)
class Reference:
    """What an upload's asset is to say. Empty: as an asset over the same bytes says it."""

    owner_id: int
    hash: str
    lifetime: timedelta
    name: str = ""
    content_type: str = ""
    # Of the request that asks for it, if it may come again.
    once: Once | None = None


def upload(file: File[Any], wanted: Reference, storage_limit: int) -> tuple[Asset, bool]:
    """Return an asset over the bytes of `file`, whose hash `wanted` has; and whether the bytes are new.

    Raises StorageFull if the owner's bytes would be more than the limit, and what `mint` raises.
    """
    if minted := mint(wanted):
        return minted[0], False
    with stored(
        file,
        owner_id=wanted.owner_id,
        hash=wanted.hash,
        name=wanted.name,
        content_type=wanted.content_type,
    ) as asset:
        if minted := mint(wanted):  # the same bytes came by another request meanwhile
            return minted[0], False
        asset.expires_at = Now() + wanted.lifetime
        asset.save(force_insert=True)
        Asset.objects.check_room(wanted.owner_id, storage_limit)
        spend(wanted, asset)
    asset.refresh_from_db()
    return asset, True


def spend(wanted: Reference, asset: Asset) -> None:
    if wanted.once is not None:
        IdempotencyKey.objects.spend(wanted.once, asset.pk)


def mint(wanted: Reference) -> tuple[Asset, bool] | None:
    """Return an asset over bytes that the owner has already, and whether it is new. None: no such bytes.

    One that says the same is taken again, and lives at least as long as is wanted now. A transaction that this
    is part of goes on to hold the owner's lock, whatever the answer. Raises what `IdempotencyKey.objects.spend`
    does.
    """
    expires_at = Now() + wanted.lifetime
    with transaction.atomic():
        lock_assets(wanted.owner_id)
        owned = over_bytes(wanted.owner_id, wanted.hash)
        source = owned.first()
        if source is None:
            return None
        says = {
            "name": wanted.name or source.name,
            "content_type": wanted.content_type or source.content_type,
        }
        asset = owned.uploads().filter(**says).first()
        is_new = asset is None
        if asset is None:
            asset = Asset.objects.create(
                owner_id=source.owner_id,
                hash=source.hash,
                size=source.size,
                width=source.width,
                height=source.height,
                file=source.file.name,
                expires_at=expires_at,
                **says,
            )
        else:
            same = Asset.objects.filter(pk=asset.pk)
            same.update(expires_at=Greatest("expires_at", expires_at))
        spend(wanted, asset)
    asset.refresh_from_db()
    return asset, is_new


def over_bytes(owner_id: int, content_hash: str) -> AssetQuerySet:
    """Return the owner's assets over these bytes, if they are there."""
    if not HASH.fullmatch(content_hash):
        return Asset.objects.none()
    is_stored = Exists(Blob.objects.filter(name=OuterRef("file")))
    return Asset.objects.available().filter(is_stored, owner=owner_id, hash=content_hash)


@contextmanager
def stored(content: bytes | File[Any], **values: Any) -> Iterator[Asset]:
    """Store bytes, then run the block, which saves the row for them, in a transaction. No row: no bytes.

    They are stored outside of the transaction: an object store may be slow, and takes nothing back.
    """
    asset = Asset.store(content, **values)
    try:
        with transaction.atomic():
            yield asset
    finally:
        forget([asset])


def forget(assets: Sequence[Asset]) -> None:
    """Let go of stored bytes that no row names. Rows are looked for: an answer to COMMIT can get lost."""
    named = Asset.objects.filter(pk__in=[asset.pk for asset in assets])
    kept = set(named.values_list("pk", flat=True))
    discard([asset.file.name or "" for asset in assets if asset.pk not in kept])
