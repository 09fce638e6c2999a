"""A request that comes again, because its sender lost the answer, makes nothing twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import requests
from django.db import connection, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.test import Client
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from jobs.errors import ApiError
from jobs.housekeeping import SWEEP_BATCH, sweep
from jobs.idempotency import fingerprint
from jobs.models import (
    AlreadyMade,
    Asset,
    Blob,
    IdempotencyKey,
    Job,
    JobQuerySet,
    KeyReused,
    Once,
    new_id,
)
from jobs.photos import photo_rules, read_photo
from jobs.tests.databases import fetch
from jobs.tests.go_between import GoBetween
from jobs.tests.helpers import make_user, photo_bytes, start, wait_until
from jobs.tests.helpers_api import (
    API,
    Answer,
    client_of,
    error_of,
    finish,
    photo_file,
    picture_bytes,
    post_portrait,
    token_of,
)
from jobs.tests.processes import web_process

pytestmark = pytest.mark.django_db
PORTRAITS = f"{API}/portraits"


def send(client: Client, key: str, **fields: Any) -> Answer:
    form = {"photo": photo_file(), "prompt": "a quiet portrait"} | fields
    return client.post(PORTRAITS, form, headers={"Idempotency-Key": key})


def let_expire() -> None:
    IdempotencyKey.objects.update(expires_at=Now() - timedelta(seconds=1))


# --- the same again ---


def test_a_request_sent_again_with_its_key_gets_the_same_job() -> None:
    ann = client_of()

    first, again = send(ann, "k1"), send(ann, "k1")

    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    assert again["Location"] == first["Location"]
    assert "Idempotency-Replayed" not in first
    assert again["Idempotency-Replayed"] == "true"
    assert Job.objects.count() == Asset.objects.count() == Blob.objects.count() == 1


def test_the_job_is_told_as_it_is_now() -> None:
    ann = client_of()
    send(ann, "k1")
    finish(Job.objects.get(), picture_bytes())

    again = send(ann, "k1").json()

    assert again["status"] == "succeeded"
    assert len(again["outputs"]) == 1


@pytest.mark.parametrize("end", ["failed", "canceled"])
def test_a_job_that_ended_badly_is_not_made_again_by_its_key(end: str) -> None:
    ann = client_of()
    send(ann, "k1")
    Job.objects.update(status=end, completed_at=Now())

    assert send(ann, "k1").json()["status"] == end
    assert Job.objects.count() == 1


def test_the_photo_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ann = client_of()
    send(ann, "k1")
    monkeypatch.setattr("jobs.views.read_photo", lambda *args, **limits: pytest.fail("decoded"))

    assert send(ann, "k1").status_code == 201


def test_how_the_form_is_packed_makes_no_difference() -> None:
    ann = client_of()
    first = send(ann, "k1", steps=4)

    again = ann.post(
        PORTRAITS,
        b"--other\r\n".join(
            [
                b"",
                b'Content-Disposition: form-data; name="steps"\r\n\r\n4\r\n',
                b'Content-Disposition: form-data; name="prompt"\r\n\r\na quiet portrait\r\n',
                b'Content-Disposition: form-data; name="photo"; filename="x"\r\n\r\n'
                + photo_bytes()
                + b"\r\n--other--\r\n",
            ]
        ),
        content_type="multipart/form-data; boundary=other",
        headers={"Idempotency-Key": "k1"},
    )

    assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])


@pytest.mark.parametrize(
    "changed", [{"prompt": "another"}, {"steps": 5}, {"photo": photo_file(photo_bytes("red"))}]
)
def test_a_key_is_good_for_one_request_alone(changed: dict[str, Any]) -> None:
    ann = client_of()
    send(ann, "k1")

    other = send(ann, "k1", **changed)

    assert (other.status_code, error_of(other)["code"]) == (422, "idempotency_key_reuse")
    assert Job.objects.count() == 1


def test_another_owner_has_keys_of_their_own() -> None:
    first, other = send(client_of(), "k1"), send(client_of(make_user("bob")), "k1")

    assert other.status_code == 201
    assert other.json()["id"] != first.json()["id"]


def test_without_a_key_each_request_makes_a_job() -> None:
    ann = client_of()
    post_portrait(ann)
    post_portrait(ann)

    assert Job.objects.count() == 2


@pytest.mark.parametrize(
    "key",
    ["", "a b", " ", "k" * 256, "k" * 300, "a%00b", "a\0b", "a\tb", "\x7f", "é", "🌅", "a\x80"],
)
def test_a_key_that_cannot_be_one_is_refused_in_a_sentence(key: str) -> None:
    response = send(client_of(), key)

    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "invalid_idempotency_key")
    assert "1 to 255 printable ASCII characters" in error["message"]
    assert not Job.objects.exists()


@pytest.mark.parametrize("key", ["k" * 255, "!", '"8e03978e-40d5-43dd-bc93-6efed5e1ef63"', "~%20"])
def test_any_other_is_taken(key: str) -> None:
    assert send(client_of(), key).status_code == 201


# --- the end of a key ---


def test_a_request_that_made_nothing_leaves_its_key_as_new(settings: Settings) -> None:
    ann = client_of()
    settings.GENFLOW_QUEUE_LIMIT = 0
    statuses = [send(ann, "k1").status_code, send(ann, "k1", steps=0).status_code]
    settings.GENFLOW_QUEUE_LIMIT = 10

    statuses += [send(ann, "k1", prompt="at last").status_code]

    assert statuses == [429, 422, 201]


def test_the_key_of_a_job_that_was_deleted_stays_spent() -> None:
    ann = client_of()
    ann.delete(send(ann, "k1")["Location"])

    again = send(ann, "k1")

    assert (again.status_code, error_of(again)["code"]) == (422, "idempotency_key_reuse")
    assert "deleted" in error_of(again)["message"]
    assert not Job.objects.exists()


def test_after_a_day_a_key_is_as_new() -> None:
    ann = client_of()
    first = send(ann, "k1")
    left = IdempotencyKey.objects.values_list(F("expires_at") - Now(), flat=True).get()
    assert timedelta(hours=23) < left <= timedelta(hours=24)
    let_expire()

    again = send(ann, "k1", prompt="another")

    assert again.status_code == 201
    assert again.json()["id"] != first.json()["id"]
    assert send(ann, "k1", prompt="another")["Idempotency-Replayed"] == "true"


def test_old_keys_are_swept_away_and_young_ones_stay() -> None:
    owner = make_user()
    rows = [Once(owner.pk, f"k{n}", "") for n in range(2 * SWEEP_BATCH + 1)]
    for once in rows:
        IdempotencyKey.objects.spend(once, new_id())
    let_expire()
    IdempotencyKey.objects.spend(Once(owner.pk, "young", ""), new_id())

    sweep()

    assert IdempotencyKey.objects.get().key == "young"


# --- at the same moment ---


def spend(once: Once) -> None:
    with transaction.atomic():
        IdempotencyKey.objects.spend(once, new_id())


@pytest.mark.django_db(transaction=True)
def test_while_a_request_is_under_way_another_like_it_is_asked_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ann = client_of()
    answers: list[Answer] = []

    def meanwhile(*args: Any) -> None:
        monkeypatch.undo()
        thread = start(lambda: answers.append(send(ann, "k1")))
        thread.join()

    monkeypatch.setattr(JobQuerySet, "_check_room", meanwhile)
    first = send(ann, "k1")

    assert first.status_code == 201
    assert (answers[0].status_code, error_of(answers[0])["code"]) == (409, "idempotency_in_flight")
    assert int(answers[0]["Retry-After"]) >= 1
    assert send(ann, "k1").json()["id"] == first.json()["id"]


@pytest.mark.django_db(transaction=True)
def test_whoever_is_patient_waits_for_the_one_under_way() -> None:
    once = Once(make_user().pk, "k1", "", patient=True)
    seen: list[Exception] = []

    def second() -> None:
        with pytest.raises(AlreadyMade) as made:
            spend(once)
        seen.append(made.value)

    with transaction.atomic():
        IdempotencyKey.objects.spend(once, new_id())
        thread = start(second)
        wait_until(lambda: fetch("SELECT 1 FROM pg_locks WHERE NOT granted"))
    thread.join()

    assert len(seen) == 1


@pytest.mark.django_db(transaction=True)
def test_a_request_that_dies_half_way_blocks_nobody() -> None:
    once = Once(make_user().pk, "k1", "", patient=True)  # the server hears of a death in a moment

    def die() -> None:
        transaction.set_autocommit(False)
        IdempotencyKey.objects.spend(once, new_id())
        connection.connection.close()

    start(die).join()

    spend(once)
    assert IdempotencyKey.objects.count() == 1


@pytest.fixture
def two_servers() -> Iterator[list[str]]:
    with web_process() as one, web_process() as other:
        yield [one.url, other.url]


@pytest.mark.django_db(transaction=True)
def test_of_twenty_posts_at_once_on_two_servers_one_makes_the_job(two_servers: list[str]) -> None:
    headers = {"Authorization": f"Bearer {token_of(make_user())}", "Idempotency-Key": "k1"}
    gate = threading.Barrier(20)
    answers: list[requests.Response] = []

    def post(url: str) -> None:
        gate.wait(20)
        while True:
            answer = requests.post(
                url + PORTRAITS,
                files={"photo": ("me.jpg", photo_bytes(), "image/jpeg")},
                data={"prompt": "a quiet portrait"},
                headers=headers,
                timeout=30,
            )
            answers.append(answer)
            if answer.status_code != 409:
                return

    threads = [start(partial(post, url)) for url in two_servers * 10]
    for thread in threads:
        thread.join()

    assert Job.objects.count() == Asset.objects.count() == Blob.objects.count() == 1
    made = [answer for answer in answers if answer.status_code == 201]
    assert len(made) == 20
    assert {answer.json()["id"] for answer in made} == {str(Job.objects.get().pk)}
    assert sum("Idempotency-Replayed" not in answer.headers for answer in made) == 1
    in_flight = [answer.json()["error"]["code"] for answer in answers if answer not in made]
    assert set(in_flight) <= {"idempotency_in_flight"}


@pytest.mark.django_db(transaction=True)
def test_an_answer_that_was_lost_on_its_way_is_got_by_asking_again(live_server: LiveServer) -> None:
    headers = {"Authorization": f"Bearer {token_of(make_user())}", "Idempotency-Key": "k1"}

    def post(url: str) -> requests.Response:
        photo = {"photo": ("me.jpg", photo_bytes(), "image/jpeg")}
        return requests.post(
            url + PORTRAITS, files=photo, data={"prompt": "x"}, headers=headers, timeout=30
        )

    with GoBetween(live_server.url) as between:
        between.spoil(f"POST {PORTRAITS}", b"")
        with pytest.raises(requests.ConnectionError):
            post(between.url)
        again = post(between.url)

    assert again.json()["id"] == str(Job.objects.get().pk)
    assert again.headers["Idempotency-Replayed"] == "true"


# --- what makes two requests the same ---


def test_json_is_compared_by_what_it_says_without_credentials() -> None:
    one = json.loads('{"workflow": {"1": {"a": 1, "b": [1, 2]}}, "extra_data": {"key": "secret"}}')
    same = json.loads('{"workflow": {"1": {"b": [1, 2], "a": 1}}}')
    other = json.loads('{"workflow": {"1": {"b": [2, 1], "a": 1}}}')

    assert fingerprint("/jobs", one) == fingerprint("/jobs", same) != fingerprint("/jobs", other)
    assert fingerprint("/jobs", one) != fingerprint("/assets", one)


def test_json_too_deep_to_compare_is_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]

    with pytest.raises(ApiError):
        fingerprint("/jobs", deep)


def test_a_file_is_read_for_the_comparison_and_again_for_its_use() -> None:
    file = photo_file()

    fingerprint("/portraits", {"photo": file})

    assert read_photo(file, photo_rules()).width == 96


def test_a_field_that_says_what_a_file_would_is_no_file() -> None:
    once = Once(make_user().pk, "k1", fingerprint("/p", {"photo": photo_file()}))
    spend(once)

    for impostor in ({"photo": "me.jpg"}, {"photo": [photo_file()]}):
        with pytest.raises(KeyReused):
            spend(Once(once.owner_id, "k1", fingerprint("/p", impostor)))
