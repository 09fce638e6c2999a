from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from pytest_django import Settings

from jobs.models import Asset, Blob, Job
from jobs.tests.helpers import fresh, make_staff, make_user, photo_bytes
from jobs.tests.helpers_api import API, check, client_of, error_of, photo_file, post_portrait

pytestmark = pytest.mark.django_db


def assert_nothing_stored() -> None:
    assert not Job.objects.exists()
    assert not Asset.objects.exists()
    assert not Blob.objects.exists()


def test_a_portrait_is_accepted_and_queued() -> None:
    response = post_portrait(client_of())

    job = response.json()
    assert response.status_code == 201
    check("Job", job)
    assert (job["status"], job["queue_position"], job["kind"]) == ("queued", 1, "portrait")
    assert (job["attempt"], job["max_attempts"], job["resubmits"]) == (1, 5, 0)
    assert (job["error"], job["retry"], job["outputs"]) == (None, None, [])
    assert job["params"]["prompt"] == "a quiet portrait"
    assert response["Location"] == job["urls"]["self"] == f"{API}/jobs/{job['id']}"


def test_every_param_is_taken_and_echoed() -> None:
    params = {
        "prompt": "a portrait, söft light 🌅",
        "negative_prompt": "",
        "seed": 2**64 - 1,
        "width": 64,
        "height": 2048,
        "steps": 150,
        "cfg": 0.5,
        "lora": "film/grain.safetensors",
        "lora_strength": -1.5,
        "face_weight": 0,
        "likeness": 5,
        "count": 8,
    }
    response = post_portrait(client_of(), **params, priority=-3, metadata='{"shoot": "7"}')

    job = response.json()
    assert response.status_code == 201
    assert job["params"] == params
    assert f'"seed":{2**64 - 1}' in response.content.decode()
    assert (job["priority"], job["metadata"]) == (-3, {"shoot": "7"})


def test_what_is_left_blank_has_its_default() -> None:
    response = post_portrait(client_of(), seed="", width="", lora="", priority="", metadata=None)

    params = response.json()["params"]
    assert response.status_code == 201
    assert (params["width"], params["steps"], params["cfg"]) == (512, 30, 6.5)
    assert params["lora"] is None
    assert 0 <= params["seed"] < 2**64


WHOLE_SIZE = "Must be a whole number from 64 to 2048 in steps of 8."


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("photo", None, "Send a photo."),
        ("photo", "a text", "Must be a file."),
        ("prompt", None, "This field is required."),
        ("prompt", "", "Must have 1 to 5000 characters."),
        ("prompt", " \n ", "Must have 1 to 5000 characters."),
        ("prompt", "x" * 5001, "Must have 1 to 5000 characters."),
        ("prompt", "a\0b", "Null characters are not allowed."),
        ("prompt", "half \N{REPLACEMENT CHARACTER}", "Must be text in UTF-8."),
        ("negative_prompt", "x" * 5001, "Must have 0 to 5000 characters."),
        ("width", 63, WHOLE_SIZE),
        ("width", 65, WHOLE_SIZE),
        ("width", 2056, WHOLE_SIZE),
        ("height", "512.0", WHOLE_SIZE),
        ("height", "true", WHOLE_SIZE),
        ("height", "9" * 5000, WHOLE_SIZE),
        ("seed", -1, "Must be a whole number from 0 to 18446744073709551615."),
        ("seed", 2**64, "Must be a whole number from 0 to 18446744073709551615."),
        ("seed", "1e3", "Must be a whole number from 0 to 18446744073709551615."),
        ("steps", 0, "Must be a whole number from 1 to 150."),
        ("steps", 151, "Must be a whole number from 1 to 150."),
        ("count", 9, "Must be a whole number from 1 to 8."),
        ("cfg", -0.1, "Must be a number from 0 to 30."),
        ("cfg", "nan", "Must be a number from 0 to 30."),
        ("cfg", "inf", "Must be a number from 0 to 30."),
        ("cfg", "1e999", "Must be a number from 0 to 30."),
        ("cfg", "False", "Must be a number from 0 to 30."),
        ("face_weight", 3.01, "Must be a number from 0 to 3."),
        ("likeness", 5.5, "Must be a number from 0 to 5."),
        ("lora_strength", -2.5, "Must be a number from -2 to 2."),
        ("lora", "x" * 256, "Must have 1 to 255 characters."),
        ("priority", 101, "Must be a whole number from -100 to 100."),
        ("steps", photo_file(), "Must be a whole number from 1 to 150."),
        ("strength", 1, "There is no such field."),
        ("Prompt", "x", "There is no such field."),
        ("prompt", ["one", "two"], "Give it once."),
        ("steps", [4, 5], "Give it once."),
        ("photo", [photo_file(), photo_file()], "Give it once."),
    ],
)
def test_each_wrong_field_is_named_with_what_is_allowed(
    field: str, value: Any, sentence: str
) -> None:
    response = post_portrait(client_of(), **{field: value})

    error = error_of(response)
    assert (response.status_code, error["code"]) == (422, "invalid_request")
    assert error["details"] == {field: [sentence]}
    assert field in error["message"]
    assert_nothing_stored()


