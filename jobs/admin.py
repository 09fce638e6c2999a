"""The admin: for looking, with a few named actions that call what everybody else calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from itertools import pairwise
from typing import Any, Final
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.actions import delete_selected
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.models import User
from django.core.exceptions import BadRequest, PermissionDenied, ValidationError
from django.core.paginator import Paginator
from django.db import transaction
from django.db.models import F, Model, Q, QuerySet
from django.db.models.fields.json import KT
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.text import Truncator

from jobs.housekeeping import UNATTENDED_AFTER
from jobs.models import (
    PRIORITY_STEP,
    ApiToken,
    Asset,
    Backend,
    BackendQuerySet,
    Job,
    NoRoom,
    OwnerLimits,
    discard,
    first_id_of,
)
from jobs.pages import asset_response
from jobs.portraits import draw_again
from jobs.status import Step
from jobs.thumbnails import is_picture

# Rows beyond are found by a search or a filter: counting hundreds of thousands for each page is slow.
COUNTED_ROWS: Final = 5_000
# One press of a button changes so many rows at most.
ACTION_LIMIT: Final = 500
DIARY_LINES: Final = 200
REST: Final = timedelta(minutes=10)
CELL: Final = 80  # characters
PRE: Final = 20_000


# --- how things look ---


def cut(text: str, length: int = CELL) -> str:
    return Truncator(text[: length + 1]).chars(length)


def pre(text: str) -> SafeString:
    """Long text, escaped, cut and in a box of its own; no text is a dash."""
    if not text:
        return mark_safe("-")
    left_out = len(text) - PRE
    note = f"\n… and {left_out:,} characters more" if left_out > 0 else ""
    return format_html('<pre class="gf-pre">{}{}</pre>', text[:PRE], note)


def pretty(value: Any) -> SafeString:
    return pre(json.dumps(value, indent=2, ensure_ascii=False) if value else "")


def badge(status: str, text: str = "") -> SafeString:
    return format_html('<span class="gf-badge {}">{}</span>', status, text or status)


def clock(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> SafeString:
    return format_html(
        '<table class="gf-table"><thead><tr>{}</tr></thead><tbody>{}</tbody></table>',
        format_html_join("", "<th>{}</th>", ((heading,) for heading in headings)),
        format_html_join(
            "",
            "<tr>{}</tr>",
            ((format_html_join("", "<td>{}</td>", ((cell,) for cell in row)),) for row in rows),
        ),
    )


def bar(seconds: float, longest: float) -> SafeString:
    html = '<progress class="gf-took" value="{}" max="{}"></progress> {} s'
    return format_html(html, seconds, longest, f"{seconds:.2f}")


def gallery(assets: Iterable[Asset]) -> SafeString:
    """Small pictures, each a link to the whole one; a file that is not there any more is shown as such."""
    inside = format_html_join("", "{}", ((thumbnail(asset),) for asset in assets))
    return format_html('<div class="gf-pictures">{}</div>', inside or "None")


def thumbnail(asset: Asset) -> SafeString:
    if not asset.file.name or not asset.file.storage.exists(asset.file.name):
        return mark_safe('<span class="gf-gone">The file is gone</span>')
    url = reverse("admin:jobs_asset_file", args=[asset.pk])
    if not is_picture(asset):
        return format_html('<a href="{}">{}</a>', url, cut(asset.name or asset.content_type))
    return format_html('<a href="{0}"><img src="{0}?size=small" alt="{1}"></a>', url, asset)


class BoundedPaginator(Paginator):  # type: ignore[type-arg]  # no generic at run time
    """Counts no further than it must: `COUNTED_ROWS` stands for that many or more."""

    @cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        return rows.order_by().values("pk")[:COUNTED_ROWS].count()  # type: ignore[no-any-return]


class ForLooking(admin.ModelAdmin):  # type: ignore[type-arg]
    """Rows that others write: none is added or changed here."""

    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    list_per_page = 50

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        # Those of the filters: addresses written by hand could ask for the year 99999 or a regular expression.
        names = {getattr(each, "parameter_name", each) for each in self.list_filter}
        return lookup.partition("__")[0] in names

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        try:
            return super().changelist_view(request, extra_context)
        except ValidationError as exc:  # an action on an id that is none
            raise BadRequest from exc


# --- jobs ---


class CreatedFilter(admin.SimpleListFilter):
    """By age, through the primary key: a job's id begins with the time it was made at."""

    title = "created"
    parameter_name = "created"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("1", "past hour"), ("24", "past day"), ("168", "past 7 days")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if self.value() not in ("1", "24", "168"):
            return queryset
        return queryset.filter(pk__gte=first_id_after(timedelta(hours=int(self.value() or 0))))


