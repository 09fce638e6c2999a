"""A photo and a prompt made into a job."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import QuerySet

from comfy.graph import FaceRequest, portrait_graph
from comfy.workflow import Fault, named
from jobs.assets import stored
from jobs.catalog import loras_on_offer, offers_of
from jobs.developing import Photo
from jobs.models import Asset, Job, Once
from jobs.submissions import submit
from jobs.wire import asset_reference

# JSON has any number, but programs that read it as a double tell those below this apart.
RANDOM_SEEDS: Final = 2**53
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


class CannotDraw(ValueError):
    """What no image server has: a code, and a sentence for whoever asked. field: the param at fault, if it is one."""

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


def submit_portrait(
    owner: User,
    photo: Photo,
    params: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    *,
    once: Once | None = None,
) -> Job:
    """Queue a portrait, or raise NoRoom or CannotDraw (or what the database raises) and store nothing.

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
        return submit(job, [asset], once)


def draw_again(job: Job) -> Job:
    """Queue a job that has ended anew: the same photo, params and seed, but the settings of today.

    Raises NoRoom, CannotDraw, or Job.DoesNotExist if the job has not ended or is gone.
    """
    with transaction.atomic():
        old, inputs = _locked(Job.objects.finished(), job)
        drawing = {"kind": old.kind, "params": old.params, "graph": old.graph}
        if old.kind == Job.Kind.PORTRAIT:
            drawing = _drawing(old.params, *inputs)
        same = {name: getattr(old, name) for name in ("owner", "priority", "metadata", "warnings")}
        again = Job(**same, **drawing)
        return submit(again, inputs)


def draw_like(job: Job, params: Mapping[str, Any], *, once: Once | None = None) -> Job:
    """Queue a portrait from the photo of an earlier one, as `submit_portrait` does from a new photo.

    Raises NoRoom, CannotDraw, or Job.DoesNotExist if the earlier portrait was deleted meanwhile.
    """
    with transaction.atomic():
        old, inputs = _locked(Job.objects.filter(deleted_at=None), job)
        like = Job(owner=old.owner, warnings=old.warnings, **_drawing(params, *inputs))
        return submit(like, inputs, once)


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
        **{"seed": secrets.randbelow(RANDOM_SEEDS), **asked},
    )
    graph = portrait_graph(request)
    offers = offers_of(node["class_type"] for node in graph.values())
    faults, unable = offers.compare(graph)
    if faults:
        raise _cannot_draw(faults[0], request)
    return {
        "kind": Job.Kind.PORTRAIT,
        "params": {name: getattr(request, name) for name in PARAMS},
        "graph": graph,
        "refused_by": unable,
    }


def _cannot_draw(fault: Fault, request: FaceRequest) -> CannotDraw:
    if fault.field == "lora_name":
        message = f"There is no LoRA {request.lora!r}. {named(loras_on_offer())}"
        return CannotDraw("model_missing", message, "lora")
    message = f"{fault.message} Portraits cannot be drawn without it: tell an operator."
    if fault.reason == "unknown_class":
        return CannotDraw("node_missing", message)
    return CannotDraw("model_missing", message)
