from __future__ import annotations

from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    dependencies = [("jobs", "0008_owner_limits")]
    operations = [
        migrations.AddIndex(
            "job",
            models.Index(
                fields=["owner", "priority", "turn"],
                name="job_owner_queue",
                condition=Q(status="queued"),
            ),
        ),
    ]
