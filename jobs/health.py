"""Whether the process lives, and whether it can serve. Open to all; they say nothing about where."""

from __future__ import annotations

import logging

from django.db import Error, connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, JsonResponse

logger = logging.getLogger(__name__)


def live(request: HttpRequest) -> JsonResponse:
    """The process answers. Looks at nothing else: a restart would not mend a database."""
    return JsonResponse({"status": "ok"})


def ready(request: HttpRequest) -> JsonResponse:
    """The database answers and has all migrations, or 503 and what is missing."""
    try:
        missing = unapplied_migrations()
    except Error as exc:
        logger.warning("database.away", extra={"reason": str(exc).strip()})
        return _unready("The database cannot be reached.")
    if missing:
        return _unready("Migrations are not applied: " + ", ".join(missing))
    return JsonResponse({"status": "ok"})


def unapplied_migrations() -> list[str]:
    executor = MigrationExecutor(connection)
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    return [str(migration) for migration, _backwards in plan]


def _unready(reason: str) -> JsonResponse:
    return JsonResponse({"status": "unready", "reason": reason}, status=503)
