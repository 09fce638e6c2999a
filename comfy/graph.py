"""Builds the graph of a portrait: photo and prompt through IPAdapter FaceID PLUS V2 (Stable Diffusion 1.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

Graph = dict[str, dict[str, Any]]
Placeholder = dict[str, Any]  # a JSON object that somebody else replaces before the graph is sent

OUTPUT_NODE: Final = "9"
DEFAULT_NEGATIVE_PROMPT: Final = (
    "blurry, noisy, messy, lowres, jpeg artifacts, ill, distorted, malformed"
)
PROMPT_MAX_LENGTH: Final = 5_000  # characters
NAME_LENGTH: Final = 200  # characters of a node's id or of a class


@dataclass(frozen=True)
class Range:
    """The numbers that a field may have, both ends included. With a `step` they are whole, and multiples of it."""

    low: float
    high: float
    step: int | None = None

    def check(self, name: str, value: float) -> None:
        if not self._holds(value):
            steps = f" in steps of {self.step}" if self.step else ""
            raise ValueError(f"{name}: {value!r} is not from {self.low} to {self.high}{steps}")

    def _holds(self, value: float) -> bool:
        kinds = (int,) if self.step else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        # NaN is in no range: every comparison with it is false.
        return self.low <= value <= self.high and (self.step is None or value % self.step == 0)


SIZE: Final = Range(64, 2048, step=8)  # pixels
SEED: Final = Range(0, 2**64 - 1, step=1)
STEPS: Final = Range(1, 150, step=1)
CFG: Final = Range(0, 30)
COUNT: Final = Range(1, 8, step=1)
FACE_WEIGHT: Final = Range(0, 3)  # IPAdapterFaceID.weight; 0 ignores the photo
LIKENESS: Final = Range(0, 5)  # IPAdapterFaceID.weight_faceidv2
LORA_STRENGTH: Final = Range(-2, 2)


@dataclass(frozen=True, kw_only=True)
class FaceRequest:
    """All that decides a picture: the same request gives the same graph. Raises ValueError out of range."""

    photo: str | Placeholder  # what upload_image returned
    prompt: str
    negative_prompt: str = DEFAULT_NEGATIVE_PROMPT
    seed: int
    width: int = 512
    height: int = 512
    steps: int = 30
    cfg: float = 6.5
    count: int = 1
    face_weight: float = 1.0
    likeness: float = 2.0
    lora: str | None = None
    lora_strength: float = 1.0
    checkpoint: str
    provider: str = "CPU"  # what InsightFace runs on: CPU, CUDA, ROCM, DirectML, OpenVINO, CoreML
    sampler: str = "ddpm"
    scheduler: str = "karras"
    filename_prefix: str | Placeholder

    def __post_init__(self) -> None:
        SEED.check("seed", self.seed)
        SIZE.check("width", self.width)
        SIZE.check("height", self.height)
        STEPS.check("steps", self.steps)
        CFG.check("cfg", self.cfg)
        COUNT.check("count", self.count)
        FACE_WEIGHT.check("face_weight", self.face_weight)
        LIKENESS.check("likeness", self.likeness)
        LORA_STRENGTH.check("lora_strength", self.lora_strength)
        for name in ("prompt", "negative_prompt"):
            Range(0, PROMPT_MAX_LENGTH).check(f"length of {name}", len(getattr(self, name)))


@dataclass(frozen=True)
class Output:
    """One output of one node, to be given to another node's input."""

    node_id: str
    slot: int


