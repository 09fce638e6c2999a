from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
import requests
from PIL import Image

from fake_comfy import FakeComfy
from fake_comfy.faults import FAULTS
from fake_comfy.tests.helpers import (
    ending,
    entry_of,
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
from fake_comfy.tests.test_captures import CAPTURES


def names_active(fake: FakeComfy) -> list[str]:
    return [fault["name"] for fault in get(fake, "/fake/faults").json()["active"]]


@pytest.mark.parametrize(
    ("name", "status", "header", "value"),
    [
        ("http_500", 500, "Content-Type", "text/plain; charset=utf-8"),
        ("http_503", 503, "Retry-After", "1"),
        ("http_413", 413, "Content-Type", "text/html; charset=utf-8"),
        ("html_502", 502, "Content-Type", "text/html; charset=utf-8"),
        ("unauthorized", 401, "WWW-Authenticate", 'Basic realm="ComfyUI"'),
        ("redirect", 302, "Location", "/login"),
    ],
)
def test_a_fault_answers_once_in_place_of_the_server(
    fake: FakeComfy, name: str, status: int, header: str, value: str
) -> None:
    fake.fault(name)

    answer = get(fake, "/queue", allow_redirects=False)

    assert (answer.status_code, answer.headers[header]) == (status, value)
    assert get(fake, "/queue").status_code == 200


def test_a_fault_strikes_as_often_as_told_and_null_means_until_cleared(fake: FakeComfy) -> None:
    fake.fault("http_500", times=2)
    assert [get(fake, "/queue").status_code for _ in range(3)] == [500, 500, 200]

    fake.fault("http_500", times=None)
    assert [get(fake, "/queue").status_code for _ in range(3)] == [500, 500, 500]
    fake.clear_faults()
    assert get(fake, "/queue").status_code == 200


def test_a_fault_strikes_only_on_its_path_and_method(fake: FakeComfy) -> None:
    fake.fault("http_500", path="POST /queue")
    fake.fault("http_503", path="/api/history")

    assert get(fake, "/queue").status_code == 200
    assert get(fake, f"/api/history/{new_id()}").status_code == 503
    assert post(fake, "/queue", {}).status_code == 500


def test_control_by_http_tells_sets_and_clears_faults(fake: FakeComfy) -> None:
    fault = {"name": "http_503", "times": None, "seconds": 7, "path": "/queue"}

    assert post(fake, "/fake/faults", fault).json()["active"] == [fault]
    assert get(fake, "/queue").headers["Retry-After"] == "7"
    assert requests.delete(f"{fake.url}/fake/faults", timeout=5).json()["active"] == []
    assert get(fake, "/queue").status_code == 200


@pytest.mark.parametrize("body", [{"name": "no_such"}, {"name": "oom", "colour": "red"}, {}])
def test_an_unknown_fault_is_refused_with_the_list(fake: FakeComfy, body: Any) -> None:
    answer = post(fake, "/fake/faults", body)

    assert answer.status_code == 400
    assert list(answer.json()["known"]) == list(FAULTS)
    assert names_active(fake) == []


def test_refuse_means_that_nobody_listens_until_it_is_cleared(fake: FakeComfy) -> None:
    fake.fault("refuse", times=None)

    with pytest.raises(requests.ConnectionError, match="refused"):
        get(fake, "/queue")
    control = f"{fake.control_url}/fake"
    assert requests.get(f"{control}/stats", timeout=5).status_code == 200
    assert requests.get(f"{fake.control_url}/queue", timeout=5).status_code == 404
    requests.delete(f"{control}/faults", timeout=5)
    assert get(fake, "/queue").status_code == 200


def test_refuse_by_http_is_answered_and_ends_by_itself(fake: FakeComfy) -> None:
    with requests.Session() as session:
        answer = session.post(
            f"{fake.url}/fake/faults", json={"name": "refuse", "seconds": 0.2}, timeout=5
        )

        assert answer.json()["control"] == fake.control_url
        with pytest.raises(requests.ConnectionError, match="refused"):
            session.get(f"{fake.url}/queue", timeout=5)
    wait_until(lambda: is_up(fake))


def is_up(fake: FakeComfy) -> bool:
    try:
        return get(fake, "/queue").status_code == 200
    except requests.ConnectionError:
        return False


def test_drop_after_accept_queues_but_never_answers(fake: FakeComfy) -> None:
    fake.fault("drop_after_accept")
    prompt_id = new_id()

    with pytest.raises(requests.ConnectionError):
        submit(fake, prompt_id=prompt_id)

    assert ending(finish(fake, prompt_id))[0] == "execution_success"


def test_drop_after_accept_waits_for_a_prompt_that_is_accepted(fake: FakeComfy) -> None:
    fake.fault("drop_after_accept")

    assert post(fake, "/prompt", {"prompt": {}}).status_code == 400

    assert names_active(fake) == ["drop_after_accept"]


def test_hang_prompt_queues_and_answers_late(fake: FakeComfy) -> None:
    fake.fault("hang_prompt", seconds=0.2)
    prompt_id = new_id()

    started = time.monotonic()
    submit(fake, prompt_id=prompt_id)

    assert time.monotonic() - started > 0.2
    assert finish(fake, prompt_id)


def test_a_hanging_answer_can_outlast_the_client(fake: FakeComfy) -> None:
    fake.fault("hang_prompt")
    prompt_id = new_id()

    with pytest.raises(requests.ReadTimeout):
        post(fake, "/prompt", {"prompt": graph(), "prompt_id": prompt_id}, timeout=0.2)

    assert finish(fake, prompt_id)


@pytest.mark.parametrize("name", ["drop_upload", "hang_upload"])
def test_an_upload_without_an_answer_is_stored(fake: FakeComfy, name: str) -> None:
    fake.fault(name)

    with pytest.raises((requests.ConnectionError, requests.ReadTimeout)):
        post(fake, "/upload/image", files={"image": ("new.png", png())}, timeout=0.3)

    assert (fake.data / "input" / "new.png").read_bytes() == png()


def test_hang_view_answers_late_and_then_right(fake: FakeComfy) -> None:
    entry = run(fake)
    fake.fault("hang_view", seconds=0.2)

    started = time.monotonic()
    answer = picture(fake, entry)

    assert time.monotonic() - started > 0.2
    assert answer.content.startswith(b"\x89PNG")


def test_slow_makes_any_answer_late(fake: FakeComfy) -> None:
    fake.fault("slow", seconds=0.2, path="/queue")

    started = time.monotonic()
    get(fake, "/queue")

    assert time.monotonic() - started > 0.2


def test_half_json_has_a_length_that_fits(fake: FakeComfy) -> None:
    fake.fault("half_json")

    answer = get(fake, "/queue")

    assert answer.status_code == 200
    with pytest.raises(ValueError, match="char"):
        answer.json()


def test_wrong_id_queues_under_another_id(fake: FakeComfy) -> None:
    fake.fault("wrong_id")
    asked = new_id()

    given = submit(fake, prompt_id=asked)

    assert given != asked
    assert finish(fake, given)
    assert entry_of(fake, asked) is None


def test_view_404_says_that_the_file_is_gone(fake: FakeComfy) -> None:
    entry = run(fake)
    fake.fault("view_404")

    assert picture(fake, entry).status_code == 404
    assert picture(fake, entry).status_code == 200


def test_truncate_view_promises_more_than_it_sends(fake: FakeComfy) -> None:
    entry = run(fake)
    fake.fault("truncate_view")

    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        picture(fake, entry)


def test_corrupt_view_has_the_right_length_but_zeros_at_the_end(fake: FakeComfy) -> None:
    entry = run(fake)
    whole = picture(fake, entry).content
    fake.fault("corrupt_view")

    spoiled = picture(fake, entry).content

    assert len(spoiled) == len(whole)
    assert spoiled[:100] == whole[:100]
    assert spoiled.endswith(bytes(1000))


def test_missing_node_and_missing_model_refuse_the_graph(fake: FakeComfy) -> None:
    fake.fault("missing_node")
    assert get(fake, "/object_info/IPAdapterFaceID").json() == {}
    refused = post(fake, "/prompt", {"prompt": graph()}).json()
    assert refused["error"]["type"] == "missing_node_type"

    fake.fault("missing_model")
    refused = post(fake, "/prompt", {"prompt": graph()}).json()
    (error,) = refused["node_errors"]["4"]["errors"]
    assert error["type"] == "value_not_in_list"

    assert ending(run(fake))[0] == "execution_success"


@pytest.mark.parametrize(
    ("name", "exception_type", "message", "node_type", "executed"),
    [
        ("oom", "torch.OutOfMemoryError", "CUDA out of memory", "KSampler", 1),
        ("runtime_error", "RuntimeError", "Expected all tensors", "KSampler", 1),
        ("no_face", "Exception", "InsightFace: No face detected.\n", "IPAdapterFaceID", 0),
        (
            "model_not_found_at_run",
            "Exception",
            "IPAdapter model not found.\n",
            "IPAdapterUnifiedLoaderFaceID",
            0,
        ),
    ],
)
def test_a_run_fails_in_the_words_of_the_real_server(
    fake: FakeComfy, name: str, exception_type: str, message: str, node_type: str, executed: int
) -> None:
    fake.fault(name)

    prompt_id = submit(fake)
    event, about = ending(finish(fake, prompt_id))

    assert (event, about["exception_type"]) == ("execution_error", exception_type)
    assert about["exception_message"].startswith(message)
    assert about["node_type"] == node_type
    assert fake.prompts[prompt_id]["executed"] == executed
    assert ending(run(fake))[0] == "execution_success"


def test_a_uniform_photo_has_no_face(fake: FakeComfy) -> None:
    upload(fake, "blank.png", png("blank"))

    event, about = ending(run(fake, graph(n12__image="blank.png")))

    assert (event, about["exception_message"]) == (
        "execution_error",
        "InsightFace: No face detected.\n",
    )


def test_cuda_broken_fails_every_run_until_a_restart(fake: FakeComfy) -> None:
    fake.fault("cuda_broken")

    failures = [ending(run(fake, graph(n3__seed=seed)))[1] for seed in range(3)]

    assert all("device-side assert" in about["exception_message"] for about in failures)
    fake.clear_faults()
    assert ending(run(fake))[0] == "execution_error"
    fake.restart()
    assert ending(run(fake))[0] == "execution_success"


def test_a_zombie_answers_and_queues_but_runs_nothing_until_a_restart(fake: FakeComfy) -> None:
    fake.fault("zombie")
    dead = submit(fake)
    waiting = submit(fake)
    wait_until(lambda: "zombie" not in names_active(fake))

    post(fake, "/interrupt", {"prompt_id": dead})
    assert post(fake, f"/api/jobs/{dead}/cancel").json() == {"cancelled": True}

    queue = get(fake, "/queue").json()
    assert [item[1] for item in queue["queue_running"]] == [dead]
    assert [item[1] for item in queue["queue_pending"]] == [waiting]
    assert get(fake, "/system_stats").status_code == 200
    fake.restart()
    assert ending(run(fake))[0] == "execution_success"


def test_forget_queue_loses_what_is_queued_and_running(fake: FakeComfy) -> None:
    fake.seconds = 60
    running, waiting = submit(fake), submit(fake)
    wait_until(lambda: fake.prompts[running]["executed"])

    fake.fault("forget_queue")

    assert is_idle(fake)
    assert entry_of(fake, running) is None
    assert fake.prompts[waiting]["deleted"] == 0
    fake.seconds = 0
    assert ending(run(fake))[0] == "execution_success"


def test_forget_queue_waits_for_a_prompt_if_there_is_none(fake: FakeComfy) -> None:
    fake.fault("forget_queue")

    lost = submit(fake)

    assert is_idle(fake)
    assert fake.prompts[lost] == {
        "submitted": 1,
        "executed": 0,
        "finished": 0,
        "cached": 0,
        "interrupted": 0,
        "deleted": 0,
    }
    assert entry_of(fake, lost) is None


def test_forget_history_takes_what_is_there_or_else_the_next_entry(fake: FakeComfy) -> None:
    first = run(fake)["prompt"][1]
    fake.fault("forget_history")
    assert entry_of(fake, first) is None

    fake.fault("forget_history")
    second = submit(fake, graph(n3__seed=2))
    wait_until(lambda: fake.prompts[second]["finished"] and is_idle(fake))
    assert entry_of(fake, second) is None
    assert len(list((fake.data / "output").iterdir())) == 2


def test_late_history_leaves_a_prompt_in_neither_for_a_while(fake: FakeComfy) -> None:
    fake.fault("late_history", seconds=0.5)

    prompt_id = submit(fake)
    wait_until(lambda: fake.prompts[prompt_id]["finished"] and is_idle(fake))

    assert entry_of(fake, prompt_id) is None
    assert finish(fake, prompt_id)


@pytest.mark.parametrize("path", ["/interrupt", "/api/jobs/{}/cancel"])
def test_lose_interrupt_answers_to_no_effect(fake: FakeComfy, path: str) -> None:
    fake.seconds = 0.5
    fake.fault("lose_interrupt")
    prompt_id = submit(fake)
    wait_until(lambda: fake.prompts[prompt_id]["executed"])

    answer = post(fake, path.format(prompt_id), {"prompt_id": prompt_id})

    assert answer.status_code == 200
    assert ending(finish(fake, prompt_id))[0] == "execution_success"


def test_foreign_interrupt_stops_a_run_half_way(fake: FakeComfy) -> None:
    fake.fault("foreign_interrupt")

    prompt_id = submit(fake)

    assert ending(finish(fake, prompt_id))[0] == "execution_interrupted"
    assert fake.prompts[prompt_id]["interrupted"] == 1


def test_black_picture_is_a_success_in_black_and_the_next_is_not(fake: FakeComfy) -> None:
    fake.fault("black_picture")

    black, lit = run(fake), run(fake, graph(n9__filename_prefix="again"))

    with Image.open(io.BytesIO(picture(fake, black).content)) as image:
        assert image.convert("L").getextrema() == (0, 0)
    with Image.open(io.BytesIO(picture(fake, lit).content)) as image:
        assert image.convert("L").getextrema() != (0, 0)


def test_empty_outputs_is_a_success_without_a_file(fake: FakeComfy) -> None:
    fake.fault("empty_outputs")

    entry = run(fake)

    assert (entry["status"]["status_str"], entry["outputs"]) == ("success", {})
    assert not list((fake.data / "output").iterdir())
    assert run(fake)["outputs"]


def test_every_fault_has_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))

    assert [name for name in FAULTS if f'"{name}"' not in tests] == []


def test_every_fault_says_whether_it_was_seen_on_a_real_server() -> None:
    origins = {name: meaning.origin for name, meaning in FAULTS.items()}
    recorded = re.findall(r"\[(.+?)\]", " ".join(origins.values()))

    assert [n for n, o in origins.items() if not re.match(r"seen on v[\d.]+: .|imagined", o)] == []
    assert [name for name in recorded if not (CAPTURES / f"{name}.json").exists()] == []
