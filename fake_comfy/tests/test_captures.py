"""The fake against recorded answers of a real ComfyUI v0.26.0: same status, headers that matter, shape of body."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import requests

from fake_comfy import FakeComfy
from fake_comfy.tests.helpers import (
    TIMEOUT_SECONDS,
    Json,
    finish,
    graph,
    is_idle,
    new_id,
    png,
    post,
    run,
    submit,
    upload,
    wait_until,
)

CAPTURES: Final = Path(__file__).parent / "captures"

NOT_REPLAYED: Final = {
    "assets-*, features-assets, *-with-assets-enabled": "another mode of the server, which genflow does not need",
    "upload-413-1MB, upload-too-big": "a TLS server; 101 MiB for what aiohttp itself answers",
    "history-error-encode-error, job-error-encode-error": "a text encoder that breaks is not pretended",
    "history-error-checkpoint-gone, -missing-clipvision, -missing-lora": "model files do not vanish here; one "
    "missing file of the loader (IPAdapter) stands for all",
    "history-interrupt-too-late": "a node class of the recording",
    "hang-interrupt, zombie-*": "the zombie's own test looks at this",
    "race-queue-history, post-then-disconnect, object-info-all-summary": "measurements, not answers",
    "view-metadata": "the header of a model file",
    "jobs-list": "outputs of a node class of the recording",
    "view-absolute-subfolder, view-trunc*": "need files outside, or half a file",
    "v0.3.64/*": "another version",
    "ws-*": "see test_websocket.py",
}

# Fields that are prose of the real server's authors, or that only its own code can have.
IGNORED: Final = {
    "tooltip",
    "description",
    "output_tooltips",
    "essentials_category",
    "traceback",
    "argv",
    "comfy_package_versions",
}
HEADERS: Final = ("allow", "content-disposition", "content-type", "retry-after")
PRESENT: Final = ("accept-ranges", "content-range", "etag", "last-modified")  # whatever their value

FILE: Final = "e4d9787e-c011-4c2d-b435-bb0a4b441bb4"
THIRD: Final = b"a third content"


def capture(name: str) -> Json:
    return json.loads((CAPTURES / f"{name}.json").read_text())  # type: ignore[no-any-return]


def names(*patterns: str) -> list[str]:
    return sorted({path.stem for pattern in patterns for path in CAPTURES.glob(f"{pattern}.json")})


def shape(value: Any) -> Any:
    """Names and types, without the values."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items() if key not in IGNORED}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return "number" if isinstance(value, int | float) else type(value).__name__