@pytest.mark.parametrize(
    "labels",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"a": 1}',
        '{"": "a"}',
        json.dumps({"k" * 65: "a"}),
        json.dumps({"a": "v" * 501}),
        json.dumps({str(n): "" for n in range(17)}),
        r'{"a": "\u0000"}',
        r'{"a": "\ud83d"}',
        r'{"\ud83d": "a"}',
    ],
)
def test_labels_that_cannot_be_kept_are_refused(labels: str) -> None:
    response = post_portrait(client_of(), metadata=labels)

    error = error_of(response)
    assert (response.status_code, error["code"]) == (422, "metadata_invalid")
    assert list(error["details"]) == ["metadata"]
    assert_nothing_stored()


def test_all_wrong_fields_are_named_at_once() -> None:
    response = post_portrait(client_of(), prompt="", width=1, style="x", photo=None)

    assert set(error_of(response)["details"]) == {"prompt", "width", "style", "photo"}


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"", 422, "bad_photo"),
        (photo_bytes()[:500], 422, "bad_photo"),
        (b"not a picture", 415, "photo_format"),
        (photo_bytes() + bytes(30_000), 413, "photo_too_large"),
    ],
)
def test_a_photo_that_is_of_no_use_is_refused(
    settings: Settings, content: bytes, status: int, code: str
) -> None:
    settings.GENFLOW_PHOTO_MAX_BYTES = 30_000

    response = post_portrait(client_of(), photo=photo_file(content))

    error = error_of(response)
    assert (response.status_code, error["code"]) == (status, code)
    assert error["details"] == {"photo": [error["message"]]}
    assert_nothing_stored()


@pytest.mark.parametrize("content", [photo_bytes(), photo_bytes() + bytes(3_000_000)])
@pytest.mark.parametrize(
    "name",
    [
        "n" * 300 + ".jpg",
        "me." + "e" * 300,
        "me.jp\0g",
        "\u202egpj.em 🌅.jpg",
        "../../me.jpg",
        "C:\\fakepath\\me.jpg",
        ".jpg",
        "me..jpg",
        "...",
        "selfie [output].png",
        "¡¡¡.¡¡",
    ],
)
def test_no_file_name_does_harm(name: str, content: bytes) -> None:
    response = client_of().post(
        f"{API}/portraits",
        raw_form(f'form-data; name="photo"; filename="{name}"', content),
        content_type="multipart/form-data; boundary=x",
    )

    assert response.status_code == 201
    assert name not in str(Asset.objects.get().file.name)


def test_a_part_whose_headers_are_not_utf_8_is_no_photo() -> None:
    response = client_of().post(
        f"{API}/portraits",
        raw_form('form-data; name="photo"; filename="me\udc80.jpg"', photo_bytes()),
        content_type="multipart/form-data; boundary=x",
    )

    assert error_of(response)["details"] == {"photo": ["Send a photo."]}


def raw_form(disposition: str, content: bytes) -> bytes:
    """A form of two parts, as a client would send it that cleans nothing."""
    head = f"Content-Disposition: {disposition}".encode(errors="surrogateescape")
    prompt = b'Content-Disposition: form-data; name="prompt"\r\n\r\na portrait'
    return b"".join(
        b"--x\r\n" + part + b"\r\n" for part in (prompt, head + b"\r\n\r\n" + content)
    ) + (b"--x--\r\n")


