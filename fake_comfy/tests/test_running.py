from __future__ import annotations

import http.client
import io
import json
from contextlib import closing
from typing import Any

import pytest
import requests
from PIL import Image, ImageStat

from fake_comfy import FakeComfy
from fake_comfy.queue import HISTORY_LIMIT, PromptQueue, Stats
from fake_comfy.tests.helpers import (
    Json,
    ending,
    finish,
    get,
    graph,
    is_idle,
    new_id,
    picture,
    png,
    post,
    run,
    submit,
    upload,
    wait_until,
)


def pixels(answer: requests.Response) -> bytes:
    with Image.open(io.BytesIO(answer.content)) as image:
        return image.convert("RGB").tobytes()


def draw(fake: FakeComfy, **inputs: Any) -> bytes:
    """The first picture of a run under a prefix of its own."""
    return pixels(picture(fake, run(fake, graph(n9__filename_prefix=new_id(), **inputs))))


def counters(fake: FakeComfy, prompt_id: str) -> Json:
    return fake.prompts[prompt_id]


def test_the_same_photo_prompt_and_seed_give_the_same_picture(fake: FakeComfy) -> None:
    first = draw(fake)
    post(fake, "/free", {"free_memory": True})

    assert draw(fake) == first


def test_another_photo_prompt_or_seed_gives_another_picture(fake: FakeComfy) -> None:
    upload(fake, "other.png", png("other"))

    changes: list[Json] = [
        {},
        {"n3__seed": 2},
        {"n6__text": "smiling"},
        {"n12__image": "other.png"},
    ]
    pictures = {draw(fake, **change) for change in changes}

    assert len(pictures) == len(changes)


def test_a_batch_has_as_many_pictures_as_asked_for_each_a_little_different(fake: FakeComfy) -> None:
    entry = run(fake, graph(n5__batch_size=3))

    names = [image["filename"] for image in entry["outputs"]["9"]["images"]]
    assert names == ["job_00001_.png", "job_00002_.png", "job_00003_.png"]
    assert len({pixels(picture(fake, entry, index=index)) for index in range(3)}) == 3


def test_the_picture_has_the_size_asked_for_and_is_not_flat(fake: FakeComfy) -> None:
    entry = run(fake, graph(n5__width=96, n5__height=160))

    with Image.open(io.BytesIO(picture(fake, entry).content)) as image:
        assert image.size == (96, 160)
        assert len(image.convert("L").getcolors() or ()) > 50


def test_the_picture_carries_the_graph_and_the_extra_texts(fake: FakeComfy) -> None:
    entry = run(fake, extra_data={"extra_pnginfo": {"job": {"id": 1}}})

    with Image.open(io.BytesIO(picture(fake, entry).content)) as image:
        assert json.loads(image.info["prompt"]) == graph()
        assert json.loads(image.info["job"]) == {"id": 1}


def test_a_photo_is_turned_upright(fake: FakeComfy) -> None:
    lying = Image.new("RGB", (64, 64), "white")
    lying.paste("black", (0, 0, 32, 64))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by 90 degrees clockwise
    buffer = io.BytesIO()
    lying.save(buffer, "JPEG", exif=exif)
    upload(fake, "lying.jpg", buffer.getvalue())

    entry = run(fake, graph(n12__image="lying.jpg"))

    with Image.open(io.BytesIO(picture(fake, entry).content)) as image:
        upper, lower = image.crop((0, 0, 64, 32)), image.crop((0, 32, 64, 64))
    assert sum(ImageStat.Stat(upper).mean) < sum(ImageStat.Stat(lower).mean)


def test_the_same_id_twice_runs_twice_and_the_second_entry_stays(fake: FakeComfy) -> None:
    prompt_id = new_id()
    first = run(fake, prompt_id=prompt_id)
    submit(fake, graph(n3__seed=2), prompt_id=prompt_id)
    wait_until(lambda: is_idle(fake))

    second = finish(fake, prompt_id)

    assert first["outputs"] != second["outputs"]
    assert counters(fake, prompt_id)["submitted"] == 2
    assert counters(fake, prompt_id)["executed"] == 2


def test_a_new_prefix_saves_again_what_the_cache_holds(fake: FakeComfy) -> None:
    run(fake)

    again = submit(fake, graph(n9__filename_prefix="other"))

    assert finish(fake, again)["outputs"]["9"]["images"][0]["filename"] == "other_00001_.png"
    assert counters(fake, again)["executed"] == 0
    assert counters(fake, again)["cached"] == 1


def test_an_identical_graph_has_outputs_only_if_a_client_listens(fake: FakeComfy) -> None:
    first = run(fake)

    assert run(fake)["outputs"] == first["outputs"]
    assert run(fake, client_id=None)["outputs"] == {}


def test_the_counter_is_one_more_than_what_lies_in_the_folder(fake: FakeComfy) -> None:
    run(fake)
    (fake.data / "output" / "job_00001_.png").unlink()

    entry = run(fake, graph(n3__seed=2))

    assert entry["outputs"]["9"]["images"][0]["filename"] == "job_00001_.png"


def test_two_outputs_of_two_kinds(fake: FakeComfy) -> None:
    made = graph()
    made["10"] = {"class_type": "PreviewImage", "inputs": {"images": ["8", 0]}}

    entry = run(fake, made)

    assert {node: out["images"][0]["type"] for node, out in entry["outputs"].items()} == {
        "9": "output",
        "10": "temp",
    }


