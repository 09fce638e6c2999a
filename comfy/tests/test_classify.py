from __future__ import annotations

import json
from typing import Any

import pytest

from comfy.classify import refusal, run_error
from comfy.errors import (
    DETAIL_LIMIT,
    MESSAGE_LIMIT,
    BadAnswer,
    BadPhoto,
    BrokenContext,
    ComfyError,
    ErrorKind,
    GraphRefused,
    InputMissing,
    ModelMissing,
    NodeMissing,
    NoFace,
    OutOfMemory,
    RunFailed,
)
from comfy.tests.captures import body_of, prompt_id_of

TIPS = "\nThis error means you ran out of memory on your GPU.\n\nTIPS: If the workflow worked before..."
CUDA_TAIL = "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"


def event(exception_type: str, message: str, node_type: str = "KSampler") -> dict[str, Any]:
    return {"exception_type": exception_type, "exception_message": message, "node_type": node_type}


def recorded(name: str) -> dict[str, Any]:
    messages = body_of(name)[prompt_id_of(name)]["status"]["messages"]
    return next(fields for kind, fields in messages if kind == "execution_error")


def refused(*errors: dict[str, Any]) -> dict[str, Any]:
    nodes = {str(i): {"class_type": "X", "errors": [error]} for i, error in enumerate(errors)}
    return {"error": {"type": "prompt_outputs_failed_validation"}, "node_errors": nodes}


NOT_IN_LIST = {"type": "value_not_in_list", "extra_info": {"input_name": "ckpt_name"}}
NO_SUCH_IMAGE = {"type": "custom_validation_failed", "details": "image - Invalid image file: a.png"}
TOO_BIG = {"type": "value_bigger_than_max", "details": "cfg"}


@pytest.mark.parametrize(
    ("exception_type", "message"),
    [
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("torch.OutOfMemoryError", "Allocation on device "),
        ("torch.OutOfMemoryError", "Allocation on device " + TIPS),
        (
            "torch.cuda.OutOfMemoryError",
            "Allocation on device 0 would exceed allowed memory. (out of memory)\n",
        ),
        ("torch.OutOfMemoryError", ""),
        ("SomeError", "Allocation on device 0 failed"),
        ("torch.AcceleratorError", "CUDA error: out of memory" + CUDA_TAIL),
        ("RuntimeError", "CUDA error: out of memory" + CUDA_TAIL),
        (
            "RuntimeError",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
        ("torch.OutOfMemoryError", "HIP out of memory. Tried to allocate 1.00 GiB"),
        ("RuntimeError", "MPS backend out of memory (MPS allocated: 8.00 GB)"),
        (
            "RuntimeError",
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory",
        ),
        ("numpy._core._exceptions._ArrayMemoryError", "Unable to allocate 9 GiB for an array"),
        ("MemoryError", ""),
    ],
)
def test_out_of_memory_is_known_by_all_its_names(exception_type: str, message: str) -> None:
    error = run_error(event(exception_type, message))

    assert (type(error), error.kind, error.code) == (
        OutOfMemory,
        ErrorKind.PERMANENT,
        "out_of_memory",
    )


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: an illegal memory access was encountered" + CUDA_TAIL,
        "CUDA error: device-side assert triggered" + CUDA_TAIL,
        "CUDA error: unspecified launch failure" + CUDA_TAIL,
        "CUDA error: invalid argument" + CUDA_TAIL,
        "HIP error: an illegal memory access was encountered",
    ],
)
def test_a_broken_gpu_context_rests_the_server(message: str) -> None:
    error = run_error(event("torch.AcceleratorError", message))

    assert (type(error), error.kind) == (BrokenContext, ErrorKind.BACKEND)


@pytest.mark.parametrize(
    "message",
    [
        "ClipVision model not found.\n",
        "Missing CLIPVision model.\n",
        "IPAdapter model not found.\n",
        "LoRA model not found.\n",
        "insightface model is required for FaceID models\n",
        "Model in folder 'checkpoints' with filename 'x.safetensors' not found.\n",
    ],
)
def test_a_model_that_fails_at_run_time_is_missing(message: str) -> None:
    assert type(run_error(event("Exception", message))) is ModelMissing


