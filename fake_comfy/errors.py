"""How a run ends before its time.

* RunEnded
  + NodeFailed    a node raised
  + Interrupted   somebody asked for it
* WorkerDied      takes the worker thread with it: nothing runs any more until a restart
"""

from __future__ import annotations

from typing import Final


class RunEnded(Exception):
    pass


class Interrupted(RunEnded):
    pass


class NodeFailed(RunEnded):
    """What execution_error will say; a real message ends with a line break, unless tips follow it."""

    def __init__(self, exception_type: str, message: str, tips: str = "") -> None:
        super().__init__(message)
        self.exception_type = exception_type
        self.message = f"{message}\n{tips}"


class WorkerDied(BaseException):
    """Not an Exception, so that nothing on the way takes it for a failed node."""


# Arguments of NodeFailed.
OUT_OF_MEMORY: Final = (
    "torch.OutOfMemoryError",
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.78 GiB of which "
    "1.21 GiB is free.",
    "This error means you ran out of memory on your GPU.\n\nTIPS: If the workflow worked before you "
    "might have accidentally set the batch_size to a large number.",
)
RUNTIME_ERROR: Final = (
    "RuntimeError",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
)
BROKEN_CONTEXT: Final = (
    "torch.AcceleratorError",
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at "
    "some other API call, so the stacktrace below might be incorrect.",
)
NO_FACE: Final = ("Exception", "InsightFace: No face detected.")
NO_IP_ADAPTER: Final = ("Exception", "IPAdapter model not found.")
