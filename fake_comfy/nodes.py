"""The node classes: what they take and give (as /object_info tells it), and what they do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any, Final

from PIL import Image, UnidentifiedImageError

from fake_comfy import errors, media, pictures
from fake_comfy.files import Files, OutsideFolder, shown_path
from fake_comfy.models import MODELS
from fake_comfy.node_class import Input, Json, NodeClass, Result, Run


@dataclass(frozen=True)
class Model:
    """Carries the photo from the FaceID node to the sampler."""

    photo: Image.Image | None = None


@dataclass(frozen=True)
class Latent:
    width: int
    height: int
    count: int = 1
    sitting: pictures.Sitting | None = None  # None: nothing sampled yet


async def load_checkpoint(run: Run, *, ckpt_name: str) -> Result:
    return Result((Model(), f"<CLIP of {ckpt_name}>", f"<VAE of {ckpt_name}>"))


async def load_lora(run: Run, *, model: Model, clip: str = "", **_: Any) -> Result:
    return Result((model, clip))


async def load_vae(run: Run, *, vae_name: str) -> Result:
    return Result((f"<VAE {vae_name}>",))


async def load_image(run: Run, *, image: str) -> Result:
    path = run.files.locate_input(image)
    shown = f"'{shown_path(image)}'"
    if path is None:
        message = f"[Errno 2] No such file or directory: {shown}"
        raise errors.NodeFailed("av.error.FileNotFoundError", message)
    if path.stat().st_size == 0:
        message = f"[Errno 1094995529] Invalid data found when processing input: {shown}"
        raise errors.NodeFailed("av.error.InvalidDataError", message)
    try:
        photo = await asyncio.to_thread(pictures.read_photo, path)
    except UnidentifiedImageError as exc:
        message = f"cannot identify image file {shown}"
        raise errors.NodeFailed("PIL.UnidentifiedImageError", message) from exc
    return Result((photo, "<mask>"))


async def load_ip_adapter(run: Run, *, model: Model, **_: Any) -> Result:
    if run.faults.take("model_not_found_at_run"):
        raise errors.NodeFailed(*errors.NO_IP_ADAPTER)
    return Result((model, "<ipadapter>"))


async def apply_face_id(run: Run, *, image: Image.Image, **_: Any) -> Result:
    if run.faults.take("no_face") or not pictures.has_face(image):
        raise errors.NodeFailed(*errors.NO_FACE)
    return Result((Model(image), image))


async def encode_text(run: Run, *, text: str, clip: str) -> Result:
    return Result((text,))


async def empty_latent(run: Run, *, width: int, height: int, batch_size: int) -> Result:
    return Result((Latent(width, height, batch_size),))


async def encode_image(run: Run, *, pixels: Image.Image, vae: str) -> Result:
    return Result((Latent(pixels.width, pixels.height),))


async def sample(
    run: Run, *, model: Model, seed: int, steps: int, positive: str, latent_image: Latent, **_: Any
) -> Result:
    latent = latent_image
    sitting = pictures.Sitting(
        model.photo, positive, seed, latent.width, latent.height, latent.count
    )
    await run.sample(steps, sitting)
    return Result((replace(latent, sitting=sitting),))


async def decode(run: Run, *, samples: Latent, vae: str) -> Result:
    if samples.sitting is None:
        grey = Image.new("RGB", (samples.width, samples.height), "grey")
        return Result(([grey] * samples.count,))
    return Result((await asyncio.to_thread(pictures.draw, samples.sitting),))


async def save_image(
    run: Run, *, images: Any, filename_prefix: str = "ComfyUI", kind: str = "output"
) -> Result:
    if run.faults.take("empty_outputs"):
        return Result((images,))
    batch = images if isinstance(images, list) else [images]
    if run.faults.take("black_picture"):
        batch = [Image.new("RGB", image.size) for image in batch]
    encoded = [
        await asyncio.to_thread(pictures.encode_png, image, run.png_chunks) for image in batch
    ]
    # Nothing is awaited from here on: a restart finds all files of a batch or none.
    return Result((images,), {"images": _write(run.files, encoded, filename_prefix, kind, "png")})


async def preview_image(run: Run, *, images: Any) -> Result:
    return await save_image(run, images=images, filename_prefix="ComfyUI_temp", kind="temp")


async def empty_image(run: Run, *, width: int, height: int, batch_size: int, color: int) -> Result:
    return Result(([Image.new("RGB", (width, height), f"#{color:06x}")] * batch_size,))


async def load_mask(run: Run, *, image: str, channel: str) -> Result:
    return Result((await load_image(run, image=image)).values[1:])


async def load_audio(run: Run, *, audio: str) -> Result:
    path = run.files.locate_input(audio)
    if path is None:
        message = f"[Errno 2] No such file or directory: '{shown_path(audio)}'"
        raise errors.NodeFailed("av.error.FileNotFoundError", message)
    return Result((path.read_bytes(),))


async def empty_audio(run: Run, *, duration: float, sample_rate: int, channels: int) -> Result:
    return Result((media.silence(duration, sample_rate, channels),))


async def save_audio(run: Run, *, audio: bytes, filename_prefix: str) -> Result:
    flac = media.flac(audio, run.png_chunks)
    return Result((), {"audio": _write(run.files, [flac], filename_prefix, "output", "flac")})


async def save_latent(run: Run, *, samples: Latent, filename_prefix: str) -> Result:
    latent = media.latent(samples.width, samples.height, run.png_chunks)
    return Result((), {"latents": _write(run.files, [latent], filename_prefix, "output", "latent")})


async def give_string(run: Run, *, value: str) -> Result:
    return Result((value,))


async def preview_any(run: Run, *, source: Any) -> Result:
    return Result((), {"text": [str(source)]})


def _write(files: Files, encoded: list[bytes], prefix: str, kind: str, ending: str) -> list[Json]:
    try:
        folder, subfolder, stem, counter = files.next_output(prefix, kind)
        names = [f"{stem}_{counter + i:05}_.{ending}" for i in range(len(encoded))]
        for name, content in zip(names, encoded, strict=True):
            (folder / name.replace("%batch_num%", "0")).write_bytes(content)
    except OutsideFolder as exc:
        raise errors.NodeFailed("Exception", str(exc)) from exc
    except OSError as exc:
        raise errors.NodeFailed("OSError", f"[Errno {exc.errno}] {exc.strerror}") from exc
    return [{"filename": name, "subfolder": subfolder, "type": kind} for name in names]


def _number(kind: str, default: float, low: float, high: float, **more: Any) -> Input:
    return [kind, {"default": default, "min": low, "max": high, **more}]


def _size(default: int = 512) -> Input:
    return _number("INT", default, 16, 16384, step=8)


def _words(text: str) -> list[str]:
    return text.split()


STRENGTH: Final = _number("FLOAT", 1.0, -100.0, 100.0, step=0.01)
SHARE: Final = {"min": 0.0, "max": 1.0, "step": 0.001}
PRESETS: Final = [
    "FACEID",
    "FACEID PLUS - SD1.5 only",
    "FACEID PLUS V2",
    "FACEID PORTRAIT (style transfer)",
    "FACEID PORTRAIT UNNORM - SDXL only (strong)",
]
WEIGHT_TYPES: Final = [
    "linear",
    "ease in",
    "ease out",
    "ease in-out",
    "reverse in-out",
    "weak input",
    "weak output",
    "weak middle",
    "strong middle",
    "style transfer",
    "composition",
    "strong style transfer",
    "style and composition",
    "style transfer precise",
    "composition precise",
]
SCHEDULERS: Final = _words(
    "simple sgm_uniform karras exponential ddim_uniform beta normal linear_quadratic kl_optimal"
)
SAMPLERS: Final = _words(
    "euler euler_cfg_pp euler_ancestral euler_ancestral_cfg_pp heun heunpp2 exp_heun_2_x0 "
    "exp_heun_2_x0_sde dpm_2 dpm_2_ancestral lms dpm_fast dpm_adaptive dpmpp_2s_ancestral "
    "dpmpp_2s_ancestral_cfg_pp dpmpp_sde dpmpp_sde_gpu dpmpp_2m dpmpp_2m_cfg_pp dpmpp_2m_sde "
    "dpmpp_2m_sde_gpu dpmpp_2m_sde_heun dpmpp_2m_sde_heun_gpu dpmpp_3m_sde dpmpp_3m_sde_gpu ddpm lcm "
    "ipndm ipndm_v deis res_multistep res_multistep_cfg_pp res_multistep_ancestral "
    "res_multistep_ancestral_cfg_pp gradient_estimation gradient_estimation_cfg_pp er_sde seeds_2 "
    "seeds_3 sa_solver sa_solver_pece ddim uni_pc uni_pc_bh2"
)
IP_ADAPTER: Final = "custom_nodes.ComfyUI_IPAdapter_plus"

CLASSES: Final = (
    NodeClass(
        "CheckpointLoaderSimple",
        "Load Checkpoint",
        "model/loaders",
        (("MODEL", "MODEL"), ("CLIP", "CLIP"), ("VAE", "VAE")),
        load_checkpoint,
        required={"ckpt_name": [MODELS["checkpoints"], {}]},
    ),
    NodeClass(
        "LoraLoader",
        "Load LoRA (Model and CLIP)",
        "model/loaders",
        (("MODEL", "MODEL"), ("CLIP", "CLIP")),
        load_lora,
        required={
            "model": ["MODEL", {}],
            "clip": ["CLIP", {}],
            "lora_name": [MODELS["loras"], {}],
            "strength_model": STRENGTH,
            "strength_clip": STRENGTH,
        },
    ),
    NodeClass(
        "LoraLoaderModelOnly",
        "Load LoRA",
        "model/loaders",
        (("MODEL", "MODEL"),),
        load_lora,
        required={
            "model": ["MODEL"],
            "lora_name": [MODELS["loras"]],
            "strength_model": STRENGTH,
        },
    ),
    NodeClass(
        "VAELoader",
        "Load VAE",
        "model/loaders",
        (("VAE", "VAE"),),
        load_vae,
        required={"vae_name": [MODELS["vae"]]},
    ),
    NodeClass(
        "LoadImage",
        "Load Image",
        "image",
        (("IMAGE", "IMAGE"), ("MASK", "MASK")),
        load_image,
        required={"image": [[], {"image_upload": True}]},
        file_input="image",
    ),
    NodeClass(
        "LoadImageMask",
        "Load Image (as Mask)",
        "mask",
        (("MASK", "MASK"),),
        load_mask,
        required={
            "image": [[], {"image_upload": True}],
            "channel": [["alpha", "red", "green", "blue"]],
        },
        file_input="image",
    ),
    NodeClass(
        "EmptyImage",
        "EmptyImage",
        "image",
        (("IMAGE", "IMAGE"),),
        empty_image,
        required={
            "width": _number("INT", 512, 1, 16384, step=1),
            "height": _number("INT", 512, 1, 16384, step=1),
            "batch_size": _number("INT", 1, 1, 4096),
            "color": _number("INT", 0, 0, 0xFFFFFF, step=1, display="color"),
        },
    ),
    NodeClass(
        "CLIPTextEncode",
        "CLIP Text Encode (Prompt)",
        "model/conditioning",
        (("CONDITIONING", "CONDITIONING"),),
        encode_text,
        required={
            "text": ["STRING", {"multiline": True, "dynamicPrompts": True}],
            "clip": ["CLIP"],
        },
    ),
    NodeClass(
        "EmptyLatentImage",
        "Empty Latent Image",
        "latent",
        (("LATENT", "LATENT"),),
        empty_latent,
        required={
            "width": _size(),
            "height": _size(),
            "batch_size": _number("INT", 1, 1, 4096),
        },
    ),
    NodeClass(
        "KSampler",
        "KSampler",
        "model/sampling",
        (("LATENT", "LATENT"),),
        sample,
        required={
            "model": ["MODEL", {}],
            "seed": _number("INT", 0, 0, 2**64 - 1, control_after_generate=True),
            "steps": _number("INT", 20, 1, 10000),
            "cfg": _number("FLOAT", 8.0, 0.0, 100.0, step=0.1, round=0.01),
            "sampler_name": [SAMPLERS, {}],
            "scheduler": [SCHEDULERS, {}],
            "positive": ["CONDITIONING", {}],
            "negative": ["CONDITIONING", {}],
            "latent_image": ["LATENT", {}],
            "denoise": _number("FLOAT", 1.0, 0.0, 1.0, step=0.01),
        },
    ),
    NodeClass(
        "VAEDecode",
        "VAE Decode",
        "latent",
        (("IMAGE", "IMAGE"),),
        decode,
        required={"samples": ["LATENT", {}], "vae": ["VAE", {}]},
    ),
    NodeClass(
        "VAEEncode",
        "VAE Encode",
        "latent",
        (("LATENT", "LATENT"),),
        encode_image,
        required={"pixels": ["IMAGE"], "vae": ["VAE"]},
    ),
    NodeClass(
        "SaveImage",
        "Save Image",
        "image",
        (("IMAGE", "images"),),
        save_image,
        required={
            "images": ["IMAGE", {}],
            "filename_prefix": ["STRING", {"default": "ComfyUI"}],
        },
        hidden={"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"},
        is_output=True,
    ),
    NodeClass(
        "PreviewImage",
        "Preview Image",
        "image",
        (("IMAGE", "images"),),
        preview_image,
        required={"images": ["IMAGE"]},
        hidden={"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"},
        is_output=True,
    ),
    NodeClass(
        "LoadAudio",
        "Load Audio",
        "audio",
        (("AUDIO", "AUDIO"),),
        load_audio,
        # As a node of the newer kind (V3) tells its choices.
        required={"audio": ["COMBO", {"multiselect": False, "audio_upload": True, "options": []}]},
        file_input="audio",
        module="comfy_extras.nodes_audio",
    ),
    NodeClass(
        "EmptyAudio",
        "Empty Audio",
        "audio",
        (("AUDIO", "AUDIO"),),
        empty_audio,
        required={
            "duration": _number("FLOAT", 60.0, 0.0, 2.0**64, step=0.01),
            "sample_rate": ["INT", {"default": 44100}],
            "channels": _number("INT", 2, 1, 2),
        },
        module="comfy_extras.nodes_audio",
    ),
    NodeClass(
        "SaveAudio",
        "Save Audio (FLAC)",
        "audio",
        (),
        save_audio,
        required={
            "audio": ["AUDIO"],
            "filename_prefix": ["STRING", {"default": "audio/ComfyUI"}],
        },
        hidden={"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"},
        is_output=True,
        module="comfy_extras.nodes_audio",
    ),
    NodeClass(
        "SaveLatent",
        "SaveLatent",
        "_for_testing",
        (),
        save_latent,
        required={
            "samples": ["LATENT"],
            "filename_prefix": ["STRING", {"default": "latents/ComfyUI"}],
        },
        hidden={"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"},
        is_output=True,
    ),
    NodeClass(
        "PrimitiveString",
        "String",
        "utils/primitive",
        (("STRING", "STRING"),),
        give_string,
        required={"value": ["STRING", {"multiline": False}]},
        module="comfy_extras.nodes_primitive",
    ),
    NodeClass(
        "PreviewAny",
        "Preview Any",
        "utils",
        (),
        preview_any,
        required={"source": ["*", {}]},
        is_output=True,
        module="comfy_extras.nodes_preview_any",
    ),
    NodeClass(
        "IPAdapterUnifiedLoaderFaceID",
        "IPAdapter Unified Loader FaceID",
        "ipadapter/faceid",
        (("MODEL", "MODEL"), ("IPADAPTER", "ipadapter")),
        load_ip_adapter,
        required={
            "model": ["MODEL"],
            "preset": [PRESETS],
            "lora_strength": _number("FLOAT", 0.6, 0, 1, step=0.01),
            "provider": [["CPU", "CUDA", "ROCM", "DirectML", "OpenVINO", "CoreML"]],
        },
        optional={"ipadapter": ["IPADAPTER"]},
        module=IP_ADAPTER,
    ),
    NodeClass(
        "IPAdapterFaceID",
        "IPAdapter FaceID",
        "ipadapter/faceid",
        (("MODEL", "MODEL"), ("IMAGE", "face_image")),
        apply_face_id,
        required={
            "model": ["MODEL"],
            "ipadapter": ["IPADAPTER"],
            "image": ["IMAGE"],
            "weight": _number("FLOAT", 1.0, -1, 3, step=0.05),
            "weight_faceidv2": _number("FLOAT", 1.0, -1, 5.0, step=0.05),
            "weight_type": [WEIGHT_TYPES],
            "combine_embeds": [["concat", "add", "subtract", "average", "norm average"]],
            "start_at": ["FLOAT", {"default": 0.0, **SHARE}],
            "end_at": ["FLOAT", {"default": 1.0, **SHARE}],
            "embeds_scaling": [["V only", "K+V", "K+V w/ C penalty", "K+mean(V) w/ C penalty"]],
        },
        optional={
            "image_negative": ["IMAGE"],
            "attn_mask": ["MASK"],
            "clip_vision": ["CLIP_VISION"],
            "insightface": ["INSIGHTFACE"],
        },
        module=IP_ADAPTER,
    ),
)

Catalog = dict[str, NodeClass]


def catalog(*, without_ip_adapter: bool = False, without_checkpoints: bool = False) -> Catalog:
    """The installed classes by name."""
    found = {cls.name: cls for cls in CLASSES}
    if without_ip_adapter:
        found = {name: cls for name, cls in found.items() if cls.module != IP_ADAPTER}
    if without_checkpoints:
        loader = found["CheckpointLoaderSimple"]
        found[loader.name] = replace(loader, required={"ckpt_name": [["another.safetensors"], {}]})
    return found
