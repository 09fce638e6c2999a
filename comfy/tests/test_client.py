from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
import responses

from comfy.client import ComfyClient, Place, parse_retry_after
from comfy.errors import (
    AccessDenied,
    BadAnswer,
    ComfyError,
    ErrorKind,
    GraphRefused,
    InputMissing,
    ModelMissing,
    NodeMissing,
    OutputMissing,
    OutputTooLarge,
    ServerTrouble,
    TooLarge,
)
from comfy.history import OutputFile
from comfy.tests.captures import BASE_URL, body_of, prompt_id_of, replay, view

RUNNING_ID = "6035a8c6-0524-4c32-bf14-2efa7f69fa9c"
PENDING_ID = "c1d1c3aa-19a4-44da-99dd-cf4c164c4c7b"
OTHER_ID = "47c0a3bc-f495-415a-b5f7-70a9764a93ee"
PICTURE = OutputFile("job_00001_.png", "genflow", "output")


@pytest.fixture
def server() -> Iterator[responses.RequestsMock]:
    with responses.RequestsMock() as mock:
        yield mock


@pytest.fixture
def client() -> Iterator[ComfyClient]:
    with ComfyClient(BASE_URL) as client:
        yield client


def submit(client: ComfyClient, prompt_id: str = OTHER_ID) -> dict[str, Any]:
    return client.submit(
        {"1": {"class_type": "X", "inputs": {}}}, prompt_id=prompt_id, client_id="c"
    )


def sent_body(server: responses.RequestsMock) -> Any:
    return json.loads(server.calls[-1].request.body or "null")


def move_to(server: responses.RequestsMock, running: list[Any], pending: list[Any]) -> None:
    server.upsert(
        "GET", f"{BASE_URL}/queue", json={"queue_running": running, "queue_pending": pending}
    )


def test_the_upload_gives_the_name_that_the_server_answered(
    server: Any, client: ComfyClient
) -> None:
    replay(server, "upload-other-content")

    value = client.upload_image(
        b"photo", filename="dup.png", subfolder="", content_type="image/png"
    )

    assert value == "dup (1).png"


def test_the_upload_puts_the_subfolder_before_the_name(server: Any, client: ComfyClient) -> None:
    replay(server, "upload-subfolder")

    value = client.upload_image(b"photo", filename="face.png", content_type="image/png")

    assert value == "genflow/abc/face.png"


def test_a_windows_subfolder_becomes_one_that_load_image_takes(
    server: Any, client: ComfyClient
) -> None:
    replay(
        server,
        "upload-subfolder",
        body={"name": "a.png", "subfolder": "genflow\\x", "type": "input"},
    )

    assert client.upload_image(b"", filename="a.png", content_type="image/png") == "genflow/x/a.png"


@pytest.mark.parametrize(
    "body", [{}, {"name": ""}, {"name": 3}, {"name": "a", "subfolder": []}, [], 1]
)
def test_an_upload_answered_without_a_name_is_a_bad_answer(
    server: Any, client: ComfyClient, body: Any
) -> None:
    replay(server, "upload-subfolder", body=body)

    with pytest.raises(BadAnswer):
        client.upload_image(b"photo", filename="a.png", content_type="image/png")


def test_a_413_is_permanent_and_tells_the_operator_the_limit(
    server: Any, client: ComfyClient
) -> None:
    replay(server, "upload-413-1MB")

    with pytest.raises(TooLarge, match="1048576") as caught:
        client.upload_image(b"photo", filename="big.png", content_type="image/png")

    assert (caught.value.kind, caught.value.code) == (ErrorKind.PERMANENT, "bad_photo")


def test_a_submitted_graph_goes_out_with_both_ids_and_no_number(
    server: Any, client: ComfyClient
) -> None:
    replay(server, "prompt-success")

    node_errors = submit(client)

    assert node_errors == {}
    assert set(sent_body(server)) == {"prompt", "prompt_id", "client_id"}


def test_what_goes_beside_a_graph_is_sent_as_extra_data(server: Any, client: ComfyClient) -> None:
    replay(server, "prompt-success", body={"prompt_id": OTHER_ID, "number": 1, "node_errors": {}})

    client.submit({}, prompt_id=OTHER_ID, client_id="c", extra_data={"mark": 3})

    assert sent_body(server)["extra_data"] == {"mark": 3}


def test_a_submit_to_an_older_server_works_the_same(server: Any, client: ComfyClient) -> None:
    replay(server, "v0.3.64/prompt-id-uuid4")

    assert submit(client, "588555ea-cba5-4cb8-a230-1c829e4aa101") == {}


def test_a_server_that_chose_its_own_prompt_id_gave_a_bad_answer(
    server: Any, client: ComfyClient
) -> None:
    replay(server, "v0.3.64/prompt-success")

    with pytest.raises(BadAnswer, match=OTHER_ID):
        submit(client)


