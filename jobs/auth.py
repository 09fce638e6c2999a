"""Bearer tokens."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from django.db import Error as DatabaseError
from django.db.models import Q
from django.db.models.functions import Now
from knox.auth import TokenAuthentication
from rest_framework.exceptions import AuthenticationFailed

from jobs.models import ApiToken
from jobs.outage import is_read_only

TOKEN = re.compile(rb"[\x21-\x7e]+")
# How stale "last used" may be: not every request writes to the token's row.
LAST_USED_PRECISION = timedelta(minutes=1)


class BearerAuthentication(TokenAuthentication):  # type: ignore[misc]  # knox ships no types
    def authenticate_credentials(self, token: bytes) -> tuple[Any, ApiToken]:
        if not TOKEN.fullmatch(token):  # other bytes could not even be looked up
            raise AuthenticationFailed("Invalid token.")
        user, auth_token = super().authenticate_credentials(token)
        note_use(auth_token)
        return user, auth_token


def note_use(token: ApiToken) -> None:
    stale = Q(last_used_at=None) | Q(last_used_at__lt=Now() - LAST_USED_PRECISION)
    try:
        ApiToken.objects.filter(stale, pk=token.pk).update(last_used_at=Now())
    except DatabaseError as exc:
        # Amid a failover jobs can still be read.
        if not is_read_only(exc):
            raise
