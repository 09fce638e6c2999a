"""What is done to a photo: whatever picture people have becomes an upright 8-bit sRGB JPEG without metadata."""

from __future__ import annotations

import platform
import re
import struct
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from PIL import AvifImagePlugin, ExifTags, Image, ImageCms, UnidentifiedImageError

# An MPO opens as a JPEG.
FORMATS: Final = ("JPEG", "PNG", "WEBP", "AVIF", "HEIF", "GIF", "BMP", "TIFF")
CONTENT_TYPE: Final = "image/jpeg"
MAX_SIDE: Final = 16_384
GROUND: Final = (255, 255, 255)  # what shows through a transparent picture
EXIF_TABLES: Final = re.compile(rb"(II\*\0|MM\0\*).*", re.DOTALL)
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

    retry_after: int | None = None  # seconds, if the same photo may be taken then

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Rules:
    """What a photo may be and take.

    min_side: in pixels; a smaller picture cannot carry a face. max_side: of the stored photo. face_check: refuse,
    warn or off. cpu_seconds: until it is given up; 64 million pixels were seen to take 4.
    """

    max_bytes: int
    max_pixels: int
    max_side: int
    face_check: str
    min_side: int = 64
    cpu_seconds: int = 10


@dataclass(frozen=True)
class Photo:
    """face: the box of the one that is used, in the photo's pixels. warnings: [{"code", "message"}]."""

    content: bytes
    content_type: str
    width: int
    height: int
    face: dict[str, int] | None = None
    warnings: list[dict[str, str]] = field(default_factory=list)


def prepare() -> None:
    """Load whatever a photo may need."""
    Image.init()
    # A thread takes memory that counts against a limit, whether it uses it or not.
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    with suppress(ImportError):
        from pi_heif.as_plugin import register_heif_opener

        register_heif_opener(decode_threads=1)
    if finds_faces():
        import jobs.faces  # noqa: F401


@cache
def finds_faces() -> bool:
    """Whether there is a detector here: dlib has no wheels for some machines, and those for x86 need AVX."""
    if find_spec("dlib") is None:
        return False
    cpu = Path("/proc/cpuinfo")
    return platform.machine() != "x86_64" or not cpu.exists() or " avx " in cpu.read_text()


def develop(content: bytes, rules: Rules) -> Photo:
    """Return the photo in these bytes or raise BadPhoto."""
    try:
        # Neither the name nor the type that came with the bytes is asked.
        with Image.open(BytesIO(content), formats=[f for f in FORMATS if f in Image.OPEN]) as image:
            _check_size(*image.size, rules)
            picture = _plain(image, rules.max_side)
        looks = rules.face_check != "off" and finds_faces()
        return _checked(picture, rules) if looks else _encoded(picture)
    except UnidentifiedImageError as exc:
        raise BadPhoto(
            415,
            "photo_format",
            "This is no photo that can be read. Send a JPEG, PNG, WebP, HEIC, AVIF, GIF, BMP or TIFF picture.",
        ) from exc
    except BOMB as exc:
        raise _too_large(rules.max_pixels) from exc
    except MemoryError as exc:
        raise too_hard() from exc
    except UNREADABLE as exc:
        raise _bad(
            "The photo is damaged or was cut off on its way. Send it again, or save it anew as a JPEG."
        ) from exc


def _bad(message: str) -> BadPhoto:
    return BadPhoto(422, "bad_photo", message)


def too_hard() -> BadPhoto:
    return _bad("The photo takes too much work to read. Save it anew as a plain JPEG.")


def _too_large(max_pixels: int) -> BadPhoto:
    return BadPhoto(
        413,
        "photo_too_large",
        f"The photo has more than {max_pixels:,} pixels, or more than {MAX_SIDE:,} on a side. Make it smaller.",
    )


def _check_size(width: int, height: int, rules: Rules) -> None:
    if width * height > rules.max_pixels or max(width, height) > MAX_SIDE:
        raise _too_large(rules.max_pixels)
    if min(width, height) < rules.min_side:
        raise _bad(
            f"The photo is {width} x {height} pixels; it must have at least {rules.min_side} on each side."
        )