def test_node_errors_of_a_partly_accepted_graph_are_returned(
    server: Any, client: ComfyClient
) -> None:
    replay(server, "prompt-partial-outputs-ok")

    node_errors = submit(client, body_of("prompt-partial-outputs-ok")["prompt_id"])

    assert list(node_errors) == ["31"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("prompt-missing-model", ModelMissing),
        ("prompt-missing-node-class", NodeMissing),
        ("v0.3.64/prompt-missing-node-class", NodeMissing),
        ("prompt-missing-image", InputMissing),
        ("prompt-cycle", GraphRefused),
        ("prompt-invalid-json", ServerTrouble),
    ],
)
def test_a_refused_graph_raises_what_the_answer_means(
    server: Any, client: ComfyClient, name: str, error: type[ComfyError]
) -> None:
    replay(server, name)

    with pytest.raises(error):
        submit(client)


def test_a_graph_that_json_cannot_hold_is_refused_before_it_is_sent(client: ComfyClient) -> None:
    with pytest.raises(GraphRefused):
        client.submit({"1": {"cfg": float("nan")}}, prompt_id=OTHER_ID, client_id="c")


@pytest.mark.parametrize(
    "body", ["<html>502</html>", "", '{"prompt_id": "47c0', "null", "[" * 100_000]
)
def test_an_answer_that_is_not_a_json_object_is_a_bad_answer(
    server: Any, client: ComfyClient, body: str
) -> None:
    replay(server, "prompt-success", body=body)

    with pytest.raises(BadAnswer):
        submit(client)


def test_a_prompt_that_runs_is_seen_running_with_its_copies(
    server: Any, client: ComfyClient
) -> None:
    replay(server, "queue-with-duplicates")

    sighting = client.look_up(RUNNING_ID)

    assert (sighting.place, sighting.copies, sighting.ahead) == (Place.RUNNING, 2, 0)


def test_a_waiting_prompt_counts_what_is_before_its_first_copy(
    server: Any, client: ComfyClient
) -> None:
    replay(server, "queue-with-duplicates")

    sighting = client.look_up(PENDING_ID)

    assert (sighting.place, sighting.copies, sighting.ahead) == (Place.PENDING, 2, 1)


def test_an_older_servers_queue_is_read_too(server: Any, client: ComfyClient) -> None:
    replay(server, "v0.3.64/queue")

    assert client.look_up("1807fcf4-6684-420e-b5bf-9538b936b220").place == Place.PENDING


def test_the_pending_list_is_a_heap_and_gets_sorted(server: Any, client: ComfyClient) -> None:
    move_to(server, [], [[3, "c"], [9, "mine"], [5, "b"]])

    assert client.look_up("mine").ahead == 2


def test_the_signature_changes_when_the_queue_moves_and_only_then(
    server: Any, client: ComfyClient
) -> None:
    move_to(server, [[1, "a"]], [[2, "b"], [3, "mine"]])
    before = client.look_up("mine").signature
    move_to(server, [[1, "a"]], [[2, "b"], [3, "mine"], [4, "later"]])
    joined = client.look_up("mine").signature
    move_to(server, [[2, "b"]], [[3, "mine"], [4, "later"]])
    moved = client.look_up("mine").signature

    assert before == joined != moved


def test_a_prompt_in_no_queue_is_looked_up_in_the_history(server: Any, client: ComfyClient) -> None:
    replay(server, "queue-empty")
    replay(server, "history-success")

    sighting = client.look_up(prompt_id_of("history-success"))

    assert sighting.place == Place.FINISHED
    assert sighting.run is not None
    assert sighting.run.error is None
    assert sighting.run.outputs == {"9": [PICTURE]}


def test_a_sighting_shows_what_was_sent_beside_the_graph(server: Any, client: ComfyClient) -> None:
    move_to(server, [], [[1, "mine", {"9": {}}, {"mark": 3}, ["9"]]])
    replay(server, "v0.3.64/history-success")
    finished = prompt_id_of("v0.3.64/history-success")

    assert client.look_up("mine").extra_data == {"mark": 3}
    assert client.look_up(finished).extra_data["client_id"]


def test_a_prompt_without_a_trace_is_unknown(server: Any, client: ComfyClient) -> None:
    replay(server, "queue-empty")
    server.get(f"{BASE_URL}/history/{OTHER_ID}", json=body_of("history-unknown"))

    assert client.look_up(OTHER_ID).place == Place.UNKNOWN


def test_a_history_answer_about_another_prompt_is_a_bad_answer(
    server: Any, client: ComfyClient
) -> None:
    replay(server, "queue-empty")
    server.get(f"{BASE_URL}/history/{PENDING_ID}", json=body_of("history-success"))

    with pytest.raises(BadAnswer):
        client.look_up(PENDING_ID)


@pytest.mark.parametrize(
    "queue", [{}, {"queue_running": 3}, {"queue_running": [[]], "queue_pending": []}]
)
def test_a_queue_of_the_wrong_shape_is_a_bad_answer(
    server: Any, client: ComfyClient, queue: Any
) -> None:
    server.get(f"{BASE_URL}/queue", json=queue)

    with pytest.raises(BadAnswer):
        client.look_up(OTHER_ID)