def first_id_after(age: timedelta) -> UUID:
    """Return the least UUIDv7 that is no older than this."""
    return first_id_of(timezone.now() - age)


@admin.register(Job)
class JobAdmin(ForLooking):
    list_display = (
        "id",
        "shown_status",
        "step",
        "owner",
        "created_at",
        "shown_attempt",
        "shown_error",
        "backend",
        "prompt",
    )
    list_filter = ("status", "step", "kind", "backend", CreatedFilter)
    list_select_related = ("owner", "backend")
    ordering = ("-pk",)
    sortable_by = ()  # no other order has an index
    search_fields = ("id",)
    search_help_text = "A job's id, an owner's name, or the beginning of a worker's name."
    actions = (
        "cancel",
        "retry",
        "rewind_to_upload",
        "rewind_to_submit",
        "rewind_to_wait",
        "raise_priority",
        "delete_selected",
    )

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        # Asked without a row it is about the actions; no row is edited.
        return obj is None and request.user.has_perm("jobs.change_job")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        # A list of jobs is not to load all that was ever written to them.
        jobs: QuerySet[Job] = super().get_queryset(request)
        return jobs.defer(
            "params", "graph", "metadata", "error", "error_detail", "progress"
        ).annotate(prompt=KT("params__prompt"), error_code=KT("error__code"))

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Job], search_term: str
    ) -> tuple[QuerySet[Job], bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        try:
            return queryset.filter(pk=UUID(term)), False
        except ValueError:
            owners = User.objects.filter(username__iexact=term).values("pk")
            return queryset.filter(Q(owner__in=owners) | Q(worker_id__startswith=term)), False

    @admin.display(description="status")
    def shown_status(self, job: Job) -> SafeString:
        return badge(job.status, f"{job.status}, deleted" if job.deleted_at else job.status)

    @admin.display(description="prompt")
    def prompt(self, job: Any) -> str:
        return cut(job.prompt or "")

    @admin.display(description="attempt")
    def shown_attempt(self, job: Job) -> str:
        return f"{job.attempt} of {job.max_attempts}"

    @admin.display(description="error")
    def shown_error(self, job: Any) -> str:
        return cut(job.error_code or "")

    # --- one job ---

    def get_fieldsets(self, request: HttpRequest, obj: Job | None = None) -> Any:
        pictures = [("Pictures", {"fields": ("shown_photos", "shown_outputs")})]
        return [
            (None, {"fields": ("id", "kind", "owner", "shown_status", "step", "shown_attempt")}),
            ("Error", {"fields": ("shown_message", "shown_detail")}),
            *(pictures if request.user.has_perm("jobs.view_asset") else []),
            ("Diary", {"fields": ("shown_timeline", "shown_checkpoints")}),
            ("Request", {"fields": ("shown_params", "shown_metadata", "priority", "turn")}),
            (
                "Work",
                {
                    "fields": (
                        "backend",
                        "refused_by",
                        "worker_id",
                        "fencing_token",
                        "lease_expires_at",
                        "lost_workers",
                        "resubmits",
                        "drawing",
                        "run_after",
                        "shown_progress",
                    )
                },
            ),
            (
                "Times",
                {
                    "fields": (
                        "created_at",
                        "started_at",
                        "cancel_requested_at",
                        "completed_at",
                        "deleted_at",
                        "expires_at",
                    )
                },
            ),
            ("Graph", {"fields": ("shown_graph",), "classes": ("collapse",)}),
        ]

    @admin.display(description="what the owner reads")
    def shown_message(self, job: Job) -> SafeString:
        return pretty(job.error)

    @admin.display(description="detail")
    def shown_detail(self, job: Job) -> SafeString:
        return pre(job.error_detail)

    @admin.display(description="photo")
    def shown_photos(self, job: Job) -> SafeString:
        return gallery(job.inputs.all())

    @admin.display(description="drawn")
    def shown_outputs(self, job: Job) -> SafeString:
        return gallery(job.outputs.all())

    @admin.display(description="params")
    def shown_params(self, job: Job) -> SafeString:
        return pretty(job.params)

    @admin.display(description="metadata")
    def shown_metadata(self, job: Job) -> SafeString:
        return pretty(job.metadata)

    @admin.display(description="progress")
    def shown_progress(self, job: Job) -> SafeString:
        return pretty(job.progress)

    @admin.display(description="graph")
    def shown_graph(self, job: Job) -> SafeString:
        return pretty(job.graph)

    @admin.display(description="checkpoints")
    def shown_checkpoints(self, job: Job) -> SafeString:
        rows = (
            (line.step, clock(line.saved_at), line.fencing_token, cut(json.dumps(line.result), 500))
            for line in job.checkpoints.all()
        )
        return table(("step", "saved", "token", "result"), rows)

    @admin.display(description="timeline")
    def shown_timeline(self, job: Job) -> SafeString:
        """The last lines of the diary, oldest first, with the time since the line before."""
        lines = list(job.events.order_by("-pk")[:DIARY_LINES])[::-1]
        took = [0.0] + [
            (line.created_at - before.created_at).total_seconds()
            for before, line in pairwise(lines)
        ]
        longest = max(took, default=0.0) or 1.0
        rows = (
            (
                clock(line.created_at),
                bar(seconds, longest),
                line.kind,
                line.attempt,
                line.worker_id,
                facts(line.facts),
            )
            for line, seconds in zip(lines, took, strict=True)
        )
        return table(("at", "after", "what", "attempt", "worker", "facts"), rows)

    # --- actions ---

    @admin.action(description="Cancel", permissions=["change"])
    def cancel(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        told = "canceled, or about to be"
        self.each(request, queryset, Job.objects.cancel, told, "already ended or canceling")

    @admin.action(description="Start over: draw anew, from the upload", permissions=["change"])
    def rewind_to_upload(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        self.rewind(request, queryset, Step.UPLOAD)

    @admin.action(description="Go back to the submit", permissions=["change"])
    def rewind_to_submit(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        self.rewind(request, queryset, Step.SUBMIT)

    @admin.action(description="Go back to the wait", permissions=["change"])
    def rewind_to_wait(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        self.rewind(request, queryset, Step.WAIT)

    def rewind(self, request: HttpRequest, queryset: QuerySet[Job], step: Step) -> None:
        def back(pk: UUID, by: str) -> bool:
            return Job.objects.rewind(pk, step, by)

        self.each(request, queryset, back, f"back at the {step}", "not waiting, or not that far")

    @admin.action(description="Raise the priority", permissions=["change"])
    def raise_priority(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        told = f"raised by {PRIORITY_STEP}"
        self.each(request, queryset, Job.objects.raise_priority, told, "ended, or at the top")

    def each(
        self,
        request: HttpRequest,
        queryset: QuerySet[Job],
        act: Callable[[UUID, str], bool],
        done: str,
        not_done: str,
    ) -> None:
        """Do it to each chosen job, log it where it was done, and tell how many they were."""
        chosen = list(queryset[:ACTION_LIMIT])
        by = f"operator {request.user.get_username()}"
        acted = [job for job in chosen if act(job.pk, by)]
        log_changes(request, acted, done)
        self.tell(request, len(acted), done)
        self.tell(request, len(chosen) - len(acted), f"left alone: {not_done}")
        self.tell_of_the_rest(request, queryset)

    @admin.action(description="Try again", permissions=["change"])
    def retry(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        """Let those that wait for a retry run now, and draw those that ended anew, as jobs of their own."""
        chosen = list(queryset[:ACTION_LIMIT])
        drawn = [job for job in chosen if self.draw_anew(request, job)]
        hurried = [job for job in chosen if Job.objects.filter(pk=job.pk).run_now()]
        log_changes(request, [*hurried, *drawn], "tried again")
        self.tell(request, len(hurried), "waited for a retry and may run now")
        self.tell(request, len(drawn), "ended and queued anew")
        self.tell(request, len(chosen) - len(hurried) - len(drawn), "left alone")
        self.tell_of_the_rest(request, queryset)

    def draw_anew(self, request: HttpRequest, job: Job) -> bool:
        try:
            if job.is_final and job.deleted_at is None:
                draw_again(job)
                return True
        except (NoRoom, ValueError) as exc:  # no room, or asked for what is not allowed now
            self.message_user(request, f"{job.pk}: {exc}", messages.ERROR)
        except Job.DoesNotExist:  # deleted since
            pass
        return False

    def tell(self, request: HttpRequest, count: int, what: str) -> None:
        if count:
            self.message_user(request, f"{count} job{'' if count == 1 else 's'} {what}.")

    def tell_of_the_rest(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        if queryset.order_by()[ACTION_LIMIT:].exists():
            text = f"Only the first {ACTION_LIMIT} were looked at; choose the rest once more."
            self.message_user(request, text, messages.WARNING)

    # --- deletion ---

    @admin.action(description="Delete", permissions=["delete"])
    def delete_selected(
        self, request: HttpRequest, queryset: QuerySet[Job]
    ) -> TemplateResponse | None:
        self.tell_of_the_rest(request, queryset)
        chosen = list(queryset.values_list("pk", flat=True)[:ACTION_LIMIT])
        return delete_selected(self, request, queryset.filter(pk__in=chosen))

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        # What goes with a job is not for this user to be asked about.
        names = [str(job) for job in objs]
        return names, {"jobs, with their photos and pictures": len(names)}, set(), []

    def delete_model(self, request: HttpRequest, obj: Job) -> None:
        Job.objects.delete_for_owner(obj.pk)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        for pk in list(queryset.values_list("pk", flat=True)):
            Job.objects.delete_for_owner(pk)


def log_changes(request: HttpRequest, rows: Iterable[Model], message: str) -> None:
    """Note in the admin's own log who did what."""
    LogEntry.objects.log_actions(request.user.pk, rows, CHANGE, change_message=message)  # type: ignore[arg-type]


def facts(values: Any) -> str:
    return cut(", ".join(f"{k}: {v}" for k, v in dict(values).items()), 300)


# --- backends ---


class BackendForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = Backend
        fields = ("name", "status", "prompt_limit")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # An operator says whether it may be used. That it rests is for the workers to say.
        status = Backend.Status
        if "status" in self.fields:
            choices = {status.UP, status.DISABLED, status(self.instance.status)}
            self.fields["status"].choices = [  # type: ignore[attr-defined]
                choice for choice in status.choices if choice[0] in choices
            ]


@admin.register(Backend)
class BackendAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """The address is not shown: it may hold a password."""

    form = BackendForm
    ordering = (F("last_seen_at").desc(nulls_last=True),)
    list_display = (
        "name",
        "shown_status",
        "shown_reason",
        "last_seen_at",
        "version",
        "prompts",
        "prompt_limit",
    )
    readonly_fields = (
        "shown_reason",
        "failures",
        "rest_until",
        "last_seen_at",
        "version",
        "prompts",
        "catalog_read_at",
    )
    fields = ("name", "status", "prompt_limit", *readonly_fields)
    actions = ("drain", "rest", "use_again")

    @admin.action(
        description="Drain: see its prompts to their end, give it no more", permissions=["change"]
    )
    def drain(self, request: HttpRequest, queryset: BackendQuerySet) -> None:
        self.each(request, queryset, BackendQuerySet.drain, "drained")

    @admin.action(description="Let it rest for ten minutes", permissions=["change"])
    def rest(self, request: HttpRequest, queryset: BackendQuerySet) -> None:
        reason = f"by operator {request.user.get_username()}"
        self.each(request, queryset, lambda backend: backend.rest(reason, REST), "resting")

    @admin.action(description="Use it again", permissions=["change"])
    def use_again(self, request: HttpRequest, queryset: BackendQuerySet) -> None:
        self.each(request, queryset, BackendQuerySet.use_again, "in use")

    def each(
        self,
        request: HttpRequest,
        queryset: BackendQuerySet,
        act: Callable[[BackendQuerySet], int],
        state: str,
    ) -> None:
        """Do it to each chosen backend, log it where it was done, and tell how many they were."""
        acted = [backend for backend in queryset if act(Backend.objects.filter(pk=backend.pk))]
        log_changes(request, acted, state)
        self.message_user(request, f"{len(acted)} of {len(queryset)} now {state}.")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Backend]:
        return Backend.objects.with_prompts().order_by(*self.ordering)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False  # a worker that drives one adds it

    def has_delete_permission(self, request: HttpRequest, obj: Backend | None = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: Backend, form: Any, change: bool) -> None:
        """Write what was changed and no more: workers write to this row as well."""
        changed = {name: form.cleaned_data[name] for name in form.changed_data}
        ours = Backend.objects.filter(pk=obj.pk)
        if "status" in changed:  # whatever made it rest is seen to
            ours.use_again()
        ours.update(**changed)

    @admin.display(description="status")
    def shown_status(self, backend: Backend) -> SafeString:
        seen = backend.last_seen_at
        silent = seen is None or timezone.now() - seen > UNATTENDED_AFTER
        if silent and backend.status == Backend.Status.UP:
            return badge(Backend.Status.RESTING, "no worker hears of it")
        return badge(backend.status, backend.get_status_display())

    @admin.display(description="reason")
    def shown_reason(self, backend: Backend) -> str:
        return cut(backend.reason, 200)

    @admin.display(description="prompts on it")
    def prompts(self, backend: Any) -> int:
        return int(backend.prompts)


# --- the rest ---


@admin.register(Asset)
class AssetAdmin(ForLooking):
    list_display = ("id", "owner", "job", "content_type", "size", "width", "height", "created_at")
    list_select_related = ("owner", "job")
    ordering = ("-pk",)
    sortable_by = ()
    search_fields = ("id",)
    search_help_text = "An asset's or a job's id."
    fields = (
        "shown_file",
        "id",
        "owner",
        "job",
        "node_id",
        "name",
        "content_type",
        "size",
        "width",
        "height",
        "hash",
        "created_at",
        "expires_at",
    )

    def has_delete_permission(self, request: HttpRequest, obj: Asset | None = None) -> bool:
        # Not here: they go with their job, or with their owner, on whose page this is asked too.
        page = request.resolver_match
        here = page is not None and (page.url_name or "").startswith("jobs_asset")
        return not here and super().has_delete_permission(request, obj)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Asset], search_term: str
    ) -> tuple[QuerySet[Asset], bool]:
        try:
            wanted = UUID(search_term.strip())
        except ValueError:
            return (queryset.none() if search_term.strip() else queryset), False
        return queryset.filter(Q(pk=wanted) | Q(job=wanted)), False

    def get_urls(self) -> list[URLPattern]:
        file_url = path(
            "<uuid:pk>/file/", self.admin_site.admin_view(self.file_view), name="jobs_asset_file"
        )
        return [file_url, *super().get_urls()]

    def file_view(self, request: HttpRequest, pk: UUID) -> HttpResponseBase:
        if not self.has_view_permission(request):
            raise PermissionDenied
        return asset_response(request, get_object_or_404(Asset, pk=pk))

    @admin.display(description="picture")
    def shown_file(self, asset: Asset) -> SafeString:
        return gallery([asset])


@admin.register(ApiToken)
class ApiTokenAdmin(ForLooking):
    """Only its hash is stored, so a token can be seen by whoever makes it, and only then."""

    list_display = ("user", "name", "created", "last_used_at", "expiry")
    list_display_links = ("user",)
    list_select_related = ("user",)
    ordering = ("-created",)
    search_fields = ("user__username", "name")
    fields = ("user", "name", "created", "last_used_at", "expiry")
    actions = ("delete_selected",)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        how = {
            "subtitle": "New ones are made on one's account page, or by: manage.py api_token USERNAME"
        }
        return super().changelist_view(request, (extra_context or {}) | how)

    @admin.action(description="Revoke", permissions=["delete"])
    def delete_selected(
        self, request: HttpRequest, queryset: QuerySet[ApiToken]
    ) -> TemplateResponse | None:
        """Django's own: it asks once more, and the history keeps who did it."""
        return delete_selected(self, request, queryset)


class OwnerLimitsInline(admin.StackedInline):  # type: ignore[type-arg]
    model = OwnerLimits


admin.site.unregister(User)


@admin.register(User)
class OwnerAdmin(UserAdmin):  # type: ignore[type-arg]
    """Whoever is deleted takes jobs and files along."""

    def get_inlines(self, request: HttpRequest, obj: User | None) -> Any:
        return [OwnerLimitsInline] if obj else []

    def delete_model(self, request: HttpRequest, obj: User) -> None:
        with transaction.atomic():
            files = set(Asset.objects.filter(owner=obj).values_list("file", flat=True))
            obj.delete()
            discard(files)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[User]) -> None:
        for user in queryset:
            self.delete_model(request, user)
