"""Takes a picture from a server: whole or refused, and without the graph that ComfyUI writes into it."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from PIL import Image, ImageSequence

from comfy.errors import BadPicture, OutputTooLarge

MAX_PIXELS: Final = 80_000_000  # over all frames; decoded, a pixel takes four bytes
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
# What decides how the picture looks. Text, EXIF and time chunks are not among them.
PNG_CHUNKS: Final = frozenset(
    b"IHDR PLTE IDAT IEND tRNS gAMA cHRM sRGB iCCP cICP sBIT bKGD pHYs acTL fcTL fdAT".split()
)
SAVE_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "JPEG": {"quality": 95},
    "WEBP": {"lossless": True},
    "GIF": {},
}
KEPT_INFO: Final = ("icc_profile", "transparency", "background", "disposal", "duration")


@dataclass(frozen=True)
class Picture:
    """A whole picture without metadata; width and height in pixels."""

    content: bytes
    content_type: str
    width: int
    height: int


def read_picture(content: bytes, *, allow_flat: bool) -> Picture:
    """Decode a picture to its last pixel and strip it. Raises BadPicture and OutputTooLarge.

    One flat colour (what NaN in the sampler becomes: success, and a black picture) is refused too, unless
    `allow_flat`. The pixels of a PNG are not touched; other formats are written anew.
    """
    if content.endswith(bytes(64)):
        raise BadPicture(f"the picture's end is missing: {len(content)} bytes that end in zeros")
    # Stripped first: a graph of many megabytes is more text than Pillow agrees to read.
    whole = _strip_png(content) if content.startswith(PNG_SIGNATURE) else content
    image, name = _decode(whole)
    if not allow_flat and _is_flat(image):
        raise BadPicture(f"the picture is one flat colour: {image.width} x {image.height}")
    stripped = whole if name == "PNG" else _rewrite(image, name)
    return Picture(stripped, Image.MIME[name], image.width, image.height)


def _decode(content: bytes) -> tuple[Image.Image, str]:
    """The picture and the name of its format, every frame having been decoded once."""
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        frames: int = getattr(image, "n_frames", 1)
        if image.width * image.height * frames > MAX_PIXELS:
            raise OutputTooLarge(f"too many pixels: {frames} of {image.width} x {image.height}")
        for frame in ImageSequence.Iterator(image):
            frame.load()
        image.seek(0)
    except OutputTooLarge:
        raise
    except Image.DecompressionBombError as exc:
        raise OutputTooLarge(f"too many pixels: {exc}") from exc
    # Pillow's decoders raise what they like on broken bytes (struct.error, IndexError, SyntaxError...).
    except Exception as exc:
        raise BadPicture(f"the picture cannot be decoded: {exc}") from exc
    return image, image.format or ""


def _is_flat(image: Image.Image) -> bool:
    bands = image.convert("RGBA") if image.mode == "P" else image
    return all(low == high for low, high in (band.getextrema() for band in bands.split()))


def _strip_png(content: bytes) -> bytes:
    kept = (chunk for kind, chunk in _png_chunks(content) if kind in PNG_CHUNKS)
    return PNG_SIGNATURE + b"".join(kept)


def _png_chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(type, whole chunk) up to IEND, or BadPicture: Pillow takes a PNG without its end for whole."""
    start = len(PNG_SIGNATURE)
    while (end := start + 12 + int.from_bytes(content[start : start + 4])) <= len(content):
        chunk = content[start:end]
        if zlib.crc32(chunk[4:-4]) != int.from_bytes(chunk[-4:]):
            raise BadPicture(f"PNG: wrong checksum of the chunk at byte {start}")
        yield chunk[4:8], chunk
        if chunk[4:8] == b"IEND":
            return
        start = end
    raise BadPicture(f"PNG: it ends at byte {len(content)} without IEND")


def _rewrite(image: Image.Image, name: str) -> bytes:
    frames = [_without_metadata(frame) for frame in ImageSequence.Iterator(image)]
    options = dict(SAVE_OPTIONS[name])
    if len(frames) > 1:
        durations = [frame.info.get("duration", 100) for frame in frames]
        options |= {"save_all": True, "append_images": frames[1:], "duration": durations}
        options["loop"] = image.info.get("loop", 0)
    written = io.BytesIO()
    frames[0].save(written, name, **options)
    return written.getvalue()


def _without_metadata(frame: Image.Image) -> Image.Image:
    clean = frame.copy()
    clean.info = {key: value for key, value in frame.info.items() if key in KEPT_INFO}
    return clean
