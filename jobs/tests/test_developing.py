from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from jobs.developing import BadPhoto, Photo, develop
from jobs.tests.helpers_photos import (
    FORMATS,
    SIZE,
    TURN,
    decoded,
    differs,
    encoded,
    entry,
    exif,
    interlaced_png,
    png,
    ramp,
    rules,
    spoiled,
    swapped_profile,
)

HEIC = (Path(__file__).parent / "data/turned.heic").read_bytes()
QUARTER = entry(TURN, 3, 1, b"\0\6\0\0")  # to be shown a quarter turn clockwise


def read(content: bytes, **changed: Any) -> Photo:
    return develop(content, rules(**changed))


def refusal(content: bytes, **changed: Any) -> BadPhoto:
    with pytest.raises(BadPhoto) as refused:
        read(content, **changed)
    return refused.value


def stands_upright(photo: Photo) -> bool:
    """Whether a ramp was turned a quarter clockwise."""
    turned = ramp().transpose(Image.Transpose.ROTATE_270)
    return (photo.width, photo.height) == turned.size and differs(photo, turned) < 16


# --- formats ---


@pytest.mark.parametrize("format", FORMATS)
def test_a_photo_of_each_known_format_becomes_a_plain_jpeg(format: str) -> None:
    photo = read(encoded(ramp(), format))

    assert (photo.content_type, photo.width, photo.height) == ("image/jpeg", *SIZE)
    assert (decoded(photo).format, decoded(photo).mode) == ("JPEG", "RGB")
    assert differs(photo, ramp()) < 16


@pytest.mark.parametrize("head", [b"\0\0\0\6Exif\0\0MM", b"\0\0\0\0Junk\0\0MM"])
def test_a_heic_of_a_phone_is_turned_once_though_both_its_boxes_and_its_exif_say_so(
    head: bytes,
) -> None:
    content = HEIC.replace(b"\0\0\0\6Exif\0\0MM", head)

    assert stands_upright(read(content))


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"subsampling": 2}, {"quality": 30}, {"optimize": True}]
)
def test_a_jpeg_may_be_made_in_any_way(options: dict[str, Any]) -> None:
    assert differs(read(encoded(ramp(), "JPEG", **options)), ramp()) < 16


def test_an_interlaced_png_is_taken() -> None:
    assert differs(read(interlaced_png(ramp("L"))), ramp()) < 16


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK", "YCbCr", "LAB", "I", "F"])
def test_a_photo_of_each_colour_mode_becomes_rgb(mode: str) -> None:
    photo = read(encoded(ramp(mode), "TIFF"))

    assert decoded(photo).mode == "RGB"
    assert differs(photo, ramp("1") if mode == "1" else ramp()) < 16


def test_a_cmyk_jpeg_keeps_its_colours() -> None:
    assert differs(read(encoded(ramp("CMYK"), "JPEG")), ramp()) < 16


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_of_a_moving_picture_the_first_frame_is_taken(format: str) -> None:
    others = [Image.new("RGB", SIZE, colour) for colour in ("red", "green", "blue")]
    photo = read(encoded(ramp(), format, save_all=True, append_images=others))

    assert differs(photo, ramp()) < 16


def test_of_a_gif_of_300_frames_the_first_is_taken() -> None:
    others = [Image.new("L", SIZE, number % 256) for number in range(299)]

    assert differs(read(encoded(ramp(), "GIF", save_all=True, append_images=others)), ramp()) < 16


def test_a_film_behind_the_photo_is_dropped() -> None:
    film = b"\0\0\0\x18ftypmp42" + bytes(50_000)

    assert len(read(encoded(ramp(), "JPEG") + film).content) < len(film)


# --- depth, ground, colours ---


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bits_of_gray_are_scaled_down_and_not_cut_off(format: str) -> None:
    deep = b"".join((value * 257).to_bytes(2, "little") for value in ramp("L").tobytes())

    assert differs(read(encoded(Image.frombytes("I;16", SIZE, deep), format)), ramp()) < 16


def test_sixteen_bits_of_each_colour_are_scaled_down_and_not_cut_off() -> None:
    row = SIZE[0] * 6
    deep = b"".join(bytes([value, 0]) for value in ramp().tobytes())
    lines = b"".join(b"\0" + deep[start : start + row] for start in range(0, len(deep), row))

    assert differs(read(png(SIZE, 16, 2, lines)), ramp()) < 16


def test_deep_numbers_that_are_none_do_no_harm() -> None:
    read(encoded(Image.new("F", SIZE, float("nan")), "TIFF"))


