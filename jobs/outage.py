from __future__ import annotations

from django.db import Error, InterfaceError, OperationalError
from psycopg.errors import ReadOnlySqlTransaction


def is_outage(error: Error) -> bool:
    """Whether the same statement may succeed later, on a fresh connection.

    So it is when the database is away, overloaded or, amid a failover, read-only. Serialization failures,
    deadlocks and time-outs are operational errors, too.
    """
    if isinstance(error, (OperationalError, InterfaceError)):
        return True
    return isinstance(error.__cause__, ReadOnlySqlTransaction)
