"""A worker of `paceline bench`: python -m paceline.cli.bench.worker JOB..., as `Job.to_argument` writes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import paceline
from paceline.cli.bench.arithmetic import make_row
from paceline.cli.bench.measure import measure
from paceline.cli.bench.plan import Job
from paceline.session.launcher import tell_launcher

__all__ = ["main"]


def main(jobs: Sequence[Job]) -> None:
    """Measures each job; rank 0 tells the rows."""
    with paceline.join() as session:
        for job in jobs:
            for schedule, times in measure(session.group, job):
                if session.rank == 0:
                    row = make_row(job.collective, schedule, "grpc", session.size, job.bytes, times)
                    tell_launcher("bench", row.as_dict(), wait_s=5.0)


if __name__ == "__main__":
    main([Job.from_argument(argument) for argument in sys.argv[1:]])