@pytest.mark.parametrize(
    ("content_type", "body", "status", "code"),
    [
        ("multipart/form-data", b"--x", 400, "bad_request"),  # no boundary
        ("multipart/form-data; boundary=\xff", b"--x", 400, "bad_request"),
        ("application/json", b'{"prompt": "x"}', 415, "unsupported_media_type"),
        ("application/x-www-form-urlencoded", b"prompt=x", 415, "unsupported_media_type"),
        ("image/jpeg", photo_bytes(), 415, "unsupported_media_type"),
        ("", b"x", 415, "unsupported_media_type"),
        ("", b"", 422, "invalid_request"),
    ],
)
def test_a_body_that_is_no_form_is_refused(
    content_type: str, body: bytes, status: int, code: str
) -> None:
    response = client_of().post(f"{API}/portraits", body, content_type=content_type)

    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert_nothing_stored()


def test_a_charset_that_is_none_of_text_does_no_harm() -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nhello\r\n--x--\r\n'

    response = client_of().generic(
        "POST", f"{API}/portraits", body, "multipart/form-data; boundary=x; charset=base64"
    )

    assert error_of(response)["details"] == {"photo": ["Send a photo."]}


def test_texts_of_megabytes_are_refused() -> None:
    response = post_portrait(client_of(), prompt="x" * 3_000_000)

    assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")


def test_a_thousand_fields_are_refused() -> None:
    response = post_portrait(client_of(), **{f"field{n}": "x" for n in range(1001)})

    assert (response.status_code, error_of(response)["code"]) == (400, "bad_request")


def test_a_full_queue_is_told_with_when_to_come_again(settings: Settings) -> None:
    settings.GENFLOW_QUEUE_LIMIT = 1
    post_portrait(client_of(make_user("bob")))

    response = post_portrait(client_of())

    assert (response.status_code, error_of(response)["code"]) == (429, "queue_full")
    assert int(response["Retry-After"]) >= 1
    assert Job.objects.count() == Asset.objects.count() == Blob.objects.count() == 1


def test_nobody_can_fill_the_queue_alone(settings: Settings) -> None:
    settings.GENFLOW_QUEUE_LIMIT_PER_OWNER = 1
    ann = client_of()
    post_portrait(ann)

    response = post_portrait(ann)

    assert (response.status_code, error_of(response)["code"]) == (429, "owner_queue_full")
    assert "Retry-After" in response
    assert post_portrait(client_of(make_user("bob"))).status_code == 201


@pytest.mark.django_db(transaction=True)
def test_of_many_submissions_at_once_exactly_as_many_as_fit_are_accepted(
    settings: Settings,
) -> None:
    settings.GENFLOW_QUEUE_LIMIT = 3
    clients = [client_of(make_user(f"user{n}")) for n in range(6)]
    start = threading.Barrier(len(clients))
    statuses: list[int] = []

    def submit(client: Client) -> None:
        start.wait()
        statuses.append(post_portrait(client).status_code)
        connection.close()

    threads = [threading.Thread(target=submit, args=[client]) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(statuses) == [201] * 3 + [429] * 3
    assert Job.objects.count() == Asset.objects.count() == Blob.objects.count() == 3


def test_the_place_in_the_queue_counts_from_one_in_the_order_of_the_queue() -> None:
    ann, staff = client_of(), client_of(make_staff("bob"))
    first, second = post_portrait(ann).json(), post_portrait(ann).json()
    urgent = post_portrait(staff, priority=1).json()

    places = [
        ann.get(first["urls"]["self"]).json()["queue_position"],
        ann.get(second["urls"]["self"]).json()["queue_position"],
        urgent["queue_position"],
    ]

    assert places == [2, 3, 1]


def test_only_staff_may_pass_everybody() -> None:
    response = post_portrait(client_of(), priority=1)

    assert response.status_code == 422
    assert "staff" in response.json()["error"]["details"]["priority"][0]
    assert not Job.objects.exists()


def test_the_owner_is_whoever_the_token_names() -> None:
    response = post_portrait(client_of(make_user("bob")))

    job = fresh(response.json()["id"])
    assert job.owner == make_user("bob")
    assert job.inputs.get().owner == make_user("bob")
