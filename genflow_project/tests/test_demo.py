"""`scripts/demo` as somebody runs it, on a database of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pytest
from django.db import connection
from PIL import Image

from jobs.tests.helpers import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROC = Path("/proc")


@pytest.fixture
def database_url(transactional_db: None) -> Iterator[str]:
    """A database beside the tests' own."""
    config = connection.settings_dict
    name = f"{config['NAME']}_demo"
    with connection.cursor() as cursor:
        cursor.execute(f'CREATE DATABASE "{name}"')
    user = quote(config["USER"], safe="")
    if config["PASSWORD"]:
        user += ":" + quote(config["PASSWORD"], safe="")
    port = f":{config['PORT']}" if config["PORT"] else ""
    # The folder of a socket stands in the path of such a URL.
    local = str(config["HOST"]).startswith("/")
    yield f"postgres://{user}@" + (
        f"/{config['HOST']}/{name}" if local else f"{config['HOST']}{port}/{name}"
    )
    with connection.cursor() as cursor:
        cursor.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


class Demo(subprocess.Popen[str]):
    def __init__(self, database_url: str, *options: str | Path, comfy_url: str = "") -> None:
        environment = os.environ | {"DATABASE_URL": database_url, "COMFY_URL": comfy_url}
        super().__init__(
            [sys.executable, ROOT / "scripts" / "demo", "--port", "0", *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def lines(self) -> dict[str, str]:
        """Wait for the last line; return what was said, by its first word."""
        assert self.stdout is not None
        said = (self.stdout.readline().strip().split(": ", 1) for _ in range(4))
        return {line[0]: line[-1] for line in said}


def children_of(pid: int) -> list[int]:
    """Return who was started by a process, as the kernel lists them."""
    return [int(child) for child in (PROC / f"{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    return (PROC / f"{pid}/exe").exists()


def test_the_demo_draws_a_portrait_and_ends(database_url: str, tmp_path: Path) -> None:
    demo = Demo(database_url, "--exit", "--out", tmp_path / "portrait.png")

    said = demo.lines()
    demo.communicate(timeout=40)

    assert demo.returncode == 0
    assert list(said) == ["job", "portrait", "page", "login"]
    assert said["page"].endswith(f"/jobs/{said['job']}/")
    with Image.open(tmp_path / "portrait.png") as picture:
        assert picture.size == (512, 512)


@pytest.mark.skipif(not PROC.exists(), reason="only Linux ends the children of a killed process")
@pytest.mark.parametrize(
    ("by", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_nothing_outlives_the_demo(
    database_url: str, tmp_path: Path, by: signal.Signals, status: int
) -> None:
    demo = Demo(database_url, "--out", tmp_path / "portrait.png")
    demo.lines()
    children = children_of(demo.pid)
    assert len(children) == 3

    demo.send_signal(by)
    demo.communicate(timeout=40)

    assert demo.returncode == status
    wait_until(lambda: not any(is_alive(child) for child in children))


def test_the_demo_ends_when_a_part_of_it_crashes(database_url: str, tmp_path: Path) -> None:
    demo = Demo(database_url, "--out", tmp_path / "portrait.png")
    demo.lines()

    os.kill(children_of(demo.pid)[1], signal.SIGKILL)
    _, said = demo.communicate(timeout=40)

    assert demo.returncode == 1
    assert "web was ended by SIGKILL" in said
    assert "/log/web-" in said


def test_a_worker_killed_in_mid_run_is_replaced_and_the_portrait_comes(
    database_url: str, tmp_path: Path
) -> None:
    demo = Demo(database_url, "--exit", "--out", tmp_path / "portrait.png")
    assert demo.stderr is not None
    wait_until(lambda: "KSampler" in demo.stderr.readline(), 40)  # type: ignore[union-attr]

    os.kill(children_of(demo.pid)[2], signal.SIGKILL)
    _, said = demo.communicate(timeout=50)

    assert demo.returncode == 0, said
    assert "the worker was ended by SIGKILL; starting another" in said
    assert (tmp_path / "portrait.png").exists()


def test_the_usual_port_of_comfyui_may_be_taken(database_url: str, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # it is taken
            other.bind(("127.0.0.1", 8188))
        demo = Demo(database_url, "--out", tmp_path / "portrait.png")

        assert list(demo.lines()) == ["job", "portrait", "page", "login"]

        demo.terminate()
        demo.communicate(timeout=40)


def test_a_comfyui_that_does_not_answer_is_named(database_url: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        demo = Demo(database_url, comfy_url=url)
        assert demo.stderr is not None
        wait_until(
            lambda: f"ComfyUI at {url} does not answer" in demo.stderr.readline(),  # type: ignore[union-attr]
            40,
        )
        demo.terminate()
        demo.communicate(timeout=40)


def test_a_photo_that_is_refused_ends_the_demo_with_the_reason(
    database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "photo.jpg").write_text("no photo")
    demo = Demo(database_url, "--photo", tmp_path / "photo.jpg")

    _, said = demo.communicate(timeout=40)

    assert demo.returncode == 1
    assert "Traceback" not in said
    assert "photo" in said.splitlines()[-1]


@pytest.mark.parametrize(
    "option",
    [
        "--port=high",
        "--photo=missing.jpg",
        f"--photo={'x' * 300}",
        "--out=/dev/null/portrait.png",
        f"--out={'x' * 300}",
        "--prompt=\udcff",
        "--nonsense",
    ],
)
def test_an_option_that_makes_no_sense_is_a_usage_error(option: str) -> None:
    demo = Demo("", option)

    _, said = demo.communicate(timeout=20)

    assert demo.returncode == 2
    assert "Traceback" not in said
    assert option.removeprefix("--").split("=")[0] in said
