from __future__ import annotations

import django.core.validators
import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
        ("jobs", "0007_idempotency_key"),
    ]
    operations = [
        migrations.CreateModel(
            "OwnerLimits",
            [
                (
                    "owner",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="limits",
                        serialize=False,
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "queued_jobs",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="Jobs that may wait; empty: GENFLOW_QUEUE_LIMIT_PER_OWNER.",
                        null=True,
                    ),
                ),
                (
                    "requests_per_minute",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="That change something; empty: GENFLOW_REQUESTS_PER_MINUTE.",
                        null=True,
                        validators=[django.core.validators.MinValueValidator(1)],
                    ),
                ),
                (
                    "streams",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="Event streams at once; empty: GENFLOW_STREAMS_PER_OWNER.",
                        null=True,
                    ),
                ),
                (
                    "storage_bytes",
                    models.PositiveBigIntegerField(
                        blank=True,
                        help_text="Of photos and pictures; empty: GENFLOW_STORAGE_PER_OWNER_BYTES.",
                        null=True,
                    ),
                ),
            ],
            options={"verbose_name": "limits", "verbose_name_plural": "limits"},
        ),
        migrations.AddIndex(
            "asset",
            models.Index(fields=["owner", "file"], include=["size"], name="asset_owner_size"),
        ),
        migrations.AlterField(
            "asset",
            "owner",
            models.ForeignKey(
                db_index=False,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="assets",
                to=settings.AUTH_USER_MODEL,
            ),
        ),
    ]
