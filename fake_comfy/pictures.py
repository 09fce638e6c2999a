"""Makes the pictures: a portrait out of the photo, graded by prompt and seed, the same bytes every time."""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageChops, ImageEnhance, ImageFilter, ImageOps, ImageStat
from PIL.PngImagePlugin import PngInfo

FACE_CENTERING: Final = (0.5, 0.4)  # of the crop: a face is a little above the middle of its photo
UNIFORM: Final = 0.01 * 255  # a photo with less contrast has no face
PREVIEW_PIXELS: Final = 256

Colour = tuple[int, int, int]
# Shadows and lights of a grade; middle tones come from the photo.
GRADES: Final[tuple[tuple[Colour, Colour], ...]] = (
    ((28, 22, 44), (255, 236, 208)),  # violet and cream
    ((16, 34, 48), (255, 226, 190)),  # teal and orange
    ((38, 24, 20), (255, 240, 224)),  # sepia
    ((14, 26, 36), (226, 240, 255)),  # north light
    ((36, 18, 32), (255, 224, 228)),  # rose
    ((22, 34, 26), (250, 242, 214)),  # olive and sand
)


@dataclass(frozen=True)
class Sitting:
    """All that decides a picture."""

    photo: Image.Image | None
    prompt: str
    seed: int
    width: int
    height: int
    count: int = 1


def read_photo(path: Path) -> Image.Image:
    """Load a photo, upright, in RGB. Raises PIL's errors."""
    with Image.open(path) as image:
        image.load()
        return _upright(image).convert("RGB")


def has_face(photo: Image.Image) -> bool:
    """Whether a detector would find something: not in a nearly uniform picture."""
    return max(ImageStat.Stat(photo).stddev) >= UNIFORM


def draw(sitting: Sitting) -> list[Image.Image]:
    """The pictures of a batch, each a little different."""
    return [_portrait(sitting, index) for index in range(sitting.count)]


def encode_png(image: Image.Image, chunks: dict[str, Any]) -> bytes:
    """A PNG with the graph (and whatever else) as JSON in text chunks, as SaveImage writes it."""
    info = PngInfo()
    for key, value in chunks.items():
        info.add_text(key, json.dumps(value))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=info, compress_level=1)
    return buffer.getvalue()


def preview_jpeg(sitting: Sitting, done: float) -> bytes:
    """The picture half-way: the less is `done` (0 to 1), the more it is a blur."""
    size = _fit_within(sitting.width, sitting.height, PREVIEW_PIXELS)
    image = _base(sitting.photo, sitting.seed, size)
    buffer = io.BytesIO()
    image.filter(ImageFilter.GaussianBlur(24 * (1 - done))).save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except (SyntaxError, ValueError, KeyError, IndexError, TypeError, OSError, struct.error):
        return image  # EXIF that cannot be read turns nothing


def _portrait(sitting: Sitting, index: int) -> Image.Image:
    chance = _chance(sitting, index)
    image = _base(sitting.photo, sitting.seed, (sitting.width, sitting.height))
    image = _grade(image, *chance.choice(GRADES), strength=chance.uniform(0.4, 0.65))
    image = _soft_light(image, chance.uniform(0.25, 0.45))
    image = ImageEnhance.Color(image).enhance(chance.uniform(0.85, 1.15))
    return _vignette(image, chance.uniform(0.35, 0.6))


def _chance(sitting: Sitting, index: int) -> random.Random:
    """Random numbers that the seed, the prompt and the place in the batch decide, on every machine alike."""
    text = f"{sitting.seed}\n{index}\n{sitting.prompt}".encode(errors="surrogatepass")
    return random.Random(hashlib.sha256(text).digest())  # noqa: S311 - a look, not a secret


def _base(photo: Image.Image | None, seed: int, size: tuple[int, int]) -> Image.Image:
    """The photo, cropped to cover the size; without one, a sky of soft colours."""
    if photo is not None:
        return ImageOps.fit(photo, size, Image.Resampling.BICUBIC, centering=FACE_CENTERING)
    chance = random.Random(seed)  # noqa: S311
    colours = Image.new("RGB", (4, 4))
    colours.putdata([tuple(chance.randrange(40, 230) for _ in range(3)) for _ in range(16)])
    return colours.resize(size, Image.Resampling.BICUBIC)


def _grade(image: Image.Image, shadows: Colour, lights: Colour, *, strength: float) -> Image.Image:
    toned = ImageOps.colorize(image.convert("L"), shadows, lights)
    return Image.blend(image, toned, strength)


def _soft_light(image: Image.Image, strength: float) -> Image.Image:
    """A glow: the picture under its own blurred light. Blurred when small, as a large blur is slow."""
    small = image.resize(_fit_within(image.width, image.height, 128))
    glow = small.filter(ImageFilter.GaussianBlur(5)).resize(image.size, Image.Resampling.BICUBIC)
    return Image.blend(image, ImageChops.soft_light(image, glow), strength)


def _vignette(image: Image.Image, strength: float) -> Image.Image:
    """Darker towards the corners."""
    distance = Image.radial_gradient("L").resize(image.size, Image.Resampling.BILINEAR)
    light = distance.point([round(255 * (1 - strength * (d / 255) ** 2)) for d in range(256)])
    return ImageChops.multiply(image, Image.merge("RGB", (light, light, light)))


def _fit_within(width: int, height: int, pixels: int) -> tuple[int, int]:
    scale = min(1.0, pixels / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))
