"""Every way in which ComfyUI says that something went wrong, and what becomes of the job in its row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest

from comfy.errors import DETAIL_LIMIT
from comfy.tests.captures import body_of, prompt_id_of
from jobs.models import Backend, Job, JobEvent
from jobs.tests.go_between import GoBetween, Reply, Seen, html_reply, json_reply
from jobs.tests.helpers import fresh, make_worker, queue_job

pytestmark = pytest.mark.django_db

TIPS: Final = (
    "\nThis error means you ran out of memory on your GPU.\n\nTIPS: If the workflow worked before you might"
    " have accidentally set the batch_size to a large number."
)
ASYNC: Final = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below"
    " might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with"
    " `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
# What a user must never read: paths, addresses, names of exceptions.
PRIVATE: Final = re.compile(
    r"/|\\|\d+\.\d+\.\d+\.\d+|:\d{4}|localhost|\w+Error|Traceback|torch|CUDA"
)


class Sayer(GoBetween):
    """A ComfyUI that takes every upload and prompt, and says of each run what it is told to say."""

    def __init__(self) -> None:
        super().__init__()
        self.entry: dict[str, Any] = {}
        self.prompts: dict[str, Any] = {}
        self.instead("GET /system_stats", json_reply(body_of("system-stats")), None)
        self.instead(
            "POST /upload/image", json_reply({"name": "a.jpeg", "subfolder": "genflow"}), None
        )
        self.instead("GET /queue", json_reply({"queue_running": [], "queue_pending": []}), None)
        self.instead("GET /history", self._history, None)
        self.instead("POST /prompt", self._accept, None)
        self.instead("POST /free", Reply(), None)

    def fails(self, event: Any) -> None:
        """Let each run end with this `execution_error`."""
        messages = [["execution_start", {}], ["execution_error", event]]
        self.ends({"outputs": {}, "status": {"status_str": "error", "messages": messages}})

    def ends(self, entry: dict[str, Any]) -> None:
        """Let this be each run's history entry."""
        self.entry = entry

    def _accept(self, seen: Seen) -> Reply:
        prompt_id = seen.json["prompt_id"]
        self.prompts[prompt_id] = seen.json
        return json_reply({"prompt_id": prompt_id, "number": 1, "node_errors": {}})

    def _history(self, seen: Seen) -> Reply:
        prompt_id = seen.path.rpartition("/")[2]
        if prompt_id not in self.prompts:
            return json_reply({})
        sent = self.prompts[prompt_id]
        prompt = [1, prompt_id, sent["prompt"], sent["extra_data"], ["9"]]
        return json_reply({prompt_id: {"prompt": prompt} | self.entry})


@pytest.fixture
def comfy() -> Iterator[Sayer]:
    with Sayer() as server:
        yield server


def event(exception_type: Any, message: Any, node_type: Any = "KSampler") -> dict[str, Any]:
    return {
        "node_id": "3",
        "node_type": node_type,
        "executed": [],
        "exception_type": exception_type,
        "exception_message": message,
        "traceback": ['  File "/srv/ComfyUI/execution.py", line 542, in execute\n'],
        "current_inputs": {},
        "current_outputs": [],
    }


def recorded(name: str) -> dict[str, Any]:
    messages = body_of(name)[prompt_id_of(name)]["status"]["messages"]
    return next(fields for kind, fields in messages if kind == "execution_error")


def one_attempt(comfy: Sayer, **values: Any) -> Job:
    """Let a worker do what it does with one attempt at a job."""
    job = queue_job(**values)
    make_worker(comfy.url).run_once()
    return fresh(job)


def assert_says(row: Job, code: str, detail: str = "") -> None:
    """The user gets a code and a plain sentence, the operator all of it."""
    assert row.error is not None
    assert row.error["code"] == code
    assert row.error["message"].strip().endswith(".")
    assert not PRIVATE.search(row.error["message"].replace("GPU's", "")), row.error["message"]
    assert detail in row.error_detail


# --- a run that failed ---

