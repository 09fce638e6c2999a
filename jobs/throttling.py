"""How fast requests may come.

The counts are of one web process, in its memory: they protect it, cost nothing, and need no database, which
may be what is overloaded. Behind n processes an owner may reach n times the rate. What must be exact over
all of them (the queue's length, the bytes stored) is counted in the database.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final

from django.contrib.auth.models import User
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request
from rest_framework.throttling import BaseThrottle

from jobs.limits import limits_of

BUCKETS: Final = 10_000
MINUTE: Final = 60.0
READS_PER_WRITE: Final = 10


class Buckets:
    """Token buckets by name. Each holds a minute's worth of tokens, and fills again at that rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # When each will be full: one that is not here is. The longest unused go first.
        self._full_at: OrderedDict[Hashable, float] = OrderedDict()
        self._lock = threading.Lock()

    def wait(self, name: Hashable, per_minute: int) -> int:
        """Return how many seconds it takes until there is a token; 0: there is one."""
        return self._seconds_to(self._full_without_one(name, per_minute))

    def take(self, name: Hashable, per_minute: int) -> int:
        """Take a token if there is one. Return what `wait` does."""
        with self._lock:
            full_at = self._full_without_one(name, per_minute)
            if seconds := self._seconds_to(full_at):
                return seconds
            self._full_at[name] = full_at
            self._full_at.move_to_end(name)
            if len(self._full_at) > BUCKETS:
                self._full_at.popitem(last=False)
        return 0

    def _full_without_one(self, name: Hashable, per_minute: int) -> float:
        """Return when the bucket would be full if a token were taken now."""
        now = self._clock()
        return max(self._full_at.get(name, now), now) + MINUTE / per_minute

    def _seconds_to(self, full_at: float) -> int:
        """Return how long to wait for a bucket not to be in debt: full within a minute from then."""
        over = full_at - self._clock() - MINUTE
        return max(0, math.ceil(over - 1e-6))  # sums of fractions are not exact

    def clear(self) -> None:
        self._full_at.clear()


OWNERS: Final = Buckets()


def count_request(owner: User, method: str) -> int:
    """Count a request. Return 0, or after how many seconds it may come again.

    Reads are counted apart, so that whoever polls can still submit.
    """
    per_minute = limits_of(owner).requests_per_minute
    if method in SAFE_METHODS:
        return OWNERS.take((owner.pk, "read"), per_minute * READS_PER_WRITE)
    return OWNERS.take((owner.pk, "write"), per_minute)


class OwnerThrottle(BaseThrottle):
    """Lets through what an owner may send; what comes without one (by a signed link) is not counted."""

    seconds = 0

    def allow_request(self, request: Request, view: Any) -> bool:
        if isinstance(request.user, User):
            self.seconds = count_request(request.user, request.method or "")
        return self.seconds == 0

    def wait(self) -> float:
        return self.seconds
