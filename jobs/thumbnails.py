"""Small pictures for lists: each is made when it is first asked for, and kept beside the large one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Final

from django.core.files.base import ContentFile
from django.db import Error as DatabaseError
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.cache import get_conditional_response
from django.utils.http import quote_etag

from jobs.developing import BadPhoto
from jobs.models import Asset
from jobs.outage import StorageAway
from jobs.photos import photo_rules, read_photo

LONGEST_SIDE: Final = 480  # pixels


def is_picture(asset: Asset) -> bool:
    """Whether browsers show it: a workflow can make other files too."""
    return asset.content_type.startswith("image/") and "svg" not in asset.content_type


def thumbnail_response(request: HttpRequest, asset: Asset) -> HttpResponse:
    """Answer with a small JPEG. Call it only when the request was found to be allowed to see the asset.

    Raises Http404 if the bytes are gone or no picture.
    """
    etag = quote_etag(f"{asset.hash}:{LONGEST_SIDE}")
    response = get_conditional_response(request, etag=etag)
    if response is None:
        response = HttpResponse(_thumbnail(asset), content_type="image/jpeg")
    response["ETag"] = etag
    # Kept, but asked for again each time: whoever logs out sees no more of it.
    response["Cache-Control"] = "private, no-cache"
    return response


def _thumbnail(asset: Asset) -> bytes:
    storage, name = asset.file.storage, asset.thumbnail_name
    try:
        with storage.open(name) as file:
            kept: bytes = file.read()
            return kept
    except FileNotFoundError:
        content = _small(asset)
    # Another request may have made it at the same moment, and a standby takes no writes: all can see it still.
    with suppress(DatabaseError, StorageAway):
        storage.save(name, ContentFile(content))
    return content


def _small(asset: Asset) -> bytes:
    # What a workflow drew, or was given, is as little to be trusted as a photo.
    rules = replace(
        photo_rules(),
        max_bytes=asset.size,
        min_side=1,
        max_side=LONGEST_SIDE,
        face_check="off",
    )
    try:
        with asset.file.open() as file:
            return read_photo(file, rules).content
    except (BadPhoto, FileNotFoundError) as exc:
        raise Http404 from exc
