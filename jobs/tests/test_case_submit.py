"""Field cases: the photo and the graph on their way to ComfyUI."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from fake_comfy import FakeComfy
from jobs.models import Job
from jobs.tests.go_between import GoBetween, Reply, html_reply, json_reply
from jobs.tests.helpers import (
    fresh,
    let_lease_expire,
    make_user,
    make_worker,
    photo_bytes,
    queue_job,
    run_until_done,
    start,
    wait_until,
)
from jobs.tests.helpers_api import client_of, post_portrait
from jobs.tests.processes import worker_process
from jobs.tests.test_worker import runs

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(180)]
# For those with threads or processes of their own.
committed = pytest.mark.django_db(transaction=True)


@pytest.fixture
def between(fake: FakeComfy) -> Iterator[GoBetween]:
    with GoBetween(fake.url) as server:
        yield server


def load_image_of(fake: FakeComfy, job: Job) -> str:
    """Return what LoadImage was told to load for this job."""
    sent = [r.json for r in fake.requests if (r.method, r.path) == ("POST", "/prompt")]
    prompt = next(body["prompt"] for body in sent if body["prompt_id"] == str(job.pk))
    return str(prompt["12"]["inputs"]["image"])


def partly_refused(reply: Reply, node: str) -> Reply:
    error = {"type": "value_not_in_list", "message": "Value not in list", "details": "x"}
    entry = {"class_type": "SaveImage", "errors": [error], "dependent_outputs": [node]}
    return json_reply(reply.json | {"node_errors": {node: entry}})


EMPTY: dict[str, list[Any]] = {"queue_running": [], "queue_pending": []}


# the answer got lost


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        html_reply(504, "504 Gateway Time-out"),
        html_reply(502, "502 Bad Gateway"),
        Reply(500, b"500 Internal Server Error\n\nServer got itself in trouble"),
        html_reply(200, "Welcome to nginx!"),
        Reply(200, b'{"prompt_id": "'),
        json_reply({"prompt_id": "123", "number": 1, "node_errors": {}}),
    ],
)
def test_a_prompt_that_was_queued_under_a_bad_answer_is_found_and_not_sent_again(
    fake: FakeComfy, between: GoBetween, answer: Reply | bytes
) -> None:
    between.spoil("POST /prompt", answer)
    job = queue_job()

    row = run_until_done(job, make_worker(between.url))

    assert (row.status, row.attempt, row.outputs.count()) == ("succeeded", 1, 1)
    assert runs(fake, job) == (1, 1)


def test_a_prompt_whose_answer_and_look_both_fail_is_found_on_the_next_attempt(
    fake: FakeComfy, between: GoBetween
) -> None:
    between.spoil("POST /prompt", b"")
    job = queue_job()
    worker = make_worker(between.url)
    between.instead("GET /queue", lambda seen: b"" if runs(fake, job)[0] else json_reply(EMPTY), 2)

    worker.run_once()
    assert (fresh(job).status, fresh(job).step, fresh(job).attempt) == ("queued", "submit", 2)

    row = run_until_done(job, worker)
    assert (row.status, row.attempt) == ("succeeded", 2)
    assert runs(fake, job) == (1, 1)


def test_a_picture_drawn_under_an_id_of_the_servers_own_is_found_by_its_name(
    fake: FakeComfy,
) -> None:
    fake.fault("wrong_id", times=None)
    job = queue_job()
    worker = make_worker(fake.url)
    worker.run_once()
    assert (fresh(job).status, fresh(job).attempt) == ("queued", 2)
    picture = fake.data / "output" / "genflow" / f"{job.pk}_00001_.png"
    wait_until(picture.exists)

    row = run_until_done(job, worker)

    assert (row.status, row.outputs.count()) == ("succeeded", 1)
    assert sum(r.path == "/prompt" for r in fake.requests) == 1


def test_a_server_that_makes_ids_of_its_own_fails_in_words_and_after_a_few_runs(
    fake: FakeComfy,
) -> None:
    fake.seconds = 20
    fake.fault("wrong_id", times=None)
    job = queue_job(max_attempts=3)

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.attempt) == ("failed", 3)
    assert "another prompt_id" in row.error_detail
    assert sum(r.path == "/prompt" for r in fake.requests) == 3


# a part of the graph was dropped


def test_an_output_of_somebody_elses_node_that_was_left_out_does_no_harm(
    fake: FakeComfy, between: GoBetween
) -> None:
    between.spoil("POST /prompt", lambda reply: partly_refused(reply, "40"))
    job = queue_job()

    row = run_until_done(job, make_worker(between.url))

    assert (row.status, row.attempt, row.outputs.count()) == ("succeeded", 1, 1)
    assert runs(fake, job) == (1, 1)


def test_a_portrait_that_was_left_out_of_its_own_graph_fails_and_is_not_sent_twice(
    fake: FakeComfy, between: GoBetween
) -> None:
    between.spoil("POST /prompt", lambda reply: partly_refused(reply, "9"), None)
    job = queue_job()

    row = run_until_done(job, make_worker(between.url))

    assert row.error is not None
    assert (row.status, row.error["code"], row.attempt) == ("failed", "graph_refused", 1)
    assert "value_not_in_list" in row.error_detail
    assert runs(fake, job)[0] == 1


# names of photos


def test_a_photo_kept_under_another_name_is_loaded_by_that_name(fake: FakeComfy) -> None:
    job = queue_job()
    taken = fake.data / "input" / "genflow" / f"{job.pk}-0.jpeg"
    taken.parent.mkdir(parents=True, exist_ok=True)
    taken.write_bytes(photo_bytes("red"))

    row = run_until_done(job, make_worker(fake.url))

    assert row.status == "succeeded"
    assert load_image_of(fake, job) == f"genflow/{job.pk}-0 (1).jpeg"


def test_a_photo_without_a_folder_in_the_answer_is_loaded_from_where_it_is_said_to_be(
    fake: FakeComfy, between: GoBetween
) -> None:
    between.spoil("POST /upload/image", json_reply({"name": "elsewhere.jpeg"}))
    (fake.data / "input" / "elsewhere.jpeg").write_bytes(photo_bytes())
    job = queue_job()

    row = run_until_done(job, make_worker(between.url))

    assert row.status == "succeeded"
    assert load_image_of(fake, job) == "elsewhere.jpeg"


@committed
def test_two_users_who_both_send_image_png_each_get_their_own_face(fake: FakeComfy) -> None:
    faces = {"ann": photo_bytes("red"), "bob": photo_bytes("blue")}
    jobs = {}
    for name, face in faces.items():
        photo = SimpleUploadedFile("image.png", face, "image/png")
        answer = post_portrait(client_of(make_user(name)), photo=photo)
        jobs[name] = Job.objects.get(pk=answer.json()["id"])

    worker = make_worker(fake.url)
    while worker.run_once():
        pass

    for job in jobs.values():
        stored = fake.data / "input" / load_image_of(fake, job)
        assert fresh(job).status == "succeeded"
        assert stored.read_bytes() == job.inputs.get().file.open().read()
        assert "image" not in stored.name
    assert len({load_image_of(fake, job) for job in jobs.values()}) == 2


# the known gap: POST /prompt on its way while its worker is frozen or dead


def leave_a_prompt_on_its_way(between: GoBetween, job: Job) -> Callable[[], None]:
    """Kill a worker whose POST /prompt has not reached ComfyUI yet; return what lets it arrive."""
    hold = between.hold("POST /prompt")
    with worker_process(between.url) as victim:
        assert hold.arrived.wait(50)
        victim.kill()
    let_lease_expire(job)
    return hold.release


@committed
def test_a_prompt_that_arrives_late_beside_its_double_is_deleted_from_the_queue(
    fake: FakeComfy, between: GoBetween
) -> None:
    fake.seconds = 3
    job = queue_job()
    let_it_arrive = leave_a_prompt_on_its_way(between, job)
    second = start(make_worker(between.url).run_once)
    wait_until(lambda: runs(fake, job) == (1, 1))

    let_it_arrive()
    second.join()

    counts = fake.prompts[str(job.pk)]
    assert (fresh(job).status, fresh(job).outputs.count()) == ("succeeded", 1)
    assert (counts["submitted"], counts["executed"], counts["deleted"]) == (2, 1, 1)


@committed
def test_a_prompt_that_arrives_after_its_double_has_finished_costs_the_gpu_nothing(
    fake: FakeComfy, between: GoBetween
) -> None:
    job = queue_job()
    let_it_arrive = leave_a_prompt_on_its_way(between, job)
    row = run_until_done(job, make_worker(between.url))

    let_it_arrive()
    wait_until(lambda: fake.prompts[str(job.pk)]["finished"] == 2)

    counts = fake.prompts[str(job.pk)]
    assert (row.status, row.outputs.count()) == ("succeeded", 1)
    assert (counts["submitted"], counts["executed"], counts["cached"]) == (2, 1, 1)


def test_what_is_sent_names_the_job_and_no_other_origin(fake: FakeComfy) -> None:
    run_until_done(queue_job(), make_worker(fake.url))

    assert len(fake.requests) > 5
    assert not [r for r in fake.requests if "Origin" in r.headers or "Cookie" in r.headers]
    assert "me.jpg" not in json.dumps([r.json for r in fake.requests])
