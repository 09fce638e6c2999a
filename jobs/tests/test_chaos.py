"""The short form of `python -m bench.chaos`: everything breaks at random, and no job gets lost or is drawn twice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from django.conf import settings


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [3, 8])
def test_no_job_is_lost_or_drawn_twice_while_everything_breaks(seed: int) -> None:
    form = ["--jobs", "20", "--seconds", "10", "--workers", "4", "--lease", "2"]
    command = [sys.executable, "-m", "bench.chaos", *form, "--seed", str(seed)]

    run = subprocess.run(  # noqa: S603 (our own)
        command,
        cwd=settings.BASE_DIR,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert "lost                       0" in run.stdout
