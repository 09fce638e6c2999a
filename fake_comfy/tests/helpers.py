"""What the tests of the fake share: a graph, photos, a client without any cleverness."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar
from uuid import uuid4

import requests
from PIL import Image

from fake_comfy import FakeComfy

T = TypeVar("T")
Json = dict[str, Any]

TIMEOUT_SECONDS: Final = 10.0
GRAPH: Final[Json] = {
    "4": {
        "class_type": "CheckpointLoaderSimple",
        "inputs": {"ckpt_name": "realisticVisionV51_v51VAE.safetensors"},
    },
    "12": {"class_type": "LoadImage", "inputs": {"image": "face.png"}},
    "20": {
        "class_type": "IPAdapterUnifiedLoaderFaceID",
        "inputs": {
            "model": ["4", 0],
            "preset": "FACEID PLUS V2",
            "lora_strength": 0.6,
            "provider": "CPU",
        },
    },
    "18": {
        "class_type": "IPAdapterFaceID",
        "inputs": {
            "model": ["20", 0],
            "ipadapter": ["20", 1],
            "image": ["12", 0],
            "weight": 1.0,
            "weight_faceidv2": 2.0,
            "weight_type": "linear",
            "combine_embeds": "concat",
            "start_at": 0.0,
            "end_at": 1.0,
            "embeds_scaling": "V only",
        },
    },
    "6": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["4", 1], "text": "a portrait"}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["4", 1], "text": "blurry"}},
    "5": {
        "class_type": "EmptyLatentImage",
        "inputs": {"width": 64, "height": 64, "batch_size": 1},
    },
    "3": {
        "class_type": "KSampler",
        "inputs": {
            "model": ["18", 0],
            "seed": 1,
            "steps": 4,
            "cfg": 6.5,
            "sampler_name": "ddpm",
            "scheduler": "karras",
            "positive": ["6", 0],
            "negative": ["7", 0],
            "latent_image": ["5", 0],
            "denoise": 1.0,
        },
    },
    "8": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["4", 2]}},
    "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "job"}},
}


def new_id() -> str:
    return str(uuid4())


def png(kind: str = "face", size: int = 64) -> bytes:
    """A picture with contrast ("face", "other") or a grey sheet ("blank")."""
    image = Image.radial_gradient("L").resize((size, size)).convert("RGB")
    if kind == "other":
        image = image.rotate(90).point([255 - value for value in range(256)] * 3)
    if kind == "blank":
        image = Image.new("RGB", (size, size), "grey")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def graph(**inputs: Any) -> Json:
    """The portrait graph with other inputs, each named node__input (`n3__seed=5`)."""
    made = copy.deepcopy(GRAPH)
    for name, value in inputs.items():
        node, _, key = name.removeprefix("n").partition("__")
        made[node]["inputs"][key] = value
    return made


def upload(
    fake: FakeComfy, name: str = "face.png", content: bytes | None = None, **fields: str
) -> requests.Response:
    files = {"image": (name, png() if content is None else content, "image/png")}
    return post(fake, "/upload/image", files=files, data=fields)


def post(
    fake: FakeComfy, path: str, json: Any = None, timeout: float = TIMEOUT_SECONDS, **options: Any
) -> requests.Response:
    return requests.post(fake.url + path, json=json, timeout=timeout, **options)


def get(
    fake: FakeComfy, path: str, timeout: float = TIMEOUT_SECONDS, **options: Any
) -> requests.Response:
    return requests.get(fake.url + path, timeout=timeout, **options)


def submit(fake: FakeComfy, prompt: Json | None = None, **fields: Any) -> str:
    """Queue a graph; return its prompt id."""
    body = {"prompt": prompt or graph(), "prompt_id": new_id(), "client_id": "c", **fields}
    answer = post(fake, "/prompt", body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["prompt_id"])


def entry_of(fake: FakeComfy, prompt_id: str) -> Json | None:
    return get(fake, f"/history/{prompt_id}").json().get(prompt_id)  # type: ignore[no-any-return]


def finish(fake: FakeComfy, prompt_id: str) -> Json:
    """Wait for the end of a prompt and return its history entry."""
    return wait_until(lambda: entry_of(fake, prompt_id))


def run(fake: FakeComfy, prompt: Json | None = None, **fields: Any) -> Json:
    return finish(fake, submit(fake, prompt, **fields))


def picture(fake: FakeComfy, entry: Json, node: str = "9", index: int = 0) -> requests.Response:
    return get(fake, "/view", params=entry["outputs"][node]["images"][index])


def ending(entry: Json) -> tuple[str, Json]:
    """The last message of a run: its name and what it says."""
    name, about = entry["status"]["messages"][-1]
    return name, about


def is_idle(fake: FakeComfy) -> bool:
    return bool(get(fake, "/prompt").json() == {"exec_info": {"queue_remaining": 0}})


def wait_until(condition: Callable[[], T | None], seconds: float = TIMEOUT_SECONDS) -> T:
    """Return the first truthy value of `condition`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds} s")
