"""A worker of `paceline demo`: python -m paceline.demo.worker."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import paceline
from paceline.demo.data import load_digits
from paceline.demo.training import Plan, train
from paceline.session.launcher import tell_launcher

__all__ = ["main"]

_RESULT_WAIT_S = 5.0
"""A step's news may get lost when the launcher is slow; the result must not."""


def main() -> None:
    """Joins, trains, and tells the launcher how it goes."""
    digits = load_digits()
    with paceline.join() as session:
        outcome = train(session, digits, Plan(), _tell)
        if session.rank == 0:
            tell_launcher("result", {**asdict(outcome), "world_size": session.size}, wait_s=_RESULT_WAIT_S)


def _tell(kind: str, facts: dict[str, Any]) -> None:
    tell_launcher(kind, facts)


if __name__ == "__main__":
    main()
