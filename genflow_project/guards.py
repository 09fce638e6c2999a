"""What keeps private pages private, beside Django's own middleware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from inspect import isawaitable
from ipaddress import ip_address
from typing import Any, Final

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponseBase

# The form takes a photo with the camera; nothing else of a device is any page's business.
PERMISSIONS: Final = "camera=(self), geolocation=(), microphone=(), payment=(), usb=()"


class PrivateByDefault:
    """Lets no cache keep an answer that does not say otherwise: pages, pictures and jobs are somebody's own."""

    async_capable = sync_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        answer = self.get_response(request)
        return with_headers_later(answer) if isawaitable(answer) else with_headers(answer)


async def with_headers_later(response: Awaitable[HttpResponseBase]) -> HttpResponseBase:
    return with_headers(await response)


def with_headers(response: HttpResponseBase) -> HttpResponseBase:
    response.headers.setdefault("Cache-Control", "private, no-store")
    response.headers.setdefault("Permissions-Policy", PERMISSIONS)
    return response


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
