"""Chooses the microbatch that several ranks compute, and finds the rank with other bits (docs/decisions/18)."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline._base.shares import Shares, ranges_of
from paceline._links.base import Peer
from paceline._links.fault import Suspicion
from paceline._microbatch.microbatch import StepGroup
from paceline.errors import DivergenceError, PacelineError
from pacelinepb.v1.errors_pb2 import ErrorReason

_log = logging.getLogger("paceline.elastic")

_TWICE = 1 << 42
"""Tells this choice from the seeds of microbatches."""


class ComputedTwice(NamedTuple):
    """A microbatch that several ranks compute: its owner, whose gradients count, and the checkers.

    An owner that is alone is the only checker.
    """

    number: int
    owner: int
    checkers: tuple[int, ...]


def computed_twice(
    seed: int, step: int, world: int, leaves: int, every: int, shares: Shares | None = None
) -> ComputedTwice | None:
    """Returns the microbatch that is computed twice; None if it is not the turn of the step, or `every` is 0.

    With three ranks or more there are two checkers, so that a majority can be right.
    """
    if not every or step % every:
        return None
    # Raw bits, since only they stay the same in all versions of NumPy (NEP 19).
    number = int(np.random.PCG64(np.random.SeedSequence([seed, step, _TWICE])).random_raw()) % leaves
    owner = next(rank for rank, (_, hi) in enumerate(ranges_of(world, leaves, shares)) if number < hi)
    return ComputedTwice(number, owner, tuple((owner + ahead) % world for ahead in range(1, max(2, min(3, world)))))


def odd_ones(found: Sequence[tuple[int, bytes]]) -> list[int]:
    """Returns the ranks of the digests that differ from the majority; all if there is none."""
    digest, count = Counter(digest for _, digest in found).most_common(1)[0]
    odd = [rank for rank, other in found if other != digest]
    return sorted({rank for rank, _ in found} if odd and 2 * count <= len(found) else set(odd))


def compare_twice(group: StepGroup, what: ComputedTwice, digests: Mapping[bool, Any], step: int) -> None:
    """Compares the gradients of a microbatch that several ranks have computed. A collective.

    `digests` are this rank's: of what it computed as the owner (False), and to check it (True). A rank with other bits
    than the majority raises `DivergenceError`; so do all that have computed it if there is no majority.
    """
    mesh = group._core.mesh
    mine = np.frombuffer(digests[False].digest() + digests[True].digest(), np.uint8)
    rows: Any = group.all_gather(mine[None], label=f"twice-{step}")
    found = [(what.owner, rows[what.owner, :32].tobytes())]
    found += [(rank, rows[rank, 32:].tobytes()) for rank in what.checkers]
    if not (odd := odd_ones(found)):
        return
    with contextlib.suppress(PacelineError):
        group.barrier()  # no member may end the generation before all know
    text = _said_of(
        odd, [rank for rank, _ in found], mesh.peers, f"gradients of microbatch {what.number} in step {step}"
    )
    _log.error("%s", text)
    if mesh.rank in odd or len(odd) == len({rank for rank, _ in found}):
        raise DivergenceError(text, ranks=tuple(odd), generation=mesh.generation)
    operation = group._core.progress().operation
    mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, odd[0], operation, text))
    mesh.fault.check()


def _said_of(odd: Sequence[int], ranks: Sequence[int], peers: Sequence[Peer], what: str) -> str:
    """Returns a sentence about the ranks that computed other gradients of a microbatch than the others."""
    names = " and ".join(str(peers[rank]) for rank in odd)
    why = (
        "A processor or memory is at fault, or the script does not compute a microbatch from its samples and seed alone"
    )
    if set(odd) != set(ranks):
        rest = " and ".join(str(peers[rank]) for rank in ranks if rank not in odd)
        return f"{names} computed other {what} than {rest}. {why}"
    return f"{names} computed different {what}{' in two tries' if len(odd) == 1 else ''}. {why}"
