"""The description of the API, beside the views so that these stay short: `/api/schema` is made of it.

drf-spectacular turns the serializers below into JSON Schema. `OPERATIONS` says what each path of
`jobs.api_urls` takes and answers; what every operation may refuse is added by `refusals`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from drf_spectacular.extensions import (
    OpenApiAuthenticationExtension,
    OpenApiSerializerFieldExtension,
)
from drf_spectacular.generators import EndpointEnumerator
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import (
    OpenApiExample,
    OpenApiParameter,
    OpenApiResponse,
    extend_schema,
)
from rest_framework import serializers
from rest_framework.views import APIView

from jobs.auth import BearerAuthentication
from jobs.error_codes import JOB_ERRORS, REQUEST_ERRORS
from jobs.keyring import KEY_LENGTH
from jobs.models import Job
from jobs.serializers import (
    ExtraDataField,
    FromHashSerializer,
    JobListSerializer,
    JobSubmissionSerializer,
    MetadataField,
    NumberField,
    PhotoSerializer,
    PortraitSerializer,
    UploadSerializer,
    WaitSerializer,
    WorkflowField,
)
from jobs.status import JobStatus

# --- what the answers hold ---


class ProgressSerializer(serializers.Serializer[Any]):
    """How far a run is, whole in each answer. `step` of `steps` is within the current node."""

    value = serializers.FloatField(min_value=0, max_value=1)
    nodes_done = serializers.IntegerField()
    nodes_total = serializers.IntegerField()
    current_node = serializers.CharField(allow_null=True)
    current_node_class = serializers.CharField(allow_null=True)
    step = serializers.IntegerField(allow_null=True)
    steps = serializers.IntegerField(allow_null=True)
    message = serializers.CharField(allow_null=True)


class OutputSerializer(serializers.Serializer[Any]):
    """A file that a job made. `url` needs no token and works until `url_expires_at`."""

    id = serializers.UUIDField()
    job_id = serializers.UUIDField()
    node_id = serializers.CharField()
    name = serializers.CharField()
    type = serializers.ChoiceField(["image", "video", "audio", "text", "file", "latent"])
    content_type = serializers.CharField()
    size_bytes = serializers.IntegerField()
    width = serializers.IntegerField(allow_null=True)
    height = serializers.IntegerField(allow_null=True)
    hash = serializers.CharField(help_text="`blake3:<hex>` of the bytes.")
    url = serializers.URLField()
    url_expires_at = serializers.DateTimeField()


class JobErrorSerializer(serializers.Serializer[Any]):
    """Why a job failed, in a sentence for its owner."""

    code = serializers.CharField()
    message = serializers.CharField()
    node_id = serializers.CharField(allow_null=True)
    class_type = serializers.CharField(allow_null=True)


class RetrySerializer(serializers.Serializer[Any]):
    """When a job that met a temporary error is tried again, and what it met."""

    at = serializers.DateTimeField()
    code = serializers.CharField()
    message = serializers.CharField()


class MetricsSerializer(serializers.Serializer[Any]):
    """Milliseconds; null until they are known."""

    queue_ms = serializers.IntegerField(allow_null=True)
    execution_ms = serializers.IntegerField(allow_null=True)


class WarningSerializer(serializers.Serializer[Any]):
    """Something about the photo that is doubtful and stops nothing."""

    code = serializers.ChoiceField(
        ["no_face", "turned_face", "several_faces", "small_face", "cut_face"]
    )
    message = serializers.CharField()


class FaceSerializer(serializers.Serializer[Any]):
    """The box of a face from brows to chin, in pixels of the stored photo; it may reach beyond its edges."""

    left = serializers.IntegerField()
    top = serializers.IntegerField()
    right = serializers.IntegerField()
    bottom = serializers.IntegerField()


class PhotoCheckSerializer(serializers.Serializer[Any]):
    """A photo that a portrait would take, as it would be stored."""

    ok = serializers.ChoiceField([True])
    width = serializers.IntegerField()
    height = serializers.IntegerField()
    face = FaceSerializer(allow_null=True, help_text="The one that would be portrayed.")
    warnings = WarningSerializer(many=True)


class JobUrlsSerializer(serializers.Serializer[Any]):
    """Where to go on from here: follow these instead of making them up."""

    self = serializers.CharField()
    events = serializers.CharField()
    cancel = serializers.CharField()
    image = serializers.CharField()


class JobSerializer(serializers.Serializer[Any]):
    """One request for pictures, kept until `expires_at`."""

    id = serializers.UUIDField(help_text="Also ComfyUI's prompt id.")
    kind = serializers.ChoiceField(Job.Kind.choices)
    status = serializers.ChoiceField(JobStatus.choices)
    created_at = serializers.DateTimeField()
    started_at = serializers.DateTimeField(allow_null=True)
    completed_at = serializers.DateTimeField(allow_null=True)
    expires_at = serializers.DateTimeField()
    queue_position = serializers.IntegerField(allow_null=True, help_text="From 1, while queued.")
    progress = ProgressSerializer(allow_null=True)
    outputs = OutputSerializer(many=True)
    error = JobErrorSerializer(allow_null=True)
    attempt = serializers.IntegerField(help_text="The try under way, from 1.")
    max_attempts = serializers.IntegerField()
    resubmits = serializers.IntegerField(help_text="How often a backend lost it.")
    retry = RetrySerializer(allow_null=True)
    priority = serializers.IntegerField()
    params = serializers.DictField(help_text="What was asked for, defaults and seed included.")
    warnings = WarningSerializer(many=True)
    metadata = serializers.DictField(child=serializers.CharField())
    metrics = MetricsSerializer()
    urls = JobUrlsSerializer()


class ListedJobSerializer(JobSerializer):
    """A job as a list tells it."""

    create_time = serializers.DateTimeField()
    update_time = serializers.DateTimeField()


class JobPageSerializer(serializers.Serializer[Any]):
    """A page of jobs, newest first."""

    jobs = ListedJobSerializer(many=True)
    next_cursor = serializers.CharField(
        required=False, help_text="Send it as `cursor` for the next page; absent on the last one."
    )


class WorkflowSerializer(serializers.Serializer[Any]):
    """The graph of a job, in ComfyUI's API format."""

    workflow = serializers.DictField()
    format = serializers.ChoiceField(["api"])


