from __future__ import annotations

import django.db.models.deletion
from django.db import migrations, models
from django.db.models.functions import Now


class Migration(migrations.Migration):
    dependencies = [("jobs", "0010_asset_dedup")]
    operations = [
        migrations.CreateModel(
            "Preview",
            [
                (
                    "job",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="preview",
                        serialize=False,
                        to="jobs.job",
                    ),
                ),
                ("node_id", models.CharField(max_length=200)),
                ("content_type", models.CharField(max_length=20)),
                ("image", models.BinaryField()),
                ("saved_at", models.DateTimeField(db_default=Now())),
            ],
        ),
    ]
