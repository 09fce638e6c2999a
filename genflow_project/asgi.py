from __future__ import annotations

import logging
import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "genflow_project.settings")
django.setup(set_prefix=False)

from genflow_project.door import Door  # noqa: E402  (it reads the settings)
from jobs.logs import WithoutQuery  # noqa: E402

# uvicorn writes its lines through a handler of its own.
logging.getLogger("uvicorn.access").addFilter(WithoutQuery())
application = Door()
