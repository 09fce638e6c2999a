"""Field cases: runs that end in success, and what they left or did not leave."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from fake_comfy import FakeComfy
from jobs.models import Asset, Blob, Job
from jobs.tests.go_between import GoBetween, Reply, html_reply, json_reply
from jobs.tests.helpers import (
    fresh,
    make_user,
    make_worker,
    photo_bytes,
    queue_job,
    run_until_done,
    start,
)
from jobs.tests.test_worker import runs, stop_after_submit

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(180)]
# For those with threads or processes of their own.
committed = pytest.mark.django_db(transaction=True)
OK = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"


@pytest.fixture
def between(fake: FakeComfy) -> Iterator[GoBetween]:
    with GoBetween(fake.url) as server:
        yield server


def outputs_spoiled(
    change: Callable[[str, dict[str, Any]], dict[str, Any]],
) -> Callable[[Reply], Reply]:
    """Return what changes the outputs of a finished run: `change` gets the job's id and its outputs."""

    def spoil(reply: Reply) -> Reply:
        history = reply.json
        for prompt_id, entry in history.items():
            entry["outputs"] = change(prompt_id, entry["outputs"])
        return json_reply(history)

    return spoil


def prefixes(fake: FakeComfy) -> list[str]:
    sent = [r.json for r in fake.requests if (r.method, r.path) == ("POST", "/prompt")]
    return [body["prompt"]["9"]["inputs"]["filename_prefix"] for body in sent]


def assert_nothing_is_left_over() -> None:
    assert Blob.objects.count() == Asset.objects.count()


# which pictures


def test_only_the_portraits_node_counts_however_many_nodes_saved_pictures(
    fake: FakeComfy, between: GoBetween
) -> None:
    def add_nodes(prompt_id: str, outputs: dict[str, Any]) -> dict[str, Any]:
        image = outputs["9"]["images"][0]
        return {
            "40": {"images": [image]},
            "12": {"text": ["hi"]},
            "9": outputs["9"],
            "31": {"images": [image | {"type": "temp"}]},
            "15": {"images": [], "animated": [False]},
        }

    between.spoil("GET /history", outputs_spoiled(add_nodes), None)
    job = queue_job(count=2)

    row = run_until_done(job, make_worker(between.url))

    assert row.status == "succeeded"
    assert list(row.outputs.values_list("node_id", "name")) == [
        ("9", "portrait_00001.png"),
        ("9", "portrait_00002.png"),
    ]


@committed
def test_a_batch_keeps_its_order_over_a_restart(fake: FakeComfy) -> None:
    job = queue_job(count=3)
    stop_after_submit(make_worker(fake.url), fake, job)
    fake.restart()

    row = run_until_done(job, make_worker(fake.url))

    fetched = [r.query["filename"] for r in fake.requests if (r.method, r.path) == ("GET", "/view")]
    assert fetched == [f"{job.pk}_0000{n}_.png" for n in (1, 2, 3)]
    assert row.outputs.count() == 3


@committed
def test_a_batch_of_which_a_restart_left_only_a_part_is_drawn_again(fake: FakeComfy) -> None:
    job = queue_job(count=2)
    stop_after_submit(make_worker(fake.url), fake, job)
    (fake.data / "output" / "genflow" / f"{job.pk}_00002_.png").unlink()
    fake.restart()

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.resubmits, row.outputs.count()) == ("succeeded", 1, 2)


# the cache


def test_a_success_whose_outputs_all_came_from_the_cache_is_drawn_past_the_cache(
    fake: FakeComfy, between: GoBetween
) -> None:
    job = queue_job()

    def from_the_cache(reply: Reply) -> Reply:
        history = outputs_spoiled(lambda prompt_id, outputs: {})
        return reply if len(prefixes(fake)) > 1 else history(reply)

    between.spoil("GET /history", from_the_cache, None)

    row = run_until_done(job, make_worker(between.url))

    assert (row.status, row.attempt, row.outputs.count()) == ("succeeded", 2, 1)
    assert prefixes(fake) == [f"genflow/{job.pk}", f"genflow/{job.pk}-r1"]


