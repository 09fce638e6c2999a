"""What goes wrong in the API, in one body everywhere: {"error": {"code", "message", "details"}}.

The codes that clients can rely on are the status table below and those of BadPhoto, NoRoom and the
ApiError subclasses.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any, Final

from django.core.exceptions import RequestDataTooBig, SuspiciousOperation
from django.db import Error as DatabaseError
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.template.loader import render_to_string
from django.views.decorators.csrf import csrf_exempt
from rest_framework.exceptions import (
    APIException,
    MethodNotAllowed,
    NotAuthenticated,
    Throttled,
    UnsupportedMediaType,
    ValidationError,
)
from rest_framework.response import Response
from rest_framework.views import exception_handler as rest_exception_handler

from jobs.developing import BadPhoto
from jobs.models import AssetGone, KeyInFlight, KeyReused, NoRoom
from jobs.outage import StorageAway, is_outage
from jobs.portraits import CannotDraw
from jobs.workflows import BadWorkflow

logger = logging.getLogger(__name__)

CODES: Final = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    422: "invalid_request",
    429: "rate_limited",
}
# Instead of words that the framework chose.
SENTENCES: Final[Mapping[type[Exception], str]] = {
    Http404: "You have nothing of this id.",
    MethodNotAllowed: "This method is not for this path; the header Allow names those that are.",
    UnsupportedMediaType: "Send another Content-Type: /api/docs says which one this path takes.",
    NotAuthenticated: "Send `Authorization: Bearer TOKEN`, or log in.",
    Throttled: "You send requests too fast. Wait as long as Retry-After says.",
}
# Seconds: about what a failover or a restart takes.
RETRY_AFTER: Final = 5
UNREADABLE: Final = "The request cannot be read."
DATABASE_AWAY: Final = (
    "database_unavailable",
    "The database cannot be reached. Try again soon.",
)
STORAGE_AWAY: Final = (
    "storage_unavailable",
    "The store of the pictures cannot be reached. Try again soon.",
)
KEY_REUSED: Final = (
    "idempotency_key_reuse",
    "Another request came with this Idempotency-Key before. Send a new key.",
)
KEY_IN_FLIGHT: Final = (
    "idempotency_in_flight",
    "A request with this Idempotency-Key is being worked on. Send it again in a moment.",
)


class ApiError(APIException):
    """An error with its own code. `details` is a JSON object or None."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        details: Mapping[str, Any] | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message, code)
        self.status_code = status
        self.code = code
        self.details = details
        self.wait = retry_after  # seconds; REST framework sends it as Retry-After


def exception_handler(exc: Exception, context: dict[str, Any]) -> Response | None:
    """Answer in the envelope; None (what nobody foresaw) becomes a 500."""
    exc = _translated(exc)
    response = rest_exception_handler(exc, context)
    if response is None:
        return None
    if isinstance(exc, ApiError):
        response.data = envelope(exc.code, str(exc.detail), exc.details)
    else:
        status = response.status_code
        message = SENTENCES.get(type(exc)) or str(response.data["detail"])
        response.data = envelope(CODES.get(status, "error"), message)
    return response


def _translated(exc: Exception) -> Exception:
    """Return the exception that the API answers with for one of the code below it."""
    match exc:
        case ValidationError():
            return invalid(exc.detail)
        case BadPhoto():
            return ApiError(
                exc.status,
                exc.code,
                exc.message,
                details={"photo": [exc.message]},
                retry_after=exc.retry_after,
            )
        case BadWorkflow():
            details = {"node_errors": exc.node_errors} if exc.node_errors else None
            return ApiError(422, exc.code, exc.message, details=details)
        case CannotDraw(field=str(field)):
            return invalid({field: [str(exc)]})
        case CannotDraw():
            return ApiError(422, exc.code, str(exc))
        case NoRoom():
            return ApiError(exc.status, exc.code, str(exc), retry_after=exc.retry_after)
        case KeyReused():
            return ApiError(422, *KEY_REUSED)
        case KeyInFlight():
            return ApiError(409, *KEY_IN_FLIGHT, retry_after=1)
        case RequestDataTooBig():
            return ApiError(413, CODES[413], "The text fields are too large.")
        case SuspiciousOperation():
            return ApiError(400, CODES[400], UNREADABLE)
        case AssetGone():
            return ApiError(
                422, "missing_asset", "An asset that it needs is gone. Upload it again."
            )
    if outage := _outage(exc):
        what = outage[0].partition("_")[0]
        logger.warning("%s.away", what, extra={"reason": str(exc).strip()})
        return ApiError(503, *outage, retry_after=RETRY_AFTER)
    return exc


def _outage(exc: BaseException | None) -> tuple[str, str] | None:
    """Return code and sentence if what we keep things in is away."""
    if isinstance(exc, StorageAway):
        return STORAGE_AWAY
    return DATABASE_AWAY if isinstance(exc, DatabaseError) and is_outage(exc) else None


def invalid(details: Any) -> ApiError:
    """Return the error for fields that are not valid. details: {field: [sentences]}."""
    return ApiError(422, CODES[422], f"Not valid: {', '.join(details)}.", details=details)


def envelope(code: str, message: str, details: Any = None) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "details": details}}


@csrf_exempt
def not_found(request: HttpRequest) -> JsonResponse:
    """The answer to a path of the API that does not exist."""
    return JsonResponse(envelope(CODES[404], "There is no such path: see /api/docs."), status=404)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """The answer to a request that Django refuses before a view has it, for its Host for one."""
    return refusal(request.path, 400, CODES[400], UNREADABLE)


def server_error(request: HttpRequest) -> HttpResponse:
    """The answer to what no view foresaw."""
    if outage := _outage(sys.exception()):
        return later(request.path, *outage)
    return refusal(request.path, 500, "server_error", "Something went wrong here.")


def busy(path: str) -> HttpResponse:
    """The answer to a request that would have to wait too long for its turn."""
    return later(path, "server_busy", "The server has too much to do. Try again soon.")


def later(path: str, code: str, message: str) -> HttpResponse:
    response = refusal(path, 503, code, message)
    response["Retry-After"] = str(RETRY_AFTER)
    return response


def refusal(path: str, status: int, code: str, message: str) -> HttpResponse:
    """Return an error in the envelope for the API, and for all else the page named by the status."""
    if path.startswith("/api/"):
        return JsonResponse(envelope(code, message), status=status)
    return HttpResponse(render_to_string(f"{status}.html"), status=status)
