from __future__ import annotations

import json
import os
import subprocess
import sys

from django.conf import settings

SERVE = """
import logging.config
from django.test import RequestFactory
from uvicorn.config import LOGGING_CONFIG
logging.config.dictConfig(LOGGING_CONFIG)
from genflow_project.asgi import application
access = ("client", "GET", "/x?signature=secret", "1.1", 404)
logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', *access)
failed = {"request": RequestFactory().get("/x?signature=secret")}
logging.getLogger("django.request").warning("Not Found: %s", "/x", extra=failed)
logging.getLogger("PIL.TiffImagePlugin").debug("tag: GPSLatitude - value: secret")
"""


def test_a_request_is_logged_without_its_query_and_without_the_photos_metadata() -> None:
    served = subprocess.run(  # noqa: S603
        [sys.executable, "-c", SERVE],
        cwd=settings.BASE_DIR,
        env=os.environ | {"LOG_LEVEL": "DEBUG"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert '"GET /x HTTP/1.1" 404' in served.stdout
    (line,) = map(json.loads, served.stderr.splitlines())
    assert (line["message"], line["request"]) == ("Not Found: /x", "GET /x")
    assert "secret" not in served.stdout + served.stderr
