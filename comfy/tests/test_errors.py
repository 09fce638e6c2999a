from __future__ import annotations

import pytest

from comfy import errors
from comfy.errors import ComfyError, NoAnswer
from comfy.text import clean_text

CLASSES = ComfyError.__subclasses__()


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_tells_the_user_something_in_plain_words(error: type[ComfyError]) -> None:
    assert error.user_message.endswith(".")
    assert not set("/\\:_<>") & set(error.user_message)


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_stands_in_the_tree_under_its_kind(error: type[ComfyError]) -> None:
    lines = [
        line.split()
        for line in (errors.__doc__ or "").splitlines()
        if f"+ {error.__name__} " in line
    ]

    assert [line[-1] for line in lines] == [f"({error.kind})"]


def test_an_error_without_words_still_has_a_message() -> None:
    assert NoAnswer(" \0").message == "NoAnswer"


def test_clean_text_can_be_stored_anywhere() -> None:
    assert clean_text("a\0b\ud83dc", 100) == "ab?c"
    assert clean_text(None, 100) == ""
    assert clean_text("x" * 50, 10) == "x" * 9 + "…"
