from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db.models.functions import Now
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from fake_comfy import FakeComfy
from jobs.forms import PortraitForm
from jobs.models import Asset, Blob, Failure, Job
from jobs.status import JobStatus, Step
from jobs.tests.helpers import make_user, make_worker, photo_bytes, start
from jobs.tests.helpers_pages import (
    failed_job,
    finished_job,
    form_values,
    logged_in,
    lose_file,
    page_of,
    picture_of,
    picture_url,
    portrait_bytes,
    retrying_job,
    running_job,
    status_of,
    waiting_job,
)

pytestmark = pytest.mark.django_db


def all_urls(job: Job) -> Iterator[tuple[str, str]]:
    """Yield method and address of everything that is about this job."""
    yield "get", page_of(job)
    yield "get", reverse("job-fragment", args=[job.pk])
    yield "get", reverse("job-new", args=[job.pk])
    yield "post", reverse("draw-again", args=[job.pk])
    yield "get", reverse("delete-job", args=[job.pk])
    yield "post", reverse("delete-job", args=[job.pk])
    yield "post", reverse("cancel-job", args=[job.pk])
    for asset in [*job.outputs.all(), *job.inputs.all()]:
        yield "get", picture_url(job, asset)
        yield "get", picture_url(job, asset) + "?size=small"


# --- who may see what ---


def test_nobody_is_sent_to_the_login(client: Client, ann: User) -> None:
    job = finished_job(ann)
    urls = [*all_urls(job), ("get", reverse("job-list")), ("get", reverse("job-new"))]

    answers = [getattr(client, method)(url) for method, url in urls]

    assert {answer.status_code for answer in answers} == {302}
    assert all(answer["Location"].startswith("/login/?next=") for answer in answers)
    assert Job.objects.count() == 1


def test_a_strangers_job_is_not_there(ann: User) -> None:
    job = finished_job(ann)
    stranger = logged_in(make_user("bob"))

    answers = [getattr(stranger, method)(url) for method, url in all_urls(job)]

    assert {answer.status_code for answer in answers} == {404}
    assert Job.objects.visible_to(ann).count() == 1


def test_staff_sees_no_more_on_the_pages_than_others(ann: User) -> None:
    job = finished_job(ann)
    admin = logged_in(User.objects.create_superuser("root"))

    assert admin.get(page_of(job)).status_code == 404


def test_a_picture_of_one_job_is_not_found_under_another(as_ann: Client, ann: User) -> None:
    job, other = finished_job(ann), finished_job(ann)
    picture = other.outputs.get()

    assert as_ann.get(picture_url(job, picture)).status_code == 404


def test_a_known_etag_shows_a_stranger_nothing(as_ann: Client, ann: User) -> None:
    job = finished_job(ann)
    url = picture_url(job, job.outputs.get())
    etag = as_ann.get(url)["ETag"]

    assert as_ann.get(url, headers={"If-None-Match": etag}).status_code == 304
    stranger = logged_in(make_user("bob"))
    assert stranger.get(url, headers={"If-None-Match": etag}).status_code == 404


# --- the form ---


def test_a_photo_and_a_prompt_make_a_job(as_ann: Client, ann: User) -> None:
    answer = as_ann.post(
        "/new/send/", form_values(prompt="  by the sea ", seed=2**64 - 1, width="")
    )

    job = Job.objects.get()
    assert answer["Location"] == page_of(job)
    assert job.owner == ann
    assert job.params["prompt"] == "by the sea"
    assert job.params["seed"] == 2**64 - 1
    assert job.params["width"] == 512
    assert job.inputs.get().content_type == "image/jpeg"


