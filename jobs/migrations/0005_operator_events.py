from __future__ import annotations

from django.db import migrations, models

KINDS = (
    "submitted",
    "claimed",
    "step_finished",
    "resubmitted",
    "retry",
    "handed_back",
    "cancel_asked",
    "succeeded",
    "failed",
    "canceled",
    "operator",
)


class Migration(migrations.Migration):
    dependencies = [("jobs", "0004_job_refused_by")]
    operations = [
        migrations.AlterField(
            "jobevent",
            "kind",
            models.CharField(
                max_length=20, choices=[(kind, kind.replace("_", " ").title()) for kind in KINDS]
            ),
        ),
    ]
