from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from fake_comfy import FakeComfy
from fake_comfy.tests.helpers import (
    Json,
    entry_of,
    finish,
    get,
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
from fake_comfy.tests.test_captures import capture, same_shape, shape

Message = Json | bytes

QUIET_SECONDS: Final = 0.2  # long enough for anything that is going to come


@contextmanager
def listening(fake: FakeComfy, client_id: str | None = "c") -> Iterator[ClientConnection]:
    query = f"?clientId={client_id}" if client_id else ""
    with connect(fake.url.replace("http", "ws") + "/ws" + query, close_timeout=1) as socket:
        yield socket


def hear(socket: ClientConnection, seconds: float = 10.0) -> Message:
    message = socket.recv(timeout=seconds)
    return message if isinstance(message, bytes) else dict(json.loads(message))


def hear_until_end(socket: ClientConnection) -> list[Message]:
    """All messages up to `executing` with node null."""
    heard = [hear(socket)]
    while not is_end(heard[-1]):
        heard.append(hear(socket))
    return heard


def is_end(message: Message) -> bool:
    if isinstance(message, bytes):
        return False
    return bool(message["type"] == "executing" and message["data"]["node"] is None)


def hear_all(socket: ClientConnection) -> list[Message]:
    """All messages until it has been quiet for a while."""
    heard: list[Message] = []
    while True:
        try:
            heard.append(hear(socket, QUIET_SECONDS))
        except TimeoutError:
            return heard


def kinds(messages: list[Message]) -> list[str]:
    return ["binary" if isinstance(m, bytes) else m["type"] for m in messages]


def recorded(name: str, connection: str) -> list[Any]:
    """What a connection of a capture heard after its greeting, from the first event of its run on."""
    events = [event for event in capture(name)["events"] if event["conn"] == connection]
    texts = [event.get("text", {"type": "binary", "data": {}}) for event in events]
    return [text for text in texts if "sid" not in text["data"]]


def test_a_run_tells_its_client_what_the_real_one_tells_in_the_same_order(fake: FakeComfy) -> None:
    run(fake)
    with listening(fake) as socket:
        hear(socket)  # the greeting
        submit(fake, graph(n6__text="another"))
        ours = hear_until_end(socket)

    theirs = recorded("ws-success-two-clients", "A(submitter)")
    assert kinds(ours) == [message["type"] for message in theirs]
    for mine, real in zip(ours, theirs, strict=True):
        assert same_shape(shape(mine), shape(real))


def test_a_stranger_hears_only_of_the_length_of_the_queue(fake: FakeComfy) -> None:
    with listening(fake, "stranger") as socket:
        hear(socket)
        run(fake)

        assert set(kinds(hear_all(socket))) == {"status"}


def test_a_cached_run_tells_its_outputs_and_ends(fake: FakeComfy) -> None:
    run(fake)
    with listening(fake) as socket:
        hear(socket)
        submit(fake)
        ours = hear_until_end(socket)

    assert kinds(ours) == [message["type"] for message in recorded("ws-cached", "A")]


def test_a_run_without_a_client_is_told_to_everybody_in_part(fake: FakeComfy) -> None:
    with listening(fake, "anybody") as socket:
        hear(socket)
        finish(fake, submit(fake, client_id=None))
        ours = set(kinds(hear_all(socket)))

    theirs = {message["type"] for message in recorded("ws-no-client-id", "B(other)")}
    assert ours == theirs == {"status", "progress", "progress_state"}


def test_an_interruption_without_a_client_is_told_to_everybody(fake: FakeComfy) -> None:
    fake.fault("foreign_interrupt")
    with listening(fake, "anybody") as socket:
        hear(socket)
        finish(fake, submit(fake, client_id=None))

        assert "execution_interrupted" in kinds(hear_all(socket))


def test_a_failed_run_ends_with_its_error(fake: FakeComfy) -> None:
    upload(fake, "blank.png", png("blank"))
    with listening(fake) as socket:
        hear(socket)
        submit(fake, graph(n12__image="blank.png"))
        ours = hear_until_end(socket)

    theirs = recorded("ws-error-noface", "A")
    assert kinds(ours)[-3:] == [message["type"] for message in theirs[-3:]]
    assert same_shape(shape(ours[-3]), shape(theirs[-3]))


def test_success_is_told_before_the_history_has_it_and_the_end_after(fake: FakeComfy) -> None:
    with listening(fake) as socket:
        hear(socket)
        prompt_id = submit(fake)

        types = kinds(hear_until_end(socket))

        assert entry_of(fake, prompt_id) is not None
    assert types[-3:] == ["execution_success", "status", "executing"]


def test_the_greeting_has_the_length_of_the_queue_and_the_id(fake: FakeComfy) -> None:
    with listening(fake, "me") as socket:
        assert hear(socket) == {
            "type": "status",
            "data": {"status": {"exec_info": {"queue_remaining": 0}}, "sid": "me"},
        }
    with listening(fake, None) as socket:
        greeting = hear(socket)
        assert isinstance(greeting, dict)
        assert len(greeting["data"]["sid"]) == 32


def test_who_comes_back_in_mid_run_is_told_the_node_and_hears_the_rest(fake: FakeComfy) -> None:
    fake.seconds = 0.5
    submit(fake)
    wait_until(lambda: any(counters["executed"] for counters in fake.prompts.values()))

    with listening(fake) as socket:
        hear(socket)
        assert hear(socket) == {"type": "executing", "data": {"node": "3"}}
        assert "execution_success" in kinds(hear_until_end(socket))


def test_the_second_socket_takes_all_and_goes_deaf_when_the_first_closes(fake: FakeComfy) -> None:
    with listening(fake) as second_to_be:
        hear(second_to_be)
        first = second_to_be
        with listening(fake) as second:
            hear(second)
            run(fake)
            assert kinds(hear_all(first)) == []
            assert "execution_success" in kinds(hear_all(second))

            first.close()
            run(fake, graph(n3__seed=2))

            assert kinds(hear_all(second)) == []


@pytest.mark.parametrize("with_metadata", [False, True])
def test_previews_come_in_the_form_that_the_client_understands(
    fake: FakeComfy, with_metadata: bool
) -> None:
    with listening(fake) as socket:
        hear(socket)
        if with_metadata:
            flags = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
            socket.send(json.dumps(flags))
            answer = hear(socket)
            assert isinstance(answer, dict)
            assert answer["data"] == get(fake, "/features").json()
        prompt_id = submit(fake, extra_data={"preview_method": "auto"})
        previews = [m for m in hear_until_end(socket) if isinstance(m, bytes)]

    assert len(previews) == 4
    image = previews[-1][8:]
    if with_metadata:
        assert previews[-1][:4] == b"\0\0\0\4"
        length = int.from_bytes(previews[-1][4:8])
        metadata, image = json.loads(image[:length]), image[length:]
        assert metadata["prompt_id"] == prompt_id
        assert metadata["image_type"] == "image/jpeg"
    else:
        assert previews[-1][:8] == b"\0\0\0\1\0\0\0\1"
    assert image.startswith(b"\xff\xd8")


@pytest.mark.parametrize("before", [True, False])
def test_ws_silent_keeps_a_socket_open_without_a_word(fake: FakeComfy, before: bool) -> None:
    if before:
        fake.fault("ws_silent")
    with listening(fake) as socket:
        hear(socket)
        if not before:
            fake.fault("ws_silent")

        run(fake)

        assert hear_all(socket) == []
        socket.ping().wait(5)


def test_ws_drop_cuts_the_socket_in_mid_run_and_the_run_goes_on(fake: FakeComfy) -> None:
    fake.fault("ws_drop")
    with listening(fake) as socket:
        prompt_id = submit(fake)

        with pytest.raises(ConnectionClosed) as closed:
            hear_until_end(socket)

    assert closed.value.rcvd is None  # no close frame
    assert finish(fake, prompt_id)


def test_a_restart_drops_the_sockets_and_new_ones_hear_again(fake: FakeComfy) -> None:
    with listening(fake) as socket:
        hear(socket)
        post(fake, "/fake/restart")
        with pytest.raises(ConnectionClosed):
            hear(socket)

    with listening(fake) as socket:
        hear(socket)
        submit(fake, prompt_id=new_id())
        assert "execution_success" in kinds(hear_until_end(socket))
    wait_until(lambda: is_idle(fake))