def test_what_is_transparent_is_laid_on_a_light_ground() -> None:
    cutout = Image.new("RGBA", SIZE, (200, 0, 0, 0))
    cutout.paste((0, 0, 200, 255), (0, 0, 48, 72))

    image = decoded(read(encoded(cutout, "PNG")))

    assert image.getpixel((90, 36)) == (255, 255, 255)
    red, _green, blue = image.getpixel((10, 36))  # type: ignore[misc]
    assert (red < 10, blue > 190) == (True, True)


def test_the_hidden_colours_of_a_large_cutout_do_not_bleed_into_its_edge() -> None:
    cutout = Image.new("RGBA", (1000, 1000), (0, 0, 0, 0))
    cutout.paste((255, 255, 255, 255), (0, 0, 333, 1000))

    darkest = decoded(read(encoded(cutout, "PNG"), max_side=100)).convert("L").getextrema()[0]

    assert darkest > 250  # type: ignore[operator]


@pytest.mark.parametrize("transparency", [0, bytes([0, 255])])
def test_transparent_colours_of_a_palette_are_laid_on_the_ground(transparency: Any) -> None:
    picture = Image.new("P", SIZE, 1)
    picture.putpalette([0, 0, 0, 0, 0, 200])
    picture.paste(0, (0, 0, 48, 72))

    image = decoded(read(encoded(picture, "PNG", transparency=transparency)))

    assert image.getpixel((10, 36)) == (255, 255, 255)


def test_a_fully_transparent_photo_is_refused() -> None:
    refused = refusal(encoded(Image.new("RGBA", SIZE), "PNG"))

    assert (refused.status, refused.code) == (422, "bad_photo")
    assert "fully transparent" in refused.message


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_the_colours_of_a_profile_become_those_of_srgb(format: str) -> None:
    red = Image.new("RGB", SIZE, "red")

    photo = read(encoded(red, format, icc_profile=swapped_profile()))

    assert differs(photo, Image.new("RGB", SIZE, "blue")) < 16


def test_a_profile_is_followed_under_transparency_too() -> None:
    content = encoded(Image.new("RGBA", SIZE, "red"), "PNG", icc_profile=swapped_profile())

    assert differs(read(content), Image.new("RGB", SIZE, "blue")) < 16


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("profile", [b"no profile", swapped_profile()[:200], b"\0" * 4000])
def test_a_broken_profile_is_ignored(mode: str, profile: bytes) -> None:
    assert differs(read(encoded(ramp(mode), "JPEG", icc_profile=profile)), ramp()) < 16


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_a_profile_for_other_channels_is_ignored(mode: str) -> None:
    content = encoded(ramp(mode), "JPEG", icc_profile=swapped_profile())

    assert differs(read(content), ramp()) < 16


# --- the way up, and what else stands beside the pixels ---


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "MPO"])
def test_a_photo_taken_with_a_turned_camera_stands_upright(format: str) -> None:
    assert stands_upright(read(encoded(ramp(), format, exif=exif(QUARTER))))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow speaks of corrupt EXIF
@pytest.mark.parametrize(
    "broken",
    [
        exif(QUARTER, count=9),  # cut behind the turn
        exif(entry(0x010F, 2, 99_999, b"\xff\xff\xff\xf0"), QUARTER),  # a maker's name far outside
        exif(entry(0x010F, 99, 1, b"abcd"), QUARTER),  # of no known kind
        exif(QUARTER, entry(0x8825, 4, 1, b"\xff\xff\xff\xff")),  # a place that is nowhere
        exif(QUARTER, entry(0x8769, 4, 1, b"\0\0\0\x08")),  # a table within itself
        exif(QUARTER, head=b"Exif\0\0" * 2),
        exif(QUARTER, head=b"Exif\0\0" * 3),
        exif(QUARTER, head=b"Exif\0\0 and some junk "),
    ],
)
def test_a_photo_stands_upright_though_the_rest_of_its_exif_is_broken(broken: bytes) -> None:
    assert stands_upright(read(encoded(ramp(), "JPEG", exif=broken)))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "broken",
    [
        b"Exif\0\0",
        b"Exif\0\0Exif\0\0II*\0\x08\0\0\0",
        b"Exif\0\0not a table at all",
        b"Exif\0\0II*\0\x08\0\0\0\x09\0\x12",  # cut in the first entry
        exif(entry(TURN, 3, 1, b"\0\0\0\0")),
        exif(entry(TURN, 3, 1, b"\0\x09\0\0")),
        exif(entry(TURN, 2, 4, b"abc\0")),
    ],
)
def test_exif_that_says_nothing_breaks_nothing(broken: bytes) -> None:
    assert differs(read(encoded(ramp(), "JPEG", exif=broken)), ramp()) < 16


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("profile", [None, swapped_profile(), b"broken"])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
def test_place_comment_and_profile_are_dropped(format: str, profile: bytes | None) -> None:
    place = exif(entry(0x010E, 2, 4, b"home"), entry(0x8825, 4, 1, b"\0\0\0\x20"))
    content = encoded(ramp(), format, exif=place, comment=b"a secret", icc_profile=profile)
    assert b"home" in content

    photo = read(content)

    words = (b"Exif", b"home", b"secret", b"ICC_PROFILE", b"acsp")
    assert not [word for word in words if word in photo.content]
    assert not decoded(photo).getexif()