def same_shape(ours: Any, theirs: Any) -> bool:
    """Lists fit if they are as long and fit piece by piece, or are all of one kind; an empty one fits any."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same_shape(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) == len(theirs):
            return all(map(same_shape, ours, theirs))
        return not ours or not theirs or all(same_shape(each, theirs[0]) for each in ours)
    return bool(ours == theirs)


def content_of(name: str, size: str) -> bytes:
    """The bytes of a recorded upload: only how they relate to one another was kept."""
    if "12420" not in size:
        return b"not an image"[: int(size.strip("<> bytes")) if size[1].isdigit() else None]
    if name == "upload-overwrite-True":
        return THIRD
    return png("other" if "other" in name or name == "upload-overwrite" else "face")


def replay(fake: FakeComfy, name: str) -> requests.Response:
    """Send a recorded request."""
    request = capture(name)["request"]
    parts = urlsplit(request["url"])
    url = f"{fake.url}{parts.path}{'?' + parts.query if parts.query else ''}"
    headers = {k: v for k, v in request["headers"].items() if k != "content-length"}
    if name == "origin-same":
        headers["origin"] = fake.url
    if name == "view-if-none-match":
        headers["if-none-match"] = requests.head(url, timeout=TIMEOUT_SECONDS).headers["etag"]
    if name in ("origin-other-host-nonloopback", "host-any"):
        headers["host"] = "gpu.example:8188"
    options: Json = {"data": request["body"]}
    if isinstance(request["body"], dict | list):
        options = {"data": json.dumps(request["body"])}
    if headers.get("content-type", "").startswith("multipart"):
        del headers["content-type"]
        options = form_of(name, request["body"])
    return requests.request(
        request["method"], url, headers=headers, timeout=TIMEOUT_SECONDS, **options
    )


def form_of(name: str, body: Json) -> Json:
    ((field, (filename, size, *kind)),) = body["files"].items()
    if filename:
        filename = filename.replace("\0", "%00")  # as the recording client sent it
    file = (filename, content_of(name, size), *kind)
    return {"files": {field: file}, "data": body["data"]}


def assert_like_recorded(name: str, ours: requests.Response) -> None:
    assert_same_head(name, ours)
    assert_same_body(ours, capture(name)["response"]["body"])


def assert_same_head(name: str, ours: requests.Response) -> None:
    theirs = capture(name)["response"]
    assert ours.status_code == theirs["status"]
    for header in HEADERS:
        # A header is Latin-1 to `requests`, whatever was meant.
        value = ours.headers.get(header, "").encode("latin-1").decode()
        assert value == theirs["headers"].get(header, ""), header
    for header in PRESENT:
        assert (header in ours.headers) == (header in theirs["headers"]), header


def assert_same_body(ours: requests.Response, theirs: Any) -> None:
    if isinstance(theirs, dict | list):
        assert same_shape(shape(ours.json()), shape(theirs)), ours.text
    elif theirs.startswith("<"):  # "<13891 bytes, first 16: 89504e47...>"
        first = bytes.fromhex(theirs.rstrip(">").rpartition(" ")[2])
        assert ours.content[:4] == first[:4]
    else:
        assert ours.text == theirs


@pytest.fixture(scope="module")
def furnished() -> Iterator[FakeComfy]:
    """A server with the files that the recorded requests name."""
    with FakeComfy(seconds=0) as fake:
        upload(fake)
        upload(fake, "a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>")
        upload(fake, "text.png", b"hello, not an image")
        upload(fake, "x.html", b"<script>alert(1)</script>")
        upload(fake, "портрет 名前 é.png")
        for prefix in (f"genflow/{FILE}", "genflow/job"):
            run(fake, graph(n9__filename_prefix=prefix))
        yield fake


PLAIN: Final = names(
    "404*",
    "api-*",
    "auth-*",
    "embeddings",
    "features",
    "free",
    "get-prompt-exec-info",
    "history-after-delete",
    "history-after-queue-delete",
    "history-bad-max",
    "history-delete",
    "history-unknown",
    "host-any",
    "interrupt-*",
    "job-after-queue-delete",
    "job-not-uuid",
    "job-unknown",
    "jobs-cancel-batch*",
    "jobs-cancel-finished",
    "jobs-cancel-not-uuid",
    "jobs-cancel-unknown",
    "jobs-list-bad-status",
    "method-not-allowed",
    "models*",
    "object-info-*",
    "options",
    "origin-*",
    "prompt-*",
    "queue-delete-*",
    "queue-empty",
    "queue-post-no-body",
    "sec-fetch-*",
    "system-stats",
    "upload-first",
    "upload-[!fo]*",
    "view-*",
    "ws-plain-get",
)
# Compared more closely than by shape.
REFUSALS: Final = [n for n in names("prompt-*") if capture(n)["response"]["status"] == 400]
# In this order, as each builds on the one before.
UPLOADS: Final = [
    "upload-first",
    "upload-same-content",
    "upload-other-content",
    "upload-other-content-again",
    "upload-overwrite",
    "upload-overwrite-1",
    "upload-overwrite-True",
]


@pytest.mark.parametrize("name", sorted({*PLAIN} - {*UPLOADS, *REFUSALS}))
def test_a_recorded_request_gets_the_recorded_answer(furnished: FakeComfy, name: str) -> None:
    wait_until(lambda: is_idle(furnished))

    answer = replay(furnished, name)

    assert_like_recorded(name, answer)


@pytest.mark.parametrize("name", REFUSALS)
def test_a_graph_is_refused_in_the_very_words(furnished: FakeComfy, name: str) -> None:
    answer = replay(furnished, name)

    assert_same_head(name, answer)
    assert comparable(answer.json()) == comparable(capture(name)["response"]["body"])


def comparable(value: Any) -> Any:
    """The body without prose and stack, and with the errors of a node in one order."""
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items() if key not in IGNORED}
    if isinstance(value, list):
        found = [comparable(each) for each in value]
        return sorted(found, key=str) if found and isinstance(found[0], dict) else found
    return value


def test_uploads_keep_rename_and_overwrite_as_recorded() -> None:
    with FakeComfy(seconds=0) as fake:
        for name in UPLOADS:
            answer = replay(fake, name)

            assert answer.json() == capture(name)["response"]["body"], name


# The name of a recorded history entry or job, and the fault that makes one like it.
ENDINGS: Final = {
    "history-cached-no-client": None,
    "history-cached-with-client": None,
    "history-error-image-gone": None,
    "history-error-missing-ipadapter": "model_not_found_at_run",
    "history-error-noface": None,
    "history-error-not-an-image": None,
    "history-error-oom": "oom",
    "history-error-oom-allocation": "oom",
    "history-error-runtime-error": "runtime_error",
    "history-extra-data": None,
    "history-interrupted": "foreign_interrupt",
    "history-max-items": "foreign_interrupt",
    "history-nan-black": "black_picture",
    "history-partial-outputs": None,
    "history-prefix-traversal": None,
    "history-success": None,
    "history-after-dup": None,
    "job-error-noface": "no_face",
    "job-error-oom": "oom",
    "job-error-oom-allocation": "oom",
    "job-error-runtime-error": "runtime_error",
    "job-interrupted": "foreign_interrupt",
    "job-success": None,
    "jobs-list-status": "foreign_interrupt",
}


def recorded_prompt(name: str) -> Json:
    """The body of the POST /prompt that a recorded entry came from."""
    body = capture(name)["response"]["body"]
    if "workflow" in body:
        prompt_id, graph_, extra = body["id"], body["workflow"]["prompt"], body["workflow"]
        extra_data = extra["extra_data"]
    elif "jobs" in body:
        return {"prompt": graph(), "prompt_id": body["jobs"][0]["id"]}
    else:
        ((prompt_id, entry),) = body.items()
        _, _, graph_, extra_data, _ = entry["prompt"]
    extra_data = {key: value for key, value in extra_data.items() if key != "create_time"}
    return {"prompt": graph_, "prompt_id": prompt_id, "extra_data": extra_data}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_leaves_an_entry_like_the_recorded_one(fake: FakeComfy, name: str) -> None:
    body = recorded_prompt(name)
    for file, content in {"face.png": png(), "blank.png": png("blank"), "text.png": b"t"}.items():
        upload(fake, file, content)
    upload(fake, subfolder="genflow")
    if "cached" in name:
        run(fake, body["prompt"])
    if ENDINGS[name]:
        fake.fault(str(ENDINGS[name]))
    if name == "history-error-image-gone":
        submit_and_lose_photo(fake, body)
    else:
        post(fake, "/prompt", body)
    entry = finish(fake, body["prompt_id"])

    answer = replay(fake, name)

    assert_like_recorded(name, answer)
    assert summary(entry) == summary(recorded_entry(name, entry))


def submit_and_lose_photo(fake: FakeComfy, body: Json) -> None:
    upload(fake, "gone.png")
    fake.seconds = 0.2
    submit(fake)  # so that ours waits
    post(fake, "/prompt", body)
    (fake.data / "input" / "gone.png").unlink()


def recorded_entry(name: str, entry: Json) -> Json:
    body = capture(name)["response"]["body"]
    if "jobs" in body:
        return entry
    if "execution_status" in body:
        return {"status": body["execution_status"], "outputs": body["outputs"]}
    return dict(next(iter(body.values())))


def summary(entry: Json) -> Any:
    """What a client decides by."""
    status = entry["status"]
    event, about = status["messages"][-1]
    where = [about.get(key) for key in ("node_id", "node_type", "exception_type")]
    kinds = {node: list(output) for node, output in entry["outputs"].items()}
    messages = [name for name, _ in status["messages"]]
    return status["status_str"], status["completed"], messages, event, where, kinds


# Answers about a server with work to do; the queue is filled as in the recording first.
BUSY: Final = [
    "dup-after-finished",
    "dup-queued-1",
    "dup-queued-2-while-queued",
    "dup-while-running",
    "dup-same-number-1",
    "same-number-other-id",
    "queue-with-duplicates",
    "queue-after-same-number",
    "jobs-with-duplicates",
    "job-running-dup",
    "jobs-cancel-pending",
    "jobs-cancel-running",
]


@pytest.mark.parametrize("name", BUSY)
def test_a_busy_server_answers_as_recorded(fake: FakeComfy, name: str) -> None:
    fake.seconds = 60
    fill_queue(fake, name)

    answer = replay(fake, name)

    assert_like_recorded(name, answer)
    if "cancel" in name:
        assert answer.json() == {"cancelled": True}


def fill_queue(fake: FakeComfy, name: str) -> None:
    body = capture(name)["response"]["body"]
    if "queue_running" in body:
        for number, prompt_id, graph_, _, _ in body["queue_running"] + body["queue_pending"]:
            explicit = {"number": number} if isinstance(number, float) else {}
            post(fake, "/prompt", {"prompt": graph_, "prompt_id": prompt_id, **explicit})
        return
    running = new_id()
    if name in ("job-running-dup", "jobs-cancel-running", "dup-while-running"):
        running = job_id_in(capture(name)["request"])
    submit(fake, prompt_id=running)
    wait_until(lambda: fake.prompts[running]["executed"])
    if name == "jobs-cancel-pending":
        submit(fake, prompt_id=job_id_in(capture(name)["request"]))
    if name == "jobs-with-duplicates":
        for job in body["jobs"][:3]:
            submit(fake, prompt_id=job["id"])


def job_id_in(request: Json) -> str:
    if request["body"]:
        return str(request["body"]["prompt_id"])
    return str(urlsplit(request["url"]).path.split("/")[3])


def test_the_same_number_and_id_twice_is_a_500_and_queued_and_thrice_kills_the_worker(
    fake: FakeComfy,
) -> None:
    fake.seconds = 0.3
    submit(fake)
    assert_like_recorded("dup-same-number-1", replay(fake, "dup-same-number-1"))

    answers = [replay(fake, "dup-same-number-2") for _ in range(2)]

    for answer in answers:
        assert_like_recorded("dup-same-number-2", answer)
    wait_until(lambda: requests.get(f"{fake.url}/queue", timeout=5).json()["queue_running"] == [])
    assert len(requests.get(f"{fake.url}/queue", timeout=5).json()["queue_pending"]) >= 1
    assert not is_idle(fake)


def test_every_copied_capture_is_replayed() -> None:
    everything = {path.stem for path in CAPTURES.glob("*.json")}
    by_socket = set(names("ws-*"))

    replayed = {*PLAIN, *UPLOADS, *ENDINGS, *BUSY, "dup-same-number-2"}

    assert everything - by_socket <= replayed
