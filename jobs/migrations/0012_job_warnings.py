from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("jobs", "0011_preview")]
    operations = [
        migrations.AddField("job", "warnings", models.JSONField(default=list, blank=True)),
    ]