class GraphBuilder:
    """Nodes, one method each; the ids are the caller's choice, the wires are the methods' results."""

    def __init__(self) -> None:
        self.graph: Graph = {}

    def checkpoint(self, node_id: str, name: str) -> tuple[Output, Output, Output]:
        """Return model, clip and vae."""
        self._add(node_id, "CheckpointLoaderSimple", ckpt_name=name)
        return Output(node_id, 0), Output(node_id, 1), Output(node_id, 2)

    def load_image(self, node_id: str, image: str | Placeholder) -> Output:
        return self._add(node_id, "LoadImage", image=image)

    def lora(
        self, node_id: str, model: Output, clip: Output, *, name: str, strength: float
    ) -> tuple[Output, Output]:
        """Return model and clip."""
        self._add(
            node_id,
            "LoraLoader",
            model=model,
            clip=clip,
            lora_name=name,
            strength_model=float(strength),
            strength_clip=float(strength),
        )
        return Output(node_id, 0), Output(node_id, 1)

    def unified_loader_face_id(
        self, node_id: str, model: Output, *, provider: str
    ) -> tuple[Output, Output]:
        """Return model and ipadapter."""
        self._add(
            node_id,
            "IPAdapterUnifiedLoaderFaceID",
            model=model,
            preset="FACEID PLUS V2",
            lora_strength=0.6,
            provider=provider,
        )
        return Output(node_id, 0), Output(node_id, 1)

    def ip_adapter_face_id(
        self,
        node_id: str,
        model: Output,
        ipadapter: Output,
        *,
        face: Output,
        weight: float,
        likeness: float,
    ) -> Output:
        # ComfyUI asks for all of them, whether they have a default or not.
        return self._add(
            node_id,
            "IPAdapterFaceID",
            model=model,
            ipadapter=ipadapter,
            image=face,
            weight=float(weight),
            weight_faceidv2=float(likeness),
            weight_type="linear",
            combine_embeds="concat",
            start_at=0.0,
            end_at=1.0,
            embeds_scaling="V only",
        )

    def clip_text(self, node_id: str, clip: Output, text: str) -> Output:
        return self._add(node_id, "CLIPTextEncode", clip=clip, text=text)

    def empty_latent(self, node_id: str, *, width: int, height: int, count: int) -> Output:
        return self._add(node_id, "EmptyLatentImage", width=width, height=height, batch_size=count)

    def k_sampler(
        self,
        node_id: str,
        model: Output,
        *,
        positive: Output,
        negative: Output,
        latent: Output,
        seed: int,
        steps: int,
        cfg: float,
        sampler: str,
        scheduler: str,
    ) -> Output:
        return self._add(
            node_id,
            "KSampler",
            model=model,
            seed=seed,
            steps=steps,
            cfg=float(cfg),
            sampler_name=sampler,
            scheduler=scheduler,
            positive=positive,
            negative=negative,
            latent_image=latent,
            denoise=1.0,
        )

    def vae_decode(self, node_id: str, samples: Output, vae: Output) -> Output:
        return self._add(node_id, "VAEDecode", samples=samples, vae=vae)

    def save_image(
        self, node_id: str, images: Output, *, filename_prefix: str | Placeholder
    ) -> None:
        self._add(node_id, "SaveImage", images=images, filename_prefix=filename_prefix)

    def _add(self, node_id: str, class_type: str, **inputs: Any) -> Output:
        wired = {
            name: [value.node_id, value.slot] if isinstance(value, Output) else value
            for name, value in inputs.items()
        }
        self.graph[node_id] = {"class_type": class_type, "inputs": wired}
        return Output(node_id, 0)


def portrait_graph(request: FaceRequest) -> Graph:
    """The graph of a portrait, in ComfyUI's API format. Its pictures come from OUTPUT_NODE."""
    g = GraphBuilder()
    model, clip, vae = g.checkpoint("4", request.checkpoint)
    if request.lora is not None:
        strength = request.lora_strength
        model, clip = g.lora("10", model, clip, name=request.lora, strength=strength)
    face = g.load_image("12", request.photo)
    model, ipadapter = g.unified_loader_face_id("20", model, provider=request.provider)
    model = g.ip_adapter_face_id(
        "18",
        model,
        ipadapter,
        face=face,
        weight=request.face_weight,
        likeness=request.likeness,
    )
    samples = g.k_sampler(
        "3",
        model,
        positive=g.clip_text("6", clip, request.prompt),
        negative=g.clip_text("7", clip, request.negative_prompt),
        latent=g.empty_latent("5", width=request.width, height=request.height, count=request.count),
        seed=request.seed,
        steps=request.steps,
        cfg=request.cfg,
        sampler=request.sampler,
        scheduler=request.scheduler,
    )
    images = g.vae_decode("8", samples, vae)
    g.save_image(OUTPUT_NODE, images, filename_prefix=request.filename_prefix)
    return g.graph
