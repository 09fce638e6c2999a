"""Bytes of an asset as an HTTP answer."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Iterator
from typing import Any, Final

from django.core.files.base import File
from django.db import close_old_connections, connection
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.cache import get_conditional_response
from django.utils.http import content_disposition_header, quote_etag

from jobs.errors import ApiError
from jobs.models import Asset

# One range; RFC 9110 lets a server ignore what else the header may say.
RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)
PIECE_BYTES: Final = 256 * 1024
# What browsers show and do not run. An SVG can be a page.
SHOWN: Final = re.compile(r"(image|audio|video)/(?!svg).*")
HEADERS: Final = {
    "Cache-Control": "private, no-store",
    # Some files can be pages, whatever they are said to be: saved, and if shown never run.
    "Content-Security-Policy": "sandbox",
    "X-Content-Type-Options": "nosniff",
    "Accept-Ranges": "bytes",
}


def picture_response(request: HttpRequest, asset: Asset) -> HttpResponseBase:
    """Answer with the asset's bytes. Call it only when the request was found to be allowed to see them."""
    etag = quote_etag(asset.hash)
    response = get_conditional_response(request, etag=etag) or _bytes_response(request, asset, etag)
    for name, value in HEADERS.items():
        response[name] = value
    response["ETag"] = etag
    return response


def _bytes_response(request: HttpRequest, asset: Asset, etag: str) -> HttpResponseBase:
    file = _open(asset)
    part = _range(request, asset.size, etag)
    if part is not None and not part:
        return HttpResponse(status=416, headers={"Content-Range": f"bytes */{asset.size}"})
    wanted, status = (range(asset.size), 200) if part is None else (part, 206)
    headers = {
        "Content-Type": asset.content_type,
        "Content-Length": str(len(wanted)),
        "Content-Disposition": _disposition(asset),
    }
    if part is not None:
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{asset.size}"
    if request.method == "HEAD":
        return HttpResponse(headers=headers)
    return StreamingHttpResponse(_pieces(file, wanted), status=status, headers=headers)


def _open(asset: Asset) -> File[Any]:
    try:
        return asset.file.open()
    except FileNotFoundError as exc:
        raise output_unavailable() from exc


def output_unavailable() -> ApiError:
    return ApiError(
        404,
        "output_unavailable",
        "There is no picture: its job has not drawn one yet, or has ended without.",
    )


def _pieces(file: File[Any], wanted: range) -> Iterator[bytes]:
    with file:
        file.seek(wanted.start)
        left = len(wanted)
        while left:
            piece = file.read(min(PIECE_BYTES, left))
            left -= len(piece)
            if not connection.in_atomic_block:  # as it is in tests alone
                close_old_connections()  # a slow reader is not to keep one
            yield piece


def _disposition(asset: Asset) -> str:
    extension = mimetypes.guess_extension(asset.content_type) or ""
    name = "".join(filter(str.isprintable, asset.name.rpartition("/")[2]))
    is_saved = not SHOWN.fullmatch(asset.content_type)
    header = content_disposition_header(is_saved, name or f"picture{extension}")
    assert header is not None
    return header


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
