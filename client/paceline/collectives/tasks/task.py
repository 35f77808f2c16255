"""The task: a collective whose arguments have been checked. And the barrier, which has none.

A task is made in the caller's thread, where user mistakes raise; its body runs when the operation's turn has come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from paceline.collectives.choose import Choice, where_of
from paceline.collectives.engine import Call, Engine
from paceline.collectives.program import SEGMENT_BYTES
from paceline.collectives.programs import barrier_program
from paceline.links.shm.layout import frame_bytes

__all__ = ["Chooser", "Task", "barrier_task", "segment"]

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
