from __future__ import annotations

import os
import signal
import threading
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import OperationalError, connection

from comfy.address import canonical
from jobs.checks import is_http_url, without_password
from jobs.health import unapplied_migrations
from jobs.worker import Options, Worker


class Command(BaseCommand):
    help = "Draw the queued jobs on ComfyUI. SIGTERM stops politely, a second one at once."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--concurrency", type=int, help="jobs at once in this process")
        parser.add_argument(
            "--comfy-url",
            action="append",
            metavar="URL",
            help="a ComfyUI to drive; may be repeated (default: COMFY_URL)",
        )
        parser.add_argument("--name", default="", help="a name for people (default: the host's)")
        parser.add_argument(
            "--drain", action="store_true", help="exit when nothing is queued and nothing held"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        urls = options["comfy_url"] or settings.COMFY_URLS
        if not urls:
            raise CommandError("COMFY_URL is empty; set it, or give --comfy-url")
        if wrong := [without_password(url) for url in urls if not is_http_url(url)]:
            raise CommandError(f"{wrong[0]!r} is no address; write it like http://127.0.0.1:8188")
        concurrency = options["concurrency"]
        if concurrency is None:
            concurrency = settings.GENFLOW_CONCURRENCY
        if concurrency < 1:
            raise CommandError("--concurrency must be 1 or more")
        refuse_old_tables()
        worker = Worker(
            list(dict.fromkeys(map(canonical, urls))),
            Options.from_settings(concurrency=concurrency, drain=options["drain"]),
            options["name"],
        )
        if not run_until_signal(worker):
            raise CommandError("a thread of the worker died; see the log")


def refuse_old_tables() -> None:
    try:
        missing = unapplied_migrations()
    except OperationalError:  # away: the worker waits for it
        return
    finally:
        connection.close()  # this thread has no more use for it
    if missing:
        raise CommandError(
            f"The database lacks {', '.join(missing)}; run `manage.py migrate` first"
        )


def run_until_signal(worker: Worker) -> bool:
    """Run the worker on a thread of its own, so that a signal never interrupts a lock it needs."""
    succeeded: list[bool] = []
    thread = threading.Thread(target=lambda: succeeded.append(worker.run()))

    def stop(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, exit_now)
        signal.signal(signal.SIGINT, exit_now)
        worker.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    return succeeded == [True]


def exit_now(signum: int, frame: Any) -> None:
    os._exit(128 + signum)
