"""The pages in a real browser, as a person uses them: wide and on a phone, light and dark, without scripts too."""

from __future__ import annotations

import base64
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from django.contrib.auth.models import User
from django.core.signals import request_finished, request_started
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    expect,
    sync_playwright,
)
from pytest_django.live_server_helper import LiveServer

from fake_comfy import FakeComfy
from jobs.models import Job
from jobs.status import JobStatus
from jobs.tests.helpers import photo_bytes, queue_job, wait_until
from jobs.tests.helpers_pages import (
    PASSWORD,
    failed_job,
    finished_job,
    logged_in,
    lose_file,
    page_of,
    retrying_job,
    running_job,
    waiting_job,
)
from jobs.tests.processes import web_process
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
PHONE, WIDE = (390, 844), (1440, 900)
LOOKS = [(size, scheme) for size in (PHONE, WIDE) for scheme in ("light", "dark")]
NewContext = Callable[..., BrowserContext]


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
def ann() -> User:
    return User.objects.create_superuser("ann", password=PASSWORD)


@pytest.fixture
def quiet_server(live_server: LiveServer) -> Iterator[LiveServer]:
    """A server that has answered all before the database is emptied: closing a browser does not stop it."""
    under_way: list[object] = []

    def begin(sender: object, **_: object) -> None:
        under_way.append(sender)

    def end(sender: object, **_: object) -> None:
        under_way.pop()

    request_started.connect(begin)
    request_finished.connect(end)
    yield live_server
    wait_until(lambda: not under_way)
    request_started.disconnect(begin)
    request_finished.disconnect(end)


@pytest.fixture
def new_context(browser: Browser, quiet_server: LiveServer, ann: User) -> Iterator[NewContext]:
    """Opens browsers that know nothing of each other; a script that fails or is refused fails the test."""
    problems: list[str] = []
    contexts: list[BrowserContext] = []

    def note(line: ConsoleMessage) -> None:
        if "Content Security Policy" in line.text:
            problems.append(line.text)

    def watch(page: Page) -> None:
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", note)

    def new(**options: Any) -> BrowserContext:
        context = browser.new_context(**{"base_url": quiet_server.url} | options)
        context.set_default_timeout(SECONDS)
        context.on("page", watch)
        contexts.append(context)
        return context

    yield new
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def page(new_context: NewContext) -> Page:
    """A page at the login."""
    page = new_context().new_page()
    page.goto("/login/")
    return page


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    file = tmp_path / "me.jpg"
    file.write_bytes(photo_bytes())
    return file


def log_in(page: Page) -> None:
    page.get_by_label("Username").fill("ann")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Portraits")).to_be_visible()


def fill_in(page: Page, photo: Path) -> None:
    page.get_by_role("link", name="New portrait").click()
    page.get_by_label("Your photo").set_input_files(photo)
    page.get_by_label("What should the portrait show?").fill("A quiet portrait by the sea")


def send(page: Page) -> None:
    page.get_by_role("button", name="Draw the portrait").click()


def expect_heading(page: Page, name: str) -> None:
    expect(page.get_by_role("heading", name=name)).to_be_visible(timeout=SECONDS)


# --- how the pages look, to eyes and to screen readers ---


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_every_page_fits_the_screen_and_is_open_to_everybody(
    new_context: NewContext, ann: User, size: tuple[int, int], scheme: Any
) -> None:
    jobs = [
        finished_job(ann),
        finished_job(ann, pictures=3),
        failed_job(ann),
        retrying_job(ann),
        running_job(ann, value=0.4, step=12, steps=30),
        waiting_job(ann, priority=-1),
    ]
    width, height = size
    viewport: Any = {"width": width, "height": height}
    context = new_context(viewport=viewport, color_scheme=scheme, has_touch=size == PHONE)
    page = context.new_page()
    page.goto("/login/")
    check_page(page, width)
    log_in(page)

    first = jobs[0].pk
    for address in (
        "/",
        "/?show=canceled",
        "/new/",
        f"/new/like/{first}/",
        f"/jobs/{first}/delete/",
        "/account/",
        "/account/password/",
        "/account/delete/",
        "/nothing/",
        *map(page_of, jobs),
    ):
        page.goto(address)
        open_what_is_folded(page)
        check_page(page, width)


def open_what_is_folded(page: Page) -> None:
    for summary in page.locator("summary").all():
        summary.click()


