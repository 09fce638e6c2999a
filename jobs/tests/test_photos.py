from __future__ import annotations

import io
import threading
from typing import Any

import pytest
from PIL import Image, ImageChops

from jobs.photos import BadPhoto, Photo, read_photo
from jobs.tests.helpers import start, wait_until

SIZE = (96, 72)


def read(content: bytes, *, max_bytes: int = 1_000_000, max_pixels: int = 1_000_000) -> Photo:
    return read_photo(io.BytesIO(content), max_bytes=max_bytes, max_pixels=max_pixels)


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def decoded(photo: Photo) -> Image.Image:
    return Image.open(io.BytesIO(photo.content))


def ramp(mode: str = "RGB") -> Image.Image:
    """Black at the top to white at the bottom."""
    gray = Image.linear_gradient("L").resize(SIZE)
    if mode == "CMYK":
        return gray.convert("RGB").convert("CMYK")
    return gray.convert(mode)


def deep_ramp() -> Image.Image:
    """The same in 16 bits a pixel."""
    raw = b"".join((value * 257).to_bytes(2, "little") for value in ramp("L").tobytes())
    return Image.frombytes("I;16", SIZE, raw)


def differs(photo: Photo, expected: Image.Image) -> int:
    """Return by how much any pixel is off; JPEG costs a few levels."""
    difference = ImageChops.difference(decoded(photo), expected.convert("RGB"))
    return max(high for _low, high in difference.getextrema())  # type: ignore[misc]


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "MPO"])
def test_a_photo_of_each_known_format_becomes_a_plain_jpeg(format: str) -> None:
    photo = read(encoded(ramp(), format))

    assert (photo.content_type, photo.width, photo.height) == ("image/jpeg", *SIZE)
    assert (decoded(photo).format, decoded(photo).mode) == ("JPEG", "RGB")
    assert differs(photo, ramp()) < 16


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK", "YCbCr", "I", "F"])
def test_a_photo_of_each_colour_mode_becomes_rgb(mode: str) -> None:
    photo = read(encoded(ramp(mode), "TIFF"))

    assert decoded(photo).mode == "RGB"
    assert differs(photo, ramp("1") if mode == "1" else ramp()) < 16


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_down_and_not_cut_off(format: str) -> None:
    assert differs(read(encoded(deep_ramp(), format)), ramp()) < 16


def test_deep_numbers_that_are_none_do_no_harm() -> None:
    read(encoded(Image.new("F", SIZE, float("nan")), "TIFF"))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_photo_taken_with_a_turned_camera_stands_upright(format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown a quarter turn clockwise
    photo = read(encoded(ramp(), format, exif=exif))

    assert (photo.width, photo.height) == (SIZE[1], SIZE[0])
    assert differs(photo, ramp().transpose(Image.Transpose.ROTATE_270)) < 16


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow speaks of corrupt EXIF
@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0",
        b"Exif\0\0Exif\0\0II*\0\x08\0\0\0",
        b"Exif\0\0not a table at all",
        b"Exif\0\0II*\0\x08\0\0\0\x09\0\x12",  # cut in the first entry
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x09\0\0\0\0\0\0",  # turn 9
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x04abc\0\0\0\0\0",  # turn "abc"
    ],
)
def test_broken_exif_breaks_nothing(exif: bytes) -> None:
    photo = read(encoded(ramp(), "JPEG", exif=exif))

    assert (photo.width, photo.height) == SIZE


def test_metadata_is_dropped() -> None:
    exif = Image.Exif()
    exif[0x010E] = "taken at home"
    content = encoded(ramp(), "JPEG", exif=exif, comment=b"a secret", icc_profile=b"profile")

    photo = read(content)

    assert not any(
        word in photo.content for word in (b"Exif", b"home", b"secret", b"ICC_PROFILE", b"profile")
    )


def test_a_film_behind_the_photo_is_dropped_but_counts_as_bytes() -> None:
    content = encoded(ramp(), "JPEG")
    film = b"\0\0\0\x18ftypmp42" + bytes(50_000)

    assert len(read(content + film).content) < len(film)
    with pytest.raises(BadPhoto, match="larger than"):
        read(content + film, max_bytes=len(content) + 100)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_a_moving_picture_the_first_frame_is_taken(format: str) -> None:
    others = [Image.new("RGB", SIZE, colour) for colour in ("red", "green", "blue")]
    photo = read(encoded(ramp(), format, save_all=True, append_images=others))

    assert differs(photo, ramp()) < 16


def test_what_is_transparent_is_laid_on_a_light_ground() -> None:
    cutout = Image.new("RGBA", SIZE, (200, 0, 0, 0))
    cutout.paste((0, 0, 200, 255), (0, 0, 48, 72))

    image = decoded(read(encoded(cutout, "PNG")))

    assert image.getpixel((90, 36)) == (255, 255, 255)
    red, _green, blue = image.getpixel((10, 36))  # type: ignore[misc]
    assert (red < 10, blue > 190) == (True, True)


