from __future__ import annotations

from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    dependencies = [("jobs", "0005_operator_events")]
    operations = [
        migrations.RemoveIndex("job", "job_completed"),
        migrations.AddIndex(
            "job",
            models.Index(
                fields=["completed_at"],
                include=["status", "started_at"],
                name="job_completed",
                condition=Q(completed_at__isnull=False),
            ),
        ),
        migrations.AddIndex(
            "job",
            models.Index(fields=["completed_at"], name="job_failed", condition=Q(status="failed")),
        ),
    ]
