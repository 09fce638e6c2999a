from __future__ import annotations

from django.db import migrations

# A row is written several times in its life: room for HOT updates in its page, and dead rows cleared early,
# so that the claim does not walk over them.
FORWARDS = """ALTER TABLE jobs_job SET (
    fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 200,
    autovacuum_analyze_scale_factor = 0.02)"""
BACKWARDS = """ALTER TABLE jobs_job RESET (
    fillfactor, autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold, autovacuum_analyze_scale_factor)"""


class Migration(migrations.Migration):
    dependencies = [("jobs", "0001_initial")]
    operations = [migrations.RunSQL(FORWARDS, BACKWARDS)]
