"""The account's page: usage, a new password, and the end of all one's data."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from jobs.models import Asset, Blob, Job, first_id_of
from jobs.status import JobStatus
from jobs.tests.helpers import make_user
from jobs.tests.helpers_pages import (
    PASSWORD,
    finished_job,
    logged_in,
    page_of,
    running_job,
    status_of,
    waiting_job,
)

pytestmark = pytest.mark.django_db


@pytest.fixture
def ann() -> User:
    return User.objects.create_user("ann", password=PASSWORD)


def test_the_account_shows_what_was_used(as_ann: Client, ann: User) -> None:
    finished_job(ann)
    finished_job(make_user("bob"))
    Asset.objects.filter(owner=ann).update(size=1024 * 1024)

    context = as_ann.get("/account/").context

    assert context["jobs_this_month"] == 1
    assert context["jobs_under_way"] == 0
    assert context["bytes"] == 2 * 1024 * 1024


def test_last_months_jobs_do_not_count(as_ann: Client, ann: User) -> None:
    month = as_ann.get("/account/").context["month"]
    waiting_job(ann, id=first_id_of(month - timedelta(seconds=1)))

    assert as_ann.get("/account/").context["jobs_this_month"] == 0


def test_the_account_takes_few_queries(
    as_ann: Client, ann: User, django_assert_max_num_queries: Any
) -> None:
    for _ in range(3):
        finished_job(ann)

    with django_assert_max_num_queries(7):
        as_ann.get("/account/")


def test_a_new_password_logs_the_other_browsers_out(as_ann: Client, ann: User) -> None:
    other = logged_in(ann)
    new = {"new_password1": "an-even-quieter-one", "new_password2": "an-even-quieter-one"}

    answer = as_ann.post("/account/password/", {"old_password": PASSWORD, **new}, follow=True)

    assert "Your password was changed." in answer.content.decode()
    assert other.get("/").status_code == 302
    ann.refresh_from_db()
    assert ann.check_password("an-even-quieter-one")


@pytest.mark.parametrize(
    ("new", "sentence"),
    [
        ("ann-ann-ann", "too similar to the username"),
        ("short", "at least 8 characters"),
        ("password123", "too common"),
        ("8273645190", "entirely numeric"),
    ],
)
def test_a_weak_password_is_refused_in_words(as_ann: Client, new: str, sentence: str) -> None:
    User.objects.update(username="ann-ann-ann")

    answer = as_ann.post(
        "/account/password/",
        {"old_password": PASSWORD, "new_password1": new, "new_password2": new},
    )

    assert sentence in answer.content.decode()


def test_a_new_password_takes_the_old_one(as_ann: Client, ann: User) -> None:
    new = {"new_password1": "an-even-quieter-one", "new_password2": "an-even-quieter-one"}

    answer = as_ann.post("/account/password/", {"old_password": "no", **new})

    assert "That is not your password." in answer.content.decode()
    ann.refresh_from_db()
    assert ann.check_password(PASSWORD)


# --- delete my data ---


def test_deleting_my_data_takes_the_password(as_ann: Client, ann: User) -> None:
    job = finished_job(ann)

    answer = as_ann.post("/account/delete/", {"password": "no"})

    assert "That is not your password." in answer.content.decode()
    assert status_of(job) == JobStatus.SUCCEEDED


@pytest.mark.django_db(transaction=True)
def test_deleting_my_data_leaves_nothing_of_mine(as_ann: Client, ann: User) -> None:
    finished_job(ann)
    waiting_job(ann)
    Asset.store(b"never used", owner=ann, content_type="image/png").save()
    kept = finished_job(make_user("bob"))

    answer = as_ann.post("/account/delete/", {"password": PASSWORD}, follow=True)

    assert "were deleted" in answer.content.decode()
    assert list(Job.objects.all()) == [kept]
    assert Asset.objects.exclude(owner=kept.owner).count() == 0
    assert Blob.objects.count() == Asset.objects.count()


def test_deleting_my_data_hides_and_stops_what_is_being_drawn(as_ann: Client, ann: User) -> None:
    job = running_job(ann)

    as_ann.post("/account/delete/", {"password": PASSWORD})

    assert status_of(job) == JobStatus.CANCELING
    assert as_ann.get(page_of(job)).status_code == 404


def test_nobody_gets_to_an_account(client: Client) -> None:
    for page in ("/account/", "/account/password/", "/account/delete/"):
        assert client.get(page)["Location"].startswith("/login/")
