"""Goes through the microbatches of a step as `step.microbatches` does, without a coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline._base.shares import Shares
from paceline._microbatch.attempt import StepAttempt
from paceline._microbatch.rank_plan import usual_plan

__all__ = ["microbatches"]


def microbatches(
    group: Any, leaves: int, attempt: StepAttempt | None = None, shares: Shares | None = None
) -> Iterator[int]:
    """Yields the number of each microbatch of this rank while it runs; behind the loop the group is between two.

    Args:
        group: the ranks.
        leaves: V.
        attempt: the attempt at the step; None for an undisturbed one.
        shares: those of an undisturbed one; None for equal ones.
    """
    attempt = StepAttempt(usual_plan(group.rank, group.size, leaves, shares)) if attempt is None else attempt
    for turn in attempt.turns():
        attempt.enter(turn)
        group._core.set_order(turn)
        yield turn.number
        attempt.leave(turn, whole=True)
        group._core.set_order(attempt.between)