OUT_OF_MEMORY: Final = [
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB." + TIPS),
    ("torch.OutOfMemoryError", "Allocation on device \n"),
    ("torch.OutOfMemoryError", "Allocation on device " + TIPS),
    ("torch.cuda.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0)\n"),
    (
        "torch.cuda.OutOfMemoryError",
        "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated : 14.81 GiB\nRequested : 1.25 GiB\n",
    ),
    ("torch.AcceleratorError", "CUDA error: out of memory" + ASYNC),
    ("RuntimeError", "CUDA error: out of memory" + ASYNC),
    ("torch.OutOfMemoryError", "HIP out of memory. Tried to allocate 1.00 GiB.\n"),
    ("RuntimeError", "MPS backend out of memory (MPS allocated: 8.00 GB, max allowed: 9.07 GB).\n"),
    (
        "RuntimeError",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"
        " tried to allocate 99999 bytes. Error code 12 (Cannot allocate memory)\n",
    ),
]
MODEL_MISSING: Final = [
    ("Exception", "ClipVision model not found.\n"),
    ("Exception", "Missing CLIPVision model.\n"),
    ("Exception", "IPAdapter model not found.\n"),
    ("Exception", "LoRA model not found.\n"),
    ("Exception", "insightface model is required for FaceID models\n"),
    ("FileNotFoundError", "Model in folder 'checkpoints' with filename 'X' not found.\n"),
]
REFUSED: Final = [
    ("Exception", "light model is not supported for SDXL\n"),
    ("Exception", "portrait unnorm model is not supported for SD1.5\n"),
    ("Exception", "**** ERROR: Saving image outside the output folder is not allowed. /srv/x\n"),
    ("OSError", "[Errno 36] File name too long: '/srv/ComfyUI/output/x'\n"),
    ("RuntimeError", "ERROR: clip input is invalid: None\n\nIf the clip is from a checkpoint...\n"),
]
PERMANENT: Final = [
    *(("out_of_memory", *spelling) for spelling in OUT_OF_MEMORY),
    *(("model_missing", *spelling) for spelling in MODEL_MISSING),
    *(("graph_refused", *spelling) for spelling in REFUSED),
    ("no_face", "Exception", "InsightFace: No face detected.\n"),
    ("node_missing", "ModuleNotFoundError", "No module named 'insightface'\n"),
    ("bad_photo", "PIL.UnidentifiedImageError", "cannot identify image file '/srv/input/a.jpeg'\n"),
]


@pytest.mark.parametrize(("code", "exception_type", "message"), PERMANENT)
def test_what_will_not_go_away_fails_on_the_first_attempt(
    comfy: Sayer, code: str, exception_type: str, message: str
) -> None:
    comfy.fails(event(exception_type, message))

    row = one_attempt(comfy)

    assert (row.status, row.attempt) == ("failed", 1)
    assert_says(row, code, detail=message.strip()[:60])
    assert 'File "/srv/ComfyUI/execution.py"' in row.error_detail
    assert len(comfy.requests("POST /prompt")) == 1


def test_a_photo_that_comfyui_cannot_decode_is_a_bad_photo(comfy: Sayer) -> None:
    comfy.fails(event("av.error.InvalidDataError", "[Errno 1094995529] Invalid data", "LoadImage"))

    assert_says(one_attempt(comfy), "bad_photo", detail="Invalid data")


def test_no_face_tells_the_user_to_leave_room_around_it(comfy: Sayer) -> None:
    comfy.fails(recorded("history-error-noface"))

    row = one_attempt(comfy)

    assert row.error is not None
    assert (row.status, row.error["code"]) == ("failed", "no_face")
    assert "room around it" in row.error["message"]


@pytest.mark.parametrize("free", [Reply(), Reply(500), html_reply(502)])
def test_out_of_memory_frees_the_gpu_for_the_next_job_if_it_can(comfy: Sayer, free: Reply) -> None:
    comfy.instead("POST /free", free)
    comfy.fails(recorded("history-error-oom"))

    row = one_attempt(comfy)

    assert row.status == "failed"
    assert [seen.json["unload_models"] for seen in comfy.requests("POST /free")] == [True]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("history-error-oom", "out_of_memory"),
        ("history-error-oom-allocation", "out_of_memory"),
        ("history-error-noface", "no_face"),
        ("history-error-not-an-image", "bad_photo"),
        ("history-error-checkpoint-gone", "model_missing"),
        ("history-error-missing-lora", "model_missing"),
        ("history-error-missing-clipvision", "model_missing"),
        ("history-error-missing-ipadapter", "model_missing"),
        ("history-error-encode-error", "graph_refused"),
        ("v0.3.64/history-error-oom", "out_of_memory"),
        ("v0.3.64/history-error-noface", "no_face"),
    ],
)
def test_what_real_servers_said_fails_on_the_first_attempt(
    comfy: Sayer, name: str, code: str
) -> None:
    comfy.fails(recorded(name))

    row = one_attempt(comfy)

    assert (row.status, row.attempt) == ("failed", 1)
    assert_says(row, code, detail=recorded(name)["exception_type"])


