"""What stands between a request and its route: the record of requests, the HTTP faults, the real server's guards."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

from fake_comfy.faults import Fault, Faults, without_api

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HANG_SECONDS: Final = 60.0
PROXY_PAGE: Final = "<html><head><title>{0}</title></head><body><h1>{0}</h1>nginx</body></html>"
# Answers that come in place of the route's own.
INSTEAD: Final[dict[str, Callable[[Fault], web.Response]]] = {
    "http_500": lambda fault: server_in_trouble(),
    "http_503": lambda fault: web.Response(
        status=503, text="Service Unavailable", headers={"Retry-After": f"{fault.seconds or 1:g}"}
    ),
    "http_413": lambda fault: _proxy_page(413, "413 Request Entity Too Large"),
    "html_502": lambda fault: _proxy_page(502, "502 Bad Gateway"),
    "unauthorized": lambda fault: web.Response(
        status=401, text="Unauthorized", headers={"WWW-Authenticate": 'Basic realm="ComfyUI"'}
    ),
    "redirect": lambda fault: web.Response(status=302, headers={"Location": "/login"}),
}
# Where these strike, once the route has done its work; None: on any route.
LATE: Final[dict[str, tuple[str, str] | None]] = {
    "slow": None,
    "hang_prompt": ("POST", "/prompt"),
    "hang_upload": ("POST", "/upload/image"),
    "hang_view": ("GET", "/view"),
}
DROPPED: Final = {
    "drop_after_accept": ("POST", "/prompt"),
    "drop_upload": ("POST", "/upload/image"),
}


@dataclass(frozen=True)
class SeenRequest:
    """A request as it came. `path` is without /api; `json` is None if the body is not JSON."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    json: Any = None


def route_of(request: web.BaseRequest) -> str:
    return without_api(request.path)


def server_in_trouble() -> web.Response:
    """What the real server says when its code raises."""
    text = "500 Internal Server Error\n\nServer got itself in trouble"
    return web.Response(status=500, text=text, headers={"Connection": "close"})


def is_control(request: web.BaseRequest) -> bool:
    return request.path.startswith("/fake/")


@web.middleware
async def catch_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return web.Response(status=404, headers={"Content-Type": "application/octet-stream"})
    except web.HTTPException:
        raise
    except Exception:
        logger.debug("500 for %s %s", request.method, request.path, exc_info=True)
        return server_in_trouble()


@web.middleware
async def guard_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a browser sends from another site; the Origin only counts if the Host is this machine."""
    origin = request.headers.get("Origin")
    foreign = request.headers.get("Sec-Fetch-Site") == "cross-site"
    if origin and _is_loopback(request.host):
        foreign |= urlsplit(origin).netloc.lower() != request.host.lower()
    if foreign:
        return web.Response(status=403)
    return web.Response() if request.method == "OPTIONS" else await handler(request)


def cause_trouble(faults: Faults, seen: deque[SeenRequest]) -> Any:
    """The middleware that keeps the record and applies the faults of HTTP."""

    @web.middleware
    async def trouble(request: web.Request, handler: Handler) -> web.StreamResponse:
        if is_control(request):
            return await handler(request)
        seen.append(await _seen(request))
        where = request.method, route_of(request)
        for name, answer in INSTEAD.items():
            if fault := faults.take_for(name, *where):
                return answer(fault)
        return await _spoil(faults, request, await handler(request))

    return trouble


async def _spoil(
    faults: Faults, request: web.Request, answer: web.StreamResponse
) -> web.StreamResponse:
    """Delay, drop or cut an answer. The route has done its work: only the client does not hear of it."""
    where = request.method, route_of(request)
    for name, place in LATE.items():
        if place in (None, where) and (fault := faults.take_for(name, *where)):
            await asyncio.sleep(HANG_SECONDS if fault.seconds is None else fault.seconds)
    for name, place in DROPPED.items():
        if place == where and answer.status == 200 and faults.take_for(name, *where):
            drop(request)
    body = answer.body if isinstance(answer, web.Response) else None
    if isinstance(body, bytes) and body and faults.take_for("half_json", *where):
        return web.Response(body=body[: len(body) // 2], content_type="application/json")
    return answer


def drop(request: web.BaseRequest) -> None:
    """Close the connection at once; what is then written to it goes nowhere."""
    if request.transport is not None:
        request.transport.abort()


async def _seen(request: web.Request) -> SeenRequest:
    json = None
    # A form is left to its route, which reads it as a stream.
    if request.can_read_body and not request.content_type.startswith("multipart/"):
        with suppress(ValueError):
            json = await request.json()
    headers = dict(request.headers)
    return SeenRequest(request.method, route_of(request), dict(request.query), headers, json)


def _proxy_page(status: int, title: str) -> web.Response:
    return web.Response(status=status, text=PROXY_PAGE.format(title), content_type="text/html")


def _is_loopback(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
