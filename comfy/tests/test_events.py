from __future__ import annotations

import base64
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from comfy.events import EventStream, Progress, ProgressTracker
from comfy.previews import PreviewImage
from comfy.tests.captures import capture, messages_of
from comfy.tests.raw_server import free_port, wait_until

GRAPH = capture("faceid-graph-sd15-plusv2")


def prompt_id_of(messages: list[dict[str, Any]]) -> str:
    return next(str(m["data"]["prompt_id"]) for m in messages if "prompt_id" in m["data"])


def track(messages: list[dict[str, Any]], *, prompt_id: str | None = None) -> list[Progress]:
    tracker = ProgressTracker(GRAPH, prompt_id or prompt_id_of(messages))
    return [progress for message in messages if (progress := tracker.feed(message))]


def message(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "data": {"prompt_id": "mine"} | fields}


def test_a_recorded_run_goes_from_its_cached_part_to_one_and_never_back() -> None:
    seen = track(messages_of("ws-success-two-clients", "A(submitter)"))

    values = [progress.value for progress in seen]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (0.0, 1.0)
    assert (seen[-1].nodes_done, seen[-1].nodes_total) == (10, 10)


def test_the_sampler_dominates() -> None:
    seen = track(messages_of("ws-success-two-clients", "A(submitter)"))

    sampling = [progress.value for progress in seen if progress.current_node == "3"]
    assert sampling[-1] - sampling[0] > 0.6


def test_a_snapshot_has_the_keys_of_the_api_and_says_what_is_going_on() -> None:
    tracker = ProgressTracker(GRAPH, "mine")

    progress = tracker.feed(message("progress", node="3", value=21, max=30))

    assert progress is not None
    assert progress.as_json() == {
        "value": pytest.approx(84 / 129),
        "nodes_done": 0,
        "nodes_total": 10,
        "current_node": "3",
        "current_node_class": "KSampler",
        "step": 21,
        "steps": 30,
        "message": "KSampler 21/30",
    }


def test_older_servers_without_progress_state_are_understood_too() -> None:
    messages = messages_of("ws-success-two-clients", "A(submitter)")

    seen = track([m for m in messages if m["type"] != "progress_state"])

    assert seen[-1].value == 1.0
    assert any(progress.step == 2 for progress in seen)
    assert any(progress.current_node_class == "VAEDecode" for progress in seen)


def test_a_wholly_cached_run_is_done_at_once() -> None:
    messages = messages_of("ws-cached", "A")

    assert track(messages)[-1].value == 1.0


def test_an_interrupted_run_never_reaches_one() -> None:
    assert 0 < track(messages_of("ws-interrupted", "A"))[-1].value < 1


def test_the_events_of_another_prompt_are_not_ours() -> None:
    messages = messages_of("ws-success-two-clients", "A(submitter)")

    assert track(messages, prompt_id="another") == []


def test_a_second_run_of_the_same_prompt_does_not_take_the_value_back() -> None:
    tracker = ProgressTracker(GRAPH, "mine")
    first = tracker.feed(message("progress", node="3", value=20, max=30))

    second = tracker.feed(message("progress", node="3", value=1, max=30))

    assert first is not None
    assert second is not None
    assert second.value == first.value


def test_a_node_made_at_run_time_is_told_as_the_one_it_stands_for() -> None:
    tracker = ProgressTracker(GRAPH, "mine")
    tracker.feed(message("executing", node="3", display_node="3"))
    tracker.feed(message("executing", node="3.0.0.5", display_node="3"))
    state = {"value": 4, "max": 8, "state": "running", "display_node_id": "3"}

    working = tracker.feed(message("progress_state", nodes={"3.0.0.5": state}))
    state["state"] = "finished"
    after = tracker.feed(message("progress_state", nodes={"3.0.0.5": state}))
    last = tracker.feed(message("execution_success"))

    assert working is not None
    assert (working.current_node, working.current_node_class) == ("3", "KSampler")
    assert (working.step, working.steps, working.nodes_done) == (4, 8, 0)
    assert after is None  # its own part of the work is not at its end
    assert last is not None
    assert (last.value, last.nodes_done, last.nodes_total) == (1.0, 10, 10)


@pytest.mark.parametrize(
    "junk",
    [
        {},
        {"type": "progress"},
        {"type": "progress", "data": None},
        {"type": ["progress"], "data": {"prompt_id": "mine"}},
        message("progress", node=["3"], value=1, max=2),
        message("executing", node=["3"], display_node=["3"]),
        message("executing", node="3.0", display_node="77"),
        message("progress", node="3", value="1", max=2),
        message("progress", node="3", value=1, max=0),
        message("progress", node="3", value=10**400, max=10**401),
        message("progress", node="3", value=None, max=None),
        message("progress_state", nodes=[1]),
        message(
            "progress_state", nodes={"3": None, "77": {"state": "finished"}, "4": {"state": {}}}
        ),
        message("execution_cached", nodes={"4": 1}),
        message("execution_cached", nodes=[{}, None, "77"]),
        message("executing", node={}),
        message("executed", node=None),
        message("crystools.monitor", node="3"),
    ],
)
def test_junk_is_no_progress(junk: dict[str, Any]) -> None:
    tracker = ProgressTracker(GRAPH, "mine")
    tracker.feed(message("execution_start"))

    assert tracker.feed(junk) is None


