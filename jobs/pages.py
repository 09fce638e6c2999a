"""The pages: what a person sees in a browser. They work without JavaScript."""

from __future__ import annotations

import json
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol
from uuid import UUID

from blake3 import blake3
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from jobs.errors import ApiError
from jobs.forms import PortraitForm
from jobs.models import Asset, Job, QueueFull
from jobs.pictures import picture_response
from jobs.portraits import PARAMS, submit_portrait
from jobs.serializers import shown
from jobs.thumbnails import thumbnail_response
from jobs.wording import tell, word_of

PAGE_SIZE: Final = 24
REMEMBERED_FORMS: Final = 20  # of a session


class UserRequest(HttpRequest):
    """A request of somebody who is logged in."""

    user: User


def own_job(request: UserRequest, pk: UUID) -> Job:
    return get_object_or_404(shown(Job.objects.visible_to(request.user)), pk=pk)


@require_GET
@never_cache
@login_required
def job_list(request: UserRequest) -> HttpResponse:
    jobs = Job.objects.visible_to(request.user).order_by("-pk")
    if before := _uuid(request.GET.get("before", "")):
        jobs = jobs.filter(pk__lt=before)
    # One more than shown: whether there are older ones. Counting them all is nobody's wish.
    page = list(
        jobs.defer("graph", "error_detail").prefetch_related("outputs", "inputs")[: PAGE_SIZE + 1]
    )
    cards = [{"job": job, "word": word_of(job), "picture": _cover(job)} for job in page[:PAGE_SIZE]]
    older = page[PAGE_SIZE - 1].pk if len(page) > PAGE_SIZE else None
    return render(request, "jobs/list.html", {"cards": cards, "older": older, "before": before})
