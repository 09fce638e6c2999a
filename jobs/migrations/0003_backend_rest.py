from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("jobs", "0002_job_table_storage")]
    operations = [
        migrations.AddField(
            "backend",
            "failures",
            models.PositiveSmallIntegerField(
                default=0,
                help_text="Rests since its last good run; above 0 it gets one job at a time.",
            ),
        ),
        migrations.AddField(
            "backend", "rest_until", models.DateTimeField(null=True, blank=True)
        ),
    ]
