from __future__ import annotations

import io
import json
import struct

import pytest
from PIL import Image

from comfy.events import ProgressTracker
from comfy.previews import MAX_BYTES, PreviewImage, read_preview
from comfy.tests.test_events import GRAPH, message


def image_bytes(kind: str = "JPEG", size: tuple[int, int] = (64, 64)) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").save(buffer, kind)
    return buffer.getvalue()


def legacy(image: bytes) -> bytes:
    return struct.pack(">II", 1, 1) + image


def with_metadata(image: bytes, metadata: object) -> bytes:
    text = metadata if isinstance(metadata, bytes) else json.dumps(metadata).encode()
    return struct.pack(">II", 4, len(text)) + text + image


METADATA = {
    "node_id": "3",
    "prompt_id": "mine",
    "display_node_id": "3",
    "parent_node_id": None,
    "real_node_id": "3",
    "image_type": "image/jpeg",
}


def test_both_forms_of_a_preview_are_read() -> None:
    image = image_bytes()

    assert read_preview(legacy(image)) == PreviewImage(image)
    assert read_preview(with_metadata(image, METADATA)) == PreviewImage(image, "3", "mine")


@pytest.mark.parametrize(
    "binary",
    [
        b"",
        b"\0\0\0\1",
        struct.pack(">II", 3, 1) + b"3a text",
        struct.pack(">II", 2, 1) + image_bytes(),
        struct.pack(">II", 4, 2**32 - 1) + b"{}",
        with_metadata(b"", b"\xff"),
        with_metadata(b"", b"[" * 100_000),
        with_metadata(b"", []),
        with_metadata(b"", {"node_id": 3, "prompt_id": "mine"}),
        with_metadata(b"", {"node_id": "3"}),
    ],
)
def test_what_is_no_preview_is_left_out(binary: bytes) -> None:
    assert read_preview(binary) is None


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_tells_its_own_type(kind: str) -> None:
    assert PreviewImage(image_bytes(kind)).content_type() == f"image/{kind.lower()}"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<svg onload='alert(1)'/>",
        image_bytes("GIF"),
        image_bytes()[:-300],
        image_bytes("PNG", (4096, 2048)),
        image_bytes() + bytes(MAX_BYTES),
    ],
    ids=["empty", "svg", "gif", "cut", "many pixels", "many bytes"],
)
def test_what_is_no_small_whole_image_is_not_shown(content: bytes) -> None:
    assert PreviewImage(content).content_type() is None


# --- whose it is ---


def test_a_preview_that_names_its_prompt_is_that_prompts_alone() -> None:
    tracker = ProgressTracker(GRAPH, "mine")

    assert tracker.node_of(PreviewImage(b"", "8", "mine")) == "8"
    assert tracker.node_of(PreviewImage(b"", "8", "another")) is None


@pytest.mark.parametrize(
    "end",
    [
        message("execution_success"),
        message("execution_error"),
        message("execution_interrupted"),
        message("executing", node=None),
    ],
    ids=lambda end: end["type"],
)
def test_a_preview_that_names_none_is_ours_only_while_our_prompt_runs(end: object) -> None:
    tracker, preview = ProgressTracker(GRAPH, "mine"), PreviewImage(b"")
    tracker.feed({"type": "executing", "data": {"node": "3", "prompt_id": "another"}})
    before = tracker.node_of(preview)
    tracker.feed(message("execution_start"))
    at_start = tracker.node_of(preview)
    tracker.feed(message("executing", node="3"))
    during = tracker.node_of(preview)
    assert isinstance(end, dict)
    tracker.feed(end)

    assert (before, at_start, during, tracker.node_of(preview)) == (None, "", "3", None)
