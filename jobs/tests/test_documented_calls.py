"""The calls in README.md and docs/api.md, run as they are written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from PIL import Image

from jobs.models import Job
from jobs.tests.helpers import make_user, photo_bytes, wait_until
from jobs.tests.helpers_api import check, token_of
from jobs.tests.node import INSTALLED, run_node
from jobs.tests.processes import environment
from jobs.tests.test_workflow_runs import with_a_photo

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]


def blocks(page: str, language: str) -> list[str]:
    text = (settings.BASE_DIR / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def bodies(printed: str) -> Iterator[Any]:
    """Read answers in JSON that stand one behind the other."""
    while printed := printed.strip():
        body, end = json.JSONDecoder().raw_decode(printed)
        yield body
        printed = printed[end:]


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
@pytest.mark.parametrize(
    ("page", "kinds"), [("README.md", ["portrait"]), ("docs/api.md", ["portrait", "workflow"])]
)
def test_the_curl_lines_of_a_page_make_jobs_that_are_drawn(
    server: str, page: str, kinds: list[str]
) -> None:
    calls = [block for block in blocks(page, "sh") if "TOKEN=$(" in block or "curl " in block]
    script = "\n".join(calls).replace("http://127.0.0.1:8000", server)

    done = subprocess.run(  # noqa: S603
        ["bash", "-euo", "pipefail", "-c", script],  # noqa: S607
        cwd=settings.BASE_DIR,
        env=environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    jobs = list(bodies(done.stdout))
    for job in jobs:
        check("Job", job)
    assert [job["kind"] for job in jobs] == kinds
    wait_until(lambda: Job.objects.filter(status="succeeded").count() == len(kinds))
    assert {job.owner.username for job in Job.objects.all()} == {"ann"}


@pytest.fixture
def folder(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the SDKs' examples run: with a workflow and a face."""
    monkeypatch.setenv("COMFY_BASE_URL", server)
    (tmp_path / "workflow_api.json").write_text(json.dumps(with_a_photo()))
    (tmp_path / "face.jpg").write_bytes(photo_bytes())
    return tmp_path


def assert_drawn(folder: Path) -> None:
    job = Job.objects.get()
    assert (job.status, job.outputs.count()) == ("succeeded", 2)
    for output in job.outputs.all():
        with Image.open(folder / output.name) as picture:
            assert picture.size == (output.width, output.height)


def test_the_example_in_python_keeps_the_pictures(folder: Path) -> None:
    (example,) = blocks("docs/api.md", "python")
    example = f"TOKEN = {token_of(make_user())!r}\n{example}"

    subprocess.run([sys.executable, "-c", example], cwd=folder, check=True)  # noqa: S603

    assert_drawn(folder)


def test_the_example_in_javascript_keeps_the_pictures(folder: Path) -> None:
    (example,) = blocks("docs/api.md", "js")
    (folder / "node_modules").symlink_to(INSTALLED / "node_modules")
    example = f'const TOKEN = "{token_of(make_user())}";\n{example}'

    run_node("--input-type=module", "-e", example, cwd=folder)

    assert_drawn(folder)
