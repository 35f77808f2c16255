"""Operations whose large arrays are carried by an engine (`paceline.engines`), and a small one by links.

Links go first. So the engine starts only when all members are in the same operation, with the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

import numpy as np

from paceline._base.arrays import Array
from paceline._base.waits import Latch
from paceline._collectives.engine import CollectiveCall, Engine
from paceline._collectives.tasks import Chooser, Task, reducing_task
from paceline._links.fault import Fault
from paceline.engines import DataEngine, EngineFailed, EngineTimeout, OnDevice, Ticket
from paceline.errors import LinkUnavailable

_SLICE = 1.0
"""Seconds for which an aborted engine is waited for at a time; it takes milliseconds."""


def carried_task(
    engine: Engine,
    carrier: DataEngine,
    start: Callable[[DataEngine], Ticket],
    x: Any,
    tail: Array,
    choose: Chooser,
    patience: float,
    detail: str = "",
    divisor: Callable[[], float] | None = None,
) -> Task[Any]:
    """Makes a task of a group's methods `..._carried`.

    `start` has the carrier change `x` in place, which is then divided by what `divisor` returns. Links sum `tail`,
    shape [M], in place by the schedule that `choose` picks, and notice a failure within `patience` seconds after the
    carrier has. Ranks must also agree on the dtype and shape of `x`, and on `detail`.
    """
    detail = f" {carrier.name}={str(x.dtype).removeprefix('torch.')}{list(x.shape)}{detail}"
    links = reducing_task(engine, "all_reduce", tail, "sum", tail, choose, detail=detail)
    fault = engine.mesh.fault

    def body(call: CollectiveCall) -> Any:
        links.body(call)
        try:
            carrier.await_ready(call.deadline)
            start(carrier).wait(call.deadline)
        except BaseException as error:
            _let_go(carrier)
            if isinstance(error, EngineFailed):
                _await_fault(fault, patience)
            fault.check()
            if isinstance(error, EngineFailed | EngineTimeout):
                raise LinkUnavailable(f"the engine {carrier.name!r} has failed: {error}") from error
            raise
        if divisor is not None:
            _divide(x, divisor())
        return x

    return Task(links.signature, body)


def _divide(x: Any, total: float) -> None:
    if isinstance(x, OnDevice):
        x.tensor.div_(total)
    else:
        with np.errstate(all="ignore"):  # infinities are valid here
            np.divide(x, total, out=x)


def _let_go(carrier: DataEngine) -> None:
    """Aborts the engine, and returns when it touches the array no more (I7), even if interrupts come.

    The engine is asked, not a ticket: if an interrupt came inside of `all_reduce`, there is a sum but no ticket.
    """
    let_go = False
    while not let_go:
        with suppress(KeyboardInterrupt):
            while not let_go:  # a loop inside of `suppress`, because an interrupt may also come between two rounds
                carrier.abort()
                let_go = carrier.drained(monotonic() + _SLICE)


def _await_fault(fault: Fault, seconds: float) -> None:
    """Waits until links have noticed the failure too: they know which member it was."""
    noticed = Latch()
    fault.on_failure(noticed.set)
    try:
        noticed.wait(seconds)
    finally:
        fault.forget(noticed.set)
