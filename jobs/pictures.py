"""Bytes of an asset as an HTTP answer."""

from __future__ import annotations

import mimetypes
import re
from typing import Final

from django.http import HttpRequest, HttpResponse
from django.utils.cache import get_conditional_response
from django.utils.http import quote_etag

from jobs.errors import ApiError
from jobs.models import Asset

# One range; RFC 9110 lets a server ignore what else the header may say.
RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)
HEADERS: Final = {
    "Cache-Control": "private, no-store",
    # Some outputs of a workflow can be pages: shown, never run.
    "Content-Security-Policy": "sandbox",
    "X-Content-Type-Options": "nosniff",
    "Accept-Ranges": "bytes",
}


def picture_response(request: HttpRequest, asset: Asset) -> HttpResponse:
    """Answer with the asset's bytes. Call it only when the request was found to be allowed to see them."""
    etag = quote_etag(asset.hash)
    response = get_conditional_response(request, etag=etag)
    if response is None:
        response = _bytes_response(request, _content(asset), asset.content_type, etag)
    for name, value in HEADERS.items():
        response[name] = value
    response["ETag"] = etag
    return response


def _content(asset: Asset) -> bytes:
    try:
        with asset.file.open() as file:
            content: bytes = file.read()
            return content
    except FileNotFoundError as exc:
        raise output_unavailable() from exc


def output_unavailable() -> ApiError:
    return ApiError(
        404,
        "output_unavailable",
        "There is no picture: its job has not drawn one yet, or has ended without.",
    )


def _bytes_response(
    request: HttpRequest, content: bytes, content_type: str, etag: str
) -> HttpResponse:
    wanted = _range(request, len(content), etag)
    if wanted is None:
        response = HttpResponse(content, content_type=content_type)
    elif not wanted:
        return HttpResponse(status=416, headers={"Content-Range": f"bytes */{len(content)}"})
    else:
        part = content[wanted.start : wanted.stop]
        response = HttpResponse(part, status=206, content_type=content_type)
        response["Content-Range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{len(content)}"
    extension = mimetypes.guess_extension(content_type) or ""
    response["Content-Disposition"] = f'inline; filename="picture{extension}"'
    return response


def _range(request: HttpRequest, size: int, etag: str) -> range | None:
    """Return the bytes the request wants (none of them: not satisfiable), or None for all."""
    match = RANGE.fullmatch(request.headers.get("Range", ""))
    if match is None or request.method != "GET" or request.headers.get("If-Range", etag) != etag:
        return None
    first, last = match.groups()
    if not first:
        return range(max(0, size - int(last)), size) if last else None
    stop = min(int(last) + 1, size) if last else size
    if last and int(last) < int(first):
        return None
    return range(int(first), stop)
