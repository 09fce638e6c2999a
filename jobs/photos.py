"""Photos as users send them, made into one plain kind: an upright 8-bit RGB JPEG without metadata."""

from __future__ import annotations

import re
import struct
import threading
import zlib
from dataclasses import dataclass
from io import BytesIO
from tempfile import TemporaryFile
from typing import Any, Final, Protocol

from django.core.files.uploadedfile import UploadedFile
from django.core.files.uploadhandler import FileUploadHandler, TemporaryFileUploadHandler
from PIL import ExifTags, Image, UnidentifiedImageError

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # an MPO opens as a JPEG
CONTENT_TYPE: Final = "image/jpeg"
MIN_SIDE: Final = 64  # pixels; a smaller picture cannot carry a face
MAX_SIDE: Final = 16_384
GROUND: Final = (255, 255, 255)  # what shows through a transparent picture
# One of 64 million pixels takes up to 1.3 GB for two seconds, however small its file is: the rest wait.
DECODED_AT_ONCE: Final = threading.BoundedSemaphore(2)
# Of a JPEG. Each scan goes over all pixels again, and may have a hundred bytes; cameras make about ten.
MAX_SCANS: Final = 50
MAX_SEGMENTS: Final = 2_000
JPEG_MARKER: Final = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")  # those with a length, and the end

TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# What Pillow's decoders raise on broken or hostile bytes.
UNREADABLE: Final = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)
BOMB: Final = (Image.DecompressionBombError, Image.DecompressionBombWarning)


class BadPhoto(Exception):
    """A photo we cannot take: an HTTP status, a code, and a sentence for whoever sent it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Photo:
    content: bytes
    content_type: str
    width: int
    height: int


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class NamelessUploadHandler(TemporaryFileUploadHandler):
    """Writes to files without a name on the disk.

    The system takes them away however the process ends, and a user's file name, in which a long ending or a NUL
    is an error, is no part of theirs.
    """

    def new_file(self, *args: Any, **kwargs: Any) -> None:
        FileUploadHandler.new_file(self, *args, **kwargs)
        file = TemporaryFile()  # noqa: SIM115 (closed by the request)
        self.file = UploadedFile(file, "upload", self.content_type)  # type: ignore[assignment]

    def upload_interrupted(self) -> None:
        self.file.close()


def read_photo(file: Readable, *, max_bytes: int, max_pixels: int) -> Photo:
    """Return the photo in `file` or raise BadPhoto. All bytes count against `max_bytes`, a film behind it too."""
    with DECODED_AT_ONCE:
        content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise _too_large(f"The photo is larger than {max_bytes:,} bytes.")
        if not content:
            raise _bad("The photo is empty.")
        return _decode(content, max_pixels)


def _decode(content: bytes, max_pixels: int) -> Photo:
    try:
        _check_segments(content)
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            _check_size(*image.size, max_pixels)
            return _encode(_plain(image))
    except UnidentifiedImageError as exc:
        raise BadPhoto(
            415,
            "photo_format",
            "The photo must be a JPEG, PNG, WebP, GIF, BMP or TIFF picture.",
        ) from exc
    except BOMB as exc:
        raise _too_large(_pixel_limit(max_pixels)) from exc
    except UNREADABLE as exc:
        raise _bad("The photo is damaged and cannot be read.") from exc


def _bad(message: str) -> BadPhoto:
    return BadPhoto(422, "bad_photo", message)


def _too_large(message: str) -> BadPhoto:
    return BadPhoto(413, "photo_too_large", message)


def _pixel_limit(max_pixels: int) -> str:
    return f"The photo has more than {max_pixels:,} pixels, or more than {MAX_SIDE:,} on a side."


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels or max(width, height) > MAX_SIDE:
        raise _too_large(_pixel_limit(max_pixels))
    if min(width, height) < MIN_SIDE:
        raise _bad(
            f"The photo is {width} x {height} pixels; it must have at least {MIN_SIDE} on each side."
        )


def _check_segments(content: bytes) -> None:
    """Refuse a JPEG of too many segments, which would keep the decoder busy for minutes, or scans: for hours."""
    if not content.startswith(b"\xff\xd8"):
        return
    at = scans = 0
    for _ in range(MAX_SEGMENTS):
        marker = JPEG_MARKER.search(content, at)
        if marker is None or marker[0] == b"\xff\xd9":  # the end
            return
        scans += marker[0] == b"\xff\xda"
        if scans > MAX_SCANS:
            break
        at = marker.end() + int.from_bytes(content[marker.end() : marker.end() + 2])
    raise _bad("The photo is made of too many pieces. Save it anew as a plain JPEG.")


def _plain(image: Image.Image) -> Image.Image:
    """Decode the first frame whole and return it upright, in 8-bit RGB."""
    image.load()
    turn = TURNS.get(_orientation(image))  # read after the pixels: a PNG may have its EXIF last
    rgb = _on_ground(_eight_bit(image))
    return rgb if turn is None else rgb.transpose(turn)


def _orientation(image: Image.Image) -> Any:
    """Return what EXIF (or XMP) says; broken EXIF says nothing."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except UNREADABLE:
        return None


def _eight_bit(image: Image.Image) -> Image.Image:
    """Scale deep gray pictures down: converted as they are, all above 255 would turn white."""
    if image.mode.startswith("I;16"):
        low, high = 0.0, 65_535.0
        image = image.convert("I")
    elif image.mode in ("I", "F"):  # any range at all
        low, high = image.getextrema()  # type: ignore[assignment]
    else:
        return image
    scale = 255 / ((high - low) or 1)
    gray = image.point(lambda value: value * scale - low * scale).convert("L")
    gray.info.pop("transparency", None)  # a deep value, which names no pixel any more
    return gray


def _on_ground(image: Image.Image) -> Image.Image:
    """Lay what is transparent on a plain light ground: dropping alpha would bring out hidden colours."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image if image.mode == "RGBA" else image.convert("RGBA")  # a copy of 64 MP is 256 MB
    alpha = layer.getchannel("A")
    if alpha.getextrema()[1] == 0:
        raise _bad("The photo is fully transparent.")
    ground = Image.new("RGB", layer.size, GROUND)
    ground.paste(layer, mask=alpha)
    return ground


def _encode(image: Image.Image) -> Photo:
    image.info.clear()  # comments, profiles and places are nobody's business
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=95, subsampling="4:4:4")
    return Photo(buffer.getvalue(), CONTENT_TYPE, *image.size)