def test_a_picture_that_is_there_can_be_viewed_and_exists(server: Any, client: ComfyClient) -> None:
    replay(server, "view-ok", body="the picture")
    replay(server, "view-head")

    assert view(client, PICTURE) == b"the picture"
    assert client.exists(PICTURE)
    assert server.calls[0].request.params == {
        "filename": "job_00001_.png",
        "subfolder": "genflow",
        "type": "output",
    }


def test_a_picture_that_is_gone_is_missing(server: Any, client: ComfyClient) -> None:
    replay(server, "view-missing-file")
    server.head(f"{BASE_URL}/view", status=404)

    assert not client.exists(PICTURE)
    with pytest.raises(OutputMissing):
        view(client, PICTURE)


@pytest.mark.parametrize(
    ("body", "content_type"), [("", "image/png"), ("<html>", "text/html; charset=utf-8")]
)
def test_nothing_or_a_web_page_is_not_a_picture(
    server: Any, client: ComfyClient, body: str, content_type: str
) -> None:
    server.get(f"{BASE_URL}/view", body=body, content_type=content_type)

    with pytest.raises(BadAnswer):
        view(client, PICTURE)


def test_an_interrupt_always_names_its_prompt(server: Any, client: ComfyClient) -> None:
    replay(server, "interrupt-running-id")

    client.interrupt(OTHER_ID)

    assert sent_body(server) == {"prompt_id": OTHER_ID}
    with pytest.raises(ValueError, match="prompt_id"):
        client.interrupt("")


def test_a_file_beyond_the_limit_is_not_read_to_its_end(server: Any, client: ComfyClient) -> None:
    replay(server, "view-ok", body="the picture")

    with pytest.raises(OutputTooLarge, match="more than 5 bytes") as caught:
        view(client, PICTURE, max_bytes=5)

    assert caught.value.kind == ErrorKind.PERMANENT


def test_the_other_commands_send_what_comfyui_expects(server: Any, client: ComfyClient) -> None:
    replay(server, "queue-delete-pending")
    replay(server, "free")

    client.delete_pending(OTHER_ID)
    client.free_memory()

    bodies = [json.loads(call.request.body) for call in server.calls]
    assert bodies == [{"delete": [OTHER_ID]}, {"unload_models": True, "free_memory": True}]


@pytest.mark.parametrize(
    ("name", "version"), [("system-stats", "0.26.0"), ("v0.3.64/system-stats", "0.3.64")]
)
def test_the_version_and_the_devices_are_told(
    server: Any, client: ComfyClient, name: str, version: str
) -> None:
    replay(server, name)

    stats = client.system_stats()

    assert (stats.version, stats.devices[0]["type"]) == (version, "cpu")


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (401, AccessDenied, ErrorKind.BACKEND),
        (403, AccessDenied, ErrorKind.BACKEND),
        (302, AccessDenied, ErrorKind.BACKEND),
        (307, AccessDenied, ErrorKind.BACKEND),
        (429, ServerTrouble, ErrorKind.TEMPORARY),
        (500, ServerTrouble, ErrorKind.TEMPORARY),
        (504, ServerTrouble, ErrorKind.TEMPORARY),
        (404, BadAnswer, ErrorKind.TEMPORARY),
        (413, TooLarge, ErrorKind.PERMANENT),
    ],
)
def test_a_status_means_the_same_everywhere(
    server: Any, client: ComfyClient, status: int, error: type[ComfyError], kind: ErrorKind
) -> None:
    server.post(f"{BASE_URL}/prompt", status=status, body="<html>", headers={"Location": "/login"})

    with pytest.raises(error) as caught:
        submit(client)

    assert caught.value.kind == kind


def test_the_password_goes_to_basic_auth_and_nowhere_else(server: Any) -> None:
    server.get(f"{BASE_URL}/queue", status=401, body="who are you?")

    with ComfyClient("http://user:s%C3%A9cret@127.0.0.1:8188/") as client:
        with pytest.raises(AccessDenied) as caught:
            client.look_up(OTHER_ID)
        shown = (
            f"{caught.value} {caught.value.detail} {client.address!r} {server.calls[0].request.url}"
        )

    sent = server.calls[0].request.headers
    assert base64.b64decode(sent["Authorization"].split()[1]).decode() == "user:sécret"
    assert "cret" not in shown
    assert "Origin" not in sent


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("20", 20.0),
        ("1.5", 1.5),
        ("999999999", 3600.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", None),
        ("soon", None),
        ("-5", None),
        ("nan", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_is_read_or_ignored(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value) == seconds


def test_retry_after_may_be_a_date(server: Any, client: ComfyClient) -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(minutes=5), usegmt=True)
    server.get(f"{BASE_URL}/queue", status=503, headers={"Retry-After": soon})

    with pytest.raises(ServerTrouble) as caught:
        client.look_up(OTHER_ID)

    assert caught.value.retry_after == pytest.approx(300, abs=5)