def _plain(image: Image.Image, max_side: int) -> Image.Image:
    """Decode the first frame whole and return it upright, in 8-bit sRGB. What is large is made small first."""
    # A JPEG is decoded at a half or less of its size if that is enough.
    image.draft(None, _fitting(image.size, max_side))
    image.load()
    profile = image.info.get("icc_profile")
    turn = TURNS.get(_orientation(image))  # read after the pixels: a PNG may have its EXIF last
    picture = _on_ground(_in_srgb(_scaled(_eight_bit(image), max_side), profile))
    return picture if turn is None else picture.transpose(turn)


def _fitting(size: tuple[int, int], max_side: int) -> tuple[int, int]:
    scale = min(1, max_side / max(size))
    return round(size[0] * scale) or 1, round(size[1] * scale) or 1


def _scaled(image: Image.Image, max_side: int) -> Image.Image:
    return image.resize(_fitting(image.size, max_side), Image.Resampling.BICUBIC, reducing_gap=2.0)


def _orientation(image: Image.Image) -> Any:
    """Return what EXIF (or XMP) says of the turn, even if the rest of it is broken; None if it says nothing."""
    if image.format == "HEIF":  # turned already, as its own boxes say
        return None
    turn = None
    with suppress(*UNREADABLE):
        turn = image.getexif().get(ExifTags.Base.Orientation)
    head = None if turn else EXIF_TABLES.search(image.info.get("exif") or b"")
    with suppress(*UNREADABLE):
        if head:  # behind junk
            exif = Image.Exif()
            exif.load(head[0])
            turn = exif.get(ExifTags.Base.Orientation)
    return turn


def _eight_bit(image: Image.Image) -> Image.Image:
    """Return the picture with 8 bits for each channel, so that it can be scaled."""
    if image.mode.startswith("I;16"):
        return _gray(image.convert("I"), 0, 65_535)
    if image.mode in ("I", "F"):  # any range at all
        low, high = image.getextrema()
        return _gray(image, low, high)
    if image.has_transparency_data:
        return image if image.mode == "RGBA" else image.convert("RGBA")  # a copy of 64 MP is 256 MB
    return image.convert("RGB") if image.mode in ("1", "P") else image


def _gray(image: Image.Image, low: Any, high: Any) -> Image.Image:
    """Scale deep numbers down: converted as they are, all above 255 would turn white."""
    scale = 255 / ((high - low) or 1)
    gray = image.point(lambda value: value * scale - low * scale).convert("L")
    gray.info.pop("transparency", None)  # a deep value, which names no pixel any more
    return gray


def _in_srgb(image: Image.Image, profile: Any) -> Image.Image:
    """Convert the colours of a profile; one that is broken, or for other channels, is ignored."""
    if profile is None:
        return image
    mode = "RGBA" if image.mode == "RGBA" else "RGB"
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        srgb = ImageCms.createProfile("sRGB")
        return ImageCms.profileToProfile(image, source, srgb, outputMode=mode) or image
    except (ImageCms.PyCMSError, *UNREADABLE):
        return image


def _on_ground(image: Image.Image) -> Image.Image:
    """Lay what is transparent on a plain light ground: dropping alpha would bring out hidden colours."""
    if image.mode != "RGBA":
        return image.convert("RGB")
    alpha = image.getchannel("A")
    if alpha.getextrema()[1] == 0:
        raise _bad("The photo is fully transparent. Send one that shows something.")
    ground = Image.new("RGB", image.size, GROUND)
    ground.paste(image, mask=alpha)
    return ground


def _checked(picture: Image.Image, rules: Rules) -> Photo:
    """Look for the face that is portrayed."""
    from jobs.faces import find_face

    framed, face, doubts = find_face(picture)
    if doubts and rules.face_check == "refuse":
        raise BadPhoto(422, doubts[0].code, doubts[0].message)
    photo = _encoded(_scaled(framed, rules.max_side))
    box = None if face is None else asdict(face.scaled(photo.width / framed.width))
    return replace(photo, face=box, warnings=[asdict(doubt) for doubt in doubts])


def _encoded(image: Image.Image) -> Photo:
    image.info.clear()  # comments, profiles and places are nobody's business
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=95, subsampling="4:4:4")
    return Photo(buffer.getvalue(), CONTENT_TYPE, *image.size)
