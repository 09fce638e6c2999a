"""The pages: what a person sees in a browser. They work without JavaScript."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from jobs.errors import ApiError
from jobs.forms import PortraitForm
from jobs.idempotency import fingerprint
from jobs.models import AlreadyMade, Asset, IdempotencyKey, Job, NoRoom, Once
from jobs.pictures import picture_response
from jobs.portraits import submit_portrait
from jobs.serializers import shown
from jobs.thumbnails import is_picture, thumbnail_response
from jobs.wording import tell, word_of

PAGE_SIZE: Final = 24


class UserRequest(HttpRequest):
    """A request of somebody who is logged in."""

    user: User


def own_job(request: UserRequest, pk: UUID) -> Job:
    return get_object_or_404(shown(Job.objects.visible_to(request.user)), pk=pk)


@require_safe
@never_cache
@login_required
def job_list(request: UserRequest, before: UUID | None = None) -> HttpResponse:
    jobs = Job.objects.visible_to(request.user).order_by("-pk")
    if before is not None:
        jobs = jobs.filter(pk__lt=before)
    # One more than shown: whether there are older ones, without counting them.
    page = list(
        jobs.defer("graph", "error_detail").prefetch_related("outputs", "inputs")[: PAGE_SIZE + 1]
    )
    context = {
        "cards": [(job, word_of(job), cover_of(job)) for job in page[:PAGE_SIZE]],
        "older_than": page[PAGE_SIZE - 1].pk if len(page) > PAGE_SIZE else None,
        "is_first_page": before is None,
    }
    return render(request, "jobs/list.html", context)


def cover_of(job: Job) -> Asset | None:
    """Return the picture that stands for a job: its first one, or the photo it starts from."""
    pictures = [*job.outputs.all(), *job.inputs.all()]
    return next(filter(is_picture, pictures), None)


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def job_new(request: UserRequest, like: UUID | None = None) -> HttpResponse:
    # Not `never_cache`: the browser's back button is to bring the same form, with the same key.
    if request.method != "POST":
        return form_page(request, PortraitForm(initial=params_of(request, like)))
    form = PortraitForm(request.POST, request.FILES)
    once = once_of(request)
    try:
        if once is not None:
            IdempotencyKey.objects.expect_new(once)
        if not form.is_valid():
            return form_page(request, form, status=422)
        photo = form.cleaned_data["photo"]
        job_id = submit_portrait(request.user, photo, form.params(), once=once).pk
    except AlreadyMade as exc:
        job_id = exc.pk
        if not Job.objects.visible_to(request.user).filter(pk=job_id).exists():
            messages.info(request, "The portrait of that form was deleted. This is a new form.")
            return redirect("job-new")
    except NoRoom as exc:
        form.add_error(None, str(exc))
        response = form_page(request, form, status=exc.status)
        if exc.retry_after is not None:
            response["Retry-After"] = str(exc.retry_after)
        return response
    return redirect("job-detail", job_id)


def params_of(request: UserRequest, pk: UUID | None) -> dict[str, Any]:
    """Return what an earlier job was asked for, but for the seed: a new portrait is to differ."""
    if pk is None:
        return {}
    return {name: value for name, value in own_job(request, pk).params.items() if name != "seed"}


def form_page(request: UserRequest, form: PortraitForm, status: int = 200) -> HttpResponse:
    return render(request, "jobs/new.html", {"form": form}, status=status)


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


@require_safe
@never_cache
@login_required
def job_detail(request: UserRequest, pk: UUID) -> HttpResponse:
    job = own_job(request, pk)
    context = {**what_changes(job), "photo": job.inputs.first(), "params": params_in_words(job)}
    return render(request, "jobs/detail.html", context)


@require_safe
@never_cache
@login_required
def job_fragment(request: UserRequest, pk: UUID) -> HttpResponse:
    """The part of the job's page that changes while it is under way."""
    return render(request, "jobs/_status.html", what_changes(own_job(request, pk)))


def what_changes(job: Job) -> dict[str, Any]:
    outputs = job.outputs.all()
    return {
        "job": job,
        "story": tell(job),
        "pictures": [asset for asset in outputs if is_picture(asset)],
        "files": [asset for asset in outputs if not is_picture(asset)],
    }


def params_in_words(job: Job) -> list[tuple[Any, Any]]:
    """Return what was asked for, but the prompt, under the form's labels."""
    left_out = {"prompt"} if job.params.get("lora") else {"prompt", "lora_strength"}
    return [
        (field.label, job.params[name])
        for name, field in PortraitForm.base_fields.items()
        if name not in left_out and job.params.get(name) not in (None, "")
    ]


@require_safe
@login_required
def job_picture(request: UserRequest, pk: UUID, asset_id: UUID) -> HttpResponse:
    """A picture of the job or the photo it was made from; `?size=small` for lists."""
    visible = Job.objects.visible_to(request.user).filter(pk=pk)
    asset = get_object_or_404(
        Asset.objects.filter(Q(job__in=visible) | Q(used_by__in=visible)), pk=asset_id
    )
    return asset_response(request, asset)


def asset_response(request: HttpRequest, asset: Asset) -> HttpResponse:
    """Answer with the asset's bytes, whole or small. Call it only when the request may see them."""
    if request.GET.get("size") == "small":
        return thumbnail_response(request, asset)
    try:
        return picture_response(request, asset)
    except ApiError as exc:  # the bytes are gone
        raise Http404 from exc


@require_POST
@login_required
def cancel_job(request: UserRequest, pk: UUID) -> HttpResponse:
    Job.objects.cancel(own_job(request, pk).pk, by="owner")  # an ended job stays as it is
    return redirect("job-detail", pk)


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
@login_required
def delete_job(request: UserRequest, pk: UUID) -> HttpResponse:
    job = own_job(request, pk)
    if request.method != "POST":
        return render(request, "jobs/delete.html", {"job": job})
    Job.objects.delete_for_owner(job.pk)
    messages.success(request, "The portrait and its photo were deleted.")
    return redirect("job-list")
