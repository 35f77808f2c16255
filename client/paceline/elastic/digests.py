"""Where the states of members differ, in words, and who differs from the others."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.tree import split
from paceline.elastic.state import TrainState
from paceline.errors import DivergenceError, PacelineError
from paceline.group import Group

__all__ = ["crc_of", "digests_of", "find_minority", "where_they_differ"]

_MOST_NAMES = 6
"""Names in a text: of so many of a model's arrays one sees which part it is."""


def digests_of(state: TrainState) -> dict[str, int]:
    """32 bits of each array that every member has whole, and of all else that a part has; the same names everywhere."""
    arrays = {name: crc_of(array) for name, array in state.named().items()}
    return {**arrays, **{name: crc_of(part.rest()) for name, (_, part) in state.objects.items()}}


def where_they_differ(names: Sequence[str], digests: NDArray[np.uint32]) -> str:
    """Which arrays and parts are not the same at all members.

    Args:
        names: of `digests_of`.
        digests: shape [W, number of names].
    """
    odd = [name for name, differs in zip(names, (digests != digests[0]).any(axis=0), strict=True) if differs]
    if not odd:  # the word is of the state, and of whether the update ran
        return "optimizer.step() ran in the step before at some of them only"
    more = f" and {len(odd) - _MOST_NAMES} more" if len(odd) > _MOST_NAMES else ""
    return f"they differ in {', '.join(odd[:_MOST_NAMES])}{more}"


def find_minority(group: Group, state: TrainState, step: int, digest: int) -> tuple[list[int], str]:
    """The ranks that do not hold what most members hold, and where they differ, in a sentence. A collective.

    Args:
        group: all members, of which some differ.
        state: this member's.
        step: the next one; of some members it may be another one.
        digest: of this member's state.

    Raises:
        DivergenceError: there is no majority, so nobody can tell who is right.
        PacelineError: the generation has failed.
    """
    found: Any = group.all_gather(np.array([step << 32 | digest], np.uint64))
    digests = digests_of(state)
    theirs: Any = group.all_gather(np.array([[*digests.values()]], np.uint32))
    where = where_they_differ(list(digests), theirs)
    with contextlib.suppress(PacelineError):
        group.barrier()  # so that nobody ends the generation before all have heard
    values, counts = np.unique(found, return_counts=True)
    if 2 * counts.max() <= group.size:
        text = f"before step {step}, members did not hold the same bits: {where}"
        raise DivergenceError(text, generation=group.generation)
    odd = [int(rank) for rank in np.flatnonzero(found != values[np.argmax(counts)])]
    members = ", ".join(str(group.members[rank]) for rank in odd)
    return odd, f"before step {step}, {members} did not hold the same bits as the others: {where}"


def crc_of(tree: Any) -> int:
    """CRC-32 of nested values.

    Raises:
        UnsupportedOp: there is one that could not be kept in a checkpoint.
    """
    skeleton, arrays = split(tree)
    crc = zlib.crc32(json.dumps(skeleton, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, zlib.crc32(name.encode(), crc))
    return crc
