"""A worker of `paceline demo`: python -m paceline.demo.worker WORKERS KILL_AT_STEP."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from typing import Any

import paceline
from paceline.demo.data import load_digits
from paceline.demo.training import Plan, train
from paceline.session.identity import process_identity
from paceline.session.launcher import tell_launcher

__all__ = ["main"]

_WAIT_S = 30.0
"""For a launcher that is slow. The count of samples needs every record, so training rather waits."""


def main() -> None:
    """Joins, trains, and tells the launcher how it goes."""
    began = _began()
    os.environ.setdefault("PACELINE_FLIGHT_DIR", "off")  # nobody has to ask what a worker died of here
    workers, kill_at_step = (int(argument) for argument in sys.argv[1:])
    digits = load_digits()
    with paceline.join() as session:
        _tell("joined", {"began": began})
        outcome = train(session, digits, Plan(workers, kill_at_step), _tell)
        if session.rank == 0:
            _tell("result", asdict(outcome))


def _tell(kind: str, facts: dict[str, Any]) -> None:
    """Tells the launcher, with the time, on the clock that all processes of this machine share."""
    tell_launcher(kind, {**facts, "at": time.monotonic()}, wait_s=_WAIT_S)


def _began() -> float:
    """When this process was started, to 10 ms; now, where the system does not tell."""
    ticks, now = process_identity().start_ticks, time.monotonic()
    if not ticks or not hasattr(time, "CLOCK_BOOTTIME"):
        return now
    return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


if __name__ == "__main__":
    main()
