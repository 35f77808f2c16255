"""The all_reduce whose large part is carried by an engine (`paceline.engines`), and its small part by links.

Links go first. So the engine starts a sum only when all members are in the same operation, with the same sizes.
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
from paceline.engines import DataEngine, EngineFailed, EngineTimeout, OnDevice
from paceline.errors import LinkUnavailable

_SLICE = 1.0
"""Seconds for which an aborted engine is waited for at a time; it takes milliseconds."""


def carried_task(
    engine: Engine,
    carrier: DataEngine,
    x: Any,
    tail: Array,
    choose: Chooser,
    divisor: Callable[[], float] | None,
    patience: float,
) -> Task[Any]:
    """Makes the task of `Group.all_reduce_carried`.

    The carrier sums `x`, shape [N], in place and divides it by what `divisor` returns. Links sum `tail`, shape [M], in
    place by the schedule that `choose` picks, and notice a failure within `patience` seconds after the carrier has.
    """
    detail = f" {carrier.name}={str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    links = reducing_task(engine, "all_reduce", tail, "sum", tail, choose, detail=detail)
    fault = engine.mesh.fault

    def body(call: CollectiveCall) -> Any:
        links.body(call)
        try:
            carrier.await_ready(call.deadline)
            carrier.all_reduce(x).wait(call.deadline)
        except BaseException as error:
            _let_go(carrier)
            if isinstance(error, EngineFailed):
                _await_fault(fault, patience)
            fault.check()
            if isinstance(error, EngineFailed | EngineTimeout):
                raise LinkUnavailable(f"the engine {carrier.name!r} did not sum gradients: {error}") from error
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