def test_the_form_shows_the_defaults(as_ann: Client) -> None:
    page = as_ann.get("/new/").content.decode()

    assert 'name="width" value="512" min="64" max="2048" step="8"' in page
    assert 'name="cfg" value="6.5" min="0" max="30" step="any"' in page


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("prompt", "", "Say what the portrait should show."),
        ("prompt", " ", "Say what the portrait should show."),
        ("prompt", "x" * 5001, "at most 5000 characters"),
        ("prompt", "a\0b", "Null characters are not allowed."),
        ("width", "65", "Give a whole number from 64 to 2048, in steps of 8."),
        ("height", "4096", "Give a whole number from 64 to 2048, in steps of 8."),
        ("count", "9", "Give a whole number from 1 to 8."),
        ("steps", "many", "Give a whole number from 1 to 150."),
        ("cfg", "nan", "Give a number from 0 to 30."),
        ("cfg", "1e999", "Give a number from 0 to 30."),
        ("seed", "9" * 5000, "Give a whole number from 0 to 18446744073709551615."),
        ("likeness", "5.1", "Give a number from 0 to 5."),
        ("face_weight", "-1", "Give a number from 0 to 3."),
        ("lora_strength", "3", "Give a number from -2 to 2."),
        ("lora", "x" * 256, "at most 255 characters"),
        ("size", "1x1", "not one of the available choices"),
        ("photo", "", "Choose a photo."),
    ],
)
def test_a_wrong_field_is_told_beside_it_and_nothing_is_lost(
    as_ann: Client, field: str, value: str, sentence: str
) -> None:
    form = form_values(**{"size": "own", "negative_prompt": "no hats", field: value})

    answer = as_ann.post("/new/send/", form)

    page = answer.content.decode()
    assert answer.status_code == 422
    assert sentence in page
    assert f'id="id_{field}_error"' in page
    assert "no hats" in page
    assert not Job.objects.exists()
    assert not Blob.objects.exists()


def test_what_is_folded_away_is_unfolded_when_it_is_wrong(as_ann: Client) -> None:
    for field, value, unfolded in (("steps", "many", True), ("prompt", "", False)):
        page = as_ann.post("/new/send/", form_values(**{field: value})).content.decode()

        assert ('<details class="options" open>' in page) == unfolded


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "The photo is empty."),
        (b"<html>", "Send a JPEG, PNG"),
        (photo_bytes()[:400], "damaged or was cut off"),
    ],
)
def test_a_bad_photo_is_told_in_a_sentence(as_ann: Client, content: bytes, sentence: str) -> None:
    answer = as_ann.post("/new/send/", form_values(photo=SimpleUploadedFile("me.jpg", content)))

    assert answer.status_code == 422
    assert sentence in answer.content.decode()


def test_what_is_doubtful_about_a_photo_is_told_beside_it(as_ann: Client) -> None:
    page = as_ann.post("/new/send/", form_values(), follow=True).content.decode()

    assert "No face was found in the photo." in page


def test_a_photo_above_the_limit_is_refused(as_ann: Client, settings: Settings) -> None:
    settings.GENFLOW_PHOTO_MAX_BYTES = 100

    answer = as_ann.post("/new/send/", form_values())

    assert "larger than 100 bytes" in answer.content.decode()


@pytest.mark.parametrize(
    "behind_it", [0, 6_000_000]
)  # bytes; the large one goes by a temporary file
@pytest.mark.parametrize(
    "name",
    [
        "x" * 300 + ".jpg",
        "me." + "j" * 300,
        "\u202egpj.me",
        "¡¡¡.¡¡",
        "../../x.jpg",
        r"C:\fakepath\me.jpg",
        ".jpg",
        "...",
        "me..jpg",
        "selfie [output].png",
        "\N{SMILING FACE WITH SUNGLASSES}.jpg",
        "a\0b.jpg",
    ],
)
def test_any_file_name_will_do(as_ann: Client, name: str, behind_it: int) -> None:
    photo = SimpleUploadedFile("x.jpg", photo_bytes() + b"\0" * behind_it, "image/jpeg")
    photo._name = name  # type: ignore[attr-defined]  # what a browser would send

    assert as_ann.post("/new/send/", form_values(photo=photo)).status_code == 302


def test_a_full_queue_is_told_and_the_form_is_kept(as_ann: Client, settings: Settings) -> None:
    settings.GENFLOW_QUEUE_LIMIT = 0

    answer = as_ann.post("/new/send/", form_values(prompt="by the sea"))

    assert answer.status_code == 429
    assert int(answer["Retry-After"]) > 0
    assert "The queue is full" in answer.content.decode()
    assert "by the sea" in answer.content.decode()
    assert not Blob.objects.exists()


