from __future__ import annotations

import io
from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client

from jobs.models import ApiToken
from jobs.tests.helpers import make_user
from jobs.tests.helpers_api import API

pytestmark = pytest.mark.django_db


def api_token(*arguments: str) -> str:
    stdout = io.StringIO()
    call_command("api_token", *arguments, stdout=stdout)
    return stdout.getvalue()


def test_the_token_alone_is_printed_and_opens_the_api() -> None:
    make_user("ann")

    printed = api_token("ann", "--name", "laptop")

    assert printed.endswith("\n")
    headers = {"Authorization": f"Bearer {printed.strip()}"}
    assert Client().get(f"{API}/jobs", headers=headers).status_code == 200
    assert ApiToken.objects.get().name == "laptop"


def test_an_unknown_user_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(CommandError, match=r"no user zoe.*--create-user") as refused:
        api_token("zoe")

    assert refused.value.returncode == 1
    assert not User.objects.exists()


def test_a_user_made_on_the_way_has_no_password() -> None:
    api_token("zoe", "--create-user")
    api_token("zoe", "--create-user")

    user = User.objects.get()
    assert (user.username, user.has_usable_password(), user.is_staff) == ("zoe", False, False)
    assert ApiToken.objects.filter(user=user).count() == 2


def test_a_token_is_not_stored_as_it_is() -> None:
    token = api_token("zoe", "--create-user").strip()

    stored = ApiToken.objects.values().get()
    assert token not in str(stored)


def test_a_token_may_have_an_end() -> None:
    api_token("zoe", "--create-user", "--days", "2")

    token = ApiToken.objects.get()
    assert token.expiry is not None
    assert timedelta(days=1) < token.expiry - token.created <= timedelta(days=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["zoe", "--create-user", "--days", "0"],
        ["zoe", "--create-user", "--days", "99999999999"],
        ["", "--create-user"],
        ["z" * 151, "--create-user"],
        ["zoe", "--create-user", "--name", "n" * 101],
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(arguments: list[str]) -> None:
    with pytest.raises(CommandError):
        api_token(*arguments)

    assert not User.objects.exists()