@pytest.mark.parametrize(
    "unknown",
    [
        event("KeyError", "'clipvision'\n"),
        event("KeyError", ""),
        event("UnboundLocalError", "cannot access local variable 'x'\n"),
        event("comfy_execution.graph_utils.ExecutionBlocked", "\n"),
        event("FileNotFoundError", "[Errno 2] No such file or directory: '/srv/models/x'\n"),
        recorded("history-error-runtime-error"),
        {},
        None,
        [],
        {"exception_message": None, "exception_type": 3, "traceback": "x", "node_id": 7},
        {"traceback": {"a": 1}, "node_id": ["3"], "node_type": {}, "exception_message": ["a"]},
    ],
)
def test_an_unknown_error_of_any_shape_is_tried_again_and_never_without_words(
    comfy: Sayer, unknown: Any
) -> None:
    comfy.fails(unknown)

    row = one_attempt(comfy)

    assert (row.status, row.attempt, row.backend) == ("queued", 2, None)
    assert_says(row, "unknown", detail="RunFailed: ")
    assert Backend.objects.get().status == "up"


def test_an_unknown_error_is_tried_as_often_as_the_job_allows(comfy: Sayer) -> None:
    comfy.fails(event("KeyError", "'clipvision'\n"))

    row = one_attempt(comfy, max_attempts=1)

    assert (row.status, row.attempt) == ("failed", 1)
    assert_says(row, "unknown", detail="KeyError: 'clipvision'")


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: device-side assert triggered" + ASYNC,
        "CUDA error: an illegal memory access was encountered" + ASYNC,
        "CUDA error: invalid argument" + ASYNC,
        "CUDA error: unspecified launch failure" + ASYNC,
    ],
)
@pytest.mark.parametrize("exception_type", ["torch.AcceleratorError", "RuntimeError"])
def test_a_broken_gpu_rests_and_its_job_goes_on_elsewhere(
    comfy: Sayer, exception_type: str, message: str
) -> None:
    comfy.fails(event(exception_type, message))

    row = one_attempt(comfy)

    assert (row.status, row.attempt, row.backend) == ("queued", 2, None)
    assert_says(row, "backend_unreachable", detail=message[:40])
    assert Backend.objects.get().status == "resting"
    assert "CUDA error" in Backend.objects.get().reason


@pytest.mark.parametrize("status_str", ["error", "success"])
def test_a_run_that_somebody_else_stopped_is_drawn_again(comfy: Sayer, status_str: str) -> None:
    messages = [["execution_start", {}], ["execution_interrupted", {"node_id": "3"}]]
    comfy.ends({"outputs": {}, "status": {"status_str": status_str, "messages": messages}})

    row = one_attempt(comfy)

    assert (row.status, row.attempt, row.drawing) == ("queued", 2, 1)
    assert_says(row, "unknown", detail="interrupted")


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"status": None, "outputs": None},
        {"status": {"status_str": "error", "completed": False, "messages": []}},
        {"status": {"status_str": 7, "messages": {"a": 1}}, "outputs": []},
        {"status": "error", "outputs": {"9": None}},
        {"status": {"status_str": "\0\ud800", "messages": [None, [], 7]}},
    ],
)
def test_a_run_that_ended_without_a_reason_is_tried_again(comfy: Sayer, entry: Any) -> None:
    comfy.ends(entry)

    row = one_attempt(comfy)

    assert (row.status, row.attempt) == ("queued", 2)
    assert_says(row, "unknown", detail="without a reason")


def test_a_success_without_a_picture_is_drawn_again(comfy: Sayer) -> None:
    comfy.ends({"outputs": {}, "status": {"status_str": "success", "messages": []}})

    row = one_attempt(comfy)

    assert (row.status, row.attempt, row.drawing) == ("queued", 2, 1)
    assert_says(row, "bad_picture")


@pytest.mark.parametrize("name", ["history-error-image-gone"])
def test_a_photo_that_got_lost_on_the_server_is_sent_again(comfy: Sayer, name: str) -> None:
    comfy.fails(recorded(name))

    row = one_attempt(comfy)

    assert (row.status, row.attempt, row.resubmits) == ("failed", 1, 3)
    assert_says(row, "bad_photo", detail="FileNotFoundError")
    assert len(comfy.requests("POST /upload/image")) == 4


# --- what cannot be stored as it is ---

NASTY: Final = "a\0b \ud83d \udc80 \x1b[31m \u202e"