def test_a_graph_of_any_shape_can_be_tracked() -> None:
    odd: dict[str, dict[str, Any]] = {
        "1": {},
        "2": {"inputs": []},
        "3": {"class_type": "S", "inputs": {"latent_image": 1, "steps": ["4", 0]}},
    }
    tracker = ProgressTracker(odd, "mine")

    done = tracker.feed(message("execution_success"))

    assert done is not None
    assert done.value == 1.0
    assert ProgressTracker({}, "mine").feed(message("execution_success")) == Progress(0.0, 0, 0)


class Listener:
    """A WebSocket server that counts who comes, and a stream's messages."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.open = 0
        self.most_open = 0
        self.heard: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    @contextmanager
    def serving(self, behave: Callable[[ServerConnection], None], port: int = 0) -> Iterator[str]:
        def handle(connection: ServerConnection) -> None:
            with self._lock:
                self.requests.append(connection.request)
                self.open += 1
                self.most_open = max(self.most_open, self.open)
            try:
                behave(connection)
            finally:
                with self._lock:
                    self.open -= 1

        with serve(handle, "127.0.0.1", port) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"127.0.0.1:{server.socket.getsockname()[1]}"
            finally:
                server.shutdown()
                thread.join()


@contextmanager
def listening(url: str, on_message: Callable[[dict[str, Any]], None]) -> Iterator[EventStream]:
    stream = EventStream(url, client_id="job 1", on_message=on_message)
    stream.start()
    try:
        yield stream
    finally:
        stream.close()


def send(*messages: str | bytes) -> Callable[[ServerConnection], None]:
    def behave(connection: ServerConnection) -> None:
        for text in messages:
            connection.send(text)
        connection.recv()

    return behave


def test_text_messages_come_through_and_everything_else_does_not() -> None:
    server = Listener()
    behave = send("no json", b"\0\0\0\1picture", "[]", "[" * 100_000, '{"type": "a", "n": NaN}')

    with server.serving(behave) as host, listening(f"http://{host}", server.heard.append):
        wait_until(lambda: bool(server.heard))

    assert server.heard == [{"type": "a", "n": None}]


def test_who_wants_previews_says_so_first_and_gets_them() -> None:
    server = Listener()
    previews: list[PreviewImage] = []

    def behave(connection: ServerConnection) -> None:
        server.heard.append(json.loads(connection.recv()))
        connection.send(b"\0\0\0\1\0\0\0\1an image")
        connection.send(b"\0\0\0\3no image")
        connection.recv()

    with server.serving(behave) as host:
        stream = EventStream(
            f"http://{host}", client_id="job 1", on_message=print, on_preview=previews.append
        )
        stream.start()
        wait_until(lambda: bool(previews))
        stream.close()

    assert server.heard == [{"type": "feature_flags", "data": {"supports_preview_metadata": True}}]
    assert previews == [PreviewImage(b"an image")]


def test_the_client_id_and_the_password_are_sent_and_no_origin() -> None:
    server = Listener()

    with (
        server.serving(send()) as host,
        listening(f"http://me:s%20s@{host}/comfy", server.heard.append),
    ):
        wait_until(lambda: bool(server.requests))

    request = server.requests[0]
    assert request.path == "/comfy/ws?clientId=job%201"
    assert base64.b64decode(request.headers["Authorization"].split()[1]) == b"me:s s"
    assert "Origin" not in request.headers


def test_the_password_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    server = Listener()
    secret = base64.b64encode(b"me:secret").decode()

    caplog.set_level(logging.DEBUG)
    with (
        server.serving(send()) as host,
        listening(f"http://me:secret@{host}", server.heard.append),
    ):
        wait_until(lambda: bool(server.requests))
    client_lines = [
        r.getMessage() for r in caplog.records if not r.name.startswith("websockets.server")
    ]

    assert not any(secret in line or "me:secret" in line for line in client_lines)


def test_a_dropped_line_is_taken_up_again_one_at_a_time() -> None:
    server = Listener()

    def behave(connection: ServerConnection) -> None:
        connection.send(json.dumps({"type": str(len(server.requests))}))
        if len(server.requests) == 1:
            connection.socket.close()
        else:
            connection.recv()

    with server.serving(behave) as host, listening(f"http://{host}", server.heard.append):
        wait_until(lambda: len(server.heard) == 2)

    assert server.most_open == 1


def test_a_server_that_comes_up_later_is_found() -> None:
    server, port = Listener(), free_port()

    with (
        listening(f"http://127.0.0.1:{port}", server.heard.append),
        server.serving(send('{"type": "a"}'), port),
    ):
        wait_until(lambda: bool(server.heard))


def test_a_message_that_chokes_its_reader_does_not_end_the_stream() -> None:
    server = Listener()

    def choke(received: dict[str, Any]) -> None:
        server.heard.append(received)
        raise KeyError("missing")

    with (
        server.serving(send('{"type": "a"}', '{"type": "b"}')) as host,
        listening(f"http://{host}", choke),
    ):
        wait_until(lambda: len(server.heard) == 2)


def test_closing_ends_the_thread_and_the_connection() -> None:
    server = Listener()
    before = threading.active_count()

    with server.serving(send()) as host, listening(f"http://{host}", server.heard.append) as stream:
        wait_until(lambda: server.open == 1)
        stream.close()
        wait_until(lambda: server.open == 0)

    wait_until(lambda: threading.active_count() <= before)


def test_a_stream_that_was_never_started_can_be_closed() -> None:
    EventStream("http://127.0.0.1:1", client_id="a", on_message=print).close()
