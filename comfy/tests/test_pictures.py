from __future__ import annotations

import io
import zlib
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

from comfy.errors import BadPicture, OutputTooLarge
from comfy.pictures import MAX_PIXELS, read_picture

GRAPH_TEXT = "the whole graph with the prompt"


def gradient(width: int = 64, height: int = 48) -> Image.Image:
    return Image.linear_gradient("L").resize((width, height)).convert("RGB")


def saved(image: Image.Image, name: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, name, **options)
    return written.getvalue()


def png_with_graph(image: Image.Image) -> bytes:
    """A PNG as SaveImage writes it."""
    text = PngImagePlugin.PngInfo()
    text.add_text("prompt", GRAPH_TEXT)
    text.add_itxt("workflow", GRAPH_TEXT)
    exif = Image.Exif()
    exif[0x010E] = GRAPH_TEXT
    return saved(image, pnginfo=text, exif=exif, dpi=(72, 72))


def chunk(kind: bytes, content: bytes) -> bytes:
    return len(content).to_bytes(4) + kind + content + zlib.crc32(kind + content).to_bytes(4)


def test_a_png_loses_its_graph_and_not_one_pixel() -> None:
    content = png_with_graph(gradient())

    picture = read_picture(content, allow_flat=False)

    assert (picture.content_type, picture.width, picture.height) == ("image/png", 64, 48)
    assert GRAPH_TEXT.encode() in content
    assert GRAPH_TEXT.encode() not in picture.content
    before, after = Image.open(io.BytesIO(content)), Image.open(io.BytesIO(picture.content))
    assert before.tobytes() == after.tobytes()
    assert after.info["dpi"] == before.info["dpi"]


def test_a_stripped_png_is_left_as_it_is() -> None:
    content = read_picture(png_with_graph(gradient()), allow_flat=False).content

    assert read_picture(content, allow_flat=False).content == content


@pytest.mark.parametrize("name", ["JPEG", "WEBP"])
def test_other_formats_lose_their_metadata_too(name: str) -> None:
    exif = Image.Exif()
    exif[0x010E] = GRAPH_TEXT
    options = {"comment": GRAPH_TEXT} if name == "JPEG" else {}
    content = saved(gradient(), name, exif=exif, xmp=GRAPH_TEXT.encode(), **options)

    picture = read_picture(content, allow_flat=False)

    assert GRAPH_TEXT.encode() in content
    assert GRAPH_TEXT.encode() not in picture.content
    assert picture.content_type == f"image/{name.lower()}"
    assert read_picture(picture.content, allow_flat=False).width == 64


@pytest.mark.parametrize("name", ["WEBP", "GIF", "PNG"])
def test_a_moving_picture_keeps_its_frames_and_their_time(name: str) -> None:
    turned = gradient().rotate(90)
    content = saved(
        gradient(), name, save_all=True, append_images=[turned], duration=[70, 110], loop=3
    )

    picture = read_picture(content, allow_flat=False)

    moving: Any = Image.open(io.BytesIO(picture.content))
    durations = []
    for index in range(moving.n_frames):
        moving.seek(index)
        moving.load()
        durations.append(moving.info["duration"])
    assert durations == [70, 110]
    assert moving.info["loop"] == 3


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9])
def test_a_cut_picture_is_refused_wherever_it_is_cut(name: str, kept: float) -> None:
    content = saved(Image.effect_noise((64, 64), 90).convert("RGB"), name)

    with pytest.raises(BadPicture):
        read_picture(content[: int(len(content) * kept)], allow_flat=True)


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP"])
def test_a_picture_whose_end_was_never_written_is_refused(name: str) -> None:
    content = saved(Image.effect_noise((128, 128), 90).convert("RGB"), name)

    with pytest.raises(BadPicture):
        read_picture(content[:-2048] + bytes(2048), allow_flat=True)


def test_a_png_without_its_last_chunk_is_refused_though_all_pixels_are_there() -> None:
    content = saved(gradient())

    with pytest.raises(BadPicture, match="IEND"):
        read_picture(content[:-12], allow_flat=False)


def test_a_png_with_one_wrong_bit_is_refused() -> None:
    content = bytearray(saved(gradient()))
    content[len(content) // 2] ^= 1

    with pytest.raises(BadPicture):
        read_picture(bytes(content), allow_flat=False)


@pytest.mark.parametrize("colour", ["black", "white", "#808080"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_one_flat_colour_is_no_portrait_but_may_be_allowed(mode: str, colour: str) -> None:
    sheet = Image.new("RGB", (64, 64), colour)
    content = saved(sheet.quantize() if mode == "P" else sheet.convert(mode))

    with pytest.raises(BadPicture, match="flat"):
        read_picture(content, allow_flat=False)
    assert read_picture(content, allow_flat=True).width == 64


@pytest.mark.parametrize("mode", ["I;16", "L", "LA", "1", "P"])
def test_pictures_of_every_depth_that_show_something_are_taken(mode: str) -> None:
    image = Image.new("I;16", (64, 64), 300) if mode == "I;16" else gradient().convert(mode)
    image.putpixel((3, 3), (7, 7) if mode == "LA" else 1)

    assert read_picture(saved(image), allow_flat=False).content_type == "image/png"


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    side = int(MAX_PIXELS**0.5) + 1
    header = side.to_bytes(4) + side.to_bytes(4) + b"\x08\x02\x00\x00\x00"
    pixels = chunk(b"IDAT", zlib.compress(bytes(1000)))

    with pytest.raises(OutputTooLarge, match="too many pixels"):
        read_picture(
            b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b""),
            allow_flat=True,
        )


@pytest.mark.parametrize(
    "content", [b"", b"<html>no</html>", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe", b"RIFF" + bytes(8)]
)
def test_what_is_no_picture_is_refused(content: bytes) -> None:
    with pytest.raises(BadPicture):
        read_picture(content, allow_flat=True)
