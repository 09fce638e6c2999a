"""A client of genflow's HTTP API, for any machine: it needs neither a database nor the server's settings."""

from __future__ import annotations
