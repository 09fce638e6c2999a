from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from django.conf import settings as project
from PIL import Image

from jobs import photos
from jobs.darkroom import _photo
from jobs.developing import BadPhoto, Photo, Rules
from jobs.photos import DARKROOM, read_photo
from jobs.tests.helpers import start, wait_until
from jobs.tests.helpers_photos import decoded, encoded, ramp, rules, tile_bomb

PHOTO = encoded(ramp(), "JPEG")
# The decoder looks at each of these bytes anew, for ten seconds.
SLOW_PHOTO = PHOTO[:2] + b"\xff" * 19_000_000 + PHOTO[2:]


def read(content: bytes, **changed: Any) -> Photo:
    return read_photo(io.BytesIO(content), rules(**changed))


def refusal(content: bytes, **changed: Any) -> BadPhoto:
    with pytest.raises(BadPhoto) as refused:
        read(content, **changed)
    return refused.value


def darkroom_pid() -> int:
    assert DARKROOM._process is not None
    return DARKROOM._process.pid


def is_gone(group: int) -> bool:
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return False
    return True


def test_a_photo_is_developed_by_a_process_of_its_own() -> None:
    photo = read(PHOTO)

    assert (photo.width, photo.height) == decoded(photo).size == (96, 72)
    assert darkroom_pid() != os.getpid()


def test_what_it_refuses_comes_back_whole() -> None:
    refused = refusal(b"hello")

    assert (refused.status, refused.code) == (415, "photo_format")
    assert refused.message.startswith("This is no photo")


def test_no_more_than_the_allowed_bytes_are_read() -> None:
    file = io.BytesIO(bytes(1_000_000))

    with pytest.raises(BadPhoto, match="larger than 1,000 bytes") as refused:
        read_photo(file, rules(max_bytes=1000))

    assert (refused.value.status, refused.value.code) == (413, "photo_too_large")
    assert file.tell() == 1001


def test_as_many_bytes_as_allowed_are_taken_and_a_film_behind_the_photo_counts() -> None:
    read(PHOTO, max_bytes=len(PHOTO))

    assert refusal(PHOTO + b"film", max_bytes=len(PHOTO)).status == 413


def test_an_empty_file_is_refused() -> None:
    refused = refusal(b"")

    assert refused.status == 422
    assert "empty" in refused.message


def test_a_photo_that_takes_too_long_is_given_up() -> None:
    refused = refusal(SLOW_PHOTO, max_bytes=20_000_000, cpu_seconds=1)

    assert (refused.status, refused.code) == (422, "bad_photo")
    assert refused.message == (
        "The photo takes too much work to read. Save it anew as a plain JPEG."
    )


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not limit a process's memory")
def test_a_photo_that_takes_too_much_memory_is_refused() -> None:
    assert refusal(tile_bomb(18_000), max_bytes=2_000_000).status == 422


def test_after_a_photo_that_killed_its_process_the_next_one_is_read() -> None:
    refusal(SLOW_PHOTO, max_bytes=20_000_000, cpu_seconds=1)
    before = darkroom_pid()

    read(PHOTO)

    assert darkroom_pid() == before


def test_an_answer_that_broke_off_is_no_photo() -> None:
    with pytest.raises(BadPhoto):
        _photo({"content_type": "image/jpeg", "width": 96, "height": 72, "size": 9}, b"half")


def test_a_darkroom_that_was_killed_is_started_anew() -> None:
    read(PHOTO)
    killed = darkroom_pid()
    os.kill(killed, signal.SIGKILL)
    assert DARKROOM._process is not None
    DARKROOM._process.wait(10)

    assert read(PHOTO).width == 96
    assert darkroom_pid() != killed


def test_a_darkroom_killed_before_it_took_the_photo_is_not_the_photos_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read(PHOTO)
    before, send_fds = DARKROOM._process, socket.send_fds

    def kill_and_send(*args: Any) -> int:
        if before is not None and before is DARKROOM._process:
            before.kill()
            before.wait(10)
        return send_fds(*args)

    monkeypatch.setattr(socket, "send_fds", kill_and_send)

    assert read(PHOTO).width == 96


def test_a_darkroom_that_dies_again_and_again_is_told_as_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "send_fds", lambda *args: 0)  # nobody hears of the line

    with pytest.raises(photos.PhotosBusy):
        read(PHOTO)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_meant_for_the_web_server_ends_no_photo(stop: signal.Signals) -> None:
    read(PHOTO)
    before = darkroom_pid()

    os.kill(before, stop)

    assert read(PHOTO).width == 96
    assert darkroom_pid() == before


@pytest.mark.parametrize("ending", ["darkroom.close()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_nothing_of_the_darkroom_outlives_the_web_server(ending: str) -> None:
    script = f"""
import json, os, signal, socket, sys
from dataclasses import asdict
from jobs.darkroom import Darkroom
from jobs.developing import Rules

photo = sys.stdin.buffer.read()
rules = Rules(10**8, 10_000, 100, "warn", cpu_seconds=60)
darkroom = Darkroom()
darkroom.develop(photo, rules)
with darkroom._new_line() as line:  # to a fork that is then busy with a photo
    line.sendall(json.dumps(asdict(rules)).encode() + b"\\n" + photo[:2] + b"\\xff" * 19_000_000 + photo[2:])
    line.shutdown(socket.SHUT_WR)
    print(darkroom._process.pid, flush=True)
    {ending}
"""
    server = subprocess.run(  # noqa: S603
        [sys.executable, "-W", "error", "-X", "dev", "-c", script],
        cwd=project.BASE_DIR,
        input=PHOTO,
        capture_output=True,
        check=False,
    )

    assert server.stderr == b""
    wait_until(lambda: is_gone(group=int(server.stdout)), seconds=8)


def test_photos_sent_at_once_are_developed_two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    inside, most = [], []

    def develop(content: bytes, rules: Rules) -> Photo:
        inside.append(content)
        most.append(len(inside))
        go_on.wait(20)
        inside.pop()
        return Photo(content, "image/jpeg", 96, 72)

    monkeypatch.setattr(DARKROOM, "develop", develop)

    threads = [start(lambda: read(PHOTO)) for _ in range(6)]
    wait_until(lambda: len(inside) == 2)
    go_on.set()
    for thread in threads:
        thread.join()

    assert (len(most), max(most)) == (6, 2)


def test_who_waits_too_long_for_others_photos_is_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(photos, "WAIT_SECONDS", 0.01)

    with photos.DEVELOPED_AT_ONCE, photos.DEVELOPED_AT_ONCE:
        refused = refusal(PHOTO)

    assert (refused.status, refused.code, refused.retry_after) == (503, "photos_busy", 15)
    read(PHOTO)


def test_threads_get_each_their_own_photo() -> None:
    sizes = [(64 + number, 64) for number in range(6)]
    widths: dict[int, int] = {}

    def send(size: tuple[int, int]) -> None:
        widths[size[0]] = read(encoded(Image.new("RGB", size), "PNG")).width

    for thread in [start(partial(send, size)) for size in sizes]:
        thread.join()

    assert widths == {width: width for width, _height in sizes}