def test_the_same_form_sent_twice_makes_one_job(as_ann: Client) -> None:
    key = as_ann.get("/new/").context["form"]["key"].value()

    first = as_ann.post("/new/send/", form_values(key=key))
    second = as_ann.post("/new/send/", form_values(key=key))

    assert Job.objects.count() == 1
    assert second["Location"] == first["Location"]


def test_a_form_sent_again_after_the_login_was_renewed_leads_to_its_job(
    as_ann: Client, ann: User
) -> None:
    key = as_ann.get("/new/").context["form"]["key"].value()

    first = as_ann.post("/new/send/", form_values(key=key))
    second = logged_in(ann).post("/new/send/", form_values(key=key, csrfmiddlewaretoken="new"))

    assert second["Location"] == first["Location"]


def test_the_photo_of_a_form_sent_again_is_not_decoded(
    as_ann: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = as_ann.get("/new/").context["form"]["key"].value()
    as_ann.post("/new/send/", form_values(key=key))
    monkeypatch.setattr("jobs.forms.read_photo", lambda *args, **limits: pytest.fail("decoded"))

    assert as_ann.post("/new/send/", form_values(key=key)).status_code == 302


def test_a_form_whose_job_was_deleted_gives_way_to_a_new_one(as_ann: Client) -> None:
    key = as_ann.get("/new/").context["form"]["key"].value()
    as_ann.post("/new/send/", form_values(key=key))
    Job.objects.delete_for_owner(Job.objects.get().pk)

    answer = as_ann.post("/new/send/", form_values(key=key), follow=True)

    assert "was deleted. This is a new form" in answer.content.decode()
    assert answer.context["form"]["key"].value() != key
    assert not Job.objects.exists()


def test_a_form_that_was_changed_makes_another_job(as_ann: Client) -> None:
    key = as_ann.get("/new/").context["form"]["key"].value()

    as_ann.post("/new/send/", form_values(key=key))
    as_ann.post("/new/send/", form_values(key=key, prompt="another"))

    assert Job.objects.count() == 2


def test_a_form_opened_anew_makes_another_job(as_ann: Client) -> None:
    for _ in range(2):
        as_ann.post(
            "/new/send/", form_values(key=as_ann.get("/new/").context["form"]["key"].value())
        )

    assert Job.objects.count() == 2


@pytest.mark.django_db(transaction=True)
def test_a_double_click_makes_one_job(as_ann: Client) -> None:
    key = as_ann.get("/new/").context["form"]["key"].value()
    gate = threading.Barrier(2)
    locations: list[str] = []

    def press() -> None:
        browser = Client()
        browser.cookies = as_ann.cookies
        values = form_values(key=key)
        gate.wait(10)
        locations.append(browser.post("/new/send/", values)["Location"])

    for thread in [start(press) for _ in range(2)]:
        thread.join(20)

    assert Job.objects.count() == 1
    assert locations == [page_of(Job.objects.get())] * 2


@pytest.mark.parametrize(
    ("size", "width", "height"), [("512x768", 512, 768), ("own", 640, 64), ("", 640, 64)]
)
def test_a_format_decides_the_size_unless_it_is_ones_own(
    as_ann: Client, size: str, width: int, height: int
) -> None:
    as_ann.post("/new/send/", form_values(size=size, width="640", height="64"))

    params = Job.objects.get().params
    assert (params["width"], params["height"]) == (width, height)


def test_what_is_left_in_the_fields_of_ones_own_size_is_no_error_of_a_format(
    as_ann: Client,
) -> None:
    as_ann.post("/new/send/", form_values(size="512x512", width="65", height="x"))

    assert Job.objects.get().params["width"] == 512


def test_the_styles_that_servers_have_are_there_to_choose(as_ann: Client, fake: FakeComfy) -> None:
    assert '<input type="text" name="lora"' in as_ann.get("/new/").content.decode()

    make_worker(fake.url).housekeeper.read_catalogs()

    page = as_ann.get("/new/").content.decode()
    assert '<option value="add_detail.safetensors">add_detail</option>' in page
    as_ann.post("/new/send/", form_values(lora="add_detail.safetensors"))
    assert Job.objects.get().params["lora"] == "add_detail.safetensors"


# --- the form for another one of the same photo ---


def test_an_earlier_jobs_settings_and_photo_fill_the_form_but_not_its_seed(as_ann: Client) -> None:
    values = form_values(prompt="by the sea", cfg="7.25", seed="42", size="512x768")
    as_ann.post("/new/send/", values)
    job = Job.objects.get()

    page = as_ann.get(reverse("job-new", args=[job.pk])).content.decode()

    assert "by the sea" in page
    assert 'value="7.25"' in page
    assert 'value="42"' not in page
    assert 'value="512x768" id="id_size_1" checked' in page
    assert picture_url(job, job.inputs.get()) in page


def test_a_workflow_is_no_example_for_a_portrait(as_ann: Client, ann: User) -> None:
    job = waiting_job(ann)
    Job.objects.update(kind=Job.Kind.WORKFLOW, params={"files": {}, "extra_data": []})
    job.inputs.clear()

    assert as_ann.get(reverse("job-new", args=[job.pk])).status_code == 404


def like_values(job: Job, **changed: Any) -> dict[str, Any]:
    """What the browser sends for a portrait of the photo of an earlier one."""
    return {"prompt": "in the mountains", "like": str(job.pk), **changed}


def test_the_photo_of_an_earlier_job_need_not_be_sent_again(as_ann: Client, ann: User) -> None:
    job = finished_job(ann)
    blobs = Blob.objects.count()

    answer = as_ann.post("/new/send/", like_values(job))

    new = Job.objects.latest("pk")
    assert answer["Location"] == page_of(new)
    assert new.params["prompt"] == "in the mountains"
    assert list(new.inputs.all()) == list(job.inputs.all())
    assert Blob.objects.count() == blobs


def test_another_photo_takes_the_place_of_the_earlier_one(as_ann: Client, ann: User) -> None:
    job = finished_job(ann)

    as_ann.post("/new/send/", form_values(like=str(job.pk)))

    assert list(Job.objects.latest("pk").inputs.all()) != list(job.inputs.all())


def test_a_double_press_for_the_same_photo_makes_one_job(as_ann: Client, ann: User) -> None:
    job = finished_job(ann)
    key = as_ann.get(reverse("job-new", args=[job.pk])).context["form"]["key"].value()

    for _ in range(2):
        as_ann.post("/new/send/", like_values(job, key=key))

    assert Job.objects.count() == 2


def test_the_earlier_photo_stays_in_the_form_when_something_is_wrong(
    as_ann: Client, ann: User
) -> None:
    job = finished_job(ann)

    answer = as_ann.post("/new/send/", like_values(job, prompt=""))

    assert answer.status_code == 422
    assert picture_url(job, job.inputs.get()) in answer.content.decode()


def test_somebody_elses_photo_cannot_be_taken(as_ann: Client) -> None:
    strange = finished_job(make_user("bob"))

    answer = as_ann.post("/new/send/", like_values(strange))

    assert answer.status_code == 422
    assert "Choose a photo." in answer.content.decode()
    assert Job.objects.get() == strange


@pytest.mark.parametrize("like", ["x", "\0", str(uuid.uuid4())])
def test_a_photo_that_is_not_there_is_told_in_words(as_ann: Client, like: str) -> None:
    answer = as_ann.post("/new/send/", {"prompt": "by the sea", "like": like})

    assert answer.status_code == 422
    assert "Choose a photo." in answer.content.decode()


def test_a_photo_deleted_while_the_form_was_filled_in_is_told(
    as_ann: Client, ann: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = finished_job(ann)
    clean = PortraitForm.clean_lora

    def deleted_meanwhile(form: PortraitForm) -> str | None:
        Job.objects.delete_for_owner(job.pk)
        return clean(form)

    monkeypatch.setattr(PortraitForm, "clean_lora", deleted_meanwhile)

    answer = as_ann.post("/new/send/", like_values(job))

    assert answer.status_code == 422
    assert "The earlier portrait was deleted" in answer.content.decode()


def test_again_draws_the_same_with_another_seed(as_ann: Client, ann: User) -> None:
    as_ann.post("/new/send/", form_values(prompt="by the sea", cfg="7.25", seed="42"))
    job = Job.objects.get()

    answer = as_ann.post(reverse("draw-again", args=[job.pk]), {"key": "1"})

    new = Job.objects.latest("pk")
    assert answer["Location"] == page_of(new)
    assert new.params["seed"] != 42
    assert new.params | {"seed": 42} == job.params
    assert list(new.inputs.all()) == list(job.inputs.all())


def test_again_pressed_twice_makes_one_job_and_once_more_another(as_ann: Client, ann: User) -> None:
    job = finished_job(ann)
    first, second = (as_ann.get(page_of(job)).context["key"] for _ in range(2))

    for key in (first, first, second):
        as_ann.post(reverse("draw-again", args=[job.pk]), {"key": key})

    assert Job.objects.count() == 3


def test_again_says_so_when_a_style_is_gone(as_ann: Client, fake: FakeComfy) -> None:
    as_ann.post("/new/send/", form_values(lora="old_style.safetensors"))
    job = Job.objects.get()
    make_worker(fake.url).housekeeper.read_catalogs()

    answer = as_ann.post(reverse("draw-again", args=[job.pk]), follow=True)

    assert "There is no LoRA" in answer.content.decode()
    assert Job.objects.get() == job


def test_again_says_so_when_the_queue_is_full(
    as_ann: Client, ann: User, settings: Settings
) -> None:
    job = finished_job(ann)
    settings.GENFLOW_QUEUE_LIMIT = 0

    answer = as_ann.post(reverse("draw-again", args=[job.pk]), follow=True)

    assert "The queue is full" in answer.content.decode()
    assert Job.objects.get() == job


def test_a_form_without_its_csrf_token_is_refused_in_words(ann: User) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(ann)

    answer = strict.post("/new/send/", form_values())

    assert answer.status_code == 403
    assert "This form is out of date" in answer.content.decode()
    assert not Job.objects.exists()


# --- a job's page ---


def test_a_waiting_job_says_how_many_are_ahead(as_ann: Client, ann: User) -> None:
    jobs = [waiting_job(make_user("bob")) for _ in range(2)]
    job = waiting_job(ann, priority=-1)

    assert "2 portraits are ahead of yours." in as_ann.get(page_of(job)).content.decode()
    Job.objects.cancel(jobs[0].pk, by="owner")
    assert "One portrait is ahead of yours." in as_ann.get(page_of(job)).content.decode()
    Job.objects.cancel(jobs[1].pk, by="owner")
    assert "Your portrait is next." in as_ann.get(page_of(job)).content.decode()


def test_a_waiting_job_says_how_long_when_the_pace_is_known(as_ann: Client, ann: User) -> None:
    job = waiting_job(ann)
    assert "Ready in" not in as_ann.get(page_of(job)).content.decode()

    done = finished_job(make_user("bob"))
    Job.objects.filter(pk=done.pk).update(started_at=Now() - timedelta(minutes=5))

    assert "Ready in about 5 minutes." in as_ann.get(page_of(job)).content.decode()


def test_a_running_job_shows_how_far_it_is(as_ann: Client, ann: User) -> None:
    job = running_job(ann, value=0.456, step=14, steps=30)

    page = as_ann.get(page_of(job)).content.decode()

    assert '<progress id="progress" max="100" value="46"' in page
    assert "46 %" in page
    assert "Step 14 of 30" in page
    assert '<noscript><meta http-equiv="refresh"' in page


@pytest.mark.parametrize("step", Step)
def test_each_step_has_a_sentence_of_its_own(as_ann: Client, ann: User, step: Step) -> None:
    job = running_job(ann, step)

    story = as_ann.get(page_of(job)).context["story"]

    assert [stage.place for stage in story.stages].index("now") == list(Step).index(step)


@pytest.mark.parametrize("progress", [None, [], {}, {"value": None}, {"value": "x", "step": 3}])
def test_odd_progress_is_no_reason_to_fail(as_ann: Client, ann: User, progress: Any) -> None:
    job = running_job(ann)
    Job.objects.update(progress=progress)

    assert as_ann.get(page_of(job)).status_code == 200


def test_a_job_that_waits_for_another_try_says_why_and_when(as_ann: Client, ann: User) -> None:
    job = retrying_job(ann)

    page = as_ann.get(page_of(job)).content.decode()

    assert "The server that draws did not answer." in page
    assert f"{job.run_after:%H:%M:%S} UTC" in page
    assert "Try 2 of 5." in page
    assert "10.0.0.7" not in page


def test_a_failed_job_says_why_and_nothing_about_our_servers(as_ann: Client, ann: User) -> None:
    job = failed_job(ann)

    page = as_ann.get(page_of(job)).content.decode()

    assert "The picture is too large for the graphics card." in page
    assert "out_of_memory" in page
    assert "10.0.0.7" not in page
    assert "http-equiv" not in page


@pytest.mark.parametrize("error", [None, {}, [], "text", {"message": None}])
def test_a_failure_without_a_reason_still_has_a_page(as_ann: Client, ann: User, error: Any) -> None:
    job = failed_job(ann)
    Job.objects.update(error=error)

    assert "Something went wrong." in as_ann.get(page_of(job)).content.decode()


def test_a_finished_job_shows_its_pictures(as_ann: Client, ann: User) -> None:
    job = finished_job(ann, pictures=2)

    page = as_ann.get(page_of(job)).content.decode()

    assert "Your pictures are ready" in page
    for picture in job.outputs.all():
        answer = as_ann.get(picture_url(job, picture))
        assert picture_url(job, picture) in page
        assert answer.getvalue() == portrait_bytes()
        assert answer["Content-Type"] == "image/png"
        assert "private" in answer["Cache-Control"]


@pytest.mark.parametrize(
    ("code", "title", "offer"),
    [
        ("no_face", "No face in the photo", "Choose another photo"),
        ("bad_photo", "The photo did not work", "Choose another photo"),
        ("out_of_memory", "Too large for the graphics card", "Change the settings"),
        ("model_missing", "Something is missing on the server", "Change the settings"),
        ("backend_stuck", "This did not work", "Try again"),
        ("a code of tomorrow", "This did not work", "Try again"),
    ],
)
def test_a_failure_has_a_title_and_a_way_on(
    as_ann: Client, ann: User, code: str, title: str, offer: str
) -> None:
    page = as_ann.get(page_of(failed_job(ann, Failure(code, "Why.")))).content.decode()

    assert title in page
    assert offer in page


def test_the_pages_of_a_job_take_few_queries(
    as_ann: Client, ann: User, django_assert_max_num_queries: Any
) -> None:
    job, waiting = finished_job(ann, pictures=8), waiting_job(ann)

    with django_assert_max_num_queries(5):  # session, user, job, pictures, photo
        as_ann.get(page_of(job))
    with django_assert_max_num_queries(6):
        as_ann.get(page_of(waiting))
    with django_assert_max_num_queries(7):
        as_ann.get(reverse("job-new", args=[job.pk]))


def test_a_file_that_is_no_picture_is_offered_not_shown(as_ann: Client, ann: User) -> None:
    job = finished_job(ann, content=b"<script>alert(1)</script>", content_type="text/html")
    file = job.outputs.get()

    page = as_ann.get(page_of(job)).content.decode()
    answer = as_ann.get(picture_url(job, file))

    assert f'<a href="{picture_url(job, file)}" download>portrait_0.png</a>' in page
    assert answer["Content-Security-Policy"] == "sandbox"
    assert as_ann.get(picture_url(job, file) + "?size=small").status_code == 404


@pytest.mark.parametrize("query", ["", "?size=small"])
def test_a_picture_whose_bytes_are_gone_is_not_there(as_ann: Client, ann: User, query: str) -> None:
    job = finished_job(ann)
    lose_file(job.outputs.get())

    assert as_ann.get(page_of(job)).status_code == 200
    assert as_ann.get(picture_url(job, job.outputs.get()) + query).status_code == 404


def test_the_fragment_changes_only_when_the_job_does(as_ann: Client, ann: User) -> None:
    job = running_job(ann, value=0.25)
    url = reverse("job-fragment", args=[job.pk])

    first, second = as_ann.get(url), as_ann.get(url)
    Job.objects.succeed(job, [picture_of(job)], {})
    last = as_ann.get(url)

    assert first.content == second.content
    assert b"data-final" not in second.content
    assert b"data-final" in last.content


# --- cancel and delete ---


def test_cancel_ends_a_waiting_job(as_ann: Client, ann: User) -> None:
    job = waiting_job(ann)

    answer = as_ann.post(reverse("cancel-job", args=[job.pk]), follow=True)

    assert status_of(job) == JobStatus.CANCELED
    assert "Canceled" in answer.content.decode()


def test_cancel_asks_the_worker_to_stop_a_running_job(as_ann: Client, ann: User) -> None:
    job = running_job(ann)

    page = as_ann.post(reverse("cancel-job", args=[job.pk]), follow=True).content.decode()

    assert status_of(job) == JobStatus.CANCELING
    assert "The drawing is being stopped." in page
    assert 'id="cancel"' not in page


def test_cancel_leaves_a_finished_job_as_it_is(as_ann: Client, ann: User) -> None:
    job = finished_job(ann)

    as_ann.post(reverse("cancel-job", args=[job.pk]))

    assert status_of(job) == JobStatus.SUCCEEDED


def test_a_link_cancels_nothing_and_leads_to_the_job(as_ann: Client, ann: User) -> None:
    job = waiting_job(ann)

    assert as_ann.get(reverse("cancel-job", args=[job.pk]))["Location"] == page_of(job)
    assert status_of(job) == JobStatus.QUEUED


def test_delete_asks_first(as_ann: Client, ann: User) -> None:
    job = finished_job(ann)

    page = as_ann.get(reverse("delete-job", args=[job.pk])).content.decode()

    assert "Delete this portrait?" in page
    assert Job.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_delete_takes_the_photo_and_the_pictures_with_it(as_ann: Client, ann: User) -> None:
    job = finished_job(ann)

    answer = as_ann.post(reverse("delete-job", args=[job.pk]), follow=True)

    assert "The portrait was deleted." in answer.content.decode()
    assert not Job.objects.exists()
    assert not Asset.objects.exists()
    assert not Blob.objects.exists()


def test_a_deleted_job_that_still_runs_is_not_there_any_more(as_ann: Client, ann: User) -> None:
    job = running_job(ann)

    as_ann.post(reverse("delete-job", args=[job.pk]))

    assert as_ann.get(page_of(job)).status_code == 404
    assert page_of(job) not in as_ann.get("/").content.decode()
    assert status_of(job) == JobStatus.CANCELING


# --- when something is wrong ---


def test_a_page_that_is_not_there_says_so_in_our_look(as_ann: Client) -> None:
    answer = as_ann.get("/nothing/")

    assert answer.status_code == 404
    assert "There is nothing here" in answer.content.decode()
    assert "genflow.css" in answer.content.decode()


def test_an_error_of_ours_has_a_page_too(as_ann: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    as_ann.raise_request_exception = False
    monkeypatch.setattr("jobs.pages.word_of", lambda job: 1 / 0)
    as_ann.post("/new/send/", form_values())

    answer = as_ann.get("/")

    assert answer.status_code == 500
    assert "Something went wrong here" in answer.content.decode()


def test_a_job_queued_for_later_without_an_error_only_waits(as_ann: Client, ann: User) -> None:
    job = waiting_job(ann)
    Job.objects.update(run_after=Now() + timedelta(hours=1))

    assert "Waiting for its turn" in as_ann.get(page_of(job)).content.decode()
