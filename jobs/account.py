"""The account's page: usage, API tokens (made, seen once, and revoked), the password, and the end of all one's data."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from django import forms
from django.contrib import messages
from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST

from jobs.forms import NewPassword, PasswordAgain
from jobs.limits import limits_of
from jobs.models import ApiToken, Asset, Job, first_id_of
from jobs.pages import UserRequest

LIFETIMES: Final = [("30", "30 days"), ("90", "90 days"), ("365", "a year"), ("", "for ever")]


class TokenForm(forms.ModelForm):  # type: ignore[type-arg]
    days = forms.TypedChoiceField(
        label="Good for",
        choices=LIFETIMES,
        initial="365",
        coerce=int,
        empty_value=None,
        required=False,
    )

    class Meta:
        model = ApiToken
        fields = ("name",)
        help_texts = {"name": "What uses it, such as: my laptop."}

    def __init__(self, user: User, *args: Any) -> None:
        super().__init__(*args)
        self.user = user
        self.fields["name"].required = True

    def clean_name(self) -> str:
        # Also when the answer to the form is loaded again, which would send it twice.
        name: str = self.cleaned_data["name"]
        if ApiToken.objects.filter(user=self.user, name=name).exists():
            raise ValidationError("You have a token of this name.")
        return name

    def make_token(self) -> str:
        """Return a new token. It is stored hashed: nobody sees it again."""
        days = self.cleaned_data["days"]
        token: str = ApiToken.objects.create(
            user=self.user,
            name=self.cleaned_data["name"],
            expiry=None if days is None else timedelta(days=days),
        )[1]
        return token


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def account(request: UserRequest) -> HttpResponse:
    context: dict[str, Any] = {"form": TokenForm(request.user, request.POST or None)}
    if context["form"].is_valid():
        context = {"new_token": context["form"].make_token(), "form": TokenForm(request.user)}
    status = 422 if context["form"].errors else 200
    tokens = ApiToken.objects.filter(user=request.user).order_by("-created")
    context |= {"tokens": tokens, **usage_of(request.user)}
    return render(request, "account/account.html", context, status=status)


def usage_of(user: User) -> dict[str, Any]:
    month = timezone.now().replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    jobs = Job.objects.visible_to(user)
    return {
        "month": month,
        "jobs_this_month": jobs.filter(pk__gte=first_id_of(month)).count(),
        "jobs_under_way": jobs.unfinished().count(),
        "bytes": Asset.objects.bytes_of(user.pk),
        "limits": limits_of(user),
    }


@require_POST
@login_required
def revoke_token(request: UserRequest) -> HttpResponse:
    for token in ApiToken.objects.filter(user=request.user):
        if token.pk == request.POST.get("token"):
            token.delete()
            messages.success(request, f"The token {token.name} was revoked.")
    return redirect("account")


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def change_password(request: UserRequest) -> HttpResponse:
    form = NewPassword(request.user, request.POST or None, request=request)
    if not form.is_valid():
        return render(request, "account/password.html", {"form": form})
    update_session_auth_hash(request, form.save())
    messages.success(request, "Your password was changed. Other browsers were logged out.")
    return redirect("account")


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def delete_all(request: UserRequest) -> HttpResponse:
    form = PasswordAgain(request.POST or None, request=request)
    if not form.is_valid():
        return render(request, "account/delete.html", {"form": form})
    Job.objects.delete_all_for_owner(request.user)
    messages.success(request, "All your portraits, pictures and photos were deleted.")
    return redirect("account")
