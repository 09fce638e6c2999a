"""Break everything at random while portraits are drawn, then count: python -m bench.chaos --help"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import django

from jobs.tests.databases import OwnPostgres


@dataclass(frozen=True)
class Plan:
    jobs: int
    seconds: float
    workers: int
    lease: float
    seed: int

    @property
    def run_seconds(self) -> float:
        """What one drawing takes: so long that there is work to the end of the trouble."""
        return max(0.05, self.seconds / self.jobs)


def read_plan() -> Plan:
    parser = argparse.ArgumentParser(prog="bench.chaos", description=__doc__)
    parser.add_argument("--jobs", type=int, default=60, help="portraits to draw (60)")
    parser.add_argument("--seconds", type=float, default=60, help="how long trouble lasts (60)")
    parser.add_argument("--workers", type=int, default=8, help="worker processes (8)")
    parser.add_argument("--lease", type=float, default=3, help="GENFLOW_LEASE_SECONDS (3)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the trouble")  # noqa: S311
    return Plan(**vars(parser.parse_args()))


def main() -> int:
    plan = read_plan()
    say(
        f"seed {plan.seed}: {plan.jobs} jobs on {plan.workers} workers, {plan.seconds:g} s of trouble"
    )
    with ExitStack() as stack:
        server = stack.enter_context(OwnPostgres())
        set_up_django(server)
        # These import the models, for which Django must know its database.
        from bench.trouble import House, make_trouble
        from bench.verdict import judge
        from jobs.tests.helpers import queue_job

        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="genflow-chaos-")))
        house = stack.enter_context(House(plan, server, logs))
        jobs = [queue_job(seed=n, max_attempts=1000).pk for n in range(plan.jobs)]
        house.open()
        house.wait_for_work()
        make_trouble(house, random.Random(plan.seed), time.monotonic() + plan.seconds)  # noqa: S311
        house.calm_down()
        house.wait_for(jobs)
        house.close()
        verdict = judge(house, jobs)
        say(verdict.text)
        return 0 if verdict.good else 1


def set_up_django(server: OwnPostgres) -> None:
    where = server.address()
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "genflow_project.settings",
        "DATABASE_URL": f"postgres://{where['USER']}:@/{where['HOST']}/{where['NAME']}",
        "SECRET_KEY": "chaos",
        "ALLOWED_HOSTS": "localhost",
        "LOG_LEVEL": "WARNING",
    }
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
