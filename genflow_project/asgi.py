from __future__ import annotations

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "genflow_project.settings")
django.setup(set_prefix=False)

from genflow_project.door import Door  # noqa: E402  (it reads the settings)

application = Door()