class AssetSerializer(serializers.Serializer[Any]):
    """Bytes with an owner. `url` needs no token and works until `url_expires_at`."""

    id = serializers.UUIDField()
    hash = serializers.CharField(help_text="`blake3:<hex>` of the bytes.")
    size_bytes = serializers.IntegerField()
    content_type = serializers.CharField()
    width = serializers.IntegerField(allow_null=True)
    height = serializers.IntegerField(allow_null=True)
    file_path = serializers.CharField(allow_null=True)
    created_new = serializers.BooleanField(required=False)
    created_at = serializers.DateTimeField()
    url = serializers.URLField()
    url_expires_at = serializers.DateTimeField()
    expires_at = serializers.DateTimeField(allow_null=True)
    job_id = serializers.UUIDField(required=False, help_text="The job that made it.")


class ErrorDetailSerializer(serializers.Serializer[Any]):
    code = serializers.CharField(help_text="Stable; see the table above.")
    message = serializers.CharField(help_text="A sentence that says what to do.")
    details = serializers.DictField(allow_null=True)


class ErrorSerializer(serializers.Serializer[Any]):
    """The body of every answer from 400 on."""

    error = ErrorDetailSerializer()


# --- the operations ---

API: Final = "/api/v2/"
# What answers with a job, an asset and so on.
JOB: Final = OpenApiResponse(JobSerializer, "The job.")
ASSET: Final = OpenApiResponse(AssetSerializer, "The asset.")
GONE: Final = {204: OpenApiResponse(description="It is gone.")}


