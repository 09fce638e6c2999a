"""Bearer tokens, and the rights of clients that stay for long."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self

from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.db import Error as DatabaseError
from django.db.models.functions import Now
from django.utils import timezone
from knox.auth import TokenAuthentication
from knox.crypto import hash_token
from rest_framework.exceptions import AuthenticationFailed, Throttled
from rest_framework.request import Request

from jobs.models import ApiToken
from jobs.outage import is_read_only
from jobs.throttling import BUCKETS, Buckets

# How stale "last used" may be: not every request writes to the token's row.
LAST_USED_PRECISION: Final = timedelta(minutes=1)
# From one address. Then only tokens that were good before are still looked up, so that who shares the address
# (an office, a proxy that tells of no other) goes on.
WRONG_TOKENS_PER_MINUTE: Final = 60
WRONG_TOKENS: Final = Buckets()
GOOD_TOKENS: Final[set[str]] = set()  # digests


class TooManyWrongTokens(Throttled):
    default_detail = "Too many wrong tokens came from your address."


class BearerAuthentication(TokenAuthentication):  # type: ignore[misc]  # knox ships no types
    def authenticate(self, request: Request) -> tuple[Any, ApiToken] | None:
        self.address = request.META.get("REMOTE_ADDR", "")
        answer: tuple[Any, ApiToken] | None = super().authenticate(request)
        return answer

    def authenticate_credentials(self, token: bytes) -> tuple[Any, ApiToken]:
        digest = hash_token(token.decode("latin-1"))
        wait = WRONG_TOKENS.wait(self.address, WRONG_TOKENS_PER_MINUTE)
        if wait and digest not in GOOD_TOKENS:
            raise TooManyWrongTokens(wait)
        try:
            user, auth_token = self._look_up(digest)
        except AuthenticationFailed:
            GOOD_TOKENS.discard(digest)
            WRONG_TOKENS.take(self.address, WRONG_TOKENS_PER_MINUTE)
            raise
        if len(GOOD_TOKENS) >= BUCKETS:
            GOOD_TOKENS.clear()
        GOOD_TOKENS.add(digest)
        note_use(auth_token)
        return user, auth_token

    def _look_up(self, digest: str) -> tuple[Any, ApiToken]:
        # One query, and by the primary key: knox's own loads all tokens of the user, to delete old ones.
        token = ApiToken.objects.select_related("user__limits").filter(digest=digest).first()
        if token is None:
            raise AuthenticationFailed("There is no such token. It may have been revoked.")
        if token.is_expired:
            raise AuthenticationFailed("This token has expired. Make another on your account page.")
        pair: tuple[Any, ApiToken] = self.validate_user(token)
        return pair


def note_use(token: ApiToken) -> None:
    if token.last_used_at and timezone.now() - token.last_used_at < LAST_USED_PRECISION:
        return
    try:
        ApiToken.objects.filter(pk=token.pk).update(last_used_at=Now())
    except DatabaseError as exc:
        # Amid a failover jobs can still be read.
        if not is_read_only(exc):
            raise


@dataclass(frozen=True)
class Pass:
    """Who a client is, and the key of what showed it: a token or a session, which may come to an end."""

    owner_id: int
    key: str

    @classmethod
    def of(cls, request: Request) -> Self:
        """Return that of a request that was found to be somebody's."""
        assert request.user.pk is not None
        token = request.auth
        return cls(request.user.pk, token.pk if token else str(request.session.session_key))


def still_good(passes: Collection[Pass]) -> set[Pass]:
    """Return those that a request would still be let in by, in three queries however many they are."""
    keys = {p.key for p in passes}
    owners = User.objects.filter(pk__in={p.owner_id for p in passes}, is_active=True)
    active = set(owners.values_list("pk", flat=True))
    alive = {
        *ApiToken.objects.filter(pk__in=keys)
        .exclude(expiry__lt=Now())
        .values_list("pk", flat=True),
        *Session.objects.filter(pk__in=keys, expire_date__gt=Now()).values_list("pk", flat=True),
    }
    return {p for p in passes if p.owner_id in active and p.key in alive}
