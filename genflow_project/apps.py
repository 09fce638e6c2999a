from __future__ import annotations

from django.contrib.admin.apps import AdminConfig


class ConsoleConfig(AdminConfig):
    default_site = "jobs.console.Console"