@pytest.mark.parametrize("fault", ["empty_outputs", "black_picture", "view_404", "corrupt_view"])
def test_a_picture_that_never_comes_right_fails_in_words_after_a_few_tries(
    fake: FakeComfy, fault: str
) -> None:
    fake.fault(fault, times=None)
    job = queue_job(max_attempts=3)

    row = run_until_done(job, make_worker(fake.url))

    assert row.error is not None
    assert (row.status, row.error["code"], row.attempt) == ("failed", "bad_picture", 3)
    assert len(set(prefixes(fake))) == 3
    assert not row.outputs.exists()
    assert_nothing_is_left_over()


def test_a_cached_answer_whose_file_was_cleaned_away_is_drawn_past_the_cache(
    fake: FakeComfy, between: GoBetween
) -> None:
    job = queue_job()

    def gone(reply: Reply) -> Reply:
        return reply if len(prefixes(fake)) > 1 else Reply(404)

    between.spoil("GET /view", gone, None)

    row = run_until_done(job, make_worker(between.url))

    assert (row.status, row.attempt, row.outputs.count()) == ("succeeded", 2, 1)
    assert prefixes(fake)[1] != prefixes(fake)[0]
    assert_nothing_is_left_over()


# broken on the way


def cut(body: bytes) -> bytes:
    return OK + b"Content-Length: %d\r\n\r\n" % len(body) + body[: len(body) // 3]


def cut_chunks(body: bytes) -> bytes:
    half = len(body) // 2
    return OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % half + body[:half] + b"\r\n"


def cut_without_a_length(body: bytes) -> bytes:
    return OK + b"Connection: close\r\n\r\n" + body[: len(body) // 2]


def nothing(body: bytes) -> bytes:
    return OK + b"Content-Length: 0\r\n\r\n"


def zeros_at_the_end(body: bytes) -> bytes:
    spoiled = body[: len(body) // 2] + bytes(len(body) - len(body) // 2)
    return OK + b"Content-Length: %d\r\n\r\n" % len(body) + spoiled


def a_web_page(body: bytes) -> bytes:
    return OK + b"Content-Length: 15\r\n\r\n<html>hi</html>"


@committed
@pytest.mark.parametrize(
    "spoil", [cut, cut_chunks, cut_without_a_length, nothing, zeros_at_the_end, a_web_page]
)
def test_a_picture_that_arrives_broken_is_fetched_again_and_never_shown(
    fake: FakeComfy, between: GoBetween, spoil: Callable[[bytes], bytes]
) -> None:
    seen: list[tuple[str, int]] = []
    job = queue_job()

    def broken(reply: Reply) -> bytes:
        return spoil(reply.body)

    def watched(reply: Reply) -> Reply:
        row = fresh(job)
        seen.append((row.status, row.outputs.count()))
        connection.close()  # of the go-between's thread
        return reply

    between.spoil("GET /view", watched)
    between.spoil("GET /view", broken, 2)

    row = run_until_done(job, make_worker(between.url))

    assert (row.status, row.attempt, row.outputs.count()) == ("succeeded", 1, 1)
    assert seen == [("running", 0)]
    assert runs(fake, job) == (1, 1)
    assert_nothing_is_left_over()


@pytest.mark.parametrize("answer", [Reply(500), html_reply(502), html_reply(200, "Log in"), b""])
def test_a_picture_that_a_proxy_keeps_back_is_fetched_later_and_not_drawn_again(
    fake: FakeComfy, between: GoBetween, answer: Reply | bytes
) -> None:
    between.instead("GET /view", answer, 4)
    job = queue_job()

    row = run_until_done(job, make_worker(between.url))

    assert (row.status, row.attempt) == ("succeeded", 2)
    assert runs(fake, job) == (1, 1)


def test_a_picture_without_end_is_given_up_at_once(fake: FakeComfy, between: GoBetween) -> None:
    between.instead("GET /view", Reply(200, bytes(200_000)), None)
    job = queue_job()

    row = run_until_done(job, make_worker(between.url, output_max_bytes=100_000))

    assert (row.status, row.attempt) == ("failed", 1)
    assert row.error is not None
    assert row.error["code"] == "output_too_large"
    assert "more than 100000 bytes" in row.error_detail


def test_one_bad_picture_of_a_batch_leaves_none_of_the_others_behind(
    fake: FakeComfy, between: GoBetween
) -> None:
    job = queue_job(count=3, max_attempts=1)
    pictures: list[bool] = []

    def third_is_gone(reply: Reply) -> Reply:
        pictures.append(True)
        return reply if len(pictures) < 3 else Reply(404)

    between.spoil("GET /view", third_is_gone, None)

    row = run_until_done(job, make_worker(between.url))

    assert (row.status, row.outputs.count()) == ("failed", 0)
    assert_nothing_is_left_over()


# another run


def test_the_picture_of_another_run_is_never_taken(fake: FakeComfy, between: GoBetween) -> None:
    first = queue_job(make_user("ann"), photo=photo_bytes("red"))
    assert run_until_done(first, make_worker(fake.url)).status == "succeeded"
    foreign = {"filename": f"{first.pk}_00001_.png", "subfolder": "genflow", "type": "output"}
    second = queue_job(make_user("bob"), photo=photo_bytes("blue"), max_attempts=2)
    between.spoil("GET /history", outputs_spoiled(lambda *run: {"9": {"images": [foreign]}}), None)

    row = run_until_done(second, make_worker(between.url))

    assert row.error is not None
    assert (row.status, row.error["code"]) == ("failed", "bad_picture")
    assert not [seen for seen in between.requests("GET /view") if str(first.pk) in seen.path]


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"subfolder": "genflow/../secret"},
        {"subfolder": "/etc"},
        {"subfolder": ""},
        {"filename": "../../etc/passwd"},
        {"filename": "x.png"},
    ],
)
def test_a_file_that_lies_anywhere_else_is_never_asked_for(
    fake: FakeComfy, between: GoBetween, elsewhere: dict[str, str]
) -> None:
    def move(prompt_id: str, outputs: dict[str, Any]) -> dict[str, Any]:
        return {"9": {"images": [image | elsewhere for image in outputs["9"]["images"]]}}

    between.spoil("GET /history", outputs_spoiled(move), None)
    job = queue_job(max_attempts=1)

    row = run_until_done(job, make_worker(between.url))

    assert (row.status, (row.error or {})["code"]) == ("failed", "bad_picture")
    assert not between.requests("GET /view")


