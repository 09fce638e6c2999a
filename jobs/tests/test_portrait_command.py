"""`manage.py portrait` as somebody runs it, from a machine that has a token and nothing else of genflow's."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.conf import settings
from django.core.management import get_commands
from django.utils import timezone
from pytest_django.live_server_helper import LiveServer

from fake_comfy import FakeComfy
from genflow_client.progress import Display
from jobs.models import Job
from jobs.tests.go_between import Answer, GoBetween, Reply, Seen, json_reply
from jobs.tests.helpers import make_user, photo_bytes, queue_job, wait_until
from jobs.tests.helpers_api import finish, picture_bytes, token_of
from jobs.worker import Worker

PORTRAITS = "POST /api/v2/portraits"
JOBS = "GET /api/v2/jobs"
PICTURES = "GET /api/v2/assets"
SMALL = ("--width", "64", "--height", "64", "--steps", "4")


class Portrait:
    """A process of the command. It reads no settings: those of its environment would end it."""

    def __init__(
        self, *arguments: object, stderr: int = subprocess.PIPE, **environment: str
    ) -> None:
        self.process = subprocess.Popen(  # noqa: S603 (our own interpreter)
            [sys.executable, "manage.py", "portrait", *map(str, arguments)],
            cwd=settings.BASE_DIR,
            env={"PATH": os.environ["PATH"], "DATABASE_URL": "nonsense", "PYTHONWARNINGS": "error"}
            | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            # Ctrl-C is not heard by what a shell runs in the background, nor by its children.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )

    def ends(self, status: int, typed: str | None = None) -> tuple[list[str], str]:
        """Wait for this exit status; return the lines of stdout, and stderr."""
        stdout, stderr = self.process.communicate(typed, timeout=50)
        assert self.process.returncode == status, stderr
        return stdout.splitlines(), stderr

    def says(self, words: str) -> str:
        """Wait for a line of stderr with these words."""
        assert self.process.stderr is not None
        stderr = self.process.stderr
        return wait_until(lambda: next((line for line in [stderr.readline()] if words in line), ""))

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


Run = Callable[..., Portrait]


@pytest.fixture
def between(live_server: LiveServer) -> Iterator[GoBetween]:
    """What can happen on the way to the server."""
    with GoBetween(live_server.url) as between:
        yield between


@pytest.fixture
def run(between: GoBetween) -> Iterator[Run]:
    started: list[Portrait] = []
    token = token_of(make_user())

    def run(*arguments: object, **options: Any) -> Portrait:
        environment = {"GENFLOW_URL": between.url, "GENFLOW_TOKEN": token} | options
        started.append(Portrait(*arguments, **environment))
        return started[-1]

    yield run
    for portrait in started:
        portrait.process.kill()
        portrait.process.communicate()


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "me.jpg"
    file.write_bytes(photo_bytes())
    return file


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "portrait.png"


def finished_job() -> Job:
    job = queue_job()
    finish(job, picture_bytes())
    return job


def way_on(stderr: str) -> list[str]:
    """Return the line that goes on, as a shell reads it."""
    (line,) = re.findall("^  manage.py portrait (.*)$", stderr, re.MULTILINE)
    return shlex.split(line)


def pictures_of(job: Job) -> list[bytes]:
    return [b"".join(asset.file.chunks()) for asset in job.outputs.order_by("pk")]


def files_beside(out: Path) -> list[str]:
    return sorted(file.name for file in out.parent.iterdir())


# --- What comes out ---


@pytest.mark.usefixtures("running_worker")
def test_a_portrait_is_drawn_and_its_path_is_all_of_stdout(
    run: Run, photo: Path, out: Path
) -> None:
    stdout, stderr = run(
        *(photo, "a quiet portrait", "-o", out, *SMALL, "--seed", 2**64 - 1, "--negative", "noise"),
        *("--cfg", 5, "--likeness", 1.5, "--face-weight", 0.5, "--priority", -1),
        *("--lora", "add_detail.safetensors", "--lora-strength", 0.5),
    ).ends(0)

    job = Job.objects.get()
    assert stdout == [str(out)]
    assert out.read_bytes() == pictures_of(job)[0]
    assert f"genflow: job {job.pk}\n" in stderr
    assert job.priority == -1
    assert job.params == job.params | {
        "prompt": "a quiet portrait",
        "negative_prompt": "noise",
        "seed": 2**64 - 1,
        "width": 64,
        "height": 64,
        "steps": 4,
        "cfg": 5,
        "likeness": 1.5,
        "face_weight": 0.5,
        "lora": "add_detail.safetensors",
        "lora_strength": 0.5,
    }


@pytest.mark.usefixtures("running_worker")
def test_several_pictures_are_numbered(run: Run, photo: Path, out: Path) -> None:
    stdout, _ = run(photo, "a quiet portrait", "-o", out, *SMALL, "--count", 2).ends(0)

    files = [out.with_name("portrait-1.png"), out.with_name("portrait-2.png")]
    assert stdout == list(map(str, files))
    assert [file.read_bytes() for file in files] == pictures_of(Job.objects.get())


def test_a_job_that_failed_is_told_in_its_own_sentence(
    run: Run, photo: Path, out: Path, fake: FakeComfy, running_worker: Worker
) -> None:
    fake.fault("no_face")

    stdout, stderr = run(photo, "a quiet portrait", "-o", out).ends(1)

    error = Job.objects.get().error
    assert error is not None
    assert stdout == []
    assert stderr.splitlines()[-1].endswith(f" failed: {error['message']} (no_face)")
    assert files_beside(out) == []


def test_a_job_that_is_canceled_meanwhile_ends_the_wait(run: Run, photo: Path, out: Path) -> None:
    portrait = run(photo, "a quiet portrait", "-o", out)
    portrait.says("queued, place 1")

    Job.objects.cancel(Job.objects.get().pk, by="owner")

    assert "canceled, without a picture" in portrait.ends(1)[1]


# --- Ctrl-C, and on ---


def test_ctrl_c_leaves_the_job_running_and_its_last_line_goes_on_with_it(
    run: Run, photo: Path, out: Path, fake: FakeComfy, running_worker: Worker
) -> None:
    fake.seconds = 4
    portrait = run(photo, "a quiet portrait", "-o", out, *SMALL)
    portrait.says("running, KSampler")

    portrait.interrupt()

    stdout, stderr = portrait.ends(130)
    assert stdout == []
    job = Job.objects.get()
    assert job.cancel_requested_at is None
    assert way_on(stderr) == ["--resume", str(job.pk), "-o", str(out)]
    assert run(*way_on(stderr)).ends(0)[0] == [str(out)]
    assert out.read_bytes() == pictures_of(job)[0]
    assert Job.objects.count() == 1


def test_what_the_environment_does_not_say_is_in_the_line_that_goes_on(
    run: Run, between: GoBetween, out: Path, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(token_of(make_user()) + "\n")
    given = ["--url", between.url, "--token-file", str(tmp_path / "token")]
    portrait = run("--resume", queue_job().pk, "-o", out, *given, GENFLOW_URL="", GENFLOW_TOKEN="")
    portrait.says("queued")

    portrait.process.send_signal(signal.SIGTERM)

    _, stderr = portrait.ends(130)
    assert way_on(stderr)[-4:] == given


def test_ctrl_c_before_the_answer_says_where_to_look(
    run: Run, photo: Path, out: Path, between: GoBetween
) -> None:
    between.instead(PORTRAITS, Reply(503, b"", {"Retry-After": "100"}))
    portrait = run(photo, "a quiet portrait", "-o", out)
    portrait.says("answers 503")

    portrait.interrupt()

    assert (
        f"if the server took the job all the same, {between.url}/ shows it" in portrait.ends(130)[1]
    )


def test_a_job_that_has_ended_is_fetched_at_once(run: Run, out: Path) -> None:
    job = finished_job()

    assert run("--resume", job.pk, "-o", out).ends(0)[0] == [str(out)]
    assert out.read_bytes() == picture_bytes()


# --- What the call can have wrong ---


def test_what_is_there_is_not_overwritten_and_nothing_is_sent(
    run: Run, photo: Path, out: Path, between: GoBetween
) -> None:
    out.with_name("portrait-2.png").write_text("dear")

    _, stderr = run(photo, "a quiet portrait", "-o", out, "--count", 2).ends(2)

    assert "portrait-2.png exists; give another name by -o, or overwrite it by --force" in stderr
    assert between.seen == []


def test_what_is_there_is_overwritten_by_force(run: Run, out: Path) -> None:
    out.with_name("elsewhere.png").write_text("old")
    out.symlink_to("elsewhere.png")

    run("--resume", finished_job().pk, "-o", out, "--force").ends(0)

    assert out.is_symlink()
    assert out.read_bytes() == picture_bytes()
    assert files_beside(out) == ["elsewhere.png", "portrait.png"]


def test_what_came_there_meanwhile_is_not_overwritten(run: Run, out: Path) -> None:
    job = queue_job()
    portrait = run("--resume", job.pk, "-o", out)
    portrait.says("queued")

    out.write_text("dear")
    finish(job, picture_bytes())

    _, stderr = portrait.ends(1)
    assert "exists" in stderr
    assert way_on(stderr) == ["--resume", str(job.pk), "-o", str(out)]
    assert out.read_text() == "dear"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing.jpg", "x", "-o", "x.png"], "the photo missing.jpg cannot be read: No such file"),
        (["manage.py", "x"], "-o/--out"),
        (["manage.py", "x", "-o", "missing/x.png"], "missing/x.png cannot be written"),
        (["manage.py", "x", "-o", "jobs", "--force"], "jobs cannot be written"),
        (["manage.py", "x", "-o", "x" * 300], "File name too long"),
        (["manage.py", "-o", "x.png"], 'give FACE.jpg "prompt", or --resume JOB_ID'),
        (["manage.py", "-o", "x.png", "--resume", str(uuid.UUID(int=7))], "or --resume JOB_ID"),
        (["manage.py", "\udcff", "-o", "x.png"], "argument prompt: this is no text in UTF-8"),
        (["manage.py", "x", "-o", "x.png", "--steps", "many"], "argument --steps"),
        (["manage.py", "x", "-o", "x.png", "--count", "9"], "argument --count"),
        (["--resume", "seven", "-o", "x.png"], "argument --resume"),
        (["manage.py", "x", "-o", "x.png", "--token-file", "missing"], "read: No such file"),
        (
            ["manage.py", "x", "-o", "x.png", "--url", "localhost:8000"],
            "write the server's address",
        ),
        (["manage.py", "x", "-o", "x.png", "--url", "ftp://host"], "write the server's address"),
        (["manage.py", "x", "-o", "x.png", "--url", "http://me:pw@host"], "write the server's"),
        (["manage.py", "x", "-o", "x.png", "--url", "http://host:99999"], "write the server's"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_before_anything_is_sent(
    arguments: list[str], sentence: str
) -> None:
    # Nobody listens there: who asks is busy for five minutes.
    portrait = Portrait(*arguments, GENFLOW_TOKEN="gf_0", GENFLOW_URL="http://127.0.0.1:9")

    stdout, stderr = portrait.ends(2)

    assert sentence in stderr
    assert "Traceback" not in stderr
    assert stdout == []


@pytest.mark.parametrize("token", ["", "two words", "schl\u00fcssel"])
def test_without_a_token_it_says_where_one_comes_from(token: str) -> None:
    _, stderr = Portrait("manage.py", "x", "-o", "x.png", GENFLOW_TOKEN=token).ends(2)

    assert "there is no token: set GENFLOW_TOKEN, or give --token-file FILE" in stderr


def test_what_the_server_refuses_is_told_in_its_words(run: Run, photo: Path, out: Path) -> None:
    _, stderr = run(photo, "a quiet portrait", "-o", out, "--steps", 151).ends(2)
    assert stderr == "genflow: steps: Must be a whole number from 1 to 150. (invalid_request)\n"

    photo.write_text("no photo")
    assert "(photo_format)" in run(photo, "a quiet portrait", "-o", out).ends(2)[1]
    assert "(unauthorized)" in run(photo, "x", "-o", out, GENFLOW_TOKEN="gf_0").ends(2)[1]
    assert "(not_found)" in run("--resume", uuid.uuid4(), "-o", out).ends(2)[1]


def test_a_token_can_come_by_stdin(run: Run, out: Path) -> None:
    portrait = run(
        "--resume", finished_job().pk, "-o", out, "--token-file", "-", GENFLOW_TOKEN="gf_0"
    )

    portrait.ends(0, typed=token_of(make_user()) + "\n")


def test_the_help_needs_no_settings_and_the_command_is_listed() -> None:
    assert "--resume JOB_ID" in "\n".join(Portrait("--help").ends(0)[0])
    assert get_commands()["portrait"] == "genflow_client"


# --- Trouble on the way ---


def test_a_lost_answer_to_the_submission_is_asked_for_again_with_the_same_key(
    run: Run, photo: Path, out: Path, between: GoBetween
) -> None:
    lost: list[Reply] = []

    def lose(reply: Reply) -> bytes:
        lost.append(reply)
        return b""

    between.instead(PORTRAITS, lambda seen: lost[0])  # as the server replays it
    between.spoil(PORTRAITS, lose)

    portrait = run(photo, "a quiet portrait", "-o", out)
    portrait.says("does not answer")
    portrait.says("queued")
    finish(Job.objects.get(), picture_bytes())

    portrait.ends(0)
    first, second = between.requests(PORTRAITS)
    assert first.body == second.body
    assert len(first.headers["Idempotency-Key"]) == 36
    assert first.headers["Idempotency-Key"] == second.headers["Idempotency-Key"]


def refusal(code: str, status: int) -> Reply:
    return json_reply({"error": {"code": code, "message": "Not now.", "details": None}}, status)


@pytest.mark.parametrize(
    ("route", "trouble"),
    [
        (PORTRAITS, refusal("idempotency_in_flight", 409)),
        (PORTRAITS, refusal("database_unavailable", 503)),
        (JOBS, Reply(502, b"<html>")),
        (JOBS, Reply(200, b"<html>")),
        (JOBS, b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"),
    ],
)
def test_trouble_that_passes_costs_nothing_but_time(
    run: Run, photo: Path, out: Path, between: GoBetween, route: str, trouble: Answer
) -> None:
    between.instead(route, trouble)
    portrait = run(photo, "a quiet portrait", "-o", out)
    wait_until(lambda: Job.objects.exists())

    finish(Job.objects.get(), picture_bytes())

    assert "trying again for 300 s at most" in portrait.ends(0)[1]
    assert Job.objects.count() == 1


def test_a_pause_that_the_server_asks_for_is_kept(run: Run, out: Path, between: GoBetween) -> None:
    times: list[float] = []

    def answer(seen: Seen) -> Answer:
        times.append(time.monotonic())
        return replace(refusal("rate_limited", 429), headers={"Retry-After": "2"})

    between.instead(JOBS, answer, times=2)

    _, stderr = run("--resume", finished_job().pk, "-o", out, "--patience", 60).ends(0)

    assert times[1] - times[0] >= 2
    assert stderr.count("Not now. (rate_limited); trying again for 60 s at most") == 1


@pytest.mark.parametrize("header", [{"Retry-After": "3600"}, {"Retry-After": "soon"}, {}])
def test_trouble_that_lasts_ends_the_wait_but_not_the_job(
    run: Run, out: Path, between: GoBetween, header: dict[str, str]
) -> None:
    job = queue_job()
    portrait = run("--resume", job.pk, "-o", out, "--patience", 2)
    portrait.says("queued")

    between.instead(JOBS, Reply(503, b"", header), times=None)

    stdout, stderr = portrait.ends(1)
    assert stdout == []
    assert "answers 503" in stderr
    assert way_on(stderr) == ["--resume", str(job.pk), "-o", str(out)]


def test_a_server_that_is_not_there_is_named(run: Run, photo: Path, out: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"

        _, stderr = run(photo, "x", "-o", out, "--url", url, "--patience", 0).ends(1)

    assert f"{url} does not answer: Connection refused" in stderr


def test_a_server_that_has_moved_is_named(
    run: Run, photo: Path, out: Path, between: GoBetween
) -> None:
    between.instead(PORTRAITS, Reply(301, b"", {"Location": "https://new.test/api/v2/portraits"}))

    assert "has moved to https://new.test/" in run(photo, "x", "-o", out).ends(2)[1]


def test_a_server_that_does_not_know_how_to_hold_its_answer_is_polled(
    run: Run, out: Path, between: GoBetween
) -> None:
    job = queue_job()
    portrait = run("--resume", job.pk, "-o", out)
    portrait.says("queued")
    between.instead(JOBS, refusal("invalid_request", 422))

    finish(job, picture_bytes())

    portrait.ends(0)
    queries = [seen.query for seen in between.requests(JOBS)]
    assert "wait=1" in queries
    assert queries[-1] == ""


# --- The picture ---


def cut(reply: Reply) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(reply.body)}\r\n\r\n"
    return head.encode() + reply.body[:-9]


def shorter(reply: Reply) -> Reply:
    return Reply(200, reply.body[:-9])


@pytest.mark.parametrize("spoiled", [cut, shorter])
def test_a_picture_that_is_cut_on_the_way_is_fetched_again(
    run: Run, out: Path, between: GoBetween, spoiled: Callable[[Reply], Answer]
) -> None:
    between.spoil(PICTURES, spoiled)

    run("--resume", finished_job().pk, "-o", out).ends(0)

    assert len(between.requests(PICTURES)) == 2
    assert out.read_bytes() == picture_bytes()
    assert files_beside(out) == ["portrait.png"]


def test_half_a_picture_is_none(run: Run, out: Path, between: GoBetween) -> None:
    between.spoil(PICTURES, cut, times=None)

    _, stderr = run("--resume", finished_job().pk, "-o", out, "--patience", 0).ends(1)

    assert "--resume" in way_on(stderr)
    assert files_beside(out) == []


def test_the_token_is_shown_to_the_server_alone(run: Run, out: Path, between: GoBetween) -> None:
    with GoBetween() as store:
        store.instead("GET /picture", Reply(200, picture_bytes()))

        def elsewhere(reply: Reply) -> Reply:
            job = reply.json
            job["outputs"][0]["url"] = f"{store.url}/picture?signature=secret"
            return json_reply(job)

        between.spoil(JOBS, elsewhere)
        run("--resume", finished_job().pk, "-o", out).ends(0)

        (seen,) = store.seen
    assert "Authorization" not in seen.headers
    assert out.read_bytes() == picture_bytes()


# --- What is shown meanwhile ---


def test_a_job_that_waits_for_another_attempt_says_why_and_until_when(run: Run, out: Path) -> None:
    job = queue_job()
    at = timezone.now() + timedelta(hours=1)
    error = {"code": "no_answer", "message": "The image server did not answer."}
    Job.objects.filter(pk=job.pk).update(run_after=at, attempt=2, error=error)

    portrait = run("--resume", job.pk, "-o", out, TZ="Asia/Tokyo")

    said = portrait.says("queued, place 1")
    there = at.astimezone(ZoneInfo("Asia/Tokyo"))
    assert f"trying again at {there:%H:%M:%S}: The image server did not answer." in said


@pytest.mark.usefixtures("running_worker")
def test_a_terminal_shows_a_bar_with_the_samplers_steps(
    run: Run, photo: Path, out: Path, fake: FakeComfy
) -> None:
    fake.seconds = 4
    ours, theirs = pty.openpty()
    portrait = run(photo, "x", "-o", out, *SMALL, stderr=theirs, TERM="xterm", COLUMNS="100")
    os.close(theirs)

    shown = b""
    with suppress(OSError):  # the terminal's end, when the process has ended
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)

    assert portrait.ends(0)[0] == [str(out)]
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown.decode())
    assert re.search(r"━ +\d+% \S+ running, KSampler \d/4", plain)
    assert plain.endswith("\x1b[?25h")  # the cursor is back


def test_without_a_terminal_a_long_wait_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    job: dict[str, Any] = {"status": "queued", "progress": None, "retry": None}

    for place in range(500, 0, -1):
        display.show(job | {"queue_position": place})
    for step in range(100):
        progress = {"value": step / 100, "message": f"KSampler {step}/100"}
        display.show(job | {"status": "running", "queue_position": None, "progress": progress})

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) < 15
    assert lines[-1] == "genflow: 75% running, KSampler 75/100"
