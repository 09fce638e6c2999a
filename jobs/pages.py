"""The pages: what a person sees in a browser. They work without JavaScript."""

from __future__ import annotations

import uuid
from typing import Any, Final
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from jobs.errors import ApiError
from jobs.forms import EXAMPLES, PortraitForm, form_of
from jobs.idempotency import fingerprint
from jobs.models import AlreadyMade, Asset, IdempotencyKey, Job, NoRoom, Once
from jobs.pictures import picture_response
from jobs.portraits import PARAMS, CannotDraw, draw_like, submit_portrait
from jobs.serializers import shown
from jobs.status import UNFINISHED, JobStatus
from jobs.thumbnails import is_picture, thumbnail_response
from jobs.wording import tell, word_of

PAGE_SIZE: Final = 24
# The list's filters: what stands in the address, its name, and the statuses it shows.
FILTERS: Final = {
    "": ("All", tuple(JobStatus)),
    "ready": ("Ready", (JobStatus.SUCCEEDED,)),
    "under-way": ("Under way", UNFINISHED),
    "failed": ("Failed", (JobStatus.FAILED,)),
    "canceled": ("Canceled", (JobStatus.CANCELED,)),
}


class UserRequest(HttpRequest):
    """A request of somebody who is logged in."""

    user: User


def own_job(request: UserRequest, pk: UUID) -> Job:
    return get_object_or_404(shown(Job.objects.visible_to(request.user)), pk=pk)


# --- the list ---


@require_safe
@login_required
def job_list(request: UserRequest) -> HttpResponse:
    chosen = request.GET.get("show", "")
    _name, statuses = FILTERS.get(chosen, FILTERS[""])
    jobs = Job.objects.visible_to(request.user).filter(status__in=statuses)
    if before := read_id(request.GET.get("before", "")):
        jobs = jobs.filter(pk__lt=before)
    # One more than shown: whether there are older ones, without counting them.
    page = with_covers(jobs.order_by("-pk")[: PAGE_SIZE + 1])
    context = {
        "cards": page[:PAGE_SIZE],
        "older_than": page[PAGE_SIZE - 1][0].pk if len(page) > PAGE_SIZE else None,
        "is_first_page": before is None,
        "filters": [(key, name) for key, (name, _statuses) in FILTERS.items()],
        "chosen": chosen,
    }
    return render(request, "jobs/list.html", context)


