"""The official TypeScript client of the Comfy API v2 with a program of ours for it, below var/."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from django.conf import settings

SOURCE: Final = Path(__file__).parent / "typescript"
INSTALLED: Final[Path] = settings.BASE_DIR / "var" / "typescript"


def run_node(*arguments: str | Path, cwd: Path, **environment: str) -> str:
    """Run node with the client at hand, and return what it printed. Without npm the test is skipped."""
    if why_not := _install():
        required = os.environ.get("GENFLOW_REQUIRE_NODE") == "1"
        (pytest.fail if required else pytest.skip)(why_not)
    done = subprocess.run(  # noqa: S603
        ["node", *arguments],  # noqa: S607
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def _install() -> str:
    """Return why it cannot be installed, or nothing."""
    npm = shutil.which("npm")
    if npm is None:
        return "npm is not installed"
    shutil.copytree(SOURCE, INSTALLED, dirs_exist_ok=True)
    command = [npm, "ci", "--prefer-offline", "--no-audit", "--ignore-scripts"]
    done = subprocess.run(command, cwd=INSTALLED, capture_output=True, text=True)  # noqa: S603
    return done.stderr if done.returncode else ""
