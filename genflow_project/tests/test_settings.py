from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import SystemCheckError

ROOT = Path(settings.BASE_DIR)
IN_PRODUCTION = {
    "DATABASE_URL": "postgres://user@host/name",
    "SECRET_KEY": "long",
    "ALLOWED_HOSTS": "example.com",
}


def load_settings(
    *, show: str = "DATABASES", first: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Import the settings in a process with this environment alone, and print some of them."""
    # Empty, and not away: what a developer has in .env is to make no difference.
    unset = dict.fromkeys(IN_PRODUCTION, "") | {"DEBUG": "0"}
    return subprocess.run(  # noqa: S603
        [
            sys.executable,
            "-c",
            f"{first}\nfrom genflow_project.settings import *; print(({show}))",
        ],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]} | unset | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_example_file_lists_every_variable_and_no_other() -> None:
    source = (ROOT / "genflow_project/settings.py").read_text()
    read = re.findall(r'(?:env\.\w+|required_in_production)\(\s*"([A-Z_]+)"', source)
    listed = re.findall(r"^#?([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)

    assert set(listed) == set(read)
    assert len(listed) == len(set(listed))


def test_the_example_files_defaults_are_those_of_the_settings() -> None:
    listed = dict(
        re.findall(r"^#(GENFLOW_[A-Z_]+)=(.+)$", (ROOT / ".env.example").read_text(), re.MULTILINE)
    )
    source = (ROOT / "genflow_project/settings.py").read_text()
    source = re.sub(r"(\d+) \* 1024 \* 1024\b", lambda m: str(int(m[1]) * 2**20), source)
    source = source.replace("64_000_000", "64000000").replace("10 * 1024**3", "10737418240")
    defaults = dict(re.findall(r'\(\s*"(GENFLOW_[A-Z_]+)", default="?([^")\n]+)"?', source))

    assert {k: v.replace("True", "1") for k, v in defaults.items()} == listed


@pytest.mark.parametrize("missing", list(IN_PRODUCTION))
def test_production_refuses_to_start_without(missing: str) -> None:
    environment = {k: v for k, v in IN_PRODUCTION.items() if k != missing}

    started = load_settings(**environment)

    assert started.returncode != 0
    assert f"{missing} is not set. Set it to" in started.stderr


def test_production_starts_when_all_is_set() -> None:
    started = load_settings(**IN_PRODUCTION)

    assert started.returncode == 0, started.stderr
    assert "'HOST': 'host'" in started.stdout


def test_another_database_is_refused_with_a_sentence() -> None:
    started = load_settings(**IN_PRODUCTION | {"DATABASE_URL": "sqlite:///x"})

    assert "DATABASE_URL must begin with postgres://" in started.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GENFLOW_CONCURRENCY", "two"),
        ("GENFLOW_LEASE_SECONDS", "15s"),
        ("GENFLOW_NOTIFY", "maybe"),
        ("LOG_LEVEL", "LOUD"),
        ("GENFLOW_FACE_CHECK", "maybe"),
        ("DATABASE_URL", "nonsense"),
        ("GENFLOW_STORAGE_URL", "https://bucket"),
        ("GENFLOW_STORAGE_URL", "s3:///folder"),
        ("GENFLOW_STORAGE_URL", "s3://bucket?password=secret"),
        ("DATABASE_URL", "postgres://me:secret/@host/name"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(name: str, value: str) -> None:
    started = load_settings(**IN_PRODUCTION | {name: value})

    assert started.returncode != 0
    assert f"ImproperlyConfigured: {name} " in started.stderr
    assert "secret" not in started.stderr


def test_what_is_often_written_is_understood() -> None:
    started = load_settings(
        **IN_PRODUCTION,
        GENFLOW_STALL_SECONDS="1e3",
        LOG_LEVEL="debug",
        COMFY_URL="http://one, http://two,",
        show="GENFLOW_STALL_SECONDS, LOG_LEVEL, COMFY_URLS",
    )

    assert started.stdout.strip() == "(1000.0, 'DEBUG', ['http://one', 'http://two'])"


def test_a_secret_may_begin_with_any_character() -> None:
    started = load_settings(**IN_PRODUCTION | {"SECRET_KEY": "$x"}, show="SECRET_KEY")

    assert started.stdout.strip() == "$x"


def test_files_go_to_the_bucket_that_is_named() -> None:
    started = load_settings(
        **IN_PRODUCTION,
        GENFLOW_STORAGE_URL="s3://pictures/genflow/?endpoint_url=https://s3.test:9000",
        show='STORAGES["default"]',
    )

    assert "jobs.object_storage.ObjectStorage" in started.stdout
    for option in ("'pictures'", "'genflow'", "'https://s3.test:9000'"):
        assert option in started.stdout


@pytest.mark.parametrize("missing", ["storages", "boto3"])
def test_a_bucket_without_the_packages_for_it_is_refused_with_what_to_do(missing: str) -> None:
    started = load_settings(
        **IN_PRODUCTION,
        GENFLOW_STORAGE_URL="s3://pictures",
        first=f"import sys; sys.modules[{missing!r}] = None",
    )

    assert "pip install -r requirements-s3.txt" in started.stderr


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("GENFLOW_LEASE_SECONDS", 0, "must be above 0"),
        ("GENFLOW_POLL_SECONDS", 60, "is above GENFLOW_LEASE_SECONDS"),
        ("GENFLOW_RETRY_BASE_SECONDS", 999, "is above GENFLOW_RETRY_MAX_SECONDS"),
        ("GENFLOW_MAX_RESUBMITS", -1, "must not be below 0"),
        ("GENFLOW_MAX_ATTEMPTS", 40_000, "must not be above 32,767"),
        ("GENFLOW_PHOTO_MAX_SIDE", 20_000, "must not be above 16,384"),
        ("GENFLOW_RETRY_MAX_SECONDS", float("inf"), "must not be above"),
        ("COMFY_URLS", ["gpu:8188"], "write addresses like"),
        ("COMFY_URLS", ["http://gpu", "http://gpu/?token=1"], "write addresses like"),
        ("COMFY_URLS", ["http://gpu box"], "write addresses like"),
        ("COMFY_URLS", ["http://me:secret@gpu:0"], "holds 'gpu:0'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    settings: pytest.FixtureRequest, name: str, value: object, sentence: str
) -> None:
    setattr(settings, name, value)

    with pytest.raises(SystemCheckError, match=sentence):
        call_command("check")


def test_production_keeps_the_login_to_https_unless_told_otherwise() -> None:
    show = "SESSION_COOKIE_SECURE, CSRF_COOKIE_SECURE, SECURE_HSTS_SECONDS > 0"

    by_default = load_settings(**IN_PRODUCTION, show=show)
    plain = load_settings(**IN_PRODUCTION, SECURE_COOKIES="0", show=show)
    on_a_developers_machine = load_settings(
        DEBUG="1", DATABASE_URL="postgres://host/name", show=show
    )

    assert by_default.stdout.strip() == "(True, True, True)"
    assert plain.stdout.strip() == "(False, False, True)"
    assert on_a_developers_machine.stdout.strip() == "(False, False, False)"


def test_djangos_check_for_production_finds_nothing() -> None:
    long = "".join(chr(33 + n % 90) for n in range(60))

    checked = subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]} | IN_PRODUCTION | {"DEBUG": "0", "SECRET_KEY": long},
        capture_output=True,
        text=True,
        check=False,
    )

    assert checked.returncode == 0, checked.stderr