def check_page(page: Page, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width, page.url
    page.evaluate(AXE_SCRIPT)
    found = page.evaluate("axe.run()")["violations"]
    assert found == [], [(page.url, each["id"], each["nodes"][0]["html"]) for each in found]


def test_the_admin_and_the_api_page_work_under_the_same_policy(page: Page, ann: User) -> None:
    job = running_job(ann)
    log_in(page)

    for address in ("", "jobs/job/", f"jobs/job/{job.pk}/change/", "jobs/backend/", "auth/user/"):
        page.goto(f"/admin/{address}")
        expect(page.get_by_role("heading").first).to_be_visible()
    page.goto("/api/docs")
    expect(page.get_by_text("Your jobs, newest first")).to_be_visible()


# --- from the photo to the picture ---


def test_a_portrait_from_the_login_to_the_picture(
    page: Page, photo: Path, fake: FakeComfy, running_worker: Worker
) -> None:
    fake.seconds = 2
    log_in(page)
    fill_in(page, photo)
    expect(page.get_by_alt_text("The photo you chose")).to_be_visible()

    send(page)

    expect_heading(page, "Drawing your portrait")
    expect(page.locator("progress[value]")).to_be_visible(timeout=SECONDS)
    expect(page.get_by_text("Step", exact=False).first).to_be_visible()
    expect(page).to_have_title(re.compile(r"\d+ % · Drawing your portrait"))
    expect_heading(page, "Your portrait is ready")
    picture = page.get_by_alt_text("Picture 1 of 1, drawn from your photo")
    expect(picture).to_have_js_property("naturalWidth", 512, timeout=SECONDS)
    expect(page).to_have_title("Your portrait is ready · genflow")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.path().read_bytes().startswith(b"\x89PNG")
    page.get_by_role("link", name="Portraits").click()
    expect(page.get_by_role("link", name="A quiet portrait by the sea")).to_be_visible()


def test_closing_the_page_and_opening_it_again_loses_nothing(
    page: Page, photo: Path, fake: FakeComfy, running_worker: Worker
) -> None:
    fake.seconds = 2
    log_in(page)
    fill_in(page, photo)
    send(page)
    expect_heading(page, "Drawing your portrait")
    address, context = page.url, page.context
    page.close()

    again = context.new_page()
    again.goto(address)

    expect_heading(again, "Your portrait is ready")


def test_another_seed_and_then_another_prompt_take_no_new_photo(
    page: Page, photo: Path, fake: FakeComfy, running_worker: Worker
) -> None:
    log_in(page)
    fill_in(page, photo)
    send(page)
    expect_heading(page, "Your portrait is ready")
    first = page.url

    page.get_by_role("button", name="Again with another seed").click()
    expect(page).not_to_have_url(first)
    expect_heading(page, "Your portrait is ready")
    page.get_by_role("link", name="Change the prompt").click()
    expect(page.get_by_alt_text("The photo of the earlier portrait")).to_be_visible()
    page.get_by_label("What should the portrait show?").fill("In the mountains")
    send(page)
    expect_heading(page, "Your portrait is ready")

    one, two, three = Job.objects.order_by("pk")
    assert one.params["seed"] != two.params["seed"]
    assert three.params["prompt"] == "In the mountains"
    assert one.inputs.get() == two.inputs.get() == three.inputs.get()


def test_a_job_is_canceled_while_one_watches(
    page: Page, photo: Path, fake: FakeComfy, running_worker: Worker
) -> None:
    fake.seconds = 60
    log_in(page)
    fill_in(page, photo)
    send(page)
    expect_heading(page, "Drawing your portrait")

    page.get_by_role("button", name="Cancel").click()

    expect_heading(page, "Canceled")
    assert Job.objects.get().status == JobStatus.CANCELED


# --- the form ---


def test_a_photo_can_be_dropped_or_pasted(page: Page) -> None:
    log_in(page)
    page.goto("/new/")
    for event, holder in (("drop", "dataTransfer"), ("paste", "clipboardData")):
        page.evaluate(
            """([event, holder, bytes]) => {
                const transfer = new DataTransfer();
                const content = Uint8Array.from(atob(bytes), (char) => char.charCodeAt(0));
                transfer.items.add(new File([content], `${event}.jpg`, { type: "image/jpeg" }));
                const options = { bubbles: true, cancelable: true, [holder]: transfer };
                const kind = event === "drop" ? DragEvent : ClipboardEvent;
                document.body.dispatchEvent(new kind(event, options));
            }""",
            [event, holder, base64.b64encode(photo_bytes()).decode()],
        )

        chosen = page.evaluate("document.getElementById('id_photo').files[0].name")
        assert chosen == f"{event}.jpg"
        expect(page.get_by_alt_text("The photo you chose")).to_be_visible()


def test_an_example_fills_the_prompt_and_can_be_undone(page: Page) -> None:
    log_in(page)
    page.goto("/new/")
    prompt = page.get_by_label("What should the portrait show?")
    prompt.fill("My own words")

    page.get_by_role("button", name="In the studio").click()
    expect(prompt).to_have_value(re.compile("^Studio portrait, "))
    page.keyboard.press("Control+z")

    expect(prompt).to_have_value("My own words")


def test_the_dice_rolls_a_seed_that_draws(page: Page, photo: Path) -> None:
    log_in(page)
    fill_in(page, photo)
    page.get_by_text("More settings").click()

    page.get_by_role("button", name="Roll a seed").click()
    rolled = page.get_by_label("Seed", exact=True).input_value()
    send(page)

    expect_heading(page, "Waiting for its turn")
    assert Job.objects.get().params["seed"] == int(rolled)


def test_what_is_wrong_is_told_and_neither_photo_nor_words_are_lost(
    page: Page, photo: Path
) -> None:
    log_in(page)
    fill_in(page, photo)
    page.get_by_text("Own size").click()
    page.get_by_label("Width").fill("65")
    page.evaluate("document.getElementById('create').noValidate = true")
    send(page)

    expect(page.get_by_text("Give a whole number from 64 to 2048, in steps of 8.")).to_be_visible()
    expect(page.get_by_label("Width")).to_be_focused()
    expect(page.get_by_alt_text("The photo you chose")).to_be_visible()
    page.get_by_label("Width").fill("64")
    send(page)

    expect_heading(page, "Waiting for its turn")
    assert Job.objects.get().params["prompt"] == "A quiet portrait by the sea"


def test_a_network_that_is_away_costs_nothing_but_another_press(page: Page, photo: Path) -> None:
    log_in(page)
    fill_in(page, photo)
    page.context.set_offline(True)
    send(page)
    expect(page.get_by_text("That did not get through")).to_be_visible()

    page.context.set_offline(False)
    send(page)

    expect_heading(page, "Waiting for its turn")
    assert Job.objects.count() == 1


def test_a_double_click_and_the_back_button_make_one_job(page: Page, photo: Path) -> None:
    log_in(page)
    fill_in(page, photo)

    page.get_by_role("button", name="Draw the portrait").dblclick()
    expect_heading(page, "Waiting for its turn")
    page.go_back()
    page.get_by_label("Your photo").set_input_files(photo)
    page.get_by_label("What should the portrait show?").fill("A quiet portrait by the sea")
    send(page)

    expect_heading(page, "Waiting for its turn")
    assert Job.objects.count() == 1


def test_the_keyboard_alone_makes_a_portrait(page: Page, photo: Path) -> None:
    log_in(page)
    page.goto("/new/")
    page.get_by_label("Your photo").set_input_files(photo)  # the browser's own dialog

    page.get_by_label("Your photo").focus()
    page.keyboard.press("Tab")
    page.keyboard.type("A quiet portrait by the sea")
    page.get_by_role("radio", name="Square").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Draw the portrait").focus()
    page.keyboard.press("Enter")

    expect_heading(page, "Waiting for its turn")
    assert Job.objects.get().params["height"] == 768


# --- the photo's check and the event stream, of which the page takes what is there ---


def answer_checks(page: Page, status: int, answer: dict[str, Any]) -> None:
    page.route("**/photos/check", lambda route: route.fulfill(status=status, json=answer))


@pytest.mark.parametrize(
    ("status", "answer", "sentence"),
    [
        (200, {"ok": True, "warnings": [], "face": {"x": 1}}, "One face, well in view."),
        (200, {"ok": True, "warnings": [{"code": "a", "message": "Small face."}]}, "Small face."),
        (422, {"error": {"code": "bad_photo", "message": "It is damaged."}}, "It is damaged."),
        (404, {"error": {"code": "not_found", "message": "Not found."}}, ""),
    ],
)
def test_the_photo_is_looked_at_before_it_is_sent(
    page: Page, photo: Path, status: int, answer: dict[str, Any], sentence: str
) -> None:
    answer_checks(page, status, answer)
    log_in(page)
    with page.expect_response("**/photos/check"):
        fill_in(page, photo)

    expect(page.locator("#verdict")).to_have_text(sentence)
    send(page)
    expect_heading(page, "Waiting for its turn")


def test_the_stream_shows_steps_and_a_picture_while_it_is_drawn(page: Page, ann: User) -> None:
    job = running_job(ann, value=0.1, step=3, steps=30)
    events = (
        'event: progress\ndata: {"value": 0.5, "step": 15, "steps": 30}\n\n'
        f'event: preview\ndata: {{"node_id": "3", "content_type": "image/jpeg",'
        f' "data_base64": "{base64.b64encode(photo_bytes()).decode()}"}}\n\n'
    )
    stream = {"content_type": "text/event-stream", "body": events}
    page.route("**/events", lambda route: route.fulfill(**stream))
    log_in(page)

    page.goto(page_of(job))

    expect(page.get_by_text("Step 15 of 30")).to_be_visible()
    preview = page.get_by_alt_text("The portrait as it is being drawn")
    expect(preview).to_have_js_property("naturalWidth", 96)
    expect(page).to_have_title(re.compile("^50 % · "))


def test_the_servers_own_stream_shows_the_picture_while_it_is_drawn(
    new_context: NewContext, ann: User, fake: FakeComfy, running_worker: Worker
) -> None:
    fake.seconds = 4
    with web_process(DEBUG=1) as web:
        context = new_context(base_url=web.url)
        session = logged_in(ann).cookies["sessionid"].value
        context.add_cookies([{"name": "sessionid", "value": session, "url": web.url}])
        page = context.new_page()

        page.goto(page_of(queue_job(ann, steps=20)))

        preview = page.get_by_alt_text("The portrait as it is being drawn")
        expect(preview).to_be_visible(timeout=SECONDS)
        expect(page.get_by_text(re.compile(r"^Step \d+ of 20$"))).to_be_visible()
        expect_heading(page, "Your portrait is ready")
        context.close()


# --- the list and the account ---


def test_many_portraits_are_deleted_at_once(page: Page, ann: User) -> None:
    jobs = [finished_job(ann) for _ in range(3)]
    log_in(page)

    page.get_by_text("Select").click()
    for box in page.get_by_role("checkbox", name="Choose “").all()[:2]:
        box.check()
    page.get_by_role("button", name="Delete the chosen ones").click()
    page.get_by_role("button", name="Delete for good").click()

    expect(page.get_by_text("2 portraits were deleted.")).to_be_visible()
    assert Job.objects.get() == jobs[0]


def test_after_the_log_out_the_back_button_shows_nothing(page: Page, ann: User) -> None:
    job = finished_job(ann)
    log_in(page)
    page.goto("/new/")
    page.get_by_label("What should the portrait show?").fill("A secret wish")
    page.goto(page_of(job))
    expect_heading(page, "Your portrait is ready")

    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("button", name="Log in")).to_be_visible()

    for _ in range(3):
        page.go_back()
        expect(page.get_by_role("button", name="Log in")).to_be_visible()
        assert "A secret wish" not in page.content()


