"""A photo and a prompt made into a job."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Final

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import QuerySet

from comfy.graph import SEED, FaceRequest, portrait_graph
from jobs.assets import stored
from jobs.developing import Photo
from jobs.limits import limits_of
from jobs.models import Asset, Job, Once
from jobs.wire import asset_reference

# What the user decides about a picture; all else is a setting.
PARAMS: Final = (
    "prompt",
    "negative_prompt",
    "seed",
    "width",
    "height",
    "steps",
    "cfg",
    "count",
    "face_weight",
    "likeness",
    "lora",
    "lora_strength",
)


def submit_portrait(
    owner: User,
    photo: Photo,
    params: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    *,
    once: Once | None = None,
) -> Job:
    """Queue a portrait, or raise NoRoom (or what the database raises) and store nothing.

    once: of the request, if it may come again; see `JobQuerySet.submit`.
    params: the names in PARAMS and `priority`, in their ranges (ValueError if not). What is None or not there
    has its default, the seed a random one. The job's own `params` hold them all.
    """
    with stored(
        photo.content,
        owner=owner,
        content_type=photo.content_type,
        width=photo.width,
        height=photo.height,
    ) as asset:
        asset.save(force_insert=True)
        job = Job(
            owner=owner,
            priority=params.get("priority") or 0,
            metadata=dict(metadata or {}),
            warnings=photo.warnings,
            **_drawing(params, asset),
        )
        return _submit(job, [asset], once)


def draw_again(job: Job) -> Job:
    """Queue a job that has ended anew: the same photo, params and seed, but the settings of today.

    Raises NoRoom, or Job.DoesNotExist if the job has not ended or is gone.
    """
    with transaction.atomic():
        old, inputs = _locked(Job.objects.finished(), job)
        drawing = {"kind": old.kind, "params": old.params, "graph": old.graph}
        if old.kind == Job.Kind.PORTRAIT:
            drawing = _drawing(old.params, *inputs)
        same = {name: getattr(old, name) for name in ("owner", "priority", "metadata", "warnings")}
        again = Job(**same, **drawing)
        return _submit(again, inputs)


def draw_like(job: Job, params: Mapping[str, Any], *, once: Once | None = None) -> Job:
    """Queue a portrait from the photo of an earlier one, as `submit_portrait` does from a new photo.

    Raises NoRoom, or Job.DoesNotExist if the earlier portrait was deleted meanwhile.
    """
    with transaction.atomic():
        old, inputs = _locked(Job.objects.filter(deleted_at=None), job)
        like = Job(owner=old.owner, warnings=old.warnings, **_drawing(params, *inputs))
        return _submit(like, inputs, once)


def _locked(jobs: QuerySet[Job], job: Job) -> tuple[Job, list[Asset]]:
    # Locked, or a purge could take the photo away before the new job is there to keep it.
    old = jobs.select_for_update(no_key=True).get(pk=job.pk)
    return old, list(old.inputs.all())


def _drawing(params: Mapping[str, Any], photo: Asset) -> dict[str, Any]:
    """Return the fields of a job that say what is drawn."""
    asked = {name: params[name] for name in PARAMS if params.get(name) is not None}
    request = FaceRequest(
        photo=asset_reference(photo.pk),
        filename_prefix="portrait",
        checkpoint=settings.GENFLOW_CHECKPOINT,
        provider=settings.GENFLOW_FACE_PROVIDER,
        sampler=settings.GENFLOW_SAMPLER,
        scheduler=settings.GENFLOW_SCHEDULER,
        **{"seed": secrets.randbelow(int(SEED.high) + 1), **asked},
    )
    return {
        "kind": Job.Kind.PORTRAIT,
        "params": {name: getattr(request, name) for name in PARAMS},
        "graph": portrait_graph(request),
    }


def _submit(job: Job, inputs: Iterable[Asset], once: Once | None = None) -> Job:
    limits = limits_of(job.owner)
    Asset.objects.check_room(job.owner_id, limits.storage_bytes)
    job.max_attempts = settings.GENFLOW_MAX_ATTEMPTS
    return Job.objects.submit(
        job,
        inputs=inputs,
        queue_limit=settings.GENFLOW_QUEUE_LIMIT,
        queue_limit_per_owner=limits.queued_jobs,
        retention=timedelta(days=settings.GENFLOW_JOB_RETENTION_DAYS),
        once=once,
    )