def bytes_of(what: str) -> dict[Any, Any]:
    return {
        (200, "*/*"): OpenApiResponse(OpenApiTypes.BINARY, what),
        (206, "*/*"): OpenApiResponse(OpenApiTypes.BINARY, "The range asked for."),
        304: OpenApiResponse(description="You have it: the ETag you sent is still right."),
        416: OpenApiResponse(description="The range is beyond its end."),
    }


def header(name: str, description: str) -> OpenApiParameter:
    return OpenApiParameter(name, str, OpenApiParameter.HEADER, description=description)


KEY: Final = header(
    "Idempotency-Key",
    "1 to 255 printable ASCII characters without spaces, best a UUID. The same request with the same key, within"
    " 24 hours, makes nothing new: it is answered with what the first one made, as it is now, and"
    " `Idempotency-Replayed: true`.",
)
IN_FLIGHT: Final = {
    409: OpenApiResponse(
        ErrorSerializer,
        "`idempotency_in_flight`: the first request with this key is being worked on. Send it again after"
        " `Retry-After` seconds.",
    )
}
RANGE: Final = [
    header("Range", "`bytes=0-1048575`: a part of it."),
    header("If-None-Match", "An ETag: 304 if it is still right."),
]

OPERATIONS: Final[Mapping[tuple[str, str], Mapping[str, Any]]] = {
    ("portraits", "post"): {
        "operation_id": "postPortraits",
        "summary": "Draw a portrait of a photo's face",
        "parameters": [KEY],
        "request": {"multipart/form-data": PortraitSerializer},
        "responses": {201: JOB} | IN_FLIGHT,
    },
    ("photo-check", "post"): {
        "operation_id": "checkPhoto",
        "summary": "What a portrait of this photo would be told of it",
        "description": "Nothing is stored. What is refused here is refused there, in the same words.",
        "request": {"multipart/form-data": PhotoSerializer},
        "responses": {200: OpenApiResponse(PhotoCheckSerializer, "It would be taken.")},
    },
    ("jobs", "post"): {
        "operation_id": "postJobs",
        "summary": "Run a workflow",
        "description": "A graph in ComfyUI's API format. Where it names an uploaded file it has the file's `file_path`"
        ' or `{"__type": "core/ASSET", "info": {"id": ...}}`. Refused with 422: `invalid_workflow` and'
        " `missing_asset`, with what is wrong with which node in `details.node_errors`, `workflow_format_ui` and"
        " `metadata_invalid`.",
        "parameters": [KEY],
        "request": {"application/json": JobSubmissionSerializer},
        "examples": [
            OpenApiExample(
                "A blue square",
                value={
                    "workflow": {
                        "1": {
                            "class_type": "EmptyImage",
                            "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 255},
                        },
                        "2": {
                            "class_type": "SaveImage",
                            "inputs": {"filename_prefix": "first", "images": ["1", 0]},
                        },
                    },
                    "metadata": {"shoot": "7"},
                },
                request_only=True,
            )
        ],
        "responses": {201: JOB} | IN_FLIGHT,
    },
    ("jobs", "get"): {
        "operation_id": "listJobs",
        "summary": "Your jobs, newest first",
        "description": "Filter by your own labels with `metadata[key]=value`, as often as you like.",
        "parameters": [JobListSerializer],
        "responses": {200: OpenApiResponse(JobPageSerializer, "A page of jobs.")},
    },
    ("job", "get"): {
        "operation_id": "getJob",
        "summary": "One job, as it is now or when it has changed",
        "description": "The ETag changes with the status, the attempt, the next try and the outputs, not with progress"
        " or the place in the queue. With `wait` the answer is held back until it does, or time is up.",
        "parameters": [
            WaitSerializer,
            header("Prefer", "`wait=30`: the same as `wait`, and nothing is refused."),
            header(
                "If-None-Match",
                "An ETag: 304 if it is still right. `wait` goes by it, if it is given.",
            ),
        ],
        "responses": {200: JOB, 304: OpenApiResponse(description="It has not changed.")},
    },
    ("job", "delete"): {
        "operation_id": "deleteJob",
        "summary": "Delete a job with its photo and pictures",
        "description": "One that has not ended is hidden at once, canceled, and then deleted.",
        "responses": GONE,
    },
    ("job-cancel", "post"): {
        "operation_id": "cancelJob",
        "summary": "Ask for a job to end",
        "description": "As often as you like: one that has ended stays as it is.",
        "request": None,
        "responses": {200: JOB},
    },
    ("job-events", "get"): {
        "operation_id": "getJobEvents",
        "summary": "What happens to a job, as it happens",
        "description": "Server-Sent Events: at first how things stand, then what changes. `status` holds `status` and"
        " `queue_position`; `progress`, `preview` (`node_id`, `content_type`, `data_base64`) and `output` what the"
        " job's own fields do. The stream ends after a final `status`. One that ends earlier may be opened again.",
        "parameters": [header("Last-Event-ID", "Of the last preview: it is not sent again.")],
        "responses": {
            (200, "text/event-stream"): OpenApiResponse(str, "The stream of events."),
            501: OpenApiResponse(ErrorSerializer, "`not_implemented`: poll the job."),
        },
    },
    ("job-image", "get"): {
        "operation_id": "getJobImage",
        "summary": "The first picture of a job",
        "parameters": RANGE,
        "responses": bytes_of("The picture."),
    },
    ("job-workflow", "get"): {
        "operation_id": "getJobWorkflow",
        "summary": "The graph of a job",
        "responses": {200: OpenApiResponse(WorkflowSerializer, "The graph.")},
    },
    ("assets", "post"): {
        "operation_id": "postAssets",
        "summary": "Upload a file",
        "description": "The same bytes are kept once; the same bytes under the same name are the same asset.",
        "parameters": [KEY],
        "request": {"multipart/form-data": UploadSerializer},
        "responses": {
            201: OpenApiResponse(AssetSerializer, "The asset; its bytes are new."),
            200: OpenApiResponse(AssetSerializer, "The asset, over bytes that you had already."),
            409: OpenApiResponse(
                ErrorSerializer,
                "`hash_mismatch`: send the bytes again. `idempotency_in_flight`: the first request with this key"
                " is being worked on. Send it again after `Retry-After` seconds.",
            ),
        },
    },
    ("asset-from-hash", "post"): {
        "operation_id": "assetFromHash",
        "summary": "Make an asset of bytes that you have here already",
        "parameters": [KEY],
        "request": {"application/json": FromHashSerializer},
        "examples": [
            OpenApiExample(
                "A photo that was sent before",
                value={"hash": f"blake3:{64 * '0'}", "file_path": "face.jpg"},
                request_only=True,
            )
        ],
        "responses": {
            201: OpenApiResponse(AssetSerializer, "A new asset over these bytes."),
            200: OpenApiResponse(AssetSerializer, "The asset of this name that there was."),
            404: OpenApiResponse(ErrorSerializer, "`blob_not_found`: upload them."),
        }
        | IN_FLIGHT,
    },
    ("asset-by-hash", "head"): {
        "operation_id": "headAssetByHash",
        "summary": "Whether you have bytes of this hash here",
        "responses": {
            200: OpenApiResponse(description="You have."),
            404: OpenApiResponse(description="You have not."),
        },
    },
    ("asset", "get"): {
        "operation_id": "getAsset",
        "summary": "What is known of an asset",
        "responses": {200: ASSET},
    },
    ("asset", "delete"): {
        "operation_id": "deleteAsset",
        "summary": "Delete an upload",
        "description": "Its bytes stay while another asset of yours is over them.",
        "responses": {
            **GONE,
            409: OpenApiResponse(ErrorSerializer, "`asset_in_use`: a job depends on it."),
        },
    },
    ("asset-content", "get"): {
        "operation_id": "getAssetContent",
        "summary": "The bytes of an asset",
        "description": "With a token, or by the `url` of an asset or output, which needs none.",
        "parameters": [
            *RANGE,
            OpenApiParameter("expires", int, description="Of a signed `url`."),
            OpenApiParameter("signature", str, description="Of a signed `url`."),
        ],
        "responses": bytes_of("The bytes."),
    },
}

