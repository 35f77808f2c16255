"""The task: a collective whose arguments have been checked. And the barrier, which has none.

A task is made in the caller's thread, where user mistakes raise; its body runs when the operation's turn has come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from paceline.collectives.choose import Choice
from paceline.collectives.engine import Call, Engine
from paceline.collectives.program import SEGMENT_BYTES
from paceline.collectives.programs import barrier_program

__all__ = ["Chooser", "Task", "barrier_task", "segment"]

T = TypeVar("T")

Chooser: TypeAlias = Callable[..., Choice]
"""As `choose.choose`: (collective, bytes, world, sums=...) to a choice."""

_NOTHING = np.empty(0, np.uint8)


class Task(NamedTuple, Generic[T]):
    """A collective, ready to run.

    Attributes:
        signature: what its part 0 says.
        body: does it, once.
    """

    signature: bytes
    body: Callable[[Call], T]


def barrier_task(engine: Engine, choose: Chooser) -> Task[None]:
    """See `Group.barrier`."""
    mesh = engine.mesh
    program = barrier_program(choose("barrier", 0, mesh.size).schedule, mesh.rank, mesh.size)
    return Task(engine.sign("barrier").encode(), lambda call: engine.run(call, program, _NOTHING, _NOTHING))


def segment(dtype: np.dtype[Any]) -> int:
    """Elements per frame."""
    return SEGMENT_BYTES // dtype.itemsize
