"""The whole way in a real browser: log in, choose a photo, watch it being drawn, see the portrait."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from playwright.sync_api import Browser, Page, expect, sync_playwright
from pytest_django.live_server_helper import LiveServer

from fake_comfy import FakeComfy
from jobs.models import Job
from jobs.status import JobStatus
from jobs.tests.helpers import photo_bytes
from jobs.worker import Worker

pytestmark = pytest.mark.django_db(transaction=True)

SECONDS = 20_000  # milliseconds that a page may take to show what it should
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-sync",
    "--disable-component-update",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if executable is None:
        reason = "no chromium here: install it, or set CHROMIUM to its path"
        if os.environ.get("GENFLOW_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch, sync_playwright() as playwright:
        # Playwright keeps an event loop on this thread, where Django would refuse to use the database.
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, live_server: LiveServer) -> Iterator[Page]:
    """A page at the login, with nothing of an earlier test; a script that fails makes the test fail."""
    User.objects.create_user("ann", password="a-quiet-secret")
    context = browser.new_context(base_url=live_server.url)
    context.set_default_timeout(SECONDS)
    problems: list[str] = []
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto("/login/")
    yield page
    context.close()
    assert problems == []


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    file = tmp_path / "me.jpg"
    file.write_bytes(photo_bytes())
    return file


def log_in(page: Page) -> None:
    page.get_by_label("Username").fill("ann")
    page.get_by_label("Password").fill("a-quiet-secret")
    page.get_by_role("button", name="Log in").click()


def fill_in(page: Page, photo: Path) -> None:
    page.get_by_role("link", name="New portrait").click()
    page.get_by_label("Your photo").set_input_files(photo)
    page.get_by_label("What should the portrait show?").fill("A quiet portrait by the sea")


def send(page: Page) -> None:
    page.get_by_role("button", name="Draw the portrait").click()


def test_a_portrait_from_the_login_to_the_picture(
    page: Page, photo: Path, fake: FakeComfy, running_worker: Worker
) -> None:
    fake.seconds = 2
    log_in(page)
    fill_in(page, photo)
    expect(page.get_by_alt_text("The photo you chose")).to_be_visible()

    send(page)

    expect(page.get_by_role("heading", name="Drawing your portrait")).to_be_visible(timeout=SECONDS)
    expect(page.locator("progress[value]")).to_be_visible(timeout=SECONDS)
    expect(page.get_by_text("Step", exact=False).first).to_be_visible()
    expect(page.get_by_role("heading", name="Your portrait is ready")).to_be_visible(
        timeout=SECONDS
    )
    picture = page.get_by_alt_text("Picture 1 of 1, drawn from your photo")
    expect(picture).to_have_js_property("naturalWidth", 512, timeout=SECONDS)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.path().read_bytes().startswith(b"\x89PNG")
    page.get_by_role("link", name="Portraits").click()
    expect(page.get_by_text("Ready")).to_be_visible()


def test_a_job_is_canceled_while_one_watches(
    page: Page, photo: Path, fake: FakeComfy, running_worker: Worker
) -> None:
    fake.seconds = 60
    log_in(page)
    fill_in(page, photo)
    send(page)
    expect(page.get_by_role("heading", name="Drawing your portrait")).to_be_visible(timeout=SECONDS)

    page.get_by_role("button", name="Cancel").click()

    expect(page.get_by_role("heading", name="Canceled")).to_be_visible(timeout=SECONDS)
    assert Job.objects.get().status == JobStatus.CANCELED


def test_a_double_click_and_the_back_button_make_one_job(page: Page, photo: Path) -> None:
    log_in(page)
    fill_in(page, photo)

    page.get_by_role("button", name="Draw the portrait").dblclick()
    expect(page.get_by_role("heading", name="Waiting for its turn")).to_be_visible(timeout=SECONDS)
    page.go_back()
    page.get_by_label("Your photo").set_input_files(photo)
    send(page)

    expect(page.get_by_role("heading", name="Waiting for its turn")).to_be_visible(timeout=SECONDS)
    assert Job.objects.count() == 1


def test_the_pages_work_without_scripts(
    browser: Browser, page: Page, photo: Path, live_server: LiveServer
) -> None:
    plain = browser.new_context(base_url=live_server.url, java_script_enabled=False).new_page()
    plain.goto("/login/")

    log_in(plain)
    fill_in(plain, photo)
    send(plain)

    expect(plain.get_by_role("heading", name="Waiting for its turn")).to_be_visible(timeout=SECONDS)
    Job.objects.cancel(Job.objects.get().pk, by="owner")
    # The page looks again by itself.
    expect(plain.get_by_role("heading", name="Canceled")).to_be_visible(timeout=SECONDS)
    plain.context.close()
