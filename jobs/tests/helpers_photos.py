"""Plain functions that the tests of photos share."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from django.conf import settings
from PIL import Image, ImageChops, ImageCms

from jobs.developing import Photo, Rules, prepare

prepare()
SIZE: Final = (96, 72)
TURN: Final = 0x0112  # EXIF's name for the orientation
FACE: Final = (175, 79, 271, 175)  # where the sample's is
FORMATS: Final = ["JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "MPO"]  # those we can write


def rules(**changed: Any) -> Rules:
    return replace(Rules(1_000_000, 1_000_000, max_side=2048, face_check="off"), **changed)


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def decoded(photo: Photo) -> Image.Image:
    return Image.open(io.BytesIO(photo.content))


def ramp(mode: str = "RGB", size: tuple[int, int] = SIZE) -> Image.Image:
    """Black at the top to white at the bottom."""
    gray = Image.linear_gradient("L").resize(size)
    return (gray.convert("RGB") if mode == "CMYK" else gray).convert(mode)


def differs(photo: Photo, expected: Image.Image) -> int:
    """Return by how much any pixel is off; JPEG costs a few levels."""
    difference = ImageChops.difference(decoded(photo), expected.convert("RGB"))
    return max(high for _low, high in difference.getextrema())  # type: ignore[misc]


def sample() -> Image.Image:
    """The photo of an astronaut, with one face."""
    return Image.open(settings.BASE_DIR / "static/samples/astronaut.jpg").convert("RGB")


def head(size: int) -> Image.Image:
    """The astronaut's head, square, with a face of a third of its width."""
    return sample().crop((79, 0, 367, 288)).resize((size, size))


def side_by_side(*pictures: Image.Image) -> Image.Image:
    wide = Image.new(
        "RGB", (sum(p.width for p in pictures), max(p.height for p in pictures)), "silver"
    )
    x = 0
    for picture in pictures:
        wide.paste(picture, (x, 0))
        x += picture.width
    return wide


def swapped_profile() -> bytes:
    """An sRGB profile in which red is blue, and the other way."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    tags, rest = profile[:300], profile[300:]
    tags = tags.replace(b"rXYZ", b"????").replace(b"bXYZ", b"rXYZ").replace(b"????", b"bXYZ")
    return tags + rest


def png(
    size: tuple[int, int],
    depth: int,
    colour: int,
    pixels: bytes,
    *chunks: tuple[bytes, bytes],
    interlaced: bool = False,
) -> bytes:
    """A PNG by hand; `pixels` are its lines, each behind a 0."""
    header = struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, interlaced)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
        for name, content in parts
    )


def interlaced_png(gray: Image.Image) -> bytes:
    """A PNG that comes in seven passes, coarse to fine."""
    pixels, width = gray.tobytes(), gray.width
    rows = [pixels[start : start + width] for start in range(0, len(pixels), width)]
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]  # fmt: skip
    lines = [b"\0" + row[x::across] for x, y, across, down in passes for row in rows[y::down]]
    return png(gray.size, 8, 0, b"".join(lines), interlaced=True)


def exif(*entries: bytes, head: bytes = b"Exif\0\0", count: int | None = None) -> bytes:
    table = struct.pack(">H", len(entries) if count is None else count) + b"".join(entries)
    return head + b"MM\0*\0\0\0\x08" + table + bytes(4)


def entry(tag: int, kind: int, count: int, value: bytes) -> bytes:
    return struct.pack(">HHI", tag, kind, count) + value


def tile_bomb(side: int) -> bytes:
    """A small TIFF of one tile of so many pixels on a side, which takes as many bytes squared."""
    packer = zlib.compressobj(1)
    tile = b"".join(packer.compress(bytes(side)) for _ in range(side)) + packer.flush()
    fields = [
        (256, SIZE[0]), (257, SIZE[1]), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side),
        (324, 8 + 2 + 10 * 12 + 4), (325, len(tile)),
    ]  # fmt: skip
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(fields)) + table + bytes(4) + tile


def spoiled(content: bytes, seed: int) -> Iterator[bytes]:
    """Yield variants of a file: cut short, with bytes changed, taken out, or said twice."""
    chance = random.Random(seed)  # noqa: S311
    at = [chance.randrange(len(content)) for _ in range(6)]
    yield content[: at[0]]
    yield content[: at[1]] + content[at[1] + chance.randrange(1, 20) :]
    yield content[: at[2]] + content[at[2] - 10 :]
    for most, place in ((64, at[3]), (len(content), at[4])):  # in the head, and anywhere
        changed = bytearray(content)
        for _ in range(chance.randrange(1, 8)):
            changed[chance.randrange(min(most, len(content)))] = chance.choice(
                [0, 1, 127, 128, 255, place % 256]
            )
        yield bytes(changed)
