from __future__ import annotations

import pytest
from django.test import Client
from PIL import Image
from pytest_django import Settings

from jobs.models import Asset, Blob, Job
from jobs.tests.helpers import make_user, photo_bytes
from jobs.tests.helpers_api import API, Answer, client_of, error_of, photo_file, post_portrait
from jobs.tests.helpers_photos import encoded, head, sample, side_by_side

pytestmark = pytest.mark.django_db
TWO_FACES = encoded(side_by_side(head(200), head(400)), "JPEG")


def post_check(content: bytes, client: Client | None = None) -> Answer:
    return (client or client_of()).post(f"{API}/photos/check", {"photo": photo_file(content)})


def assert_nothing_stored() -> None:
    assert not Job.objects.exists()
    assert not Asset.objects.exists()
    assert not Blob.objects.exists()


def test_a_good_photo_passes_the_check_and_nothing_is_stored() -> None:
    response = post_check(encoded(sample(), "JPEG"))

    answer = response.json()
    assert response.status_code == 200
    assert (answer["ok"], answer["width"], answer["height"]) == (True, 512, 512)
    assert answer["warnings"] == []
    assert set(answer["face"]) == {"left", "top", "right", "bottom"}
    assert_nothing_stored()


def test_the_check_tells_of_doubts_and_of_the_size_that_would_be_stored() -> None:
    answer = post_check(TWO_FACES).json()

    assert [warning["code"] for warning in answer["warnings"]] == ["several_faces"]
    assert answer["width"] < 400


@pytest.mark.parametrize(
    "content", [b"", b"not a picture", photo_bytes()[:500], encoded(Image.new("L", (9, 9)), "PNG")]
)
def test_what_the_check_refuses_a_portrait_refuses_in_the_same_words(content: bytes) -> None:
    checked, sent = post_check(content), post_portrait(client_of(), photo=photo_file(content))

    assert (checked.status_code, error_of(checked)) == (sent.status_code, error_of(sent))
    assert_nothing_stored()


def test_the_check_is_for_who_is_known_alone() -> None:
    assert post_check(photo_bytes(), Client()).status_code == 401


def test_the_check_by_a_session_needs_its_csrf_token() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user())
    client.get("/new/")
    token = client.cookies["csrftoken"].value

    assert post_check(photo_bytes(), client).status_code == 403
    with_token = client.post(
        f"{API}/photos/check", {"photo": photo_file()}, headers={"X-CSRFToken": token}
    )
    assert with_token.status_code == 200


def test_a_check_without_a_photo_says_so() -> None:
    response = client_of().post(f"{API}/photos/check", {"prompt": "x"})

    assert error_of(response)["details"] == {
        "photo": ["Send a photo."],
        "prompt": ["There is no such field."],
    }


def test_a_portrait_of_several_faces_is_taken_with_a_warning_and_one_face() -> None:
    response = post_portrait(client_of(), photo=photo_file(TWO_FACES))

    job = response.json()
    assert response.status_code == 201
    assert [warning["code"] for warning in job["warnings"]] == ["several_faces"]
    assert Asset.objects.get().width < 400  # type: ignore[operator]


def test_a_good_photo_makes_a_job_without_warnings() -> None:
    response = post_portrait(client_of(), photo=photo_file(encoded(sample(), "PNG")))

    assert response.json()["warnings"] == []


def test_by_refusing_a_photo_of_several_faces_makes_no_job(settings: Settings) -> None:
    settings.GENFLOW_FACE_CHECK = "refuse"

    response = post_portrait(client_of(), photo=photo_file(TWO_FACES))

    assert (response.status_code, error_of(response)["code"]) == (422, "several_faces")
    assert_nothing_stored()


def test_switched_off_no_face_is_looked_for(settings: Settings) -> None:
    settings.GENFLOW_FACE_CHECK = "off"

    answer = post_check(TWO_FACES).json()

    assert (answer["width"], answer["face"], answer["warnings"]) == (600, None, [])


def test_the_stored_photo_is_as_large_as_the_setting_allows(settings: Settings) -> None:
    settings.GENFLOW_PHOTO_MAX_SIDE = 256

    post_portrait(client_of(), photo=photo_file(encoded(sample(), "JPEG")))

    photo = Asset.objects.get()
    assert (photo.width, photo.height, photo.content_type) == (256, 256, "image/jpeg")
