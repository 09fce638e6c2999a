"""What the API reads, strictly, and what it says about jobs and assets (Comfy API v2 and a little more)."""

from __future__ import annotations

import binascii
import json
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, ClassVar, Final, cast
from uuid import UUID

from blake3 import blake3
from django.conf import settings
from django.db.models import Case, Count, OuterRef, Q, Subquery, When
from django.db.models.functions import Coalesce
from django.http import HttpRequest, QueryDict
from django.urls import reverse
from django.utils import timezone
from rest_framework import serializers
from rest_framework.fields import empty

from comfy import graph
from comfy.filetypes import ending_of
from comfy.text import clean_text, is_storable
from jobs.errors import CODES, ApiError
from jobs.keyring import KEY_LENGTH
from jobs.links import content_url
from jobs.models import PRIORITY_MAX, Asset, Job, JobQuerySet
from jobs.status import JobStatus

# --- reading ---

Errors = dict[str, Any]  # {field: [sentences]}
METADATA_PAIRS: Final = 16
METADATA_KEY: Final = 64  # characters
METADATA_VALUE: Final = 500
PRIORITY: Final = graph.Range(-PRIORITY_MAX, PRIORITY_MAX, step=1)
WAIT: Final = graph.Range(0, 60)  # seconds
LORA_NAME: Final = 255  # characters
FILE_PATH: Final = 255  # characters
EXPIRES_IN: Final = graph.Range(60, 7 * 24 * 3600, step=1)  # seconds
UNFIT_FOR_NAMES: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\\]")
MEDIA_TYPE_LENGTH: Final = 100  # characters
MEDIA_TYPE: Final = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]*/[a-z0-9][a-z0-9!#$&^_.+-]*")
RESERVED: Final = "Reserved for later; leave it out."
METADATA_FILTER: Final = re.compile(r"metadata\[(.+)\]", re.DOTALL)


class StrictSerializer(serializers.Serializer[Any]):
    """Fields of a form, a query or a JSON object: each is known and given once, or the error names it."""

    # Names that the Comfy API v2 keeps for later.
    reserved: ClassVar[Collection[str]] = ()

    def to_internal_value(self, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise ApiError(400, CODES[400], "Send a JSON object.")
        errors: Errors = {
            name: [RESERVED if name in self.reserved else "There is no such field."]
            for name in data
            if name not in self.fields and not self.takes(name)
        }
        if isinstance(data, QueryDict):
            errors |= {
                name: ["Give it once."]
                for name, values in data.lists()
                if len(values) > 1 and not isinstance(self.fields.get(name), serializers.ListField)
            }
        try:
            valid = super().to_internal_value(data)
        except serializers.ValidationError as exc:
            raise serializers.ValidationError(cast("Errors", exc.detail) | errors) from exc
        if errors:
            raise serializers.ValidationError(errors)
        return valid

    def takes(self, name: str) -> bool:
        """Whether a name that is no field's is welcome all the same."""
        return False


class NumberField(serializers.Field[Any, Any, Any, Any]):
    """A number of a range; whatever is wrong with it, the answer says what is allowed."""

    default_error_messages = {"range": "Must be {kind} from {low} to {high}{steps}."}

    def __init__(self, allowed: graph.Range, **kwargs: Any) -> None:
        super().__init__(required=False, **kwargs)
        self.allowed = allowed

    def to_internal_value(self, data: Any) -> float:
        whole = self.allowed.step is not None
        try:
            number = (int if whole else float)(str(data))  # neither True nor 1.5 is a whole number
            self.allowed.check(self.field_name or "", number)
        except (TypeError, ValueError, OverflowError):
            step = self.allowed.step or 1
            self.fail(
                "range",
                kind="a whole number" if whole else "a number",
                low=self.allowed.low,
                high=self.allowed.high,
                steps=f" in steps of {step}" if step > 1 else "",
            )
        return number


class PriorityField(NumberField):
    def __init__(self) -> None:
        super().__init__(PRIORITY)

    def to_internal_value(self, data: Any) -> float:
        priority = super().to_internal_value(data)
        if priority > 0 and not self.context["request"].user.is_staff:
            raise serializers.ValidationError("Above 0 is for staff accounts: it passes everybody.")
        return priority


class TextField(serializers.CharField):
    """Text of one length or less; REST framework refuses NUL and lone surrogates."""

    def __init__(self, max_length: int, **kwargs: Any) -> None:
        message = f"Must have {0 if kwargs.get('allow_blank') else 1} to {max_length} characters."
        super().__init__(
            max_length=max_length,
            error_messages={"blank": message, "max_length": message},
            **kwargs,
        )

    def to_internal_value(self, data: Any) -> str:
        if "\N{REPLACEMENT CHARACTER}" in (text := super().to_internal_value(data)):
            raise serializers.ValidationError("Must be text in UTF-8.")
        return text


class MetadataField(serializers.Field[Any, Any, Any, Any]):
    """Labels of the caller's own: a JSON object, in a form as its text."""

    def to_internal_value(self, data: Any) -> dict[str, str]:
        try:
            labels = data if isinstance(data, dict) else json.loads(data)
        except (TypeError, ValueError, RecursionError):
            labels = None
        if not isinstance(labels, dict):
            raise metadata_invalid("It must be a JSON object of strings.")
        if len(labels) > METADATA_PAIRS:
            raise metadata_invalid(f"It has {len(labels)} pairs; {METADATA_PAIRS} are the most.")
        for key, value in labels.items():
            if not is_label(key, value):
                raise metadata_invalid(
                    f"{clean_text(key, METADATA_KEY)!r}: a key has 1 to {METADATA_KEY} characters,"
                    f" a value is a string of up to {METADATA_VALUE}, and NUL is in neither."
                )
        return labels


def metadata_invalid(why: str) -> ApiError:
    return ApiError(
        422, "metadata_invalid", f"Not valid: metadata. {why}", details={"metadata": [why]}
    )


def is_label(key: str, value: Any) -> bool:
    return (
        isinstance(value, str)
        and 1 <= len(key) <= METADATA_KEY
        and len(value) <= METADATA_VALUE
        and is_storable(key + value)
    )


class ExtraDataField(serializers.Field[Any, Any, Any, Any]):
    """What goes with the graph to ComfyUI, but into no database."""

    default_error_messages = {
        "keys": "Must be an object, and `api_key_comfy_org` is all that it may have.",
        "key": f"api_key_comfy_org must be a string of 1 to {KEY_LENGTH} printable ASCII characters.",
        "off": "This site cannot hand API keys to its workers: it runs with GENFLOW_NOTIFY=0.",
    }

    def to_internal_value(self, data: Any) -> dict[str, str]:
        if not isinstance(data, dict) or data.keys() - {"api_key_comfy_org"}:
            self.fail("keys")
        for key in data.values():
            if not (isinstance(key, str) and 1 <= len(key) <= KEY_LENGTH and is_printable(key)):
                self.fail("key")
        if data and not settings.GENFLOW_NOTIFY:
            self.fail("off")
        return data


def is_printable(text: str) -> bool:
    return text.isascii() and text.isprintable()


class PhotoSerializer(StrictSerializer):
    """The form of a photo alone."""

    photo = serializers.FileField(
        allow_empty_file=True,  # read_photo has a word for that
        error_messages={"invalid": "Must be a file.", "required": "Send a photo."},
    )


class PortraitSerializer(PhotoSerializer):
    """The form of a portrait."""

    prompt = TextField(graph.PROMPT_MAX_LENGTH)
    negative_prompt = TextField(graph.PROMPT_MAX_LENGTH, required=False, allow_blank=True)
    seed = NumberField(graph.SEED)
    width = NumberField(graph.SIZE)
    height = NumberField(graph.SIZE)
    steps = NumberField(graph.STEPS)
    cfg = NumberField(graph.CFG)
    lora = TextField(LORA_NAME, required=False)
    lora_strength = NumberField(graph.LORA_STRENGTH)
    face_weight = NumberField(graph.FACE_WEIGHT)
    likeness = NumberField(graph.LIKENESS)
    count = NumberField(graph.COUNT)
    priority = PriorityField()
    metadata = MetadataField(required=False)


class WorkflowField(serializers.Field[Any, Any, Any, Any]):
    """Anything that JSON can be, or nothing: `submit_workflow` says what is wrong with it."""

    def run_validation(self, data: Any = empty) -> Any:
        return None if data is empty else data


class JobSubmissionSerializer(StrictSerializer):
    """A workflow to run."""

    reserved = ("webhook_url", "inputs")

    workflow = WorkflowField()
    extra_data = ExtraDataField(required=False)
    metadata = MetadataField(required=False)
    priority = PriorityField()


class WaitSerializer(serializers.Serializer[Any]):
    """How many seconds an answer may be held back."""

    wait = NumberField(WAIT)


class FilePathField(TextField):
    """A name, perhaps with folders before it: kept, shown and looked up, never a path on a disk."""

    default_error_messages = {
        "path": "Must be a name such as `photo.png` or `faces/ann.png`: no `..`, no leading `/`, no `\\`."
    }

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(FILE_PATH, trim_whitespace=False, **kwargs)

    def to_internal_value(self, data: Any) -> str:
        path = super().to_internal_value(data)
        if UNFIT_FOR_NAMES.search(path) or {"", ".", ".."}.intersection(path.split("/")):
            self.fail("path")
        return path


class MediaTypeField(TextField):
    """A media type; its parameters are left out."""

    default_error_messages = {"media_type": "Must be a media type such as `image/png`."}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(MEDIA_TYPE_LENGTH, **kwargs)

    def to_internal_value(self, data: Any) -> str:
        media_type = super().to_internal_value(data).partition(";")[0].strip().lower()
        if not MEDIA_TYPE.fullmatch(media_type):
            self.fail("media_type")
        return media_type


class AssetSerializer(StrictSerializer):
    """What every new asset may be given. Tags are taken and not kept."""

    tags = serializers.ListField(child=TextField(100), required=False)
    expires_in = NumberField(EXPIRES_IN)


class UploadSerializer(AssetSerializer):
    file = serializers.FileField(
        allow_empty_file=True,
        error_messages={"invalid": "Must be a file.", "required": "Send a file."},
    )
    content_type = MediaTypeField()
    file_path = FilePathField()
    expected_hash = TextField(100, required=False)


class FromHashSerializer(AssetSerializer):
    hash = TextField(100)
    file_path = FilePathField(required=False)


class JobListSerializer(StrictSerializer):
    """The query of a list: status, limit, cursor, and any metadata[key]=value."""

    status = serializers.ChoiceField(JobStatus.choices, required=False)
    limit = NumberField(graph.Range(1, 100, step=1), default=20)
    cursor = serializers.CharField(required=False)

    def takes(self, name: str) -> bool:
        return METADATA_FILTER.fullmatch(name) is not None

    def validate_cursor(self, value: str) -> UUID:
        return read_cursor(value)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        labels = {
            match[1]: value
            for name, value in self.initial_data.items()
            if (match := METADATA_FILTER.fullmatch(name))
        }
        if not all(is_label(key, value) for key, value in labels.items()):
            raise ApiError(422, "invalid_metadata_filter", "No job can have such metadata.")
        return attrs | {"metadata": labels}


def cursor_after(job: Job) -> str:
    """Return where the next page begins; clients hand it back as it is."""
    return urlsafe_b64encode(job.pk.bytes).rstrip(b"=").decode()


def read_cursor(cursor: str) -> UUID:
    try:
        return UUID(bytes=urlsafe_b64decode(cursor + "=="))
    except (ValueError, binascii.Error) as exc:
        raise ApiError(422, "invalid_cursor", "This cursor was not given by a list.") from exc


# --- writing ---


def shown(jobs: JobQuerySet) -> JobQuerySet:
    """Load with the jobs what `job_json` tells, in two queries however many they are."""
    queued = Job.objects.filter(status=JobStatus.QUEUED).order_by()
    ahead = queued.filter(
        Q(priority__gt=OuterRef("priority"))
        | Q(priority=OuterRef("priority"), turn__lt=OuterRef("turn"))
        | Q(priority=OuterRef("priority"), turn=OuterRef("turn"), pk__lt=OuterRef("pk"))
    )
    count = ahead.values("status").annotate(n=Count("pk")).values("n")
    return (
        jobs.with_outputs()
        .defer("graph", "error_detail")
        .annotate(
            queue_position=Case(
                When(status=JobStatus.QUEUED, then=Coalesce(Subquery(count), 0) + 1), default=None
            )
        )
    )


def job_json(job: Job, request: HttpRequest) -> dict[str, Any]:
    """Return a job loaded through `shown` as the API tells it. What is for operators stays out."""
    return {
        "id": str(job.pk),
        "kind": job.kind,
        "status": job.status,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "completed_at": job.completed_at,
        "expires_at": job.expires_at,
        "queue_position": job.queue_position,  # type: ignore[attr-defined]  # of `shown`
        "progress": job.progress,
        "outputs": [output_json(asset, request) for asset in job.outputs.all()],
        "error": _error(job.error or {}) if job.status == JobStatus.FAILED else None,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "resubmits": job.resubmits,
        "retry": _retry(job),
        "priority": job.priority,
        "params": job.params,
        "warnings": job.warnings,
        "metadata": job.metadata,
        "metrics": {
            "queue_ms": _milliseconds(job.created_at, job.started_at),
            "execution_ms": _milliseconds(job.started_at, job.completed_at),
        },
        "urls": {
            "self": reverse("job", args=[job.pk]),
            "events": reverse("job-events", args=[job.pk]),
            "cancel": reverse("job-cancel", args=[job.pk]),
            "image": reverse("job-image", args=[job.pk]),
        },
    }


def version_of(job: Job) -> str:
    """Return an ETag that changes with the job's status, attempts, next try and outputs.

    Weak, as it leaves out what moves all the time: progress, and the place in the queue.
    """
    parts = [job.status, job.attempt, job.resubmits, job.error and job.run_after]
    outputs = [str(asset.pk) for asset in job.outputs.all()]
    if outputs:  # their links end: whoever asks again and again gets new ones in time
        outputs.append(str(time.time() // (settings.SIGNED_URL_LIFETIME.total_seconds() / 3)))
    return f'W/"{blake3(repr([*parts, outputs]).encode()).hexdigest(16)}"'


def list_item_json(job: Job, request: HttpRequest) -> dict[str, Any]:
    """Return a job as a list tells it, with the two times that clients of the Comfy API v2 read there."""
    changes = (job.created_at, job.started_at, job.cancel_requested_at, job.completed_at)
    return job_json(job, request) | {
        "create_time": job.created_at,
        "update_time": max(time for time in changes if time is not None),
    }


def _error(error: Mapping[str, Any]) -> dict[str, Any]:
    return {key: error.get(key) for key in ("code", "message", "node_id", "class_type")}


def _retry(job: Job) -> dict[str, Any] | None:
    """Return when and why a job will be tried again, if it waits for that."""
    if job.status != JobStatus.QUEUED or not job.error or job.run_after <= timezone.now():
        return None
    return {"at": job.run_after, "code": job.error["code"], "message": job.error["message"]}


def _milliseconds(begin: datetime | None, end: datetime | None) -> int | None:
    return round((end - begin).total_seconds() * 1000) if begin and end else None


def output_json(asset: Asset, request: HttpRequest) -> dict[str, Any]:
    url, expires_at = content_url(request, asset)
    return {
        "id": str(asset.pk),
        "job_id": str(asset.job_id),
        "node_id": asset.node_id,
        "name": asset.name,
        "type": output_type(asset),
        "content_type": asset.content_type,
        "size_bytes": asset.size,
        "width": asset.width,
        "height": asset.height,
        "hash": asset.hash,
        "url": url,
        "url_expires_at": expires_at,
    }


def output_type(asset: Asset) -> str:
    """Return the word that the Comfy API v2 has for this kind of file."""
    if ending_of(asset.name) == "latent":
        return "latent"
    kind = asset.content_type.partition("/")[0]
    return kind if kind in ("image", "video", "audio", "text") else "file"


def asset_json(asset: Asset, request: HttpRequest) -> dict[str, Any]:
    url, expires_at = content_url(request, asset)
    return {
        "id": str(asset.pk),
        "hash": asset.hash,
        "size_bytes": asset.size,
        "content_type": asset.content_type,
        "width": asset.width,
        "height": asset.height,
        "file_path": asset.name or None,
        "created_at": asset.created_at,
        "url": url,
        "url_expires_at": expires_at,
        "expires_at": asset.expires_at,
        **({"job_id": str(asset.job_id)} if asset.job_id else {}),
    }
