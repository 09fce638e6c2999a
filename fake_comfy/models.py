"""The model files that the pretended server has."""

from __future__ import annotations

from typing import Final

MODELS: Final[dict[str, list[str]]] = {
    "checkpoints": ["realisticVisionV51_v51VAE.safetensors", "v1-5-pruned-emaonly.safetensors"],
    "configs": [],
    "loras": [
        "add_detail.safetensors",
        "ip-adapter-faceid-plusv2_sd15_lora.safetensors",
        "ip-adapter-faceid_sd15_lora.safetensors",
    ],
    "vae": ["vae-ft-mse-840000-ema-pruned.safetensors"],
    "text_encoders": [],
    "diffusion_models": [],
    "clip_vision": ["CLIP-ViT-H-14-laion2B-s32B-b79K.safetensors"],
    "embeddings": [],
    "controlnet": [],
    "upscale_models": [],
    "ipadapter": ["ip-adapter-faceid-plusv2_sd15.bin", "ip-adapter-faceid_sd15.bin"],
}
