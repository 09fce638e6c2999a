"""The list of one's own portraits: order, filters, pages, thumbnails, and deleting many at once."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from jobs.housekeeping import sweep
from jobs.models import Asset, Blob, Job
from jobs.pages import PAGE_SIZE
from jobs.status import JobStatus
from jobs.tests.helpers import make_user
from jobs.tests.helpers_pages import (
    failed_job,
    finished_job,
    page_of,
    picture_url,
    portrait_bytes,
    retrying_job,
    running_job,
    status_of,
    waiting_job,
)

pytestmark = pytest.mark.django_db


def shown(client: Client, jobs: list[Job], **query: Any) -> list[Job]:
    """Return those of the jobs that the list shows."""
    page = client.get("/", query).content.decode()
    return [job for job in jobs if page_of(job) in page]


def test_the_list_is_empty_at_first_and_says_what_to_do(as_ann: Client) -> None:
    assert "Make your first portrait" in as_ann.get("/").content.decode()


def test_the_list_shows_own_jobs_newest_first(as_ann: Client, ann: User) -> None:
    old, new = waiting_job(ann), waiting_job(ann)
    strange = waiting_job(make_user("bob"))

    page = as_ann.get("/").content.decode()

    assert page.index(page_of(new)) < page.index(page_of(old))
    assert page_of(strange) not in page


def test_older_jobs_are_on_further_pages(as_ann: Client, ann: User) -> None:
    jobs = [waiting_job(ann) for _ in range(PAGE_SIZE + 1)]

    first = as_ann.get("/").content.decode()
    second = as_ann.get("/", {"before": str(jobs[1].pk)}).content.decode()

    assert f"/?before={jobs[1].pk}" in first
    assert page_of(jobs[0]) not in first
    assert page_of(jobs[0]) in second
    assert "Older portraits" not in second


def test_a_filter_shows_what_its_name_says(as_ann: Client, ann: User) -> None:
    ready, failed, running = finished_job(ann), failed_job(ann), running_job(ann)
    retrying, waiting, canceled = retrying_job(ann), waiting_job(ann), waiting_job(ann)
    Job.objects.cancel(canceled.pk, by="owner")
    jobs = [ready, failed, running, retrying, waiting, canceled]

    assert shown(as_ann, jobs) == jobs
    assert shown(as_ann, jobs, show="ready") == [ready]
    assert shown(as_ann, jobs, show="failed") == [failed]
    assert shown(as_ann, jobs, show="canceled") == [canceled]
    assert shown(as_ann, jobs, show="under-way") == [running, retrying, waiting]


def test_a_filter_stays_on_further_pages(as_ann: Client, ann: User) -> None:
    jobs = [waiting_job(ann) for _ in range(PAGE_SIZE + 1)]

    page = as_ann.get("/", {"show": "under-way"}).content.decode()

    assert f"/?show=under-way&amp;before={jobs[1].pk}" in page


def test_an_empty_filter_leads_back_to_all(as_ann: Client, ann: User) -> None:
    waiting_job(ann)

    page = as_ann.get("/", {"show": "failed"}).content.decode()

    assert "Nothing to show here" in page
    assert "Show all portraits" in page


@pytest.mark.parametrize(
    "query", ["show=x", "show=%00", "before=x", "before=", "show=<b>&before=1"]
)
def test_an_odd_address_shows_the_list(as_ann: Client, ann: User, query: str) -> None:
    job = waiting_job(ann)

    answer = as_ann.get(f"/?{query}")

    assert answer.status_code == 200
    assert page_of(job) in answer.content.decode()
    assert "<b>" not in answer.content.decode()


def test_the_list_takes_as_many_queries_for_many_jobs_as_for_one(
    as_ann: Client, ann: User, django_assert_num_queries: Any
) -> None:
    for _ in range(5):
        finished_job(ann)

    with django_assert_num_queries(5):  # session, user, jobs, pictures, photos
        as_ann.get("/")


def test_a_prompt_is_shown_as_text(as_ann: Client, ann: User) -> None:
    job = waiting_job(ann)
    Job.objects.update(params={"prompt": "<img src=x onerror=alert(1)>"})

    for url in ("/", page_of(job), reverse("delete-job", args=[job.pk])):
        page = as_ann.get(url).content.decode()
        assert "<img src=x" not in page
        assert "&lt;img src=x" in page


# --- thumbnails ---


def thumbnail_url(job: Job) -> str:
    return picture_url(job, job.outputs.get()) + "?size=small"


def test_a_thumbnail_is_a_small_jpeg(as_ann: Client, ann: User) -> None:
    answer = as_ann.get(thumbnail_url(finished_job(ann)))

    assert answer["Content-Type"] == "image/jpeg"
    assert answer["Cache-Control"] == "private, no-cache"
    assert len(answer.content) < len(portrait_bytes())


@pytest.mark.parametrize(
    "content",
    [
        b"P6 96 96 255\n" + bytes(96 * 96 * 3),
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 96 96\n%%EndComments\nshowpage\n",
    ],
)
def test_a_thumbnail_is_made_of_the_formats_of_photos_alone(
    as_ann: Client, ann: User, content: bytes
) -> None:
    job = finished_job(ann, content=content)  # others include some that start an interpreter

    assert as_ann.get(thumbnail_url(job)).status_code == 404


def test_a_thumbnail_is_made_once(
    as_ann: Client, ann: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = thumbnail_url(finished_job(ann))
    first = as_ann.get(url)
    monkeypatch.setattr("jobs.thumbnails._small", lambda asset: pytest.fail("made again"))

    assert as_ann.get(url).content == first.content


def test_a_thumbnail_that_cannot_be_kept_is_shown_all_the_same(
    as_ann: Client, ann: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = thumbnail_url(finished_job(ann))
    # Another request stores it between this one's look and its save.
    monkeypatch.setattr("jobs.storage.PostgresStorage.exists", lambda self, name: False)
    monkeypatch.setattr(
        "jobs.storage.PostgresStorage._open", lambda *args: open_as_if_not_there(*args)
    )

    assert [as_ann.get(url).status_code for _ in range(2)] == [200, 200]


def open_as_if_not_there(storage: Any, name: str, mode: str) -> Any:
    from django.core.files.base import ContentFile

    if name.startswith("thumbnails/"):
        raise FileNotFoundError(name)
    return ContentFile(portrait_bytes())


@pytest.mark.django_db(transaction=True)
def test_a_thumbnail_goes_with_its_picture(as_ann: Client, ann: User) -> None:
    job = finished_job(ann)
    as_ann.get(thumbnail_url(job))
    assert Blob.objects.filter(name__startswith="thumbnails/").exists()

    as_ann.post(reverse("delete-job", args=[job.pk]), {"sure": "1"})

    assert not Blob.objects.exists()


def test_the_sweep_keeps_a_thumbnail_as_long_as_its_picture(as_ann: Client, ann: User) -> None:
    as_ann.get(thumbnail_url(finished_job(ann)))
    Blob.objects.update(kept_until="2020-01-01T00:00Z")

    sweep()
    assert Blob.objects.filter(name__startswith="thumbnails/").exists()

    Asset.objects.filter(job__isnull=False).delete()
    sweep()
    assert not Blob.objects.filter(name__startswith="thumbnails/").exists()


# --- deleting many ---


def test_deleting_many_asks_first_and_names_them(as_ann: Client, ann: User) -> None:
    jobs = [finished_job(ann), failed_job(ann)]

    page = as_ann.post("/delete/", {"job": [job.pk for job in jobs]}).content.decode()

    assert "Delete 2 portraits?" in page
    assert Job.objects.count() == 2


def test_deleting_many_takes_the_chosen_ones_only(as_ann: Client, ann: User) -> None:
    chosen, kept = [finished_job(ann), waiting_job(ann)], finished_job(ann)

    answer = as_ann.post("/delete/", {"job": [job.pk for job in chosen], "sure": "1"}, follow=True)

    assert "2 portraits were deleted." in answer.content.decode()
    assert list(Job.objects.visible_to(ann)) == [kept]


def test_deleting_many_leaves_what_is_somebody_elses(as_ann: Client, ann: User) -> None:
    strange = finished_job(make_user("bob"))

    as_ann.post("/delete/", {"job": [strange.pk], "sure": "1"})

    assert status_of(strange) == JobStatus.SUCCEEDED


@pytest.mark.parametrize("job", ["", "x", "\0", ["1", "2"]])
def test_deleting_nothing_leads_back_to_the_list(as_ann: Client, job: Any) -> None:
    assert as_ann.post("/delete/", {"job": job, "sure": "1"})["Location"] == "/"
    assert as_ann.get("/delete/")["Location"] == "/"


def test_a_canceled_job_in_the_middle_of_its_drawing_is_stopped_when_deleted(
    as_ann: Client, ann: User
) -> None:
    job = running_job(ann)

    as_ann.post("/delete/", {"job": [job.pk], "sure": "1"})

    assert status_of(job) == JobStatus.CANCELING
    assert page_of(job) not in as_ann.get("/").content.decode()
