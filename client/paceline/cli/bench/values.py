"""What ranks put in, and what each must get: the first result of every job is checked. Pure. W is the world size.

A figure says nothing if what was timed is not the collective that its row names.
"""

from __future__ import annotations

from paceline.arrays import Array

__all__ = ["ROOT", "check_result", "given", "result_parts"]

ROOT = 0
"""The root of every collective that has one."""


def given(rank: int, world: int, *, in_place: bool) -> float:
    """The value of all elements that a rank gives.

    Where a sum replaces what was summed, call after call, the values add up to 0: 0 stays, others would overflow.

    Args:
        rank: the rank.
        world: W.
        in_place: the result of a sum replaces the argument.
    """
    return rank - (world - 1) / 2 if in_place else rank + 1.0


def result_parts(collective: str, rank: int, world: int, *, in_place: bool) -> list[float]:
    """What a rank's result is made of: the values of its equal parts, in order; none where it gets nothing.

    Args:
        collective: as methods of `Group` spell it; or "send_recv", to the next rank, and from the one before.
        rank: whose result.
        world: W.
        in_place: as for `given`.
    """
    every = [given(other, world, in_place=in_place) for other in range(world)]
    match collective:
        case "all_reduce" | "reduce_scatter":
            return [sum(every)]
        case "all_gather" | "all_to_all":
            return every
        case "reduce":
            return [sum(every)] if rank == ROOT else []
        case "gather":
            return every if rank == ROOT else []
        case "broadcast" | "scatter":
            return [every[ROOT]]
        case "send_recv":
            return [every[(rank - 1) % world]]
        case "barrier":
            return []
    raise ValueError(f"no such collective: {collective}")


def check_result(result: Array | None, parts: list[float]) -> None:
    """Compares a result with `result_parts`.

    Raises:
        ArithmeticError: it is something else; the text says what.
    """
    if not parts:
        return
    assert result is not None
    rows = result.reshape(len(parts), -1)
    for part, row in zip(parts, rows, strict=True):
        low, high = float(row.min()), float(row.max())
        if not low == part == high:
            raise ArithmeticError(f"a part of the result lies between {low} and {high}, and should be {part}")
