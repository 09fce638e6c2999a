from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.test import Client
from pytest_django import Settings

from jobs.models import Asset, Job
from jobs.tests.helpers import make_user, queue_job
from jobs.tests.helpers_api import API, check, client_of, error_of, finish, picture_bytes

pytestmark = pytest.mark.django_db


def finished_job() -> tuple[Job, Asset]:
    job = queue_job()
    (picture,) = finish(job, picture_bytes())
    return job, picture


def content_path(asset: Asset) -> str:
    return f"{API}/assets/{asset.pk}/content"


def link_to(asset: Asset) -> str:
    url: str = client_of().get(f"{API}/assets/{asset.pk}").json()["url"]
    return url


def test_the_image_of_a_job_is_its_first_picture() -> None:
    job = queue_job()
    finish(job, picture_bytes("red"), picture_bytes("blue"))

    response = client_of().get(f"{API}/jobs/{job.pk}/image")

    assert response.status_code == 200
    assert response.getvalue() == picture_bytes("red")
    assert response["Content-Type"] == "image/png"
    assert response["Content-Length"] == str(len(picture_bytes("red")))
    assert response["Content-Disposition"] == 'inline; filename="portrait_00001_.png"'
    assert response["X-Content-Type-Options"] == "nosniff"
    assert response["Content-Security-Policy"] == "sandbox"
    assert response["Cache-Control"] == "private, no-store"


def test_a_job_without_a_picture_has_none_yet() -> None:
    response = client_of().get(f"{API}/jobs/{queue_job().pk}/image")

    assert (response.status_code, error_of(response)["code"]) == (404, "output_unavailable")


def test_a_picture_whose_bytes_are_gone_is_not_there() -> None:
    job, picture = finished_job()
    picture.file.storage.delete(picture.file.name or "")

    for path in (f"{API}/jobs/{job.pk}/image", content_path(picture)):
        response = client_of().get(path)

        assert (response.status_code, error_of(response)["code"]) == (404, "output_unavailable")


@pytest.mark.parametrize("accept", ["image/png", "image/*", "text/html", "application/json"])
def test_a_picture_is_sent_whatever_the_client_would_rather_have(accept: str) -> None:
    job, _picture = finished_job()

    response = client_of().get(f"{API}/jobs/{job.pk}/image", headers={"Accept": accept})

    assert (response.status_code, response["Content-Type"]) == (200, "image/png")


def test_head_tells_the_same_without_the_bytes() -> None:
    _job, picture = finished_job()

    response = client_of().head(content_path(picture), headers={"Range": "bytes=0-1"})

    assert (response.status_code, response.content) == (200, b"")
    assert response["Content-Length"] == str(picture.size)


def test_an_asset_tells_what_it_is_and_where_its_bytes_are() -> None:
    job, picture = finished_job()

    body = client_of().get(f"{API}/assets/{picture.pk}").json()

    check("Asset", body)
    assert (body["id"], body["job_id"], body["hash"]) == (
        str(picture.pk),
        str(job.pk),
        picture.hash,
    )
    assert Client().get(body["url"]).getvalue() == picture_bytes()


def test_an_uploaded_photo_is_an_asset_without_a_job() -> None:
    photo = queue_job().inputs.get()

    body = client_of().get(f"{API}/assets/{photo.pk}").json()

    check("Asset", body)
    assert "job_id" not in body


# --- who may see them ---


@pytest.mark.parametrize("path", ["", "/content"])
def test_someone_elses_asset_is_answered_like_none(path: str) -> None:
    _job, picture = finished_job()
    bob = client_of(make_user("bob"))

    theirs = bob.get(f"{API}/assets/{picture.pk}{path}", headers={"If-None-Match": "*"})
    none = bob.get(f"{API}/assets/{uuid4()}{path}")

    assert theirs.status_code == none.status_code == 404
    assert theirs.content == none.content


@pytest.mark.parametrize("path", ["", "/content"])
def test_nobody_sees_an_asset(path: str) -> None:
    _job, picture = finished_job()

    response = Client().get(f"{API}/assets/{picture.pk}{path}")

    assert (response.status_code, error_of(response)["code"]) == (401, "unauthorized")


