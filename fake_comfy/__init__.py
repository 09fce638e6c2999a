"""A ComfyUI that fails on purpose: the real one's HTTP and WebSocket API (v0.26), without a GPU."""

from __future__ import annotations

from fake_comfy.thread import FakeComfy

__all__ = ["FakeComfy"]
