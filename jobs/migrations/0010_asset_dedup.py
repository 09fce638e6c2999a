from __future__ import annotations

import datetime

from django.db import migrations, models
from django.db.models.functions import Now


class Migration(migrations.Migration):
    dependencies = [("jobs", "0009_job_owner_queue")]
    operations = [
        migrations.AddIndex(
            "asset",
            # Bytes that an owner has already.
            models.Index(fields=["owner", "hash"], name="asset_owner_hash"),
        ),
        migrations.AddIndex(
            "asset",
            # Files that a workflow names.
            models.Index(fields=["owner", "name"], name="asset_owner_name"),
        ),
        migrations.AddIndex(
            "asset",
            # The sweep of uploads.
            models.Index(
                fields=["expires_at"],
                name="asset_expiry",
                condition=models.Q(job__isnull=True),
            ),
        ),
        migrations.AddField(
            "blob",
            "kept_until",
            models.DateTimeField(
                db_default=Now() + datetime.timedelta(days=1),
                help_text="Even if no asset names it.",
            ),
        ),
        migrations.RemoveField("blob", "created_at"),
    ]
