from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("jobs", "0003_backend_rest")]
    operations = [
        migrations.AddField("job", "refused_by", models.JSONField(default=list, blank=True)),
    ]
