"""System checks: settings that contradict each other are refused at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register

from jobs.developing import finds_faces

POSITIVE = (
    "LEASE_SECONDS",
    "POLL_SECONDS",
    "CONCURRENCY",
    "PROMPTS_PER_BACKEND",
    "MAX_ATTEMPTS",
    "RETRY_BASE_SECONDS",
    "STALL_SECONDS",
    "CANCEL_SECONDS",
    "SHUTDOWN_SECONDS",
    "QUEUE_LIMIT",
    "QUEUE_LIMIT_PER_OWNER",
    "REQUESTS_PER_MINUTE",
    "STREAMS_PER_OWNER",
    "STORAGE_PER_OWNER_BYTES",
    "PHOTO_MAX_BYTES",
    "PHOTO_MAX_PIXELS",
    "PHOTO_MAX_SIDE",
    "ASSET_MAX_BYTES",
    "WORKFLOW_MAX_BYTES",
    "OUTPUT_MAX_BYTES",
    "JOB_RETENTION_DAYS",
    "WEB_CONNECTIONS",
    "HEARTBEAT_SECONDS",
)
NOT_NEGATIVE = ("MAX_RESUBMITS", "MAX_LOST_WORKERS")
# What a column or a date can hold; and for the rest, of what is no typing error.
MOST = {
    "MAX_ATTEMPTS": 32_767,
    "MAX_RESUBMITS": 32_767,
    "MAX_LOST_WORKERS": 32_767,
    "JOB_RETENTION_DAYS": 36_500,
    "PHOTO_MAX_SIDE": 16_384,
    "STORAGE_PER_OWNER_BYTES": 2**60,
}
PREVIEW_METHODS = ("auto", "latent2rgb", "taesd", "default", "none")
MOST_OF_THE_REST = 1_000_000_000
URL_LENGTH = 200  # characters, of `Backend.name`
# (smaller, larger): the first may not be above the second.
ORDERED = (
    ("POLL_SECONDS", "LEASE_SECONDS"),
    ("RETRY_BASE_SECONDS", "RETRY_MAX_SECONDS"),
    ("QUEUE_LIMIT_PER_OWNER", "QUEUE_LIMIT"),
    ("POLL_SECONDS", "STALL_SECONDS"),
)


@register
def check_settings(app_configs: Any, **kwargs: Any) -> Sequence[CheckMessage]:
    names = sorted({*POSITIVE, *NOT_NEGATIVE, *sum(ORDERED, ())})
    value = {name: getattr(settings, f"GENFLOW_{name}") for name in names}
    problems = [
        f"GENFLOW_{name} is {value[name]}; it must be above 0."
        for name in POSITIVE
        if not value[name] > 0
    ]
    problems += [
        f"GENFLOW_{name} is {value[name]}; it must not be below 0."
        for name in NOT_NEGATIVE
        if value[name] < 0
    ]
    problems += [
        f"GENFLOW_{name} is {value[name]}; it must not be above {most:,}."
        for name in names
        if value[name] > (most := MOST.get(name, MOST_OF_THE_REST))
    ]
    problems += [
        f"GENFLOW_{small} ({value[small]}) is above GENFLOW_{large} ({value[large]}). Lower the first or raise"
        " the second."
        for small, large in ORDERED
        if value[small] > value[large]
    ]
    problems += [
        f"COMFY_URL holds {without_password(url)!r}; write addresses like http://127.0.0.1:8188, separated by"
        " commas."
        for url in settings.COMFY_URLS
        if not is_http_url(url)
    ]
    if settings.GENFLOW_PREVIEW_METHOD not in PREVIEW_METHODS:
        problems.append(
            f"GENFLOW_PREVIEW_METHOD is {settings.GENFLOW_PREVIEW_METHOD!r}; set it to one of"
            f" {', '.join(PREVIEW_METHODS)}."
        )
    return [Error(problem, id=f"genflow.E{n:03}") for n, problem in enumerate(problems, 1)]


@register
def check_face_detector(app_configs: Any, **kwargs: Any) -> Sequence[CheckMessage]:
    if settings.GENFLOW_FACE_CHECK == "off" or finds_faces():
        return []
    return [
        Warning(
            "Photos are taken without a look for faces: dlib is not installed, or this CPU has no AVX.",
            hint="Install dlib-bin, or set GENFLOW_FACE_CHECK=off.",
            id="genflow.W001",
        )
    ]


def is_http_url(url: str) -> bool:
    """Whether it is http(s)://[user:password@]host[:port][/path] and no more, on one short line."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not (parts.query or parts.fragment)
            and len(url) <= URL_LENGTH
            and url.isprintable()
            and " " not in url
        )
    except ValueError:
        return False


def without_password(url: str) -> str:
    return url.rpartition("@")[2]
