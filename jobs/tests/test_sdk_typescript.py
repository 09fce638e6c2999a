"""The TypeScript client of the Comfy API v2, which knows nothing of us, against our processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fake_comfy import FakeComfy
from jobs.models import Asset, Job
from jobs.tests.helpers import make_user, photo_bytes
from jobs.tests.helpers_api import token_of
from jobs.tests.node import INSTALLED, run_node
from jobs.tests.test_workflow_runs import with_a_photo

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]

Run = Callable[[str], dict[str, Any]]


@pytest.fixture
def run(server: str, tmp_path: Path) -> Run:
    """Runs a scenario of typescript/client.mjs as ann, and returns what the program saw."""
    (tmp_path / "workflow_api.json").write_text(json.dumps(with_a_photo()))
    (tmp_path / "face.jpg").write_bytes(photo_bytes())
    known = {"COMFY_BASE_URL": server, "COMFY_API_KEY": token_of(make_user())}
    files = ("workflow_api.json", "face.jpg", "out.png")

    def run(scenario: str) -> dict[str, Any]:
        printed = run_node(str(INSTALLED / "client.mjs"), scenario, *files, cwd=tmp_path, **known)
        seen: dict[str, Any] = json.loads(printed)
        return seen

    return run


def test_it_draws_from_a_photo_hears_of_it_and_keeps_the_picture(
    run: Run, fake: FakeComfy, tmp_path: Path
) -> None:
    fake.seconds = 4

    seen = run("draw")

    job = Job.objects.get(pk=seen["id"])
    output = job.outputs.get(node_id="9")
    assert (job.status, job.inputs.get().name, job.outputs.count()) == ("succeeded", "face.jpg", 2)
    assert seen["kinds"] == ["outputReady", "preview", "progress", "statusChange"]
    assert seen["values"] == sorted(seen["values"])
    assert (seen["end"], seen["format"]) == ("succeeded", "api")
    assert seen["output"] == [str(output.pk), "ComfyUI_00001_.png", "image", output.size]
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.size == (64, 64)
    assert fake.prompts[seen["id"]]["submitted"] == 1


def test_it_cancels_a_job_that_is_being_drawn(run: Run, fake: FakeComfy) -> None:
    fake.seconds = 60

    seen = run("cancel")

    assert seen["end"] == "canceled"
    assert Job.objects.get(pk=seen["id"]).status == "canceled"
    assert fake.prompts[seen["id"]]["interrupted"] == 1


def test_it_reads_our_errors_as_what_they_are(run: Run) -> None:
    assert run("refuse") == {
        "unknown": ["NotFound", "not_found", 404],
        "nobody": ["Unauthorized", "unauthorized", 401],
        "missing": ["MissingAsset", "missing_asset", 422],
        "editor": ["WorkflowFormatUi", "workflow_format_ui", 422],
    }
    assert not Job.objects.exists()


def test_it_sends_again_what_was_not_answered_and_has_one_job(run: Run) -> None:
    seen = run("lose")

    assert seen == {"lost": "fetch failed", "id": str(Job.objects.get().pk)}
    assert Asset.objects.filter(job=None).count() == 1
