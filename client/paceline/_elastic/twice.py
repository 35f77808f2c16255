"""Chooses the part that several ranks compute, and finds the rank with other bits (docs/decisions/18). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline._collectives.part_tree import part_range

_TWICE = 1 << 42
"""Tells this choice from the seeds of parts."""


class TwicePart(NamedTuple):
    """A part that several ranks compute.

    Attributes:
        number: the part.
        owner: the rank whose gradients count.
        checkers: the ranks that compute it too; the owner itself if it is alone.
    """

    number: int
    owner: int
    checkers: tuple[int, ...]


def twice_part(seed: int, step: int, world: int, parts: int, every: int) -> TwicePart | None:
    """Returns the part of a step that is computed twice; None if it is not the turn of the step, or `every` is 0.

    With three ranks or more there are two checkers, so that a majority can be right.
    """
    if not every or step % every:
        return None
    # Raw bits, since only they stay the same in all versions of NumPy (NEP 19).
    number = int(np.random.PCG64(np.random.SeedSequence([seed, step, _TWICE])).random_raw()) % parts
    owner = next(rank for rank in range(world) if number in range(*part_range(rank, world, parts)))
    return TwicePart(number, owner, tuple((owner + ahead) % world for ahead in range(1, max(2, min(3, world)))))


def odd_ones(found: Sequence[tuple[int, bytes]]) -> list[int]:
    """Returns the ranks whose digest differs from that of the majority; all of them if there is no majority.

    Args:
        found: pairs of rank and digest, one for each time that the part was computed.
    """
    digest, count = Counter(digest for _, digest in found).most_common(1)[0]
    odd = [rank for rank, other in found if other != digest]
    return sorted({rank for rank, _ in found} if odd and 2 * count <= len(found) else set(odd))