def test_a_token_is_made_shown_once_and_revoked(page: Page) -> None:
    log_in(page)
    page.get_by_role("link", name="Account").click()
    page.get_by_label("Name").fill("my laptop")
    page.get_by_role("button", name="Make a token").click()
    expect(page.get_by_text(re.compile("^gf_"))).to_be_visible()

    page.get_by_role("button", name="Revoke my laptop").click()

    expect(page.get_by_text("The token my laptop was revoked.")).to_be_visible()
    expect(page.get_by_text(re.compile("^gf_"))).to_be_hidden()


def test_all_data_is_deleted_after_the_password_was_asked_again(page: Page, ann: User) -> None:
    finished_job(ann)
    log_in(page)
    page.get_by_role("link", name="Account").click()

    page.get_by_role("link", name="Delete my data").click()
    page.get_by_label("Your password").fill(PASSWORD)
    page.get_by_role("button", name="Delete everything").click()

    expect(
        page.get_by_text("All your portraits, pictures and photos were deleted.")
    ).to_be_visible()
    assert not Job.objects.exists()


# --- without scripts ---


def test_the_pages_work_without_scripts(new_context: NewContext, photo: Path) -> None:
    page = new_context(java_script_enabled=False).new_page()
    page.goto("/login/")
    log_in(page)
    fill_in(page, photo)
    send(page)

    expect_heading(page, "Waiting for its turn")
    Job.objects.cancel(Job.objects.get().pk, by="owner")
    # The page looks again by itself.
    expect_heading(page, "Canceled")
    page.get_by_role("link", name="Change the prompt").click()
    page.get_by_label("What should the portrait show?").fill("In the mountains")
    send(page)

    expect_heading(page, "Waiting for its turn")
    assert Job.objects.count() == 2


def test_a_picture_that_is_gone_leaves_a_note(page: Page, ann: User) -> None:
    job = finished_job(ann)
    lose_file(job.outputs.get())
    log_in(page)

    page.goto(page_of(job))

    expect(page.get_by_text("The picture is gone")).to_be_visible()
