from __future__ import annotations

from pathlib import Path

import pytest
from django.core.checks import run_checks
from PIL import Image, ImageEnhance, ImageOps

from jobs import checks, developing
from jobs.developing import BadPhoto, Photo, develop
from jobs.faces import GRAY, Box, find_face
from jobs.tests.helpers_photos import decoded, encoded, head, rules, sample, side_by_side


def codes(photo: Image.Image) -> list[str]:
    return [doubt.code for doubt in find_face(photo)[2]]


def read(photo: Image.Image, face_check: str = "warn", max_side: int = 2048) -> Photo:
    return develop(encoded(photo, "PNG"), rules(face_check=face_check, max_side=max_side))


def box_of(photo: Image.Image) -> Box:
    face = find_face(photo)[1]
    assert face is not None
    return face


def is_about(one: Box, other: Box, off: int = 12) -> bool:
    return all(abs(a - b) <= off for a, b in zip(one.edges(), other.edges(), strict=True))


# --- one good face ---


def test_a_photo_with_one_face_stays_as_it_is_and_raises_no_doubt() -> None:
    photo, face, doubts = find_face(sample())

    assert (photo.size, doubts) == ((512, 512), [])
    assert face is not None
    assert is_about(face, Box(175, 79, 271, 175))


@pytest.mark.parametrize("size", [180, 300, 600, 1500])
def test_a_face_is_found_at_each_size(size: int) -> None:
    assert codes(head(size)) == []
    assert is_about(box_of(head(size)), Box(96, 79, 192, 175).scaled(size / 288), off=size // 20)


@pytest.mark.parametrize(
    "photo",
    [
        ImageOps.mirror(head(300)),
        head(300).rotate(20),
        head(300).rotate(-20),
        ImageEnhance.Brightness(head(300)).enhance(0.3),
        ImageOps.grayscale(head(300)).convert("RGB"),
    ],
)
def test_a_face_is_found_mirrored_tilted_dark_and_gray(photo: Image.Image) -> None:
    assert codes(photo) == []


# --- none ---


@pytest.mark.parametrize(
    "photo",
    [
        Image.new("RGB", (300, 300), "beige"),
        Image.effect_noise((300, 300), 90).convert("RGB"),
        sample().crop((100, 220, 500, 512)),  # her suit
        Image.new("RGB", (64, 2000)),
    ],
)
def test_a_photo_without_a_face_is_doubted(photo: Image.Image) -> None:
    assert codes(photo) == ["no_face"]


def test_a_face_of_ten_pixels_in_a_large_photo_is_none() -> None:
    photo = Image.new("RGB", (1600, 1200), "silver")
    photo.paste(head(30), (800, 600))

    assert codes(photo) == ["no_face"]


@pytest.mark.parametrize("angle", [90, 180, 270])
def test_a_face_that_lies_on_its_side_is_told_apart_from_none(angle: int) -> None:
    assert codes(head(300).rotate(angle)) == ["turned_face"]


# --- several ---


def test_of_two_faces_the_larger_is_kept_and_the_other_is_out_of_sight() -> None:
    photo, face, doubts = find_face(side_by_side(head(200), head(400)))

    assert [doubt.code for doubt in doubts] == ["several_faces"]
    assert "shows 2 faces" in doubts[0].message
    assert face is not None
    assert 110 < face.width < 160
    assert codes(photo) == []
    assert is_about(box_of(photo), face, off=20)


def test_in_a_mirror_the_same_face_is_kept() -> None:
    two = side_by_side(head(200), ImageEnhance.Color(head(400)).enhance(0))

    photos = [find_face(two)[0], find_face(ImageOps.mirror(two))[0]]

    assert [is_gray(photo) for photo in photos] == [True, True]


def is_gray(photo: Image.Image) -> bool:
    return max(high for _low, high in photo.convert("HSV").getextrema()[1:2]) < 30  # type: ignore[misc]


@pytest.mark.parametrize("place", range(3))
def test_of_faces_as_large_the_one_in_the_middle_is_kept(place: int) -> None:
    heads = [ImageEnhance.Color(head(240)).enhance(0) for _ in range(3)]
    heads[1] = head(240 - 20 * place)

    photo, _face, _doubts = find_face(side_by_side(*heads))

    assert not is_gray(photo)


def test_six_faces_are_counted() -> None:
    row = side_by_side(*[head(160)] * 3)
    photo = Image.new("RGB", (row.width, 2 * row.height))
    photo.paste(row, (0, 0))
    photo.paste(row, (0, row.height))

    doubt = find_face(photo)[2][0]

    assert "shows 6 faces" in doubt.message


# --- close and far ---


def test_a_close_up_gets_a_margin_so_that_its_face_is_found() -> None:
    close_up = sample().crop((175, 76, 266, 180)).resize((455, 520))

    photo, face, doubts = find_face(close_up)

    assert doubts == []
    assert face is not None
    assert photo.width > 1.8 * face.width
    assert photo.getpixel((0, 0)) == GRAY
    assert is_about(box_of(photo), face, off=40)


def test_with_its_margin_a_close_up_is_no_larger_than_allowed() -> None:
    close_up = sample().crop((175, 76, 266, 180)).resize((455, 520))

    photo = read(close_up, max_side=500)

    assert max(photo.width, photo.height) == 500
    assert photo.face is not None
    assert is_about(Box(**photo.face), box_of(decoded(photo)), off=40)


def test_a_face_that_is_cut_off_is_doubted() -> None:
    assert codes(sample().crop((205, 0, 500, 512))) == ["cut_face"]


def test_a_face_too_small_for_a_likeness_is_doubted_with_its_width() -> None:
    doubt = find_face(head(140))[2][0]

    assert doubt.code == "small_face"
    assert "pixels wide" in doubt.message


# --- the setting ---


def test_by_warning_a_photo_is_taken_and_its_doubts_are_told() -> None:
    photo = read(Image.new("RGB", (300, 300), "beige"))

    assert photo.face is None
    assert [warning["code"] for warning in photo.warnings] == ["no_face"]
    assert photo.warnings[0]["message"].startswith("No face was found")


def test_by_refusing_a_photo_with_a_doubt_is_not_taken() -> None:
    with pytest.raises(BadPhoto) as refused:
        read(side_by_side(head(200), head(400)), face_check="refuse")

    assert (refused.value.status, refused.value.code) == (422, "several_faces")


def test_by_refusing_a_good_photo_is_taken() -> None:
    assert read(sample(), face_check="refuse").face


def test_switched_off_nobody_looks_and_nothing_is_cut() -> None:
    photo = read(side_by_side(head(200), head(400)), face_check="off")

    assert (photo.width, photo.face, photo.warnings) == (600, None, [])


def test_without_a_detector_photos_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(developing, "finds_faces", lambda: False)

    photo = read(side_by_side(head(200), head(400)), face_check="refuse")

    assert (photo.width, photo.face, photo.warnings) == (600, None, [])


def test_a_machine_without_a_detector_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "finds_faces", lambda: False)

    assert [warning.id for warning in run_checks()] == ["genflow.W001"]


@pytest.mark.parametrize(
    ("machine", "flags", "finds"),
    [("x86_64", "sse avx avx2", True), ("x86_64", "sse sse2", False), ("aarch64", "asimd", True)],
)
def test_a_cpu_that_the_detector_would_die_of_is_known(
    monkeypatch: pytest.MonkeyPatch, machine: str, flags: str, finds: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(Path, "read_text", lambda path: f"flags : {flags} \n")

    assert developing.finds_faces.__wrapped__() is finds
