"""How the shards of a stream take turns, sample by sample."""

from __future__ import annotations

__all__ = ["one_by_one"]


def one_by_one(lengths: list[int], batch: int) -> list[list[int]]:
    """Returns how many samples each shard gives to each step of an epoch, by taking them one by one."""
    left, turn, steps = list(lengths), 0, list[list[int]]()
    while any(left):
        shares = [0] * len(left)
        while any(left) and sum(shares) < batch:
            if left[turn]:
                left[turn] -= 1
                shares[turn] += 1
            turn = (turn + 1) % len(left)
        steps.append(shares)
    return steps
