from __future__ import annotations

from typing import Any

import pytest

from comfy.catalog import InputInfo, NodeInfo, parse_object_info


def input_of(told: Any, class_type: str = "Any", name: str = "x") -> InputInfo:
    """Return what is made of an input that a server tells so."""
    answer = {class_type: {"input": {"required": {name: told}}, "output_node": False}}
    return parse_object_info(answer)[class_type].inputs[name]


@pytest.mark.parametrize(
    "told",
    [
        [["a", "b"]],
        [["a", "b"], {"tooltip": "One of two."}],
        ["COMBO", {"options": ["a", "b"], "multiselect": False}],
    ],
)
def test_a_choice_is_read_in_both_ways_of_telling_it(told: Any) -> None:
    about = input_of(told)

    assert (about.choices, about.required) == (["a", "b"], True)
    assert about.takes("a")
    assert not about.takes("c")


@pytest.mark.parametrize(
    "told",
    [
        ["COMBO", {"remote": {"route": "/internal/files/output"}}],
        ["COMBO", {"options": ["a"], "multiselect": True}],
        ["COMBO", {}],
        ["STRING", {"multiline": True}],
        ["INT", {"min": 0}],
        ["MODEL"],
    ],
)
def test_what_is_no_choice_or_does_not_tell_its_values_takes_anything(told: Any) -> None:
    assert input_of(told).takes("whatever")


def test_an_object_is_no_value_of_a_choice_and_may_stand_for_one() -> None:
    assert input_of([["a"]]).takes({"__value__": "a"})


@pytest.mark.parametrize(
    ("told", "class_type", "name"),
    [
        ([["face.png"], {"image_upload": True}], "Custom", "picture"),
        (["COMBO", {"audio_upload": True, "options": ["a.flac"]}], "LoadAudio", "audio"),
        (["COMBO", {"video_upload": True, "options": []}], "LoadVideo", "file"),
        ([["model.glb"], {"file_upload": True}], "Load3D", "model_file"),
        ([["a.latent"]], "LoadLatent", "latent"),  # says nothing of it
        ([["a.mp4"]], "VHS_LoadVideo", "video"),
    ],
)
def test_an_input_for_uploaded_files_takes_any_name(told: Any, class_type: str, name: str) -> None:
    about = input_of(told, class_type, name)

    assert about.takes_file
    assert about.takes("another.png")


def test_an_input_that_is_made_of_others_need_not_be_given_itself() -> None:
    assert not input_of(["COMFY_AUTOGROW_V3", {"template": {}}]).required


def test_a_class_is_kept_in_few_words_and_read_again() -> None:
    # As v0.26 tells it.
    loader = {
        "input": {
            "required": {
                "model": ["MODEL", {"tooltip": "The diffusion model the LoRA will be applied to."}],
                "lora_name": [["a.safetensors"], {"tooltip": "The name of the LoRA."}],
                "strength_model": ["FLOAT", {"default": 1.0, "min": -100.0, "max": 100.0}],
            },
            "optional": {"clip": ["CLIP", {}]},
            "hidden": {"prompt": "PROMPT"},
        },
        "output": ["MODEL", "CLIP"],
        "name": "LoraLoader",
        "output_node": False,
    }

    info = parse_object_info({"LoraLoader": loader})["LoraLoader"]

    assert info.as_json() == {
        "model": {"required": True},
        "lora_name": {"required": True, "choices": ["a.safetensors"]},
        "strength_model": {"required": True},
        "clip": {},
    }
    assert NodeInfo.from_json(info.as_json(), is_output=False) == info


@pytest.mark.parametrize(
    "definition",
    [
        None,
        [],
        {},
        {"input": None},
        {"input": {"required": None}},
        {"input": {"required": {"x": None}, "optional": {"y": []}}},
        {"input": {"required": {"\0": ["INT"]}}},
    ],
)
def test_what_makes_no_sense_does_no_harm(definition: Any) -> None:
    read = parse_object_info({"Odd": definition, "\ud800": {}, "x" * 201: {}})

    assert all(info.inputs == {} for info in read.values())
    assert set(read) <= {"Odd"}


def test_names_that_no_database_can_hold_are_left_out_of_a_choice() -> None:
    assert input_of([["good", "bad\udc80", 1]]).choices == ["good", 1]
