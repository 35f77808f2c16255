"""What DDP does during a backward pass of autograd, from the first gradient to the end of the pass.

The first gradient opens the pass, and each gradient is written to its bucket. A callback of autograd's engine ends the
pass, so that errors are raised by `loss.backward()`.
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
from paceline.torch.parameter import TorchModule, TorchParameter
from paceline.torch.uneven import Uneven

__all__ = ["Passes"]

_OUTSIDE = -1
"""The number that autograd reports outside of a backward pass."""


class SummedPasses(Accumulation):
    """An accumulation in which passes add up, as they do in torch: the mean over the ranks is taken of their sum.

    The weight of a rank is the average weight of its passes. So with the same weights in each pass, the result is the
    sum over the passes of the mean over the ranks.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self._torch_parameters: Mapping[str, TorchParameter] = parameters
        self._left: dict[str, int] = {}
        """Version of each gradient when the last pass left it."""

    @property
    def counts(self) -> float:
        """See `Accumulation`."""
        return self.weight / max(1, self.micro_batches)

    def add(self, weight: float, *, alone: bool) -> float:
        """See `Accumulation`. In a world of one all passes have the same weight, as without a wrapper."""
        return super().add(float(weight > 0) if alone else weight, alone=False)

    def mark(self) -> None:
        """See `Accumulation`."""
        super().mark()
        self._left = {path: _version(p) for path, p in self._torch_parameters.items()}

    def written_by_others(self, *, or_zeros: bool) -> str | None:
        """None: gradients that the user has written are used as they are, as in torch."""
        del or_zeros
        return None

    def drop_if_cleared(self) -> None:
        """Forgets a round all of whose gradients were cleared, by None or by zeros."""
        if not self.micro_batches:
            return
        changed = any(_version(p) != self._left[path] for path, p in self._torch_parameters.items())
        if changed and not any(
            p.tensor.grad.any() for p in self._torch_parameters.values() if p.tensor.grad is not None
        ):
            self.drop()


def _version(parameter: TorchParameter) -> int:
    """The gradient's version, which changes whenever torch changes the gradient; -1 without a gradient."""
    gradient = parameter.tensor.grad
    return -1 if gradient is None else int(gradient._version)


class Passes(DDP):
    """Reduces the gradients of a torch module during the backward pass; arguments as of `paceline.DDP`.

    Attributes:
        factor: see `AutogradObserver`.
        uneven: coordinates ranks that run out of inputs before others.
    """

    module: TorchModule
    _round: Accumulation
    _trains_narrow = True

    def __init__(self, module: Any, group: Any, **settings: Any) -> None:
        super().__init__(TorchModule(module), group, **settings)
        self.factor = 1.0
        self.uneven = Uneven(group)
        self._weight: float | None = None
        """Weight of the next pass, if the user has given one."""
        self._watch: AbstractContextManager[None] | None = None
        """Watches gradients while a pass is under way; None otherwise."""
        self._task = _OUTSIDE
        """Autograd's number of the pass that is under way."""
        self._sends = True
        """Whether the pass that is under way ends with a reduction."""
        self._begun = 0
        """Number of passes so far."""

    # Called around forward and backward -------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Agrees on the model with the other ranks, and drops the rest of a backward pass that raised."""
        if self._watch is not None and torch._C._current_graph_task_id() == _OUTSIDE:
            self._abandon(StepOrderError("the last backward pass did not finish"))
        self.prepare()

    @contextmanager
    def weighing(self, weight: float | None) -> Iterator[None]:
        """Gives the backward pass inside the block a weight; None for the usual one."""
        begun, self._weight = self._begun, weight
        try:
            yield
            if self._begun == begun:  # the pass reached no parameter, but the other ranks wait for this one
                self._begin()
                self._end()
        except BaseException as error:
            if self._watch is not None:
                self._abandon(error)
            raise
        finally:
            self._weight = None

    def sync_gradients(self, weight: float | None = None) -> None:
        """Reduces the gradients that passes in `no_sync` have accumulated; does nothing if there are none."""
        if weight is not None:
            raise StepOrderError("each pass got its weight in backward(): sync_gradients() takes none")
        self._prepare(may_change=False)
        self._round.drop_if_cleared()
        if self._round.micro_batches:
            with self._all_or_nothing():
                self.uneven.before_reduction()
                self._reduce()

    def reduce_without_input(self) -> None:
        """Takes part in a reduction of the other ranks with weight zero."""
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

    def before(self, parameter: TorchParameter) -> None:
        """See `AutogradObserver`."""
        try:
            task = torch._C._current_graph_task_id()
            if self._watch is None:
                self._begin()
                self._task = task
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
            elif task != self._task:
                raise StepOrderError(
                    "a backward pass began before the last one was finished: either it is nested (checkpoint with "
                    "use_reentrant=True, which DDP does not support), or the last one raised and no forward pass "
                    "followed"
                )
            if parameter._observer is not None:
                parameter._observer.before_gradient(parameter)
        except BaseException as error:
            self._abandon(error)
            raise

    def after(self, parameter: TorchParameter) -> None:
        """See `AutogradObserver`."""
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
        """Ends the pass: autograd has computed all gradients."""
        watch, self._watch = self._watch, None
        if watch is None:  # abandoned before its end
            return
        with self._all_or_nothing():
            watch.__exit__(None, None, None)
            if self._sends:
                self._reduce()

    def _abandon(self, error: BaseException) -> None:
        """Drops all gradients of a failed attempt, because some of them may be reduced and some not."""
        self._close(error)
        if self._reducer is not None:
            self._reducer.give_up()
            self._round.reset()
            self._round.mark()

    def _close(self, error: BaseException) -> None:
        """Stops watching gradients."""
        watch, self._watch = self._watch, None
        if watch is not None:
            try:
                watch.__exit__(type(error), error, error.__traceback__)
            except BaseException as same:
                if same is not error:
                    raise

    # Differences to NumPy ---------------------------------------------------------------------------------------------

    def _new_round(self, reducer: GradientReducer) -> Accumulation:
        return SummedPasses(reducer.parameters)

    def _agree(self, *, may_change: bool) -> Reducer:
        reducer = super()._agree(may_change=may_change)
        for _, parameter in self.module.named_parameters():
            parameter.listen(self)
        return reducer

    def _give_buffers(self, root: int = 0) -> None:
        super()._give_buffers(self.uneven.root)