# --- what drf-spectacular cannot find out by itself ---


class NumberFieldWords(OpenApiSerializerFieldExtension):
    target_class = NumberField
    match_subclasses = True

    def map_serializer_field(self, auto_schema: Any, direction: str) -> dict[str, Any]:
        allowed = self.target.allowed
        words = {"type": "number", "minimum": allowed.low, "maximum": allowed.high}
        return words | ({"type": "integer", "multipleOf": allowed.step} if allowed.step else {})


class MetadataFieldWords(OpenApiSerializerFieldExtension):
    target_class = MetadataField

    def map_serializer_field(self, auto_schema: Any, direction: str) -> dict[str, Any]:
        if isinstance(self.target.parent, JobSubmissionSerializer):
            return {"type": "object", "additionalProperties": {"type": "string"}}
        return {"type": "string", "contentMediaType": "application/json"}


class WorkflowFieldWords(OpenApiSerializerFieldExtension):
    target_class = WorkflowField

    def map_serializer_field(self, auto_schema: Any, direction: str) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": {"type": "object"}}


class ExtraDataFieldWords(OpenApiSerializerFieldExtension):
    target_class = ExtraDataField

    def map_serializer_field(self, auto_schema: Any, direction: str) -> dict[str, Any]:
        key = {"type": "string", "minLength": 1, "maxLength": KEY_LENGTH}
        properties = {"api_key_comfy_org": key}
        return {"type": "object", "properties": properties, "additionalProperties": False}


