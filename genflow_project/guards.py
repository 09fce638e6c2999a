"""What keeps private pages private, beside Django's own middleware."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any, Final

from django.http import HttpRequest, HttpResponseBase

# The form takes a photo with the camera; nothing else of a device is any page's business.
PERMISSIONS: Final = "camera=(self), geolocation=(), microphone=(), payment=(), usb=()"


def private_by_default(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Let no cache keep an answer that does not say otherwise: pages, pictures and jobs are somebody's own."""

    def answer(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        response.headers.setdefault("Cache-Control", "private, no-store")
        response.headers.setdefault("Permissions-Policy", PERMISSIONS)
        return response

    return answer


def client_address(request: HttpRequest) -> str | None:
    """Return the address that a request came from; None if what a proxy or a client wrote is none."""
    try:
        return str(ip_address(request.META.get("REMOTE_ADDR", "")))
    except ValueError:
        return None


def login_name(request: HttpRequest, credentials: Mapping[str, Any] | None) -> str:
    """Return the name that somebody tries to log in by, no longer than the column of it."""
    name = (credentials or request.POST).get("username") or ""
    return str(name)[:255]