@pytest.mark.parametrize(
    ("exception_type", "message", "error"),
    [
        ("ModuleNotFoundError", "No module named 'insightface'\n", NodeMissing),
        ("Exception", "light model is not supported for SDXL\n", GraphRefused),
        ("Exception", "portrait unnorm model is not supported for SD1.5\n", GraphRefused),
        (
            "Exception",
            "**** ERROR: Saving image outside the output folder is not allowed.",
            GraphRefused,
        ),
        ("OSError", "[Errno 36] File name too long: '/x'", GraphRefused),
        ("FileNotFoundError", "[Errno 2] No such file or directory: '/x'", RunFailed),
        ("KeyError", "'clipvision'\n", RunFailed),
    ],
)
def test_the_rest_of_the_table(exception_type: str, message: str, error: type[ComfyError]) -> None:
    assert type(run_error(event(exception_type, message))) is error


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("history-error-oom", OutOfMemory),
        ("history-error-oom-allocation", OutOfMemory),
        ("history-error-noface", NoFace),
        ("history-error-image-gone", InputMissing),
        ("history-error-not-an-image", BadPhoto),
        ("history-error-checkpoint-gone", ModelMissing),
        ("history-error-missing-lora", ModelMissing),
        ("history-error-missing-clipvision", ModelMissing),
        ("history-error-missing-ipadapter", ModelMissing),
        ("history-error-encode-error", GraphRefused),
        ("history-error-runtime-error", RunFailed),
    ],
)
def test_every_recorded_failure_is_known(name: str, error: type[ComfyError]) -> None:
    assert type(run_error(recorded(name))) is error


def test_the_operator_reads_node_and_traceback_and_the_user_neither() -> None:
    error = run_error(recorded("history-error-not-an-image"))

    assert (error.node_id, error.class_type) == ("12", "LoadImage")
    assert "load_image" in error.detail
    assert "/srv/" in str(error)
    assert "/" not in error.user_message


@pytest.mark.parametrize(
    "junk",
    [
        None,
        [],
        {},
        {"exception_message": None, "exception_type": 3, "traceback": "x", "node_id": 7},
        {"exception_message": "", "traceback": [1, None, "\0"]},
        {"exception_message": "bad \ud83d\0", "exception_type": "\ud83d", "node_id": float("nan")},
        {"exception_message": ["a"], "node_type": {}, "traceback": ["x" * 1000] * 2000},
    ],
)
def test_a_failure_of_any_shape_has_a_message_that_can_be_stored(junk: Any) -> None:
    error = run_error(junk)

    texts = (error.message, error.detail, error.node_id or "", error.class_type or "")
    assert type(error) is RunFailed
    assert error.message
    assert len(error.message) <= MESSAGE_LIMIT
    assert len(error.detail) <= DETAIL_LIMIT
    assert all("\0" not in text and text.encode() is not None for text in texts)


@pytest.mark.parametrize(
    ("name", "error", "node_id"),
    [
        ("prompt-missing-model", ModelMissing, "4"),
        ("v0.3.64/prompt-missing-model", ModelMissing, "4"),
        ("prompt-missing-node-class", NodeMissing, "20"),
        ("prompt-missing-node-class-title", NodeMissing, "20"),
        ("v0.3.64/prompt-missing-node-class", NodeMissing, None),
        ("prompt-no-class-type", GraphRefused, "20"),
        ("prompt-missing-image", InputMissing, "12"),
        ("prompt-bad-preset", GraphRefused, "20"),
        ("prompt-bad-sampler", GraphRefused, "3"),
        ("prompt-min-max", GraphRefused, "3"),
        ("prompt-cycle", GraphRefused, "18"),
        ("prompt-no-outputs", GraphRefused, None),
        ("prompt-id-empty", GraphRefused, None),
    ],
)
def test_every_recorded_refusal_is_known(
    name: str, error: type[ComfyError], node_id: str | None
) -> None:
    refused_by = refusal(body_of(name))

    assert (type(refused_by), refused_by.node_id) == (error, node_id)


def test_a_missing_model_is_named_with_its_input() -> None:
    error = refusal(body_of("prompt-missing-model"))

    assert "ckpt_name: 'missing.safetensors'" in error.message
    assert error.class_type == "CheckpointLoaderSimple"


def test_a_graph_that_is_wrong_anywhere_is_not_worth_another_server_or_upload() -> None:
    assert type(refusal(refused(NO_SUCH_IMAGE, NOT_IN_LIST, TOO_BIG))) is GraphRefused
    assert type(refusal(refused(NO_SUCH_IMAGE, NOT_IN_LIST))) is ModelMissing
    assert type(refusal(refused(NO_SUCH_IMAGE))) is InputMissing


@pytest.mark.parametrize("body", [None, [], "no", {}, {"detail": "a proxy's own 400"}])
def test_a_400_that_is_not_comfyuis_is_a_bad_answer(body: Any) -> None:
    assert type(refusal(body)) is BadAnswer


@pytest.mark.parametrize(
    "body",
    [
        {"error": "Prompt has no outputs", "node_errors": []},
        {"error": None},
        {"error": {"type": 3, "message": None, "extra_info": [1]}, "node_errors": {"1": 2}},
        {
            "error": {},
            "node_errors": {"1": {"errors": [None, {}, {"extra_info": 3}]}, "2": {"errors": 1}},
        },
    ],
)
def test_a_refusal_of_any_shape_is_a_refusal_with_a_message(body: Any) -> None:
    error = refusal(json.loads(json.dumps(body)))

    assert type(error) is GraphRefused
    assert error.message
