"""Links to pictures that need no login: signed, and good for a short time."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from uuid import UUID

from django.conf import settings
from django.core.signing import Signer
from django.http import HttpRequest
from django.urls import reverse
from django.utils.crypto import constant_time_compare


def content_url(request: HttpRequest, asset_id: UUID) -> tuple[str, datetime]:
    """Return an absolute link to an asset's bytes, and when it ends.

    Whoever has it can read the asset until then, or until its job is deleted.
    """
    expires = int(time.time() + settings.SIGNED_URL_LIFETIME.total_seconds())
    path = reverse("asset-content", args=[asset_id])
    query = f"?expires={expires}&signature={_signature(asset_id, expires)}"
    return request.build_absolute_uri(path + query), datetime.fromtimestamp(expires, UTC)


def is_signed(request: HttpRequest, asset_id: UUID) -> bool:
    """Whether the request came by a link of ours to this asset that is still good."""
    expires, signature = request.GET.get("expires", ""), request.GET.get("signature", "")
    if not constant_time_compare(signature, _signature(asset_id, expires)):
        return False
    return time.time() < int(expires)  # a number, since we have signed it


def _signature(asset_id: UUID, expires: int | str) -> str:
    return Signer(salt="jobs.links.content").signature(f"{asset_id} {expires}")
