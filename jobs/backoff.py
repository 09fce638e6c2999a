from __future__ import annotations

import random
from datetime import timedelta


def backoff(attempt: int, base: float, maximum: float, at_least: float | None = None) -> timedelta:
    """Return how long to wait after a failed attempt (from 1): exponential with full jitter, in seconds.

    at_least: what the server asked for by Retry-After; it may be above the maximum.
    """
    ceiling = min(maximum, base * 2 ** min(attempt - 1, 30))
    return timedelta(seconds=max(random.uniform(0, ceiling), at_least or 0))  # noqa: S311 (no secret)
