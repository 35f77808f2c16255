"""Goes through the microbatches of a step as `step.microbatches` does, without a coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline._microbatch.attempt import StepAttempt
from paceline._microbatch.rank_plan import even_plan

__all__ = ["microbatches"]


def microbatches(group: Any, leaves: int, attempt: StepAttempt | None = None) -> Iterator[int]:
    """Yields the number of each microbatch of this rank while it runs; behind the loop the group is between two.

    Args:
        group: the ranks.
        leaves: V.
        attempt: the attempt at the step; None for an undisturbed one.
    """
    attempt = StepAttempt(even_plan(group.rank, group.size, leaves)) if attempt is None else attempt
    for turn in attempt.turns():
        attempt.enter(turn)
        group.set_order(turn)
        yield turn.number
        attempt.leave(turn, whole=True)
        group.set_order(attempt.between)
