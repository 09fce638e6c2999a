from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from fake_comfy.faults import FAULTS


@contextmanager
def command(*options: str) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-W", "error", "-X", "dev", "-m", "fake_comfy", *options]
    with subprocess.Popen(  # noqa: S603
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_the_url_of_an_ipv6_address_can_be_asked() -> None:
    with command("--host", "::1", "--port", "0") as process:
        url = first_line(process).split()[1]

        assert requests.get(f"{url}/queue", timeout=5).status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_tells_its_url_and_ends_at_once_without_a_complaint(
    number: signal.Signals, tmp_path: Path
) -> None:
    with command("--port", "0", "--data", str(tmp_path), "--fault", "http_503:2") as process:
        line = first_line(process)
        assert re.fullmatch(r"fake_comfy http://127\.0\.0\.1:\d+", line)
        url = line.split()[1]
        statuses = [requests.get(f"{url}/queue", timeout=5).status_code for _ in range(3)]

        process.send_signal(number)

        assert process.wait(timeout=5) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert statuses == [503, 503, 200]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input", "output", "temp"]


def test_the_help_names_every_fault_and_an_unknown_one_is_a_usage_error() -> None:
    with command("--help") as process:
        told = process.communicate()[0]
    assert [name for name in FAULTS if name not in told] == []

    with command("--port", "0", "--fault", "no_such") as process:
        told = process.communicate()[1]
    assert process.returncode == 2
    assert "unknown fault 'no_such'" in told
