"""What kind of file a name stands for: the same on every machine, as a table of the machine's own is not asked."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

CONTENT_TYPES: Final = {
    ending: f"{kind}/{name}"
    for kind, names in {
        "image": {
            "png": "png",
            "jpeg": "jpg jpeg",
            "webp": "webp",
            "gif": "gif",
            "bmp": "bmp",
            "tiff": "tif tiff",
            "avif": "avif",
            "svg+xml": "svg",
            "x-exr": "exr",
        },
        "video": {
            "mp4": "mp4 m4v",
            "webm": "webm",
            "quicktime": "mov",
            "x-matroska": "mkv",
            "x-msvideo": "avi",
        },
        "audio": {
            "flac": "flac",
            "mpeg": "mp3",
            "ogg": "ogg",
            "opus": "opus",
            "wav": "wav",
            "mp4": "m4a",
            "aac": "aac",
        },
        "text": {"plain": "txt log", "csv": "csv", "markdown": "md"},
        "model": {"gltf-binary": "glb", "gltf+json": "gltf", "obj": "obj", "stl": "stl"},
        "application": {"json": "json", "zip": "zip"},
    }.items()
    for name, endings in names.items()
    for ending in endings.split()
}
OTHER: Final = "application/octet-stream"


def ending_of(name: str) -> str:
    """Return the ending of a file's name, in lower case and without its dot."""
    return PurePosixPath(name).suffix[1:].lower()


def content_type_of(name: str) -> str:
    return CONTENT_TYPES.get(ending_of(name), OTHER)
