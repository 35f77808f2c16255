"""The task: a collective whose arguments have been checked. And the barrier, which has none.

A task is made in the caller's thread, where user mistakes raise; its body runs when the operation's turn has come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from paceline.collectives.choose import Choice, where_of
from paceline.collectives.engine import Call, Engine
from paceline.collectives.program import AHEAD, SEGMENT_BYTES
from paceline.collectives.programs import barrier_program
from paceline.links.staging import (
    LONG_FRAME_BYTES,
    LONG_FRAMES_AHEAD,
    LONGEST_FRAME_BYTES,
    LONGEST_FRAMES_AHEAD,
    frame_bytes,
)

__all__ = ["Chooser", "Task", "barrier_task", "long_segment", "segment"]

T = TypeVar("T")

Chooser: TypeAlias = Callable[..., Choice]
"""As `choose.choose`: (collective, bytes, world, sums=..., nodes=...) to a choice."""


class Task(NamedTuple, Generic[T]):
    """A collective, ready to run.

    Attributes:
        signature: what its part 0 says.
        body: does it, once.
    """

    signature: bytes
    body: Callable[[Call], T]


def barrier_task(engine: Engine, choose: Chooser) -> Task[None]:
    """See `Group.barrier`; made once."""
    task: Task[None] | None = engine.plans.get(choose)
    if task is None:
        mesh = engine.mesh
        program = barrier_program(choose("barrier", 0, mesh.size, nodes=engine.nodes).schedule, mesh.rank, mesh.size)
        task = Task(engine.sign("barrier").encode(), lambda call: engine.run_empty(call, program))
        engine.plans[choose] = task
    return task


def segment(dtype: np.dtype[Any], engine: Engine) -> int:
    """Elements per frame; twice as many in shared memory, where a frame costs more than its bytes.

    Fewer where many ranks share a node, whose links have less memory each.

    Source: W=2, lent arrays of 16 and 64 MiB: 1.9 and 12.7 ms with frames of 1 MiB, 1.4 and 8.1 ms with 2 MiB.
    """
    nbytes = SEGMENT_BYTES * (2 if where_of(engine.nodes) == "one_node" else 1)
    return min(nbytes, frame_bytes(engine.neighbours)) // dtype.itemsize


_PAST_CACHES_BYTES = 32 << 20
"""Results of so many bytes always go past the caches: two members' fill the last cache of most core complexes. For
shorter ones `links.shm.copying` chooses. Source: lent arrays, W=2, cores that share 32 MiB: 16 MiB 0.83 ms, streamed
1.1; 32 MiB 2.9 ms both."""


def long_segment(dtype: np.dtype[Any], nbytes: int, engine: Engine) -> tuple[int, int]:
    """Elements per frame of an all_reduce, and how many frames a rank sends ahead (`program.AHEAD`).

    Where all are on one node, and no node has more than two, frames are twice as long as in other collectives, and half
    as many go ahead; a little longer, with one ahead, where the array does not fit the caches: those always stream.

    Args:
        dtype: of the array.
        nbytes: of the array.
        engine: of the group.

    Source: W=2, alternating, 2 MiB and 4 MiB: lent arrays of 8, 16 and 64 MiB 0.63, 2.06, 10.3 and 0.57, 1.91, 10.0 ms,
    others 1.85, 4.55, 17.6 and 1.69, 4.32, 17.1. W=3 on 2 cores: up to 6 % more or less, by size.
    """
    if engine.neighbours == 1 and where_of(engine.nodes) == "one_node":
        if nbytes >= _PAST_CACHES_BYTES:
            return LONGEST_FRAME_BYTES // dtype.itemsize, LONGEST_FRAMES_AHEAD
        return LONG_FRAME_BYTES // dtype.itemsize, LONG_FRAMES_AHEAD
    return segment(dtype, engine), AHEAD