class BearerWords(OpenApiAuthenticationExtension):
    target_class = BearerAuthentication
    name = "bearerAuth"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer"}


# --- hooks ---


def described_endpoints(endpoints: object) -> list[tuple[str, str, str, Any]]:
    """Return what is to be described: the paths of the API, whatever kind of view serves them."""
    from jobs.api_urls import urlpatterns

    # `pk` is our word, `id` the contract's.
    routes = {p.name: API + str(p.pattern).replace("pk>", "id>") for p in urlpatterns}
    path_of: Any = EndpointEnumerator().get_path_from_regex
    return [
        (path_of(routes[name]), routes[name], method.upper(), described_view(method, words))
        for (name, method), words in OPERATIONS.items()
    ]


def described_view(method: str, words: Mapping[str, Any]) -> Any:
    """Return a view that only describes one operation."""

    def act(self: APIView, request: Any, id: Any = None) -> None: ...

    responses = {s: refusal(s) for s in refusals(method, words)}
    describe = extend_schema(**{**words, "responses": responses | words["responses"]})
    described: type[APIView] = type("Described", (APIView,), {method: describe(act)})
    return described.as_view()


def refusals(method: str, words: Mapping[str, Any]) -> Iterator[int]:
    yield from (400, 401, 404, 429, 503)
    if method != "get":
        yield 403
    if words.get("request"):
        yield from (413, 415)
    if words.get("request") or words.get("parameters"):
        yield 422


def refusal(status: int) -> OpenApiResponse:
    """Return what is told of a status: its codes, a line and an example each."""
    codes = {code: words for code, (its, words) in REQUEST_ERRORS.items() if its == status}
    return OpenApiResponse(
        ErrorSerializer,
        "\n".join(f"- `{code}`: {words}" for code, words in codes.items()),
        examples=[
            OpenApiExample(code, {"error": {"code": code, "message": words, "details": None}})
            for code, words in codes.items()
        ],
    )


def tell_errors(result: dict[str, Any], **_: object) -> dict[str, Any]:
    """List the codes of jobs in the description (a postprocessing hook); those of requests are told with each."""
    result["info"]["description"] += (
        '\n\nErrors are `{"error": {"code", "message", "details"}}`; the codes stand with each answer. A job that'
        " failed says why in its `error`, one that is tried again in its `retry`:\n\n"
        + "\n".join(job_error_table())
    )
    return result


def job_error_table() -> Iterator[str]:
    yield from ("| code | what to do |", "|---|---|")
    for code, words in JOB_ERRORS.items():
        yield f"| `{code}` | {words} |"
