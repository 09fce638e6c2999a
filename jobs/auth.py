"""Bearer tokens."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from django.db.models import Q
from django.db.models.functions import Now
from knox.auth import TokenAuthentication
from rest_framework.exceptions import AuthenticationFailed

from jobs.models import ApiToken

TOKEN = re.compile(rb"[\x21-\x7e]+")
# How stale "last used" may be: not every request writes to the token's row.
LAST_USED_PRECISION = timedelta(minutes=1)


class BearerAuthentication(TokenAuthentication):  # type: ignore[misc]  # knox ships no types
    def authenticate_credentials(self, token: bytes) -> tuple[Any, ApiToken]:
        if not TOKEN.fullmatch(token):  # other bytes could not even be looked up
            raise AuthenticationFailed("Invalid token.")
        user, auth_token = super().authenticate_credentials(token)
        ApiToken.objects.filter(
            Q(last_used_at=None) | Q(last_used_at__lt=Now() - LAST_USED_PRECISION), pk=auth_token.pk
        ).update(last_used_at=Now())
        return user, auth_token
