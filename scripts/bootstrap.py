# ruff: noqa: I002, UP036 (an older Python must get as far as the sentence that it is too old)
# ruff: noqa: S603, S606 (every command is our own)
"""What `scripts/test` and `scripts/demo` do first: make `.venv`, and go on inside it."""

import sys

if sys.version_info < (3, 11):
    sys.stderr.write(
        "genflow needs Python 3.11 or newer; {} is Python {}.{}.\n".format(
            sys.executable, *sys.version_info[:2]
        )
    )
    sys.exit(2)

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
# There while something is being installed: if it is still there later, that was interrupted.
UNFINISHED = VENV / "genflow-unfinished"
WORKS = "import sys, pip; sys.exit(sys.version_info < (3, 11))"


def enter(requirements: str) -> None:
    """Go on in `.venv`, where `requirements` (a file of ours) are installed: this script starts again there.

    Ends the process with a sentence and status 2 if the machine lacks something, 1 if installing failed.
    """
    if Path(sys.prefix).resolve() == VENV.resolve():
        return
    open_standard_streams()
    # Not in the folder itself, which may be made anew, nor in var/, which may be another user's.
    lock = os.open(ROOT / "requirements.txt", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not is_ready(requirements):
        install(requirements)
    os.close(lock)
    # A path of ours may hold what the terminal cannot show.
    os.environ.setdefault("PYTHONIOENCODING", ":backslashreplace")
    os.execv(PYTHON, [str(PYTHON), *sys.argv])


def open_standard_streams() -> None:
    """See that none is closed: its number would go to the next file, and what is printed into that file."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def is_ready(requirements: str) -> bool:
    return stamp(requirements).exists() and is_sound()


def stamp(requirements: str) -> Path:
    """Return the file that says that just these requirements are installed, for this place of the folder."""
    files = [ROOT / "requirements.txt", ROOT / requirements]
    content = b"".join(file.read_bytes() for file in files) + bytes(VENV)
    return VENV / f"genflow-{requirements}-{hashlib.sha256(content).hexdigest()[:16]}"


def is_sound() -> bool:
    """Whether `.venv` is whole and of a Python that is still there."""
    if UNFINISHED.exists() or not PYTHON.exists():
        return False
    return subprocess.run([PYTHON, "-c", WORKS], check=False, capture_output=True).returncode == 0


def install(requirements: str) -> None:
    started = time.monotonic()
    say(f"genflow: installing {requirements} into .venv (a minute, the first time) ...")
    try:
        if not is_sound():
            make_venv()
        UNFINISHED.touch()
        for old in VENV.glob("genflow-requirements*"):
            old.unlink()
        quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
        pip = [str(PYTHON), "-m", "pip", "install", *quiet, "-r", str(ROOT / requirements)]
        subprocess.run(pip, check=True, stdout=sys.stderr)
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, subprocess.CalledProcessError) as exc:
        say(f"genflow: could not install into {VENV}: {exc}")
        sys.exit(1)
    # What the tests need includes what genflow runs on.
    for satisfied in {requirements, "requirements.txt"}:
        stamp(satisfied).touch()
    UNFINISHED.unlink()
    say(f"genflow: installed in {time.monotonic() - started:.0f} s")


def make_venv() -> None:
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        say(
            "genflow: this Python cannot make a virtual environment. "
            "Install python3-venv (Debian, Ubuntu: apt-get install python3-venv) and try again."
        )
        sys.exit(2)
    if VENV.exists():
        shutil.rmtree(VENV)
    VENV.mkdir()
    UNFINISHED.touch()
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True, stdout=sys.stderr)


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)  # noqa: T201
