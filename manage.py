#!/usr/bin/env python3
"""Django's command line: `manage.py help` lists the commands."""

from __future__ import annotations

import os
import sys


def main() -> None:
    try:
        from django.conf import settings
        from django.core.exceptions import ImproperlyConfigured
        from django.core.management import execute_from_command_line
    except ImportError as exc:
        sys.exit(f"{exc}. Do `. .venv/bin/activate` first; ./scripts/demo makes that folder.")
    if sys.argv[1:2] == ["portrait"]:
        # It talks to a server elsewhere: our settings would ask for a database, or start one.
        settings.configure(INSTALLED_APPS=["genflow_client"])
    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as exc:
        sys.exit(f"genflow: {exc}")


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "genflow_project.settings")
    main()
