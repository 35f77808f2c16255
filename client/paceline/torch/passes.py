"""A backward pass of autograd, from its first gradient to its end: what DDP does meanwhile.

The first gradient opens the pass, each goes to its bucket, and when autograd is through, the pass ends by a callback of
its engine: so errors come out of `loss.backward()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from paceline.errors import StepOrderError
from paceline.parallel.accumulation import Accumulation
from paceline.parallel.ddp import DDP
from paceline.parallel.reducer import Reducer
from paceline.parallel.wrapper import GradientReducer, checked_weight
from paceline.torch.parameter import ShownModule, ShownParameter
from paceline.torch.uneven import Uneven

__all__ = ["Passes"]

_OUTSIDE = -1
"""Number of autograd's pass where there is none."""


class Sums(Accumulation):
    """Passes add up, as they do in torch: the mean over the ranks is taken of their sum.

    Ranks weigh what their passes weigh on average. So with the same weights in each pass, the result is the sum over
    the passes of the mean over the ranks.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self._shown: Mapping[str, ShownParameter] = parameters
        self._left: dict[str, int] = {}
        """Version of each gradient when the last pass left it."""

    @property
    def counts(self) -> float:
        """See `Accumulation`."""
        return self.weight / max(1, self.micro_batches)

    def add(self, weight: float, *, alone: bool) -> float:
        """See `Accumulation`. Alone all passes count alike, as without a wrapper."""
        return super().add(float(weight > 0) if alone else weight, alone=False)

    def mark(self) -> None:
        """See `Accumulation`."""
        super().mark()
        self._left = {path: _version(p) for path, p in self._shown.items()}

    def written_by_others(self, *, or_zeros: bool) -> str | None:
        """Whatever the user has written counts as it is, as in torch."""
        del or_zeros
        return None

    def drop_if_cleared(self) -> None:
        """Forgets a round all of whose gradients were cleared, by None or by zeros."""
        if not self.micro_batches:
            return
        changed = any(_version(p) != self._left[path] for path, p in self._shown.items())
        if changed and not any(p.tensor.grad.any() for p in self._shown.values() if p.tensor.grad is not None):
            self.drop()


def _version(parameter: ShownParameter) -> int:
    """Changes when somebody changes the gradient through torch; -1 for none."""
    gradient = parameter.tensor.grad
    return -1 if gradient is None else int(gradient._version)


class Passes(DDP):
    """What reduces the gradients of a torch module; arguments as of `paceline.DDP`.

    Attributes:
        factor: see `Hearer`.
        uneven: for ranks that have no more inputs.
    """

    module: ShownModule
    _round: Accumulation
    _trains_narrow = True

    def __init__(self, module: Any, group: Any, **settings: Any) -> None:
        super().__init__(ShownModule(module), group, **settings)
        self.factor = 1.0
        self.uneven = Uneven(group)
        self._weight: float | None = None
        """Of the next pass, if somebody has given it one."""
        self._watch: AbstractContextManager[None] | None = None
        """While a pass is under way."""
        self._task = _OUTSIDE
        """Autograd's number of that pass."""
        self._sends = True
        """Whether that pass ends with a reduction."""
        self._begun = 0
        """Passes, ever."""

    # Whoever runs forward and backward --------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Agrees on the model, and drops what a backward pass that raised has left."""
        if self._watch is not None and torch._C._current_graph_task_id() == _OUTSIDE:
            self._abandon(StepOrderError("the backward pass before did not come to its end"))
        self.prepare()

    @contextmanager
    def weighing(self, weight: float | None) -> Iterator[None]:
        """For a backward pass inside the block, with that weight; None for the usual one."""
        begun, self._weight = self._begun, weight
        try:
            yield
            if self._begun == begun:  # it has reached no parameter, but the other ranks wait for this one
                self._begin()
                self._end()
        except BaseException as error:
            if self._watch is not None:
                self._abandon(error)
            raise
        finally:
            self._weight = None

    def sync_gradients(self, weight: float | None = None) -> None:
        """Reduces what passes in `no_sync` have left; does nothing if there is nothing."""
        if weight is not None:
            raise StepOrderError("each pass had its weight in backward(): there is no place for another")
        self._prepare(may_change=False)
        self._round.drop_if_cleared()
        if self._round.micro_batches:
            with self._all_or_nothing():
                self.uneven.before_reduction()
                self._reduce()

    def reduce_without_input(self) -> None:
        """Takes part in a reduction of the others, with nothing to give."""
        self._prepare(may_change=False)
        self._round.open()
        self._round.add(0.0, alone=False)
        with self._all_or_nothing():
            self._reduce()
        for _, parameter in self.named_parameters():
            parameter.grad = None

    def drop_gradients(self) -> None:
        """See `Wrapper`."""
        self._close(StepOrderError("the step was undone"))
        super().drop_gradients()

    # Autograd, through the parameters ---------------------------------------------------------------------------------

    def before(self, parameter: ShownParameter) -> None:
        """See `Hearer`."""
        try:
            task = torch._C._current_graph_task_id()
            if self._watch is None:
                self._begin()
                self._task = task
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
            elif task != self._task:
                raise StepOrderError(
                    "a backward pass began before the last one was through: a nested one (checkpoint with "
                    "use_reentrant=True, which DDP cannot do), or the last one raised, and no forward pass came since"
                )
            if parameter._observer is not None:
                parameter._observer.before_gradient(parameter)
        except BaseException as error:
            self._abandon(error)
            raise

    def after(self, parameter: ShownParameter) -> None:
        """See `Hearer`."""
        if parameter._observer is None:
            return
        try:
            parameter._observer.after_gradient(parameter)
        except BaseException as error:
            self._abandon(error)
            raise

    def _begin(self) -> None:
        reducer = self._prepare(may_change=False)
        self._begun += 1
        self._sends = self._syncing
        self._round.open()
        weight = checked_weight(self.group.share if self._weight is None else self._weight)
        self.factor = self._round.add(weight, alone=self.group.size == 1)
        counts = reducer.ignoring if self.factor == 0 else reducer.watching
        if self._sends:
            self.uneven.before_reduction()
        self._watch = counts(weight=self._round.counts, early=self._sends)
        self._watch.__enter__()

    def _end(self) -> None:
        """Autograd is through."""
        watch, self._watch = self._watch, None
        if watch is None:  # given up meanwhile
            return
        with self._all_or_nothing():
            watch.__exit__(None, None, None)
            if self._sends:
                self._reduce()

    def _abandon(self, error: BaseException) -> None:
        """An attempt that fails leaves no gradient, for part of it may be reduced and part not."""
        self._close(error)
        if self._reducer is not None:
            self._reducer.give_up()
            self._round.reset()
            self._round.mark()

    def _close(self, error: BaseException) -> None:
        """Watches no more."""
        watch, self._watch = self._watch, None
        if watch is not None:
            try:
                watch.__exit__(type(error), error, error.__traceback__)
            except BaseException as same:
                if same is not error:
                    raise

    # What is torch's --------------------------------------------------------------------------------------------------

    def _new_round(self, reducer: GradientReducer) -> Accumulation:
        return Sums(reducer.parameters)

    def _agree(self, *, may_change: bool) -> Reducer:
        reducer = super()._agree(may_change=may_change)
        for _, parameter in self.module.named_parameters():
            parameter.listen(self)
        return reducer

    def _give_buffers(self, root: int = 0) -> None:
        super()._give_buffers(self.uneven.root)
