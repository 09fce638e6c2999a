"""What browsers and caches are told, and what happens to those who try passwords."""

from __future__ import annotations

from datetime import timedelta

import pytest
from axes.models import AccessAttempt
from django.contrib.auth.models import User
from django.test import Client
from pytest_django import Settings

from jobs.tests.helpers_pages import PASSWORD, finished_job, page_of, picture_url

pytestmark = pytest.mark.django_db
PAGES = ("/", "/new/", "/account/", "/account/delete/", "/nothing/", "/admin/")


@pytest.fixture
def ann() -> User:
    return User.objects.create_superuser("ann", password=PASSWORD)


# --- headers ---


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_nothing_that_is_written_into_it(as_ann: Client, page: str) -> None:
    policy = as_ann.get(page)["Content-Security-Policy"]

    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy + ";"
    assert "style-src 'self';" in policy + ";"
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("page", PAGES)
def test_a_page_tells_browsers_to_be_careful(as_ann: Client, page: str) -> None:
    headers = as_ann.get(page).headers

    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "same-origin"
    assert headers["X-Frame-Options"] == "DENY"
    assert "camera=(self)" in headers["Permissions-Policy"]


@pytest.mark.parametrize("page", [*PAGES, "/login/"])
def test_no_cache_keeps_a_page(as_ann: Client, page: str) -> None:
    told = as_ann.get(page)["Cache-Control"]

    assert "private" in told
    assert "no-store" in told


def test_no_shared_cache_keeps_a_picture(as_ann: Client, ann: User) -> None:
    job = finished_job(ann)
    url = picture_url(job, job.outputs.get())

    assert as_ann.get(url)["Cache-Control"] == "private, no-store"
    assert as_ann.get(url + "?size=small")["Cache-Control"] == "private, no-cache"


def test_after_the_log_out_nothing_private_is_served(as_ann: Client, ann: User) -> None:
    job = finished_job(ann)
    url = picture_url(job, job.outputs.get())
    etag = as_ann.get(url + "?size=small")["ETag"]

    as_ann.post("/logout/")

    for private in ("/", page_of(job), url, url + "?size=small"):
        answer = as_ann.get(private, headers={"If-None-Match": etag})
        assert answer.status_code == 302
        assert answer["Location"].startswith("/login/")


def test_a_form_that_came_by_a_proxy_that_ends_tls_is_taken(ann: User, settings: Settings) -> None:
    settings.SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    origin = {"Host": "testserver", "Origin": "https://testserver"}
    headers = {"X-Forwarded-Proto": "https", **origin}
    browser = Client(enforce_csrf_checks=True, headers=headers)
    token = browser.get("/login/").context["csrf_token"]

    form = {"username": "ann", "password": PASSWORD, "csrfmiddlewaretoken": str(token)}

    assert browser.post("/login/", form).status_code == 302


def test_a_form_from_another_site_is_refused(ann: User) -> None:
    browser = Client(enforce_csrf_checks=True, headers={"Origin": "https://evil.example"})
    token = browser.get("/login/").context["csrf_token"]

    form = {"username": "ann", "password": PASSWORD, "csrfmiddlewaretoken": str(token)}

    assert browser.post("/login/", form).status_code == 403


# --- the login ---


def try_to_log_in(
    client: Client,
    password: str,
    *,
    page: str = "/login/",
    name: str = "ann",
    address: str = "127.0.0.1",
) -> int:
    form = {"username": name, "password": password}
    return client.post(page, form, REMOTE_ADDR=address).status_code


def lock_out(client: Client, settings: Settings, page: str = "/login/") -> None:
    for _ in range(settings.AXES_FAILURE_LIMIT):
        try_to_log_in(client, "wrong", page=page)


def test_one_can_log_in_and_out(client: Client, ann: User) -> None:
    wrong = client.post("/login/", {"username": "ann", "password": "no"})
    right = client.post("/login/", {"username": "ann", "password": PASSWORD})

    assert "correct username and password" in wrong.content.decode()
    assert right["Location"] == "/"
    assert client.post("/logout/")["Location"] == "/login/"
    assert client.get("/").status_code == 302


@pytest.mark.parametrize("page", ["/login/", "/admin/login/"])
def test_who_tries_many_passwords_has_to_wait_and_is_told_how_long(
    client: Client, ann: User, settings: Settings, page: str
) -> None:
    lock_out(client, settings, page)

    answer = client.post(page, {"username": "ann", "password": PASSWORD})

    assert answer.status_code == 429
    assert "Please wait 15 minutes" in answer.content.decode()
    assert client.get("/").status_code == 302


def test_the_owner_gets_in_from_elsewhere_meanwhile(
    client: Client, ann: User, settings: Settings
) -> None:
    lock_out(client, settings)

    assert try_to_log_in(client, PASSWORD, address="192.0.2.7") == 302


def test_after_the_pause_one_gets_in_again(client: Client, ann: User, settings: Settings) -> None:
    lock_out(client, settings)
    try_to_log_in(client, "wrong")  # while locked out, which does not make it longer

    for attempt in AccessAttempt.objects.all():
        passed = attempt.attempt_time - settings.AXES_COOLOFF_TIME - timedelta(seconds=1)
        AccessAttempt.objects.filter(pk=attempt.pk).update(attempt_time=passed)

    assert try_to_log_in(client, PASSWORD) == 302


def test_a_right_password_forgives_the_wrong_ones_before(
    client: Client, ann: User, settings: Settings
) -> None:
    for _ in range(2):
        for _ in range(settings.AXES_FAILURE_LIMIT - 1):
            try_to_log_in(client, "wrong")
        assert try_to_log_in(client, PASSWORD) == 302


@pytest.mark.parametrize("page", ["/account/delete/", "/account/password/"])
def test_passwords_cannot_be_tried_by_another_door(
    as_ann: Client, ann: User, settings: Settings, page: str
) -> None:
    form = {"password": "wrong", "old_password": "wrong"}
    new = {"new_password1": "an-even-quieter-one", "new_password2": "an-even-quieter-one"}

    statuses = {as_ann.post(page, form | new).status_code for _ in range(20)}

    assert statuses == {200, 429}
    assert not AccessAttempt.objects.filter(post_data__contains="wrong").exists()
    assert not AccessAttempt.objects.filter(post_data__contains="quieter").exists()


@pytest.mark.parametrize(
    "address", ["", "unknown", "10.0.0.1, 10.0.0.2", "fe80::1%eth0", "x" * 999]
)
@pytest.mark.parametrize("name", ["ann", "x" * 300, "a\0b"])
def test_an_odd_name_or_address_is_no_reason_to_fail(
    client: Client, ann: User, address: str, name: str
) -> None:
    assert try_to_log_in(client, "wrong", name=name, address=address) == 200
