"""A worker of `paceline bench`: python -m paceline.cli.bench.worker COLLECTIVE BYTES..."""

from __future__ import annotations

import sys

import paceline
from paceline.cli.bench.arithmetic import make_row
from paceline.cli.bench.measure import measure
from paceline.session.launcher import tell_launcher

__all__ = ["main"]


def main(collective: str, sizes: list[int]) -> None:
    """Measures each size; rank 0 tells the rows."""
    with paceline.join() as session:
        for size in sizes:
            times = measure(session.group, collective, size)
            if session.rank == 0:
                tell_launcher("bench", make_row(collective, "grpc", session.size, size, times).as_dict(), wait_s=5.0)


if __name__ == "__main__":
    main(sys.argv[1], [int(size) for size in sys.argv[2:]])
