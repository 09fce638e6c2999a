"""One's own API tokens: made, seen once, and revoked."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from jobs.models import ApiToken
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
@never_cache
@login_required
def account(request: UserRequest) -> HttpResponse:
    context: dict[str, Any] = {"form": TokenForm(request.user, request.POST or None)}
    if context["form"].is_valid():
        context = {"new_token": context["form"].make_token(), "form": TokenForm(request.user)}
    context["tokens"] = ApiToken.objects.filter(user=request.user).order_by("-created")
    return render(
        request, "jobs/account.html", context, status=422 if context["form"].errors else 200
    )


@require_POST
@login_required
def revoke_token(request: UserRequest) -> HttpResponse:
    for token in ApiToken.objects.filter(user=request.user):
        if token.pk == request.POST.get("token"):
            token.delete()
            messages.success(request, f"The token {token.name} was revoked.")
    return redirect("account")