@pytest.mark.parametrize(
    "nasty",
    [
        event(NASTY, NASTY, NASTY) | {"traceback": [NASTY] * 3, "node_id": NASTY},
        event("X", "NaN") | {"node_id": float("nan"), "current_inputs": {"a": [float("inf")]}},
        event("X", float("nan")) | {"traceback": [float("-inf"), None, {"a": "\0"}]},
        event("X" * 3_000_000, "y" * 2_000_000) | {"traceback": ["z" * 1_000] * 2_000},
        event("X", "m") | {"node_id": "n" * 5_000, "node_type": "t\0" * 5_000},
    ],
    ids=["nul-and-surrogates", "nan", "nan-message", "megabytes", "long-names"],
)
@pytest.mark.parametrize("max_attempts", [1, 2])
def test_a_failure_is_saved_whatever_is_in_it(
    comfy: Sayer, nasty: dict[str, Any], max_attempts: int
) -> None:
    comfy.fails(nasty)

    row = one_attempt(comfy, max_attempts=max_attempts)

    assert row.status == ("failed" if max_attempts == 1 else "queued")
    assert_says(row, "unknown", detail="RunFailed: ")
    assert len(row.error_detail) <= DETAIL_LIMIT + 2_000
    assert len(json.dumps(row.error)) < 5_000


def test_a_picture_with_an_odd_name_is_just_not_ours(comfy: Sayer) -> None:
    images = [{"filename": NASTY, "subfolder": "genflow\0", "type": "output"}]
    comfy.ends({"outputs": {"9": {"images": images}}, "status": {"status_str": "success"}})

    row = one_attempt(comfy)

    assert (row.status, row.attempt) == ("queued", 2)
    assert_says(row, "bad_picture")


# --- a graph that was refused ---


def refused(*errors: dict[str, Any], type: str = "prompt_outputs_failed_validation") -> Reply:
    nodes = {
        str(number): {"class_type": "CheckpointLoaderSimple", "errors": [error]}
        for number, error in enumerate(errors, 4)
    }
    main = {"type": type, "message": "Prompt outputs failed validation", "details": ""}
    return json_reply({"error": main, "node_errors": nodes}, 400)


NOT_THERE: Final = {
    "type": "value_not_in_list",
    "message": "Value not in list",
    "details": "ckpt_name: 'a.safetensors' not in ['b.safetensors']",
    "extra_info": {
        "input_name": "ckpt_name",
        "received_value": "a.safetensors",
        "input_config": [["b.safetensors"]],
    },
}


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (refused(NOT_THERE), "model_missing"),
        (refused({"type": "value_bigger_than_max", "details": "cfg"}), "graph_refused"),
        (refused({"type": "required_input_missing", "details": "seed"}), "graph_refused"),
        (refused(type="prompt_no_outputs"), "graph_refused"),
        (refused(type="invalid_prompt_id"), "graph_refused"),
        (refused({"type": "\0", "details": NASTY, "extra_info": [NASTY]}), "graph_refused"),
        (json_reply({"error": None, "node_errors": NASTY}, 400), "graph_refused"),
        *(
            (json_reply(body_of(name), 400), code)
            for name, code in [
                ("prompt-missing-model", "model_missing"),
                ("v0.3.64/prompt-missing-model", "model_missing"),
                ("prompt-missing-node-class", "node_missing"),
                ("prompt-missing-node-class-title", "node_missing"),
                ("v0.3.64/prompt-missing-node-class", "node_missing"),
                ("prompt-no-class-type", "graph_refused"),
                ("prompt-bad-preset", "graph_refused"),
                ("prompt-bad-sampler", "graph_refused"),
                ("prompt-min-max", "graph_refused"),
                ("prompt-cycle", "graph_refused"),
                ("prompt-no-outputs", "graph_refused"),
            ]
        ),
    ],
)
def test_a_refused_graph_fails_at_once_and_the_operator_reads_why(
    comfy: Sayer, reply: Reply, code: str
) -> None:
    comfy.instead("POST /prompt", reply)

    row = one_attempt(comfy)

    assert (row.status, row.attempt) == ("failed", 1)
    assert_says(row, code, detail="graph refused:")
    assert len(comfy.requests("POST /prompt")) == 1


def test_a_missing_model_is_named_to_the_operator_with_file_and_input(comfy: Sayer) -> None:
    comfy.instead("POST /prompt", refused(NOT_THERE))

    row = one_attempt(comfy)

    assert row.error is not None
    assert "ckpt_name: 'a.safetensors'" in row.error_detail
    assert (row.error["node_id"], row.error["class_type"]) == ("4", "CheckpointLoaderSimple")
    assert "a.safetensors" not in row.error["message"]


