"""Reads the preview images that ComfyUI sends over its WebSocket while it samples (FACTS section 6)."""

from __future__ import annotations

import io
import json
import struct
from dataclasses import dataclass
from typing import Any, Final

from PIL import Image

# Sent first: whoever understands it gets previews that say whose they are.
FEATURE_FLAGS: Final = json.dumps(
    {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
)
PREVIEW: Final = 1
PREVIEW_WITH_METADATA: Final = 4
HEAD_BYTES: Final = 8  # the kind, then the image's type or the length of the metadata
FORMATS: Final = ("JPEG", "PNG", "WEBP")
# ComfyUI's are within 512 x 512 unless its --preview-size says otherwise.
MAX_BYTES: Final = 512 * 1024
MAX_PIXELS: Final = 2048 * 2048


@dataclass(frozen=True)
class PreviewImage:
    """An image as it came, not looked at yet. The older of two forms says neither node nor prompt."""

    content: bytes
    node_id: str | None = None
    prompt_id: str | None = None

    def content_type(self) -> str | None:
        """Decode it to its last pixel; None if it is too large, broken, or no JPEG, PNG or WebP."""
        if len(self.content) > MAX_BYTES:
            return None
        try:
            image = Image.open(io.BytesIO(self.content), formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                return None
            image.load()
        # Pillow's decoders raise what they like on broken bytes (struct.error, IndexError, SyntaxError...).
        except Exception:  # noqa: BLE001
            return None
        return Image.MIME[image.format or ""]


def read_preview(message: bytes) -> PreviewImage | None:
    """Return the preview in a binary message; None if it is something else."""
    if len(message) < HEAD_BYTES:
        return None
    kind, length = struct.unpack_from(">II", message)
    body = message[HEAD_BYTES:]
    if kind == PREVIEW:
        return PreviewImage(body)
    metadata = _metadata(body[:length]) if kind == PREVIEW_WITH_METADATA else {}
    node_id, prompt_id = metadata.get("node_id"), metadata.get("prompt_id")
    if not (isinstance(node_id, str) and isinstance(prompt_id, str)):
        return None
    return PreviewImage(body[length:], node_id, prompt_id)


def _metadata(text: bytes) -> dict[str, Any]:
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}
