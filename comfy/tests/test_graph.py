from __future__ import annotations

import json
import math
from typing import Any

import pytest

from comfy.graph import OUTPUT_NODE, FaceRequest, portrait_graph
from comfy.tests.captures import capture

EXAMPLE: dict[str, Any] = {
    "photo": "genflow/PHOTO.png",
    "prompt": "PROMPT",
    "seed": 0,
    "checkpoint": "realisticVisionV51_v51VAE.safetensors",
    "filename_prefix": "genflow/PROMPT_ID",
}


def graph(**changes: Any) -> dict[str, dict[str, Any]]:
    return portrait_graph(FaceRequest(**(EXAMPLE | changes)))


def test_the_graph_is_the_one_that_real_servers_ran() -> None:
    # As text too: 1.0 is not 1.
    built, example = graph(), capture("faceid-graph-sd15-plusv2")

    assert json.dumps(built, sort_keys=True) == json.dumps(example, sort_keys=True)


def test_whole_numbers_become_floats_where_comfyui_has_floats() -> None:
    built = graph(cfg=7, face_weight=1, likeness=2)

    assert json.dumps(built["3"]["inputs"]["cfg"]) == "7.0"
    assert json.dumps(built["18"]["inputs"]["weight"]) == "1.0"


def test_a_lora_sits_between_the_checkpoint_and_everything_that_used_its_model_or_clip() -> None:
    built = graph(lora="add_detail.safetensors", lora_strength=-0.5)

    assert built["10"] == {
        "class_type": "LoraLoader",
        "inputs": {
            "model": ["4", 0],
            "clip": ["4", 1],
            "lora_name": "add_detail.safetensors",
            "strength_model": -0.5,
            "strength_clip": -0.5,
        },
    }
    assert built["20"]["inputs"]["model"] == ["10", 0]
    assert built["6"]["inputs"]["clip"] == built["7"]["inputs"]["clip"] == ["10", 1]
    assert built["8"]["inputs"]["vae"] == ["4", 2]


def test_placeholders_go_through_as_they_are() -> None:
    photo, prefix = {"$asset": "1"}, {"$prefix": True}

    built = graph(photo=photo, filename_prefix=prefix)

    assert built["12"]["inputs"]["image"] == photo
    assert built[OUTPUT_NODE]["inputs"]["filename_prefix"] == prefix


def test_the_same_request_gives_the_same_graph_byte_for_byte() -> None:
    assert json.dumps(graph(lora="x")) == json.dumps(graph(lora="x"))


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("seed", [0, 2**64 - 1], [-1, 2**64, 1.0, True]),
        ("width", [64, 2048], [56, 2056, 65, 512.0, math.nan]),
        ("height", [64, 2048], [0, 100]),
        ("steps", [1, 150], [0, 151]),
        ("cfg", [0, 30, 6.5], [-0.1, 30.1, math.nan, math.inf]),
        ("count", [1, 8], [0, 9]),
        ("face_weight", [0, 3], [-0.1, 3.1, math.nan]),
        ("likeness", [0, 5], [-1, 5.1]),
        ("lora_strength", [-2, 2], [-2.1, 2.1, math.nan]),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_field_value_and_range(
    field: str, good: list[float], bad: list[float]
) -> None:
    for value in good:
        graph(**{field: value})
    for value in bad:
        with pytest.raises(ValueError, match=rf"^{field}: {value} is not from .* to "):
            graph(**{field: value})


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_a_prompt_has_a_length(field: str) -> None:
    graph(**{field: "x" * 5000})

    with pytest.raises(ValueError, match=f"length of {field}: 5001"):
        graph(**{field: "x" * 5001})
