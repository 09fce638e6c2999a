"""`Idempotency-Key`: a request that comes again gets what the first one made, and nothing is made twice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, Final
from uuid import UUID

from blake3 import blake3
from django.core.files.uploadedfile import UploadedFile
from django.http import Http404, QueryDict
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.errors import CODES, UNREADABLE, ApiError
from jobs.models import AlreadyMade, IdempotencyKey, Once, hash_of

KEY: Final = re.compile(r"(?!.*%00)[\x21-\x7e]{1,255}")  # printable ASCII without spaces

Answer = Callable[[Request, UUID], Response]


def once_per_key(answer: Answer) -> Callable[[Callable[..., Response]], Callable[..., Response]]:
    """Decorate a `post` that makes something: it gets a Once, or None, to hand on to the model.

    answer: tells of what was made, by its id. When the request comes again it is all that is called.
    """

    def decorate(post: Callable[..., Response]) -> Callable[..., Response]:
        @wraps(post)
        def post_once(view: Any, request: Request, *args: Any, **kwargs: Any) -> Response:
            once = once_of(request)
            try:
                if once is not None:  # before any hard work; it is looked up again where it counts
                    IdempotencyKey.objects.expect_new(once)
                return post(view, request, once, *args, **kwargs)
            except AlreadyMade as exc:
                return replay(answer, request, exc.pk)

        return post_once

    return decorate


def replay(answer: Answer, request: Request, made: UUID) -> Response:
    try:
        response = answer(request, made)
    except Http404 as exc:
        raise ApiError(
            422,
            "idempotency_key_reuse",
            "What this Idempotency-Key made is deleted. Send a new key to make it anew.",
        ) from exc
    response["Idempotency-Replayed"] = "true"
    return response


def once_of(request: Request) -> Once | None:
    """Return what tells this request from others, None if it has no key."""
    key = request.headers.get("Idempotency-Key")
    if key is None:
        return None
    if not KEY.fullmatch(key):
        raise ApiError(
            400,
            "invalid_idempotency_key",
            "An Idempotency-Key has 1 to 255 printable ASCII characters and no spaces; a UUID is best.",
        )
    assert request.user.pk is not None
    return Once(request.user.pk, key, fingerprint(request.path, request.data))


def fingerprint(path: str, data: Any) -> str:
    """Return a hash of what was sent where: of its fields and the bytes of its files, however they were packed."""
    if isinstance(data, QueryDict):
        data = dict(data.lists())
    elif isinstance(data, dict):
        # Credentials of the moment: the contract leaves them out of the comparison.
        data = {name: value for name, value in data.items() if name != "extra_data"}
    try:
        text = json.dumps([path, data], sort_keys=True, default=_file_hash)
    except RecursionError as exc:
        raise ApiError(400, CODES[400], UNREADABLE) from exc
    return blake3(text.encode()).hexdigest()


def _file_hash(file: UploadedFile[bytes]) -> dict[str, str]:
    content_hash = hash_of(file)
    file.seek(0)
    return {"blake3": content_hash}