def test_a_photo_that_is_gone_before_the_submit_is_sent_again(comfy: Sayer) -> None:
    comfy.instead("POST /prompt", json_reply(body_of("prompt-missing-image"), 400))
    comfy.fails(recorded("history-error-noface"))

    row = one_attempt(comfy)

    assert row.error is not None
    assert (row.error["code"], row.attempt, row.resubmits) == ("no_face", 1, 1)
    assert len(comfy.requests("POST /upload/image")) == 2


# --- answers that are no answers: temporary, permanent, or the server's fault ---

ROUTES: Final = ["POST /upload/image", "GET /queue", "GET /history", "POST /prompt"]
TEMPORARY: Final = [
    Reply(500, b"500 Internal Server Error\n\nServer got itself in trouble"),
    Reply(408),
    Reply(429),
    html_reply(502, "502 Bad Gateway"),
    html_reply(503, "503 Service Temporarily Unavailable"),
    html_reply(504, "504 Gateway Time-out"),
    Reply(599, NASTY.encode("utf-8", "surrogatepass")),
    html_reply(200, "Welcome to nginx!"),
    html_reply(400, "400 Bad Request"),
    Reply(404),
    Reply(200),
    Reply(200, b'{"queue_running": [[1, "'),
    Reply(200, b"[]"),
    Reply(200, b"null"),
    Reply(200, b"[" * 100_000),
    Reply(200, b'{"a": ' + b"9" * 5_000 + b"}"),
    Reply(200, b"\xff\xfe\x00"),
    Reply(418, b"short and stout"),
    b"",
    b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{}",
    b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"que',
    b"SSH-2.0-OpenSSH_9.2\r\n",
]


@pytest.mark.parametrize("answer", TEMPORARY)
@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_that_says_nothing_spends_one_attempt(
    comfy: Sayer, route: str, answer: Reply | bytes
) -> None:
    comfy.instead(route, answer, None)

    row = one_attempt(comfy)

    assert (row.status, row.attempt, row.resubmits) == ("queued", 2, 0)
    assert_says(row, "unknown", detail=route.split()[1])
    assert Backend.objects.get().status == "up"
    assert JobEvent.objects.get(kind="retry").facts["code"] == "unknown"


@pytest.mark.parametrize(
    "answer",
    [
        Reply(401, headers={"WWW-Authenticate": 'Basic realm="ComfyUI"'}),
        Reply(403),
        html_reply(403, "403 Forbidden"),
        Reply(407),
        Reply(301, headers={"Location": "https://10.0.0.7:8443/prompt"}),
        Reply(302, headers={"Location": "/login"}),
        Reply(307, headers={"Location": "//elsewhere"}),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_a_server_that_keeps_us_out_rests_and_the_job_is_not_charged(
    comfy: Sayer, route: str, answer: Reply
) -> None:
    comfy.instead(route, answer, None)

    row = one_attempt(comfy)

    assert (row.status, row.attempt, row.error) == ("queued", 1, None)
    backend = Backend.objects.get()
    assert (backend.status, backend.failures) == ("resting", 1)
    assert str(answer.status) in backend.reason
    assert answer.headers.get("Location", "") in backend.reason


@pytest.mark.parametrize(
    "answer",
    [
        html_reply(413, "413 Request Entity Too Large"),
        Reply(413, b"Maximum request body size 104857600 exceeded."),
    ],
)
def test_a_photo_above_the_servers_limit_fails_once_and_the_operator_reads_the_limit(
    comfy: Sayer, answer: Reply
) -> None:
    comfy.instead("POST /upload/image", answer, None)

    row = one_attempt(comfy)

    assert (row.status, row.attempt) == ("failed", 1)
    assert_says(row, "bad_photo", detail=answer.body.decode()[:40])
    assert "too big" in (row.error or {})["message"]
    assert len(comfy.requests("POST /upload/image")) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {"subfolder": "genflow"},
        {"name": "", "subfolder": "genflow"},
        {"name": 7},
        {"name": NASTY, "subfolder": "genflow"},
        {"name": "a.jpeg", "subfolder": NASTY},
    ],
)
def test_an_upload_that_was_stored_under_no_usable_name_spends_one_attempt(
    comfy: Sayer, answer: dict[str, Any]
) -> None:
    comfy.instead("POST /upload/image", json_reply(answer), None)

    row = one_attempt(comfy)

    assert (row.status, row.attempt, row.step) == ("queued", 2, "upload")
    assert_says(row, "unknown", detail="no name of the uploaded file")
