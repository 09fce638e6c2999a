"""The HTTP API: HTTP in, one call of a model, HTTP out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from uuid import UUID

from django.contrib.auth.models import User
from django.http import QueryDict, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404
from django.utils.http import parse_etags
from rest_framework.parsers import MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from jobs.auth import Pass
from jobs.errors import ApiError
from jobs.idempotency import once_per_key
from jobs.models import Job, JobQuerySet, Once
from jobs.parsers import StrictJSONParser
from jobs.photos import photo_rules, read_photo
from jobs.pictures import output_unavailable, picture_response
from jobs.portraits import submit_portrait
from jobs.serializers import (
    JobListSerializer,
    JobSubmissionSerializer,
    PhotoSerializer,
    PortraitSerializer,
    StrictSerializer,
    cursor_after,
    job_json,
    list_item_json,
    shown,
    version_of,
)
from jobs.streams import Stream
from jobs.waits import Held, asked_wait, hub_of
from jobs.workflows import submit_workflow


def own_job(request: Request, pk: UUID) -> Job:
    return get_object_or_404(shown(Job.objects.visible_to(request.user)), pk=pk)


def job_created(request: Request, pk: UUID) -> Response:
    answer = job_json(own_job(request, pk), request)
    return Response(answer, status=201, headers={"Location": answer["urls"]["self"]})


class FormParser(MultiPartParser):
    """Multipart in UTF-8, whatever charset the request claims: not each that Python knows is one of text."""

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        return super().parse(stream, media_type, {**parser_context, "encoding": "utf-8"})


def form_of(request: Request, kind: type[StrictSerializer]) -> dict[str, Any]:
    """Return what a form of this kind asks for."""
    # No body is no form.
    form = kind(data=request.data or QueryDict(), context={"request": request})
    form.is_valid(raise_exception=True)
    fields: dict[str, Any] = form.validated_data
    return fields


class PhotoCheckView(APIView):
    """What a portrait of this photo would be told of it; nothing is stored."""

    parser_classes = [FormParser]

    def post(self, request: Request) -> Response:
        photo = read_photo(form_of(request, PhotoSerializer)["photo"], photo_rules())
        told = ("width", "height", "face", "warnings")
        return Response({"ok": True} | {name: getattr(photo, name) for name in told})


class PortraitsView(APIView):
    parser_classes = [FormParser]

    @once_per_key(job_created)
    def post(self, request: Request, once: Once | None) -> Response:
        params = form_of(request, PortraitSerializer)
        metadata = params.pop("metadata", None)
        photo = read_photo(params.pop("photo"), photo_rules())
        assert isinstance(request.user, User)
        job = submit_portrait(request.user, photo, params, metadata, once=once)
        return job_created(request, job.pk)


class JobsView(APIView):
    parser_classes = [StrictJSONParser]

    @once_per_key(job_created)
    def post(self, request: Request, once: Once | None) -> Response:
        form = JobSubmissionSerializer(data=request.data, context={"request": request})
        form.is_valid(raise_exception=True)
        assert isinstance(request.user, User)
        job = submit_workflow(request.user, **form.validated_data, once=once)
        return job_created(request, job.pk)

    def get(self, request: Request) -> Response:
        query = JobListSerializer(data=request.query_params)
        query.is_valid(raise_exception=True)
        asked = query.validated_data
        limit = asked.pop("limit")
        # One more than asked for tells whether there is a next page.
        jobs = list(shown(self.find(request, **asked))[: limit + 1])
        page: dict[str, Any] = {"jobs": [list_item_json(job, request) for job in jobs[:limit]]}
        if len(jobs) > limit:
            page["next_cursor"] = cursor_after(jobs[limit - 1])
        return Response(page)

    @staticmethod
    def find(
        request: Request,
        *,
        metadata: Mapping[str, str],
        status: str | None = None,
        cursor: UUID | None = None,
    ) -> JobQuerySet:
        jobs = Job.objects.visible_to(request.user).order_by("-pk")
        if metadata:
            jobs = jobs.filter(metadata__contains=metadata)
        if status is not None:
            jobs = jobs.filter(status=status)
        return jobs if cursor is None else jobs.filter(pk__lt=cursor)


class JobView(APIView):
    def get(self, request: Request, pk: UUID) -> Response:
        seconds, headers = asked_wait(request)
        job = own_job(request, pk)
        version = version_of(job)
        known = parse_etags(request.headers.get("If-None-Match", ""))
        is_known = version in known or known == ["*"]
        hub, until = hub_of(request), None
        if hub and seconds and not job.is_final and (is_known or not known):
            until = partial(hub.change, job.pk, Pass.of(request), version, seconds)
        answer = {"status": 304} if is_known else {"data": job_json(job, request)}
        return Held(**answer, headers=headers | {"ETag": version}, until=until)

    def delete(self, request: Request, pk: UUID) -> Response:
        Job.objects.delete_for_owner(own_job(request, pk).pk)
        return Response(status=204)


class CancelJobView(APIView):
    def post(self, request: Request, pk: UUID) -> Response:
        Job.objects.cancel(own_job(request, pk).pk, by="owner")
        return Response(job_json(own_job(request, pk), request))


class JobEventsView(APIView):
    http_method_names = ["get", "options"]

    def get(self, request: Request, pk: UUID) -> StreamingHttpResponse:
        job = own_job(request, pk)
        if (hub := hub_of(request)) is None:
            raise ApiError(501, "not_implemented", "There is no event stream here; poll the job.")
        response = StreamingHttpResponse(
            Stream(hub, job.pk, request), content_type="text/event-stream"
        )
        response["X-Accel-Buffering"] = "no"  # proxies are to pass each event on as it comes
        return response


class JobImageView(APIView):
    def get(self, request: Request, pk: UUID) -> HttpResponseBase:
        outputs = own_job(request, pk).outputs.filter(content_type__startswith="image/")
        picture = outputs.first()
        if picture is None:
            raise output_unavailable()
        return picture_response(request, picture)


class JobWorkflowView(APIView):
    def get(self, request: Request, pk: UUID) -> Response:
        return Response({"workflow": own_job(request, pk).graph, "format": "api"})
