from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import requests
from django.core.management.base import BaseCommand, CommandParser

from genflow_client.api import Api, ClientError, Job, Trouble
from genflow_client.progress import Display, ending

PATIENCE_SECONDS: Final = 300
INTERRUPTED: Final = 130
TOKEN: Final = re.compile(r"[!-~]+")


class Usage(ClientError):
    """The call must be another one."""


class Over(ClientError):
    """The job has ended, and there is no picture to fetch."""


def text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise ArgumentTypeError("this is no text in UTF-8") from exc
    return value


def server(value: str) -> str:
    """Return the address in the one spelling that requests gives it."""
    with suppress(ValueError):
        url = str(requests.Request("GET", value).prepare().url)
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and not (parts.username or parts.query):
            return url.rstrip("/")
    raise ArgumentTypeError("write the server's address like https://genflow.example.com")


def default_url() -> str:
    return os.environ.get("GENFLOW_URL") or "http://127.0.0.1:8000"


# What the server knows best: its name there, and what it is.
FIELDS: Final[Mapping[str, tuple[str, Callable[[str], Any], str]]] = {
    "--negative": ("negative_prompt", text, "what the picture should not show"),
    "--seed": ("seed", int, "the same seed draws the same picture"),
    "--width": ("width", int, "of the picture in pixels"),
    "--height": ("height", int, "of the picture in pixels"),
    "--steps": ("steps", int, "of the sampler"),
    "--cfg": ("cfg", float, "how closely to follow the prompt"),
    "--lora": ("lora", text, "the file name of a LoRA"),
    "--lora-strength": ("lora_strength", float, "how much of it"),
    "--likeness": ("likeness", float, "how closely to follow the face"),
    "--face-weight": ("face_weight", float, "how much the photo counts at all"),
    "--priority": ("priority", int, "below 0: after all others"),
}


