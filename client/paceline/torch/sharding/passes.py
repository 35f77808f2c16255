"""A backward pass that torch runs, as the FSDP for NumPy modules knows it: it begins, goes through units, and ends.

A unit is entered when the gradient of one of its outputs is there, and left when those of its inputs are. By then those
of its parameters are there too: of what it can do next, autograd always does first what came last in the forward pass,
and gradients of parameters before all else. Both points follow from how units hang together, and not from which of
their parameters a rank has used: so all ranks come to them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any
from weakref import ref

import torch

from paceline.errors import StepOrderError
from paceline.parallel.sharding.unit import Unit
from paceline.torch.sharding.modules import Call, mapped, tensors_in

__all__ = ["Pass", "Run"]


class Pass:
    """A backward pass under way. To be made inside of it.

    Args:
        context: of the whole pass; gives the factor.
        running: makes the context of a unit's run.
        done: called when torch is through with the pass, before its `backward()` returns.

    Attributes:
        factor: what gradients are to be multiplied by.
    """

    def __init__(
        self,
        context: AbstractContextManager[float],
        running: Callable[[Unit], AbstractContextManager[None]],
        done: Callable[[], None],
    ) -> None:
        self._running = running
        self._inside: dict[int, list[ExitStack]] = {}
        """Runs under way, by the unit's identity."""
        self._whole = ExitStack()
        self.factor = self._whole.enter_context(context)
        callback = _Callback(done)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self._callback = ref(callback)

    @property
    def is_dead(self) -> bool:
        """True if torch has given the pass up: an error has ended it. Nobody calls back in that case."""
        return self._callback() is None

    def is_inside(self, unit: Unit) -> bool:
        """True between `enter` and `leave`."""
        return bool(self._inside.get(id(unit)))

    def enter(self, unit: Unit) -> None:
        """A run of a unit begins."""
        run = ExitStack()
        run.enter_context(self._running(unit))
        self._inside.setdefault(id(unit), []).append(run)

    def leave(self, unit: Unit) -> None:
        """A run of a unit ends; which of several does not matter."""
        if self.is_inside(unit):
            self._inside[id(unit)].pop().close()

    def end(self) -> None:
        """All runs end, also those of units whose inputs take no gradient, and with them the pass."""
        for runs in self._inside.values():
            while runs:
                runs.pop().close()
        self._whole.close()

    def abandon(self) -> None:
        """The pass has failed: what it has gathered counts for nothing."""
        error = StepOrderError("the backward pass did not come to its end")
        for stack in [run for runs in self._inside.values() for run in runs] + [self._whole]:
            with suppress(StepOrderError):
                stack.__exit__(type(error), error, None)


class _Callback:
    """A function that torch keeps for as long as the pass lives."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done

    def __call__(self) -> None:
        self._done()


class Run:
    """One forward run of a unit, and the run backward that it will have.

    Args:
        enter: called when that begins.
        leave: called when it ends.
    """

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter = enter
        self._leave = leave
        self._inputs = self._awaited = 0
        self._is_entered = False

    def of_inputs(self, call: Call) -> Call:
        """What the unit is to be called with, so that the run hears of the gradients."""
        args, kwargs = mapped((call.args, call.kwargs), self._watch_input)
        return Call(args, kwargs)

    def of_outputs(self, outputs: Any) -> Any:
        """What the unit has returned, from where the run hears of the gradients."""
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._begin)
        return outputs

    def _watch_input(self, tensor: Any) -> Any:
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        self._inputs += 1
        alias = tensor.view_as(tensor)  # its gradient is that of this run alone, whoever else uses the tensor
        alias.register_hook(self._end)
        return alias

    def _begin(self, gradient: Any) -> None:
        del gradient
        if not self._is_entered:
            self._is_entered = True
            self._awaited = self._inputs
            self._enter()

    def _end(self, gradient: Any) -> None:
        del gradient
        self._awaited -= 1
        if self._is_entered and not self._awaited:
            self._is_entered = False
            self._leave()