def read_id(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def with_covers(jobs: QuerySet[Job]) -> list[tuple[Job, str, Asset | None]]:
    """Return each job with its status in a word and the picture that stands for it."""
    jobs = jobs.defer("graph", "error_detail").prefetch_related("outputs", "inputs")
    return [(job, word_of(job), cover_of(job)) for job in jobs]


def cover_of(job: Job) -> Asset | None:
    """Return the first picture of a job, or the photo it starts from."""
    pictures = [*job.outputs.all(), *job.inputs.all()]
    return next(filter(is_picture, pictures), None)


@login_required
def delete_jobs(request: UserRequest) -> HttpResponse:
    """Ask about the chosen jobs and, when that is answered, delete them."""
    chosen = [pk for pk in map(read_id, request.POST.getlist("job")[:PAGE_SIZE]) if pk]
    jobs = Job.objects.visible_to(request.user).filter(pk__in=chosen).order_by("-pk")
    if not jobs:
        return redirect("job-list")
    if "sure" not in request.POST:
        return render(request, "jobs/delete.html", {"cards": with_covers(jobs)})
    return delete_and_tell(request, jobs)


def delete_and_tell(request: UserRequest, jobs: QuerySet[Job]) -> HttpResponse:
    for job in jobs:
        Job.objects.delete_for_owner(job.pk)
    what = "The portrait was" if len(jobs) == 1 else f"{len(jobs)} portraits were"
    messages.success(request, f"{what} deleted.")
    return redirect("job-list")


# --- the form ---


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def job_new(request: UserRequest, like: UUID | None = None) -> HttpResponse:
    own = Job.objects.visible_to(request.user)
    if request.method != "POST":
        return form_page(request, PortraitForm(initial=initial_of(request, like), own=own))
    form = PortraitForm(request.POST, request.FILES, own=own)
    once = once_of(request)
    try:
        if once is not None:
            IdempotencyKey.objects.expect_new(once)
        if not form.is_valid():
            return form_page(request, form, status=422)
        job_id = submit(request, form, once).pk
    except AlreadyMade as exc:
        job_id = exc.pk
        if not own.filter(pk=job_id).exists():
            messages.info(request, "The portrait of that form was deleted. This is a new form.")
            return redirect("job-new")
    except Job.DoesNotExist:
        form.add_error("like", form.fields["like"].error_messages["invalid_choice"])
        return form_page(request, form, status=422)
    except CannotDraw as exc:
        form.add_error(exc.field, str(exc))
        return form_page(request, form, status=422)
    except NoRoom as exc:
        form.add_error(None, str(exc))
        response = form_page(request, form, status=exc.status)
        if exc.retry_after is not None:
            response["Retry-After"] = str(exc.retry_after)
        return response
    return redirect("job-detail", job_id)


def submit(request: UserRequest, form: PortraitForm, once: Once | None) -> Job:
    photo, like = form.cleaned_data["photo"], form.cleaned_data["like"]
    if photo is None:
        return draw_like(like, form.params(), once=once)
    return submit_portrait(request.user, photo, form.params(), once=once)


def once_of(request: UserRequest) -> Once | None:
    """Return what tells this form from all others, one that was changed since it was sent included."""
    if not request.POST.get("key"):
        return None
    data = request.POST.copy()
    data.update(request.FILES)  # type: ignore[arg-type]  # as lists, which update() takes
    data.pop("csrfmiddlewaretoken", None)
    body_hash = fingerprint(request.path, data)
    # The space keeps it apart from the keys of the API, which have none.
    return Once(request.user.pk, f"form {body_hash}", body_hash, patient=True)


def initial_of(request: UserRequest, like: UUID | None) -> dict[str, Any]:
    """Return the form's values for a portrait like an earlier one, from the same photo."""
    if like is None:
        return {}
    job = own_job(request, like)
    if job.kind != Job.Kind.PORTRAIT:
        raise Http404
    return form_of(job.params) | {"like": job}


def form_page(request: UserRequest, form: PortraitForm, status: int = 200) -> HttpResponse:
    return render(request, "jobs/new.html", {"form": form, "examples": EXAMPLES}, status=status)


# --- one job ---


@require_safe
@login_required
def job_detail(request: UserRequest, pk: UUID) -> HttpResponse:
    job = own_job(request, pk)
    context = {**what_changes(job), "params": params_in_words(job), "key": uuid.uuid4()}
    return render(request, "jobs/detail.html", context)


@require_safe
@login_required
def job_fragment(request: UserRequest, pk: UUID) -> HttpResponse:
    """The part of the job's page that changes while it is under way."""
    return render(request, "jobs/_status.html", what_changes(own_job(request, pk)))


def what_changes(job: Job) -> dict[str, Any]:
    outputs = job.outputs.all()
    return {
        "job": job,
        "story": tell(job),
        "photo": next(filter(is_picture, job.inputs.all()), None),
        "pictures": [asset for asset in outputs if is_picture(asset)],
        "files": [asset for asset in outputs if not is_picture(asset)],
    }


def params_in_words(job: Job) -> list[tuple[Any, Any]]:
    """Return what was asked for, but the prompt, under the form's labels."""
    left_out = {"prompt"} if job.params.get("lora") else {"prompt", "lora_strength"}
    return [
        (PortraitForm.base_fields[name].label, job.params[name])
        for name in PARAMS
        if name not in left_out and job.params.get(name) not in (None, "")
    ]


@require_safe
@login_required
def job_picture(request: UserRequest, pk: UUID, asset_id: UUID) -> HttpResponseBase:
    """A picture of the job or the photo it was made from; `?size=small` for lists."""
    visible = Job.objects.visible_to(request.user).filter(pk=pk)
    asset = get_object_or_404(
        Asset.objects.filter(Q(job__in=visible) | Q(used_by__in=visible)), pk=asset_id
    )
    return asset_response(request, asset)


def asset_response(request: HttpRequest, asset: Asset) -> HttpResponseBase:
    """Answer with the asset's bytes, whole or small. Call it only when the request may see them."""
    if request.GET.get("size") == "small":
        return thumbnail_response(request, asset)
    try:
        return picture_response(request, asset)
    except ApiError as exc:  # the bytes are gone
        raise Http404 from exc


@login_required
def draw_again(request: UserRequest, pk: UUID) -> HttpResponse:
    """Draw the same with another seed."""
    job = own_job(request, pk)
    if request.method != "POST" or job.kind != Job.Kind.PORTRAIT:
        return redirect("job-detail", pk)
    params = job.params | {"seed": None}
    try:
        pk = draw_like(job, params, once=once_of(request)).pk
    except AlreadyMade as exc:
        pk = exc.pk
    except Job.DoesNotExist as exc:  # deleted meanwhile
        raise Http404 from exc
    except (CannotDraw, NoRoom) as exc:
        messages.error(request, str(exc))
    return redirect("job-detail", pk)


@login_required
def cancel_job(request: UserRequest, pk: UUID) -> HttpResponse:
    job = own_job(request, pk)
    if request.method == "POST":  # and not a link, or the way back from the login
        Job.objects.cancel(job.pk, by="owner")  # an ended job stays as it is
    return redirect("job-detail", pk)


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def delete_job(request: UserRequest, pk: UUID) -> HttpResponse:
    own_job(request, pk)
    jobs = Job.objects.visible_to(request.user).filter(pk=pk)
    if request.method != "POST":
        return render(request, "jobs/delete.html", {"cards": with_covers(jobs)})
    return delete_and_tell(request, jobs)