def test_waiting_prompts_are_deleted_without_a_trace_but_running_ones_are_not(
    fake: FakeComfy,
) -> None:
    fake.seconds = 60
    running, waiting = submit(fake), submit(fake)
    wait_until(lambda: counters(fake, running)["executed"])

    post(fake, "/queue", {"delete": [running, waiting]})

    queue = get(fake, "/queue").json()
    assert [item[1] for item in queue["queue_running"]] == [running]
    assert queue["queue_pending"] == []
    assert counters(fake, waiting)["deleted"] == 1
    assert get(fake, f"/api/jobs/{waiting}").status_code == 404


def test_an_interrupt_stops_only_the_prompt_that_it_names(fake: FakeComfy) -> None:
    fake.seconds = 1
    running, waiting = submit(fake), submit(fake, graph(n3__seed=2))
    wait_until(lambda: counters(fake, running)["executed"])

    post(fake, "/interrupt", {"prompt_id": waiting})
    post(fake, "/interrupt", {"prompt_id": running})
    fake.seconds = 0

    assert ending(finish(fake, running))[0] == "execution_interrupted"
    assert counters(fake, running)["interrupted"] == 1
    assert ending(finish(fake, waiting))[0] == "execution_success"


def test_the_history_is_paged_deleted_and_cleared(fake: FakeComfy) -> None:
    ids = [submit(fake, graph(n3__seed=seed)) for seed in range(3)]
    wait_until(lambda: is_idle(fake))

    assert list(get(fake, "/history?max_items=1").json()) == ids[2:]
    assert list(get(fake, "/history?max_items=1&offset=1").json()) == ids[1:2]
    post(fake, "/history", {"delete": ids[:1]})
    assert list(get(fake, "/history").json()) == ids[1:]
    post(fake, "/history", {"clear": True})
    assert get(fake, "/history").json() == {}


def test_the_history_is_capped_and_the_oldest_go_first() -> None:
    queue = PromptQueue(Stats(), on_change=lambda: None)

    for number in range(HISTORY_LIMIT + 3):
        queue.remember(str(number), {})

    assert len(queue.history) == HISTORY_LIMIT + 1
    assert next(iter(queue.history)) == "2"


def test_unknown_inputs_of_a_node_are_ignored_whatever_they_say(fake: FakeComfy) -> None:
    assert ending(run(fake, graph(n3__junk=["999", 0], n4__junk=[1, 2, 3])))[0] == (
        "execution_success"
    )


def test_a_restart_forgets_queue_history_and_temp_but_keeps_files_and_counters(
    fake: FakeComfy,
) -> None:
    done = submit(fake)
    kept = picture(fake, finish(fake, done)).url
    upload(fake, "gone.png", type="temp")
    fake.seconds = 60
    running, waiting = submit(fake, graph(n3__seed=2)), submit(fake, graph(n3__seed=3))
    wait_until(lambda: counters(fake, running)["executed"])

    answer = post(fake, "/fake/restart")

    assert answer.json() == fake.stats()
    assert fake.stats()["restarts"] == 1
    assert get(fake, "/history").json() == {}
    assert is_idle(fake)
    assert requests.get(kept, timeout=5).status_code == 200
    assert get(fake, "/view?filename=gone.png&type=temp").status_code == 404
    assert post(fake, "/prompt", {"prompt": graph(n12__image="gone.png [temp]")}).status_code == 400
    assert counters(fake, done)["finished"] == 1
    assert counters(fake, running)["executed"] == 1
    assert counters(fake, waiting)["submitted"] == 1


def test_a_restart_may_take_the_files_and_the_port_for_a_while(fake: FakeComfy) -> None:
    run(fake)
    url = fake.url

    fake.restart(keep_files=False, down_seconds=0.2)

    with pytest.raises(requests.ConnectionError, match="refused"):
        get(fake, "/queue")
    wait_until(lambda: answers(fake))
    assert fake.url == url
    assert not list((fake.data / "input").iterdir())
    assert not list((fake.data / "output").iterdir())


def answers(fake: FakeComfy) -> bool:
    try:
        return get(fake, "/queue").status_code == 200
    except requests.ConnectionError:
        return False


def test_the_requests_are_on_record_but_not_those_of_the_tests(fake: FakeComfy) -> None:
    prompt_id = submit(fake)
    get(fake, "/api/queue?x=1", headers={"X-Mark": "here"})
    get(fake, "/fake/stats")

    uploaded, submitted, asked = fake.requests
    assert (uploaded.method, uploaded.path) == ("POST", "/upload/image")
    assert submitted.json["prompt_id"] == prompt_id
    assert (asked.path, asked.query, asked.headers["X-Mark"]) == ("/queue", {"x": "1"}, "here")


def test_an_upload_over_the_limit_is_refused_by_its_length_alone(fake: FakeComfy) -> None:
    connection = http.client.HTTPConnection(fake.url.removeprefix("http://"), timeout=5)
    with closing(connection):
        connection.putrequest("POST", "/upload/image")
        connection.putheader("Content-Type", "multipart/form-data; boundary=x")
        connection.putheader("Content-Length", str(100 * 2**20 + 1))
        connection.endheaders()

        answer = connection.getresponse()

        assert answer.status == 413
        assert answer.read() == b"Maximum request body size 104857600 exceeded."
