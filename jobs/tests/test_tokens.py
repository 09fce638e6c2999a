"""The page where one makes, sees and revokes one's own API tokens."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.db.models.functions import Now
from django.test import Client

from jobs.models import ApiToken
from jobs.tests.helpers import make_user
from jobs.tests.helpers_api import API, Answer, token_of

pytestmark = pytest.mark.django_db
ACCOUNT = "/account/"


def make_token(client: Client, name: str = "laptop", days: str = "") -> str:
    page = client.post(ACCOUNT, {"name": name, "days": days}).content.decode()
    found = re.search(r"<code>(gf_\w+)</code>", page)
    assert found, page
    return found[1]


def list_jobs(token: str) -> Answer:
    return Client().get(f"{API}/jobs", headers={"Authorization": f"Bearer {token}"})


def test_a_token_is_shown_once_and_opens_the_api(as_ann: Client) -> None:
    token = make_token(as_ann)

    assert list_jobs(token).status_code == 200
    page = as_ann.get(ACCOUNT)
    assert "laptop" in page.content.decode()
    assert token not in page.content.decode()
    assert "no-store" in page["Cache-Control"]


@pytest.mark.parametrize(("days", "lifetime"), [("30", timedelta(days=30)), ("", None)])
def test_a_token_is_good_for_as_long_as_was_chosen(
    as_ann: Client, days: str, lifetime: timedelta | None
) -> None:
    make_token(as_ann, days=days)

    token = ApiToken.objects.get()
    assert (token.expiry and round((token.expiry - token.created) / timedelta(hours=1))) == (
        lifetime and lifetime / timedelta(hours=1)
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": ""}, "This field is required."),
        ({"name": "n" * 101}, "at most 100 characters"),
        ({"name": "a\0b"}, "Null characters are not allowed."),
        ({"name": "x", "days": "31"}, "Select a valid choice."),
        ({"name": "x", "days": "\0"}, "Select a valid choice."),
        ({"name": "laptop"}, "You have a token of this name."),
    ],
)
def test_what_is_wrong_with_the_form_is_said(
    as_ann: Client, fields: dict[str, str], sentence: str
) -> None:
    make_token(as_ann, "laptop")

    answer = as_ann.post(ACCOUNT, fields)

    assert answer.status_code == 422
    assert sentence in answer.content.decode()
    assert ApiToken.objects.count() == 1


def test_a_name_may_be_taken_by_somebody_else(as_ann: Client) -> None:
    ApiToken.objects.create(user=make_user("bob"), name="laptop")

    assert make_token(as_ann, "laptop")


def test_the_page_tells_when_each_was_made_used_and_ends(as_ann: Client) -> None:
    used = make_token(as_ann, "used")
    make_token(as_ann, "unused", days="30")
    list_jobs(used)

    page = as_ann.get(ACCOUNT).content.decode()

    assert page.index("unused") < page.index("used</b>")  # the newest first
    assert "never" in page
    ended = ApiToken.objects.get(name="unused").expiry
    assert ended is not None
    assert f"{ended:%Y-%m-%dT%H:%M:%S}" in page
    last_used = ApiToken.objects.get(name="used").last_used_at
    assert last_used is not None
    assert f"{last_used:%Y-%m-%dT%H:%M:%S}" in page


def test_a_token_that_was_revoked_is_none_any_more(as_ann: Client) -> None:
    token = make_token(as_ann)

    answer = as_ann.post(f"{ACCOUNT}revoke/", {"token": ApiToken.objects.get().pk}, follow=True)

    assert "The token laptop was revoked." in answer.content.decode()
    refused = list_jobs(token)
    assert refused.status_code == 401
    assert "revoked" in refused.json()["error"]["message"]


def test_a_token_that_has_expired_says_so(as_ann: Client) -> None:
    token = make_token(as_ann, days="30")
    ApiToken.objects.update(expiry=Now())

    refused = list_jobs(token)

    assert refused.status_code == 401
    assert "expired" in refused.json()["error"]["message"]
    assert "Expired" in as_ann.get(ACCOUNT).content.decode()


@pytest.mark.parametrize("digest", ["", "nonsense", "a\0b"])
def test_what_is_no_token_of_ones_own_cannot_be_revoked(as_ann: Client, digest: str) -> None:
    token_of(make_user("bob"))

    for asked in (digest, ApiToken.objects.get().pk):
        assert as_ann.post(f"{ACCOUNT}revoke/", {"token": asked}).status_code == 302
    assert ApiToken.objects.count() == 1
    assert "bob" not in as_ann.get(ACCOUNT).content.decode()


def test_nobody_gets_there_without_a_login() -> None:
    for url in (ACCOUNT, f"{ACCOUNT}revoke/"):
        assert Client().post(url)["Location"].startswith("/login/")
