from __future__ import annotations

from typing import Any

import pytest

from comfy.errors import Interrupted, NoFace, OutOfMemory, RunFailed
from comfy.history import TEXT_MAX_LENGTH, OutputFile, Run, parse_run
from comfy.tests.captures import body_of, prompt_id_of

OTHER_ID = "47c0a3bc-f495-415a-b5f7-70a9764a93ee"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("history-interrupted", Interrupted),
        ("history-error-oom", OutOfMemory),
        ("v0.3.64/history-error-oom", OutOfMemory),
        ("v0.3.64/history-error-noface", NoFace),
        ("history-error-runtime-error", RunFailed),
        ("history-partial-outputs", type(None)),
    ],
)
def test_a_run_carries_what_its_history_means(name: str, error: type[object]) -> None:
    prompt_id = prompt_id_of(name)

    run = parse_run(prompt_id, body_of(name)[prompt_id])

    assert type(run.error) is error


def test_an_interruption_that_is_called_a_success_is_an_interruption() -> None:
    entry = body_of("history-interrupted")[prompt_id_of("history-interrupted")]
    entry["status"]["status_str"] = "success"

    assert isinstance(parse_run(OTHER_ID, entry).error, Interrupted)


def test_a_cached_run_is_a_success_without_outputs() -> None:
    entry = body_of("history-cached-no-client")[prompt_id_of("history-cached-no-client")]

    run = parse_run(OTHER_ID, entry)

    assert (run.outputs, run.error) == ({}, None)


def test_only_nodes_with_files_are_outputs_whatever_they_call_them() -> None:
    files = [
        {"filename": "a.png", "subfolder": "", "type": "output"},
        {"filename": "b.png"},
        {},
        None,
    ]
    outputs = {"40": {"images": files}, "9": {"gifs": files[:1]}, "12": {"tags": ["hi"]}}

    run = parse_run(
        OTHER_ID, {"outputs": outputs | {"15": {"images": [], "animated": [False]}, "1": 4}}
    )

    first, second = OutputFile("a.png", "", "output"), OutputFile("b.png", "", "output")
    assert run.outputs == {"40": [first, second], "9": [first]}


@pytest.mark.parametrize(
    "status",
    [{"status_str": "error", "messages": []}, {"messages": [[], None, [1]]}, None, {}, [], "error"],
)
def test_a_run_without_a_reason_failed_with_a_message_all_the_same(status: Any) -> None:
    error = parse_run(OTHER_ID, {"status": status}).error

    assert isinstance(error, RunFailed)
    assert error.message


def left(outputs: Any, meta: Any = None) -> Any:
    """Return what a run left according to these parts of its entry."""
    return parse_run(OTHER_ID, {"outputs": outputs, "meta": meta}).outputs


@pytest.mark.parametrize("key", ["images", "gifs", "audio", "latents", "3d", "video", "a_images"])
def test_files_are_taken_whatever_their_node_calls_them(key: str) -> None:
    file = {"filename": "a.bin", "subfolder": "x", "type": "temp", "format": "video/h264-mp4"}

    assert left({"9": {key: [file]}}) == {"9": [OutputFile("a.bin", "x", "temp")]}


def test_a_file_that_a_node_names_twice_is_one_output() -> None:
    file = {"filename": "a.mp4", "subfolder": "", "type": "output"}

    assert left({"9": {"gifs": [file], "images": [file, file]}}) == {
        "9": [OutputFile("a.mp4", "", "output")]
    }


def test_texts_that_a_node_shows_are_outputs() -> None:
    assert left({"1": {"text": ["one", ["two", 3]]}, "2": {"text": "three"}}) == {
        "1": ["one", "two"]
    }


def test_a_text_is_made_storable_and_has_an_end() -> None:
    (text,) = left({"1": {"text": ["\0\ud800" + "x" * 2 * TEXT_MAX_LENGTH]}})["1"]

    assert text.startswith("?x")
    assert len(text) <= TEXT_MAX_LENGTH


def test_what_a_node_made_at_run_time_left_is_told_under_the_node_it_stands_for() -> None:
    a, b = ({"filename": f"{name}.png", "subfolder": "", "type": "output"} for name in "ab")
    meta = {"12.0.0.3": {"node_id": "12.0.0.3", "display_node": "12"}, "12": {}}

    outputs = left({"12": {"images": [a]}, "12.0.0.3": {"images": [b]}}, meta)

    assert outputs == {"12": [OutputFile("a.png", "", "output"), OutputFile("b.png", "", "output")]}


@pytest.mark.parametrize(
    ("name", "from_cache"),
    [
        ("history-success", False),
        ("v0.3.64/history-success", False),
        ("history-cached-no-client", True),
    ],
)
def test_a_run_tells_whether_an_output_came_from_the_cache(name: str, from_cache: bool) -> None:
    prompt_id = prompt_id_of(name)

    assert parse_run(prompt_id, body_of(name)[prompt_id]).from_cache is from_cache


@pytest.mark.parametrize("item", [None, [], "text", [1, "id", {}, "x", "y"], [1, "id", {}, None]])
def test_an_entry_without_its_prompt_tells_nothing_of_it(item: Any) -> None:
    run = parse_run(OTHER_ID, {"prompt": item, "status": {"status_str": "success"}})

    assert run == Run(OTHER_ID, {}, None)
