from __future__ import annotations

from django.db import InterfaceError, OperationalError
from psycopg.errors import (
    IdleInTransactionSessionTimeout,
    ReadOnlySqlTransaction,
    TransactionTimeout,
)

# What a process finds that was frozen inside a transaction; psycopg has it among its internal errors.
TIMED_OUT = (IdleInTransactionSessionTimeout, TransactionTimeout)


class StorageAway(Exception):
    """The object store cannot be reached now, or does not want us."""


def is_outage(error: Exception) -> bool:
    """Whether the same statement, or request to the object store, may succeed later, on a fresh connection.

    So it is when the database is away, overloaded or, amid a failover, read-only. Serialization failures,
    deadlocks and time-outs are operational errors, too.
    """
    return (
        isinstance(error, (OperationalError, InterfaceError, StorageAway))
        or isinstance(error.__cause__, TIMED_OUT)
        or is_read_only(error)
    )


def is_read_only(error: Exception) -> bool:
    return isinstance(error.__cause__, ReadOnlySqlTransaction)