class Command(BaseCommand):
    help = (
        "Have a portrait drawn by a genflow server and save it. Its path goes to stdout. Ctrl-C leaves the job running. "
        "Exit status: 1 if there is no picture, 2 if the call is wrong, 130 after Ctrl-C."
    )
    requires_system_checks: list[str] = []
    # They mean nothing here.
    suppressed_base_arguments = {
        "--version",
        "--verbosity",
        "--settings",
        "--pythonpath",
        "--no-color",
        "--force-color",
    }
    job: Job | None = None  # as the server last told it

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add("photo", nargs="?", type=Path, metavar="FACE.jpg", help="a photo of a face")
        add("prompt", nargs="?", type=text, help="what to draw")
        add("-o", "--out", required=True, type=Path, metavar="FILE", help="where the picture goes")
        add("--force", action="store_true", help="overwrite what is there")
        add("--resume", type=UUID, metavar="JOB_ID", help="go on with a job that was sent before")
        add(
            "--count",
            type=int,
            choices=range(1, 9),
            metavar="N",
            help="several: out-1.png, out-2.png ...",
        )
        for option, (field, kind, what) in FIELDS.items():
            add(option, dest=field, type=kind, help=what)
        add("--url", type=server, default=default_url(), help="of the server (now: %(default)s)")
        add("--token-file", metavar="FILE", help="with the token; -: stdin (else GENFLOW_TOKEN)")
        add(
            "--patience",
            type=float,
            default=PATIENCE_SECONDS,
            metavar="SECONDS",
            help="that the server may be away or full (now: %(default)s)",
        )

    def handle(self, **options: Any) -> None:
        self.options = options
        self.display = Display()
        # `kill` and `timeout` are to leave as little behind as Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with self.display:
                files = self.draw()
        except KeyboardInterrupt:
            self.leave(INTERRUPTED, "stopped", self.way_on())
        except Over as exc:
            self.leave(1, exc)
        except (ClientError, OSError) as exc:
            if self.job is None and not isinstance(exc, Trouble):
                self.leave(2, exc)
            self.leave(1, exc, self.way_on())
        for file in files:
            self.stdout.write(str(file))

    def draw(self) -> list[Path]:
        """Have the pictures drawn, and return where they are."""
        options = self.options
        token = read_token(options["token_file"])
        api = Api(options["url"], token, patience=options["patience"], note=self.display.say)
        job = api.watch(self.begin(api), self.show)
        pictures = [output for output in job["outputs"] if output["type"] == "image"]
        if not pictures:
            raise Over(ending(job))
        files = self.free_files(len(pictures))
        for picture, file in zip(pictures, files, strict=True):
            save(api.picture(picture), file)
        return files

    def begin(self, api: Api) -> Job:
        """Return the job to go on with, or a new one. What can be wrong is looked at before it is sent."""
        options = self.options
        if options["photo"] if options["resume"] else options["prompt"] is None:
            raise Usage('give FACE.jpg "prompt", or --resume JOB_ID')
        if options["resume"]:
            job = api.find(options["resume"])
            self.free_files(job["params"].get("count", 1))
            return job
        self.free_files(options["count"] or 1)
        fields = ("prompt", "count", *(field for field, _, _ in FIELDS.values()))
        form = {field: options[field] for field in fields if options[field] is not None}
        job = api.submit(read_photo(options["photo"]), form)
        self.display.say(f"job {job['id']}")
        return job

    def show(self, job: Job) -> None:
        self.job = job
        self.display.show(job)

    def free_files(self, count: int) -> list[Path]:
        """Return where so many pictures go."""
        out: Path = self.options["out"]
        numbers = [f"-{n}" for n in range(1, count + 1)] if count > 1 else [""]
        files = [out.parent / f"{out.stem}{number}{out.suffix}" for number in numbers]
        odd = any(file.exists() and not file.is_file() for file in (out, *files))
        if odd or not os.access(out.parent, os.W_OK):
            raise Usage(f"{out} cannot be written; give another name by -o")
        for file in files:
            if file.exists() and not self.options["force"]:
                raise Usage(f"{file} exists; give another name by -o, or overwrite it by --force")
        return files

    def way_on(self) -> str:
        """Return what to do about a job that the server may go on with."""
        options = self.options
        job_id = self.job["id"] if self.job else options["resume"]
        if job_id is None:
            return f"if the server took the job all the same, {options['url']}/ shows it"
        again = [sys.argv[0], "portrait", "--resume", str(job_id), "-o", str(options["out"])]
        again += ["--url", options["url"]] if options["url"] != default_url() else []
        again += ["--token-file", options["token_file"]] if options["token_file"] else []
        return f"the job goes on without us; for its picture:\n  {shlex.join(again)}"

    def leave(self, status: int, *sentences: object) -> NoReturn:
        for sentence in sentences:
            self.display.say(str(sentence))
        sys.exit(status)


def save(content: bytes, file: Path) -> None:
    """Write the whole file, or leave what was there."""
    file = file.resolve()  # a link stays one
    part = file.with_name(f".genflow-{uuid4()}.part")
    try:
        part.write_bytes(content)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def read_photo(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as exc:
        raise Usage(f"the photo {file} cannot be read: {exc.strerror}") from exc


def read_token(file: str | None) -> str:
    """Return the token of a file, of stdin (`-`), or of the environment: others see a command line."""
    try:
        if file is None:
            token = os.environ.get("GENFLOW_TOKEN", "")
        else:
            token = sys.stdin.readline() if file == "-" else Path(file).read_text(errors="replace")
    except OSError as exc:  # its name may be a token by mistake: it is not repeated
        raise Usage(f"--token-file names a file that cannot be read: {exc.strerror}") from exc
    if not TOKEN.fullmatch(token.strip()):
        raise Usage(
            "there is no token: set GENFLOW_TOKEN, or give --token-file FILE; "
            "`manage.py api_token USERNAME` on the server makes one"
        )
    return token.strip()
