"""Files that are no pictures: made of as little as makes them whole, the same bytes every time."""

from __future__ import annotations

import json
import struct
from typing import Any, Final

Json = dict[str, Any]
FRAMES: Final = 4096  # samples of a block


def silence(duration: float, sample_rate: int, channels: int) -> bytes:
    """What a FLAC file says first of its sound: a STREAMINFO block."""
    samples = round(duration * sample_rate)
    packed = sample_rate << 44 | (channels - 1) << 41 | 15 << 36 | samples
    sizes = struct.pack(">HH", FRAMES, FRAMES) + bytes(6)
    return sizes + packed.to_bytes(8, "big") + bytes(16)


def flac(sound: bytes, texts: Json) -> bytes:
    """A FLAC file with JSON texts among its comments, as SaveAudio writes them; a player hears nothing."""
    info = sound.removeprefix(b"fLaC")[-34:]
    comments = [f"{key}={json.dumps(value)}".encode() for key, value in texts.items()]
    listed = b"".join(struct.pack("<I", len(comment)) + comment for comment in comments)
    block = struct.pack("<I", 0) + struct.pack("<I", len(comments)) + listed
    head = b"\x00" + len(info).to_bytes(3, "big") + info
    return b"fLaC" + head + b"\x84" + len(block).to_bytes(3, "big") + block


def latent(width: int, height: int, texts: Json) -> bytes:
    """A safetensors file of zeros with JSON texts in its head, as SaveLatent writes it."""
    shape = [1, 4, height // 8, width // 8]
    size = 4 * shape[1] * shape[2] * shape[3]
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    texts = {key: json.dumps(value) for key, value in texts.items()}
    head = json.dumps({"__metadata__": texts, "latent_tensor": tensor}).encode()
    return struct.pack("<Q", len(head)) + head + bytes(size)