# --- sizes ---


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "AVIF"])
@pytest.mark.parametrize(("size", "stored"), [((400, 300), (200, 150)), ((150, 600), (50, 200))])
def test_a_large_photo_is_made_smaller(
    format: str, size: tuple[int, int], stored: tuple[int, int]
) -> None:
    photo = read(encoded(ramp(size=size), format), max_side=200)

    assert (photo.width, photo.height) == stored
    assert differs(photo, ramp(size=stored)) < 16


def test_a_small_photo_is_not_made_larger() -> None:
    assert read(encoded(ramp(), "PNG"), max_side=4096).width == SIZE[0]


@pytest.mark.parametrize("size", [(1, 1), (10, 10), (63, 500), (500, 63)])
def test_a_tiny_photo_is_refused_with_the_least_size(size: tuple[int, int]) -> None:
    refused = refusal(encoded(Image.new("RGB", size), "PNG"))

    assert refused.status == 422
    assert refused.message == (
        f"The photo is {size[0]} x {size[1]} pixels; it must have at least 64 on each side."
    )


def test_the_least_and_the_most_are_allowed() -> None:
    read(encoded(Image.new("RGB", (64, 64)), "PNG"), max_pixels=64 * 64)


@pytest.mark.parametrize(
    ("size", "max_pixels"),
    [((65, 64), 64 * 64), ((16_385, 64), 10_000_000), ((12_000, 12_000), 10**9)],
)
def test_too_many_pixels_are_refused_before_they_are_decoded(
    size: tuple[int, int], max_pixels: int
) -> None:
    head = png(size, 1, 0, b"")  # there is nothing to decode

    refused = refusal(head, max_pixels=max_pixels)

    assert (refused.status, refused.code) == (413, "photo_too_large")
    assert f"more than {max_pixels:,} pixels" in refused.message


# --- what is refused ---


@pytest.mark.parametrize(
    "content",
    [
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 96 96\n",
        b"\xc5\xd0\xd3\xc6" + bytes(100),  # EPS of Windows
        b"8BPS\0\1" + bytes(100),  # Photoshop
        b"\xd7\xcd\xc6\x9a" + bytes(100),  # WMF
        b"<!doctype html><img src=x>",
        b"PK\3\4" + bytes(100),
        b"\0\0\0\x18ftypmp42" + bytes(100),
        b"\0\0\0\x18ftypheic" + bytes(100),
        encoded(Image.new("RGB", SIZE), "ICO"),
        encoded(Image.new("RGB", SIZE), "PPM"),
        encoded(Image.new("RGB", SIZE), "TGA"),
    ],
)
def test_what_is_no_photo_of_a_known_format_is_refused(content: bytes) -> None:
    refused = refusal(content)

    assert (refused.status, refused.code) == (415, "photo_format")
    assert "Send a JPEG, PNG, WebP, HEIC" in refused.message


@pytest.mark.parametrize("format", FORMATS)
def test_a_photo_cut_short_is_refused(format: str) -> None:
    content = encoded(Image.effect_noise(SIZE, 90).convert("RGB"), format)

    refused = refusal(content[: len(content) // 2])

    assert refused.status in (415, 422)


def test_a_heic_cut_short_is_refused() -> None:
    assert refusal(HEIC[: len(HEIC) // 2]).status in (415, 422)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("format", [*FORMATS, "HEIC"])
def test_spoiled_bytes_give_a_photo_or_a_refusal(format: str, seed: int) -> None:
    photo = Image.effect_noise(SIZE, 90).convert("RGB")
    content = HEIC if format == "HEIC" else encoded(photo, format, exif=exif(QUARTER))

    for variant in spoiled(content, seed):
        with suppress(BadPhoto):
            decoded(read(variant)).load()
