"""Links to pictures that need no login: signed, and good for a short time."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from django.conf import settings
from django.core.signing import Signer
from django.http import HttpRequest
from django.urls import reverse
from django.utils.crypto import constant_time_compare

from jobs.models import Asset


def content_url(request: HttpRequest, asset: Asset) -> tuple[str, datetime]:
    """Return an absolute link to an asset's bytes, and when it ends.

    Whoever has it can read the asset until then, unless it or its job is deleted, or its owner gets another
    password or is made inactive.
    """
    expires = int(time.time() + settings.SIGNED_URL_LIFETIME.total_seconds())
    path = reverse("asset-content", args=[asset.pk])
    query = f"?expires={expires}&signature={_signature(asset, expires)}"
    return request.build_absolute_uri(path + query), datetime.fromtimestamp(expires, UTC)


def is_signed(request: HttpRequest, asset: Asset) -> bool:
    """Whether the request came by a link of ours to this asset that is still good."""
    expires, signature = request.GET.get("expires", ""), request.GET.get("signature", "")
    if not asset.owner.is_active or not constant_time_compare(
        signature, _signature(asset, expires)
    ):
        return False
    return time.time() < int(expires)  # a number, since we have signed it


def _signature(asset: Asset, expires: int | str) -> str:
    password = asset.owner.get_session_auth_hash()
    return Signer(salt="jobs.links.content").signature(f"{asset.pk} {expires} {password}")
