"""Which face of a photo is portrayed: looked for on the CPU, before a GPU draws anything.

ComfyUI takes whichever face its detector names first, and a job without one fails. Here the largest is chosen, and
the photo is cut around it, or given a margin, so that it is the one and is found. The detector is dlib's HOG one,
whose model is part of the library; docs/photos.md tells what it does not see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import dlib
import numpy
from PIL import Image, ImageOps

DETECTOR: Final = dlib.get_frontal_face_detector()
# Pixels of the long side that the photo is scaled to. A face needs 70 of them to be seen.
SIDES: Final = (800, 1600)
ENLARGED: Final = 2  # at most: this much makes all faces seen that are large enough
BORDER: Final = 0.15  # of the long side, around it: a face that fills the photo is missed without
GRAY: Final = (128, 128, 128)
# Scores: textures and clothes were seen to reach 0.4, and faces from the front have 1 to 3.
SURE: Final = 0.5
ABOUT_AS_LARGE: Final = 0.75  # the detector tells widths in steps of a fifth
MIN_WIDTH: Final = 60  # pixels; less carries no likeness
CLOSE_UP: Final = 0.6  # of the shorter side; a wider face can be missed by ComfyUI
CUT_OFF: Final = 0.15  # of a face's width, beyond the edge


@dataclass(frozen=True)
class Box:
    """A face from brows to chin and from ear to ear, in pixels; it may reach beyond the photo's edges."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        return self.right - self.left

    def moved(self, x: int, y: int) -> Box:
        return Box(self.left + x, self.top + y, self.right + x, self.bottom + y)

    def scaled(self, factor: float) -> Box:
        return Box(*(round(edge * factor) for edge in self.edges()))

    def edges(self) -> tuple[int, int, int, int]:
        return self.left, self.top, self.right, self.bottom


@dataclass(frozen=True)
class Doubt:
    """Something about a photo that its owner should know, as a code and a sentence that says what to do."""

    code: str
    message: str


NO_FACE: Final = Doubt(
    "no_face",
    "No face was found in the photo. Best is one face from the front, in good light, without sunglasses or a mask.",
)
TURNED_FACE: Final = Doubt(
    "turned_face", "The face lies on its side or upside down. Turn the photo upright."
)
CUT_FACE: Final = Doubt(
    "cut_face", "The face is cut off at the edge of the photo. Send one with room around the face."
)


def several_faces(count: int) -> Doubt:
    return Doubt(
        "several_faces",
        f"The photo shows {count} faces, but a portrait is of one, the largest. Best is a photo of one person alone.",
    )


def small_face(width: int) -> Doubt:
    return Doubt(
        "small_face",
        f"The face is only {width} pixels wide, too few for a likeness. Send a photo taken from nearer.",
    )


def find_face(photo: Image.Image) -> tuple[Image.Image, Box | None, list[Doubt]]:
    """Return the photo as ComfyUI should see it, the face that is then portrayed, and what is doubtful."""
    gray = photo.convert("L")
    found = next(filter(None, (list(_faces(gray, side)) for side in SIDES)), [])
    if not found:
        return photo, None, [TURNED_FACE if _lies(gray) else NO_FACE]
    enough = min(SURE, max(score for score, _face in found))
    faces = [face for score, face in found if score >= enough]
    chosen = _largest(faces, photo.size)
    doubts = [several_faces(len(faces))] if len(faces) > 1 else []
    doubts += [small_face(chosen.width)] if chosen.width < MIN_WIDTH else []
    doubts += [CUT_FACE] if _cut_off(chosen, photo.size) else []
    faces.remove(chosen)
    return *_framed(photo, chosen, faces), doubts


def _faces(gray: Image.Image, side: int) -> Iterator[tuple[float, Box]]:
    """Yield the score and the place of each face."""
    scale = min(side / max(gray.size), ENLARGED)
    scaled = gray.resize([round(length * scale) or 1 for length in gray.size], reducing_gap=2.0)
    border = round(max(scaled.size) * BORDER)
    pixels = numpy.asarray(ImageOps.expand(scaled, border, GRAY[0]))
    rectangles, scores, _kinds = DETECTOR.run(pixels, 0, 0.0)
    for rectangle, score in zip(rectangles, scores, strict=True):
        edges = (rectangle.left(), rectangle.top(), rectangle.right(), rectangle.bottom())
        yield score, Box(*edges).moved(-border, -border).scaled(1 / scale)


def _lies(gray: Image.Image) -> bool:
    turned = (gray.rotate(angle, expand=True) for angle in (90, 180, 270))
    return any(score >= SURE for photo in turned for score, _face in _faces(photo, SIDES[0]))


def _largest(faces: list[Box], size: tuple[int, int]) -> Box:
    """Return the largest face; of those about as large, the one nearest the middle, also in a mirror."""
    largest = max(face.width for face in faces)

    def off_centre(face: Box) -> int:
        across, down = face.left + face.right - size[0], face.top + face.bottom - size[1]
        return across * across + down * down

    return min((f for f in faces if f.width >= ABOUT_AS_LARGE * largest), key=off_centre)


def _cut_off(face: Box, size: tuple[int, int]) -> bool:
    beyond = max(-face.left, -face.top, face.right - size[0], face.bottom - size[1])
    return beyond > CUT_OFF * face.width


def _framed(photo: Image.Image, chosen: Box, others: list[Box]) -> tuple[Image.Image, Box]:
    """Cut the photo so that it shows the other faces no more, and give a close-up a margin."""
    if others:
        keep = _room(chosen, others, photo.size)
        photo, chosen = photo.crop(keep.edges()), chosen.moved(-keep.left, -keep.top)
    if chosen.width > CLOSE_UP * min(photo.size):
        margin = chosen.width // 2
        photo, chosen = ImageOps.expand(photo, margin, GRAY), chosen.moved(margin, margin)
    return photo, chosen


def _room(chosen: Box, others: list[Box], size: tuple[int, int]) -> Box:
    """Return the part of the photo that is a face's width around the chosen one, or half the way to another."""
    room = [chosen.width] * 4  # left, top, right, bottom
    for other in others:
        gaps = (
            chosen.left - other.right,
            chosen.top - other.bottom,
            other.left - chosen.right,
            other.top - chosen.bottom,
        )
        way = gaps.index(max(gaps))
        room[way] = min(room[way], max(0, gaps[way] // 2))
    return Box(
        max(0, chosen.left - room[0]),
        max(0, chosen.top - room[1]),
        min(size[0], chosen.right + room[2]),
        min(size[1], chosen.bottom + room[3]),
    )
