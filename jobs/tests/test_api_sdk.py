"""The public client of the Comfy API v2, which knows nothing of us, against our server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from comfy_sdk import Comfy
from comfy_sdk.exceptions import ComfyError, NotFound
from pytest_django.live_server_helper import LiveServer

from jobs.tests.helpers import make_user, queue_job
from jobs.tests.helpers_api import finish, picture_bytes, token_of

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def comfy(live_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Comfy]:
    monkeypatch.setenv("COMFY_BASE_URL", live_server.url)
    with Comfy(api_key=token_of(make_user())) as client:
        yield client


def test_it_follows_a_job_to_its_picture(comfy: Comfy, tmp_path: Path) -> None:
    row = queue_job(metadata={"shoot": "7"})
    job = comfy.jobs.get(str(row.pk))
    assert (job.status, job.metadata) == ("queued", {"shoot": "7"})
    assert list(job.events()) == []  # not served: it polls instead

    finish(row, picture_bytes())

    (output,) = job.result().outputs
    assert (output.type, output.name) == ("image", "portrait_00001_.png")
    assert output.to_file(tmp_path / "out.png").read_bytes() == picture_bytes()
    assert output.to_bytes(range=(0, 7)) == b"\x89PNG\r\n\x1a\n"
    assert job.get_workflow().graph == row.graph


def test_it_lists_all_jobs_page_by_page(comfy: Comfy) -> None:
    jobs = [str(queue_job(metadata={"n": str(n % 2)}).pk) for n in range(5)]

    assert [job.id for job in comfy.list_jobs(limit=2)] == jobs[::-1]
    odd = list(comfy.list_jobs(metadata={"n": "1"}, limit=1))
    assert [job.id for job in odd] == [jobs[3], jobs[1]]
    assert all(job.create_time and job.update_time for job in odd)


def test_it_cancels(comfy: Comfy) -> None:
    assert comfy.jobs.get(str(queue_job().pk)).cancel().status == "canceled"


def test_it_reads_our_errors(comfy: Comfy) -> None:
    with pytest.raises(NotFound):
        comfy.jobs.get("unknown")
    with pytest.raises(ComfyError) as refused:
        list(comfy.list_jobs(metadata={"a": "\0"}))
    assert refused.value.code == "invalid_metadata_filter"