@pytest.mark.parametrize("folder", ["", "media/", "static/"])
def test_no_path_leads_to_a_file_by_its_name(folder: str) -> None:
    _job, picture = finished_job()

    assert client_of().get(f"/{folder}{picture.file.name}").status_code == 404


def test_a_link_is_good_for_its_own_picture_alone() -> None:
    _job, picture = finished_job()
    _other_job, other = finished_job()
    query = link_to(picture).partition("?")[2]

    assert Client().get(f"{content_path(picture)}?{query}").status_code == 200
    assert Client().get(f"{content_path(other)}?{query}").status_code == 401
    assert Client().get(f"{API}/assets/{picture.pk}?{query}").status_code == 401


@pytest.mark.parametrize(
    "query",
    [
        "",
        "?expires=99999999999&signature=",
        "?expires=99999999999&signature=x",
        "?expires=x&signature=%F0%9F%8C%85",
        "?signature=%00",
    ],
)
def test_a_made_up_link_opens_nothing(query: str) -> None:
    _job, picture = finished_job()

    assert Client().get(content_path(picture) + query).status_code == 401


def test_a_link_with_a_later_end_opens_nothing() -> None:
    _job, picture = finished_job()
    url = link_to(picture)

    assert Client().get(url.replace("?expires=", "?expires=9")).status_code == 401


def test_a_link_runs_out(settings: Settings) -> None:
    _job, picture = finished_job()
    settings.SIGNED_URL_LIFETIME = timedelta(seconds=-1)

    assert Client().get(link_to(picture)).status_code == 401


@pytest.mark.django_db(transaction=True)
def test_a_link_dies_with_the_job() -> None:
    job, picture = finished_job()
    url = link_to(picture)

    client_of().delete(f"{API}/jobs/{job.pk}")

    assert Client().get(url).status_code == 401


# --- parts and tags ---

SIZE = len(picture_bytes())


@pytest.mark.parametrize(
    ("header", "first", "last"),
    [
        ("bytes=0-4", 0, 4),
        ("bytes=5-", 5, SIZE - 1),
        ("bytes=-5", SIZE - 5, SIZE - 1),
        (f"bytes=5-{10**17}", 5, SIZE - 1),
        (f"bytes=-{10**17}", 0, SIZE - 1),
    ],
)
def test_one_range_of_bytes_is_served(header: str, first: int, last: int) -> None:
    _job, picture = finished_job()

    response = client_of().get(content_path(picture), headers={"Range": header})

    assert response.status_code == 206
    assert response.getvalue() == picture_bytes()[first : last + 1]
    assert response["Content-Range"] == f"bytes {first}-{last}/{SIZE}"


@pytest.mark.parametrize("header", [f"bytes={SIZE}-", f"bytes={10**17}-", "bytes=-0"])
def test_a_range_beyond_the_end_is_refused_with_the_size(header: str) -> None:
    _job, picture = finished_job()

    response = client_of().get(content_path(picture), headers={"Range": header})

    assert (response.status_code, response.content) == (416, b"")
    assert response["Content-Range"] == f"bytes */{SIZE}"


@pytest.mark.parametrize(
    "header",
    ["bytes=5-4", "bytes=a-b", "bytes=-", "bytes=0-1,3-4", "lines=0-4", "bytes=0-" + "9" * 5000],
)
def test_a_range_that_makes_no_sense_is_ignored(header: str) -> None:
    _job, picture = finished_job()

    response = client_of().get(content_path(picture), headers={"Range": header})

    assert (response.status_code, response.getvalue()) == (200, picture_bytes())


def test_what_the_client_has_is_not_sent_again_but_only_to_whom_may_have_it() -> None:
    _job, picture = finished_job()
    ann, bob = client_of(), client_of(make_user("bob"))
    tag = ann.get(content_path(picture))["ETag"]
    headers = {"If-None-Match": tag, "Range": "bytes=0-4"}

    assert ann.get(content_path(picture), headers=headers).status_code == 304
    assert bob.get(content_path(picture), headers=headers).status_code == 404


def test_a_part_of_another_version_is_sent_whole() -> None:
    _job, picture = finished_job()
    tag = client_of().get(content_path(picture))["ETag"]

    for if_range, status in ((tag, 206), ('"other"', 200)):
        headers = {"Range": "bytes=0-4", "If-Range": if_range}

        assert client_of().get(content_path(picture), headers=headers).status_code == status