@pytest.mark.parametrize("transparency", [0, bytes([0, 255])])
def test_transparent_colours_of_a_palette_are_laid_on_the_ground(transparency: Any) -> None:
    picture = Image.new("P", SIZE, 1)
    picture.putpalette([0, 0, 0, 0, 0, 200])
    picture.paste(0, (0, 0, 48, 72))

    image = decoded(read(encoded(picture, "PNG", transparency=transparency)))

    assert image.getpixel((10, 36)) == (255, 255, 255)


def test_a_fully_transparent_photo_is_refused() -> None:
    with pytest.raises(BadPhoto, match="transparent") as refused:
        read(encoded(Image.new("RGBA", SIZE), "PNG"))

    assert (refused.value.status, refused.value.code) == (422, "bad_photo")


@pytest.mark.parametrize("size", [(1, 1), (63, 500), (500, 63)])
def test_a_tiny_photo_is_refused_with_the_least_size(size: tuple[int, int]) -> None:
    with pytest.raises(BadPhoto, match="at least 64 on each side") as refused:
        read(encoded(Image.new("RGB", size), "PNG"))

    assert refused.value.status == 422


def test_the_limits_themselves_are_allowed() -> None:
    content = encoded(Image.new("RGB", (64, 64)), "PNG")

    read(content, max_bytes=len(content), max_pixels=64 * 64)


@pytest.mark.parametrize(
    ("size", "max_pixels"),
    [((65, 64), 64 * 64), ((16_385, 64), 10_000_000), ((12_000, 12_000), 10**9)],
)
def test_too_many_pixels_are_refused_before_they_are_decoded(
    size: tuple[int, int], max_pixels: int
) -> None:
    content = encoded(Image.new("1", size), "PNG")[:200]  # there is nothing to decode

    with pytest.raises(BadPhoto, match="pixels") as refused:
        read(content, max_pixels=max_pixels)

    assert (refused.value.status, refused.value.code) == (413, "photo_too_large")


def test_large_photos_sent_at_once_are_decoded_two_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()
    inside, most = [], []

    def plain(image: Image.Image) -> Image.Image:
        inside.append(image)
        most.append(len(inside))
        go_on.wait(20)
        inside.pop()
        return image.convert("RGB")

    monkeypatch.setattr("jobs.photos._plain", plain)
    content = encoded(ramp(), "PNG")

    threads = [start(lambda: read(content)) for _ in range(6)]
    wait_until(lambda: len(inside) == 2)
    go_on.set()
    for thread in threads:
        thread.join()

    assert (len(most), max(most)) == (6, 2)


def test_a_progressive_jpeg_has_only_so_many_scans() -> None:
    content = encoded(ramp(), "JPEG", progressive=True)
    first = content.index(b"\xff\xda", content.index(b"\xff\xda") + 1)
    scan = content[first : content.index(b"\xff\xda", first + 1)]

    read(content[:-2] + scan * 20 + content[-2:])
    with pytest.raises(BadPhoto, match="too many pieces"):
        read(content[:-2] + scan * 60 + content[-2:])


def test_a_jpeg_has_only_so_many_segments() -> None:
    content = encoded(ramp(), "JPEG")

    with pytest.raises(BadPhoto, match="too many pieces"):
        read(content[:2] + b"\xff\xe5\0\x02" * 5_000 + content[2:])


def test_what_follows_a_jpeg_is_no_part_of_it() -> None:
    read(encoded(ramp(), "JPEG") + b"\xff\xda\0\x02" * 5_000)


def test_no_more_than_the_allowed_bytes_are_read() -> None:
    file = io.BytesIO(bytes(1_000_000))

    with pytest.raises(BadPhoto, match="larger than 1,000 bytes") as refused:
        read_photo(file, max_bytes=1000, max_pixels=1_000_000)

    assert refused.value.status == 413
    assert file.tell() == 1001


@pytest.mark.parametrize(
    "content",
    [
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"\0\0\0\x18ftypheic",
        encoded(Image.new("RGB", SIZE), "ICO"),
    ],
)
def test_what_is_no_photo_of_a_known_format_is_refused(content: bytes) -> None:
    with pytest.raises(BadPhoto, match="must be a JPEG, PNG") as refused:
        read(content)

    assert (refused.value.status, refused.value.code) == (415, "photo_format")


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_photo_cut_short_is_refused(format: str) -> None:
    content = encoded(Image.effect_noise(SIZE, 90).convert("RGB"), format)

    with pytest.raises(BadPhoto) as refused:
        read(content[: len(content) // 2])

    assert refused.value.status in (415, 422)


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(BadPhoto, match="empty") as refused:
        read(b"")

    assert refused.value.status == 422