@committed
def test_users_with_the_same_prompt_and_seed_get_their_own_pictures_though_history_is_late(
    fake: FakeComfy,
) -> None:
    red = queue_job(make_user("ann"), photo=photo_bytes("red"))
    blue = queue_job(make_user("bob"), photo=photo_bytes("blue"))
    fake.fault("late_history", times=2, seconds=2)

    worker = make_worker(fake.url)
    threads = [start(worker.run_once) for _ in range(2)]
    for thread in threads:
        thread.join()

    for job in (red, blue):
        assert fresh(job).status == "succeeded"
        assert runs(fake, job) == (1, 1)
        drawn = (fake.data / "output" / "genflow" / f"{job.pk}_00001_.png").read_bytes()
        assert pixels(drawn) == pixels(stored(job))
    assert stored(red) != stored(blue)


def stored(job: Job) -> bytes:
    with job.outputs.get().file.open() as file:
        content: bytes = file.read()
        return content


def pixels(png: bytes) -> list[bytes]:
    return re.findall(rb"IDAT(.*?)....IEND", png, re.DOTALL)


def test_only_the_history_of_the_jobs_own_prompt_is_read(fake: FakeComfy) -> None:
    job = queue_job()

    run_until_done(job, make_worker(fake.url))

    looked_at = {r.path for r in fake.requests if r.path.startswith("/history")}
    assert looked_at == {f"/history/{job.pk}"}


def test_a_history_entry_that_appears_late_is_not_waited_for_in_vain(fake: FakeComfy) -> None:
    fake.fault("late_history", seconds=600)
    job = queue_job()

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.attempt, row.resubmits) == ("succeeded", 1, 0)
    assert runs(fake, job) == (1, 1)
