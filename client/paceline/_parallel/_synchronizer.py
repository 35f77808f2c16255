"""The data-parallel core, which DDP and FSDP for NumPy and for torch modules share.

How a gradient travels:

1. At first use the ranks *agree* on the model (`_agreement`) and take rank 0's values. The model then makes a
   `GradientReducer` for its parameters: `BucketReducer` for DDP, `UnitRunner` for FSDP.
2. The front opens a backward pass (`GradientSynchronizer.backward_pass`). The `Accumulation` counts this rank's weight,
   and says by which factor gradients must be multiplied. The reducer observes the parameters.
3. The module (or a hook of autograd) *writes* a gradient into its parameter, which puts it straight into its home: a
   slice of a bucket for DDP, of its unit's array of gradients for FSDP. The parameter tells the reducer.
4. When a bucket or unit has all of its gradients on this rank, the reducer *sends* it: a sum over the ranks starts in
   the background, in the same order on every rank. The backward pass goes on meanwhile.
5. When the pass ends, the reducer sends what is left, waits for everything, and divides the sums by the total weight
   of all ranks. `Parameter.grad` is then the mean, in the memory in which it arrived; the optimizer reads it there.
6. All ranks take the buffers of one rank. If anything fails on the way, the synchronizer drops all gradients of the
   attempt, because some may be reduced and others not.

The parts, and what each is responsible for:

- `GradientSynchronizer`: this order. It knows nothing of buckets, units or frameworks.
- `Accumulation`: weights and micro-batches of this rank.
- `GradientReducer`: which gradients are ready, and which collectives are running.
- `Parameter`: where one gradient lies. A subclass adapts the parameter of another framework.
- `GradientTransport` (DDP), `Group` (FSDP): moving memory between the ranks.
- The fronts (`DDP` and `FSDP` of `paceline` and of `paceline.torch`): running backward, and the users' API.

B is the number of samples in this rank's batch, W the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline._base.sum_order import EVEN, Node, SumOrder
from paceline._group import Group
from paceline._microbatch.leaf_buffers import LeafBuffers
from paceline._parallel._accumulation import Accumulation
from paceline._parallel._agreement import give
from paceline._parallel._parameter import Parameter
from paceline.errors import SizeMismatch, StepOrderError

SpreadParameters: TypeAlias = tuple[Group | None, Sequence[Parameter]]
"""Parameters, and the ranks over which they are spread; None if this rank has all of them whole."""


class GradientReducer(Protocol):
    """Reduces the gradients of one backward pass over the ranks."""

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The trained parameters, by path."""

    @property
    def sources(self) -> Mapping[str, Parameter]:
        """The parameters whose gradients backward writes, by path."""

    def fits(self) -> bool:
        """False once a parameter has been frozen or unfrozen."""

    def watching(self, *, weight: float, early: bool) -> AbstractContextManager[None]:
        """Observes the backward pass inside the block; with `early`, gradients may be sent while it runs."""

    def ignoring(self, *, weight: float, early: bool) -> AbstractContextManager[None]:
        """Drops the gradients of the backward pass inside the block; calls the same collectives as the other ranks."""

    def begin_pass(self, order: SumOrder) -> None:
        """Prepares for a pass whose gradients are summed in this order.

        Raises:
            UnsupportedOp: they cannot be summed in it here.
            StepOrderError: see `SumOrder.check_follows`.
            SumsNotHeld: sums that were kept of an undone attempt are missing.
        """

    def set_aside(self, *, weight: float) -> None:
        """Sets the gradients of a finished leaf aside, until the gradients of this rank's last leaf are reduced."""

    def held_sums(self) -> tuple[object, tuple[Node, ...]] | None:
        """See `SumsHolder`."""

    def recover_sums(self) -> None:
        """See `SumsHolder`."""

    def finish(self, *, weight: float, replaces: bool = False) -> None:
        """Sends the remaining gradients, waits for all, and leaves the weighted means in the gradients.

        `replaces` says that users have written the gradients themselves: these then replace the gradients that
        optimizers see, instead of being added to them.
        """

    def give_up(self) -> None:
        """Drops all gradients, and abandons running collectives."""


class SynchronizedModel(Protocol):
    """The model whose gradients are synchronised: `ReplicatedModel` for DDP, `ShardedModel` for FSDP."""

    def named_parameters(self) -> Iterable[tuple[str, Parameter]]:
        """Returns the parameters that optimizers train, as pairs of path and parameter."""

    def buffers(self) -> Mapping[str, NDArray[Any]]:
        """Returns buffers by path."""

    def buffers_given(self, buffers: Mapping[str, NDArray[Any]]) -> None:
        """Takes the values of buffers that `buffers` returned and another rank has given."""

    def agree(self, *, may_change: bool, agreed_in: int) -> GradientReducer:
        """Agrees with the other ranks on the model, and makes the reducer of its gradients; a collective.

        The arguments are as in `_agreement.agree`.
        """

    def keeps_reducer(self) -> bool:
        """True if the next agreement will keep the reducer of the last one, with the sums in it."""

    def spread_parameters(self) -> Sequence[SpreadParameters]:
        """Returns this rank's parameters, with the ranks that have the rest of them; in the same order on all ranks."""


class GradientSynchronizer:
    """Keeps the order of operations in a step, for any placement of parameters and any framework.

    Args:
        accumulation: makes the accumulation for parameters and sources.
        agreed: called with the new reducer each time the ranks have agreed on the model.
        before_reduction: called on every rank before a pass that ends with a reduction; returns the rank whose buffers
            all ranks take after it.

    Attributes:
        reducer: the reducer of the present generation; None before the first agreement.
        accumulation: micro-batches of this rank that are not reduced yet.
        rows: B of the last forward pass; None if its input had no first axis.
    """

    def __init__(
        self,
        model: SynchronizedModel,
        group: Group,
        *,
        accumulation: Callable[[Mapping[str, Parameter], Mapping[str, Parameter]], Accumulation] = Accumulation,
        agreed: Callable[[Any], None] = lambda reducer: None,
        before_reduction: Callable[[], int] = lambda: 0,
    ) -> None:
        self.reducer: GradientReducer | None = None
        self.accumulation = accumulation({}, {})
        self.rows: int | None = None
        self._model = model
        self._group = group
        self._new_accumulation = accumulation
        self._agreed = agreed
        self._before_reduction = before_reduction
        self._reduces = True
        """False inside `no_sync`."""
        self._generation = 0
        """The last generation in which all ranks agreed on the model and `reducer` was made; 0 for none."""
        self._leaf_buffers = LeafBuffers()

    def prepare(self, *, may_change: bool = True) -> GradientReducer:
        """Agrees on the model and takes rank 0's values; see `paceline.DDP.prepare`.

        `may_change` is False if gradients have been computed from this rank's own values.
        """
        moved = self.reducer is not None and self._generation != self._group.generation
        if self.reducer is not None and not moved and self.reducer.fits():
            return self.reducer
        self._group._core.order.check_may_agree()
        if moved:  # newcomers use the model for the first time, so all ranks start afresh
            self.accumulation.drop()
        if self.accumulation.micro_batches:
            raise StepOrderError("a parameter was frozen or unfrozen in the middle of an accumulation")
        first_use = self.reducer is None
        with self._group._core.order.collectives():
            self.reducer = self._model.agree(may_change=may_change, agreed_in=self._generation)
        self._generation = self._group.generation
        before = self.accumulation
        self.accumulation = self._new_accumulation(self.reducer.parameters, self.reducer.sources)
        if moved:
            self.accumulation.mark_as(before)  # sync_gradients may follow, for gradients of the new generation
        elif not first_use:
            self.accumulation.mark()  # gradients that exist now belong to the last step
        self._agreed(self.reducer)
        return self.reducer

    def begin_forward(self) -> None:
        """Gives the module the buffers with which each microbatch begins; does nothing outside of microbatches.

        Wrappers call it before each forward pass. The first call of a step may agree on the model.
        """
        order = self._group._core.order
        if order.is_leaf and order is not self._leaf_buffers.order:
            self.prepare()
            order.begin_forward()
            self._set_buffers(partial(self._leaf_buffers.begin, order))

    @property
    def reduces(self) -> bool:
        """True if a backward pass now ends with a reduction: not inside `no_sync`."""
        return self._reduces

    @contextmanager
    def backward_pass(self, weight: float, *, reduces: bool | None = None) -> Iterator[float]:
        """Surrounds a backward pass, and reduces its gradients at the end of the block; see `paceline.DDP.backward`.

        Yields the factor to multiply the pass's gradients by; with 0 they are dropped. By default (`reduces`) it ends
        with a reduction outside of `no_sync`.
        """
        reducer = self.prepare(may_change=False)
        reduces = self._reduces if reduces is None else reduces
        weight = checked_weight(weight)
        order = self._group._core.order
        if order.is_leaf:
            self._check_forward(order)
        order.begin_pass(self, reduces=reduces)
        if order.is_check:
            with self._check_pass(reducer, order, weight):
                yield weight
            return
        reducer.begin_pass(order)
        self.accumulation.open()
        # A leaf has the same factor in every world.
        factor = self.accumulation.add(weight, alone=self._group.size == 1 and not order.is_leaf)
        reduces = reduces and order.is_last
        with self._all_or_nothing(), order.collectives():
            root = self._before_reduction() if reduces else 0
            watching = reducer.watching if factor else reducer.ignoring
            with watching(weight=self.accumulation.rank_weight, early=reduces and not order.is_digested):
                yield factor
            if order.is_leaf:
                if order.is_digested:
                    order.digest(reducer.sources.items())
                self._set_buffers(partial(self._leaf_buffers.end, order))
                root = order.root
            if reduces:
                self._reduce(root)
                order.summed(self)
            elif order.is_leaf:
                reducer.set_aside(weight=self.accumulation.rank_weight)
                order.set_aside(self)
                self.accumulation.reset()

    def sync_gradients(self, weight: float | None = None, *, owed: bool = False) -> None:
        """Reduces pending gradients; does nothing if there are none. See `paceline.DDP.sync_gradients`.

        `owed` says that other ranks may wait for this rank's gradients although none was written here.
        """
        reducer = self.prepare(may_change=False)
        accumulation = self.accumulation
        accumulation.drop_if_cleared()
        path = accumulation.written_by_others(or_zeros=True)
        if path is None and not accumulation.micro_batches and not owed:
            return
        self._group._core.order.check_by_hand()
        by_hand = not accumulation.micro_batches
        if not by_hand:
            if path is not None:
                raise StepOrderError(f"the gradient of {path!r} was written outside of the wrapper in an accumulation")
            if weight is not None:
                raise StepOrderError(
                    "sync_gradients() takes no weight here: each micro-batch got its own in backward()"
                )
        else:
            weight = checked_weight((1 if self.rows is None else self.rows) if weight is None else weight)
            factor = accumulation.add(weight, alone=self._group.size == 1)
            for source in reducer.sources.values():
                if source.grad is not None and factor != 1:
                    source._hold(source.grad * factor if factor else None)
        reducer.begin_pass(EVEN)
        with self._all_or_nothing():
            self._reduce(self._before_reduction(), replaces=by_hand)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets backward passes in the block accumulate here, until the next one outside, or `sync_gradients`."""
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, powers: Callable[[float], Sequence[float]] | None = None
    ) -> float:
        """Scales all gradients so that their norm is at most `max_norm`; see `paceline.DDP.clip_grad_norm`.

        `powers` returns the powers of all whole gradients (`power_of`); None to take the powers of this rank's pieces.
        """
        if not max_norm >= 0 or not norm_type > 0:
            raise ValueError(f"want max_norm >= 0 and norm_type > 0, not {max_norm!r} and {norm_type!r}")
        spread = self._model.spread_parameters()
        if powers is None:
            norm = total_norm(spread, self._group, norm_type)
        else:
            norm = _agreed_norm(_joined(powers(norm_type), norm_type), self._group, norm_type)
        clip((parameter for _, parameters in spread for parameter in parameters), norm, max_norm)
        return norm

    def drop_gradients(self) -> None:
        """Drops all gradients, including those accumulated under `no_sync`, because their step is undone."""
        if self.reducer is not None:
            self.reducer.give_up()
        self.accumulation.drop()
        for _, parameter in self._model.named_parameters():
            parameter.grad = None
        self.accumulation.mark()

    def held_sums(self) -> tuple[object, tuple[Node, ...]] | None:
        """See `SumsHolder`: None also if the next agreement on the model will make another reducer."""
        kept = self.reducer is not None and self._model.keeps_reducer()
        return self.reducer.held_sums() if kept and self.reducer is not None else None

    def recover_sums(self) -> None:
        """See `SumsHolder`."""
        if self.reducer is not None:
            self.reducer.recover_sums()

    def abandon(self) -> None:
        """Drops all gradients and micro-batches of an attempt that failed, because some may be reduced and some not."""
        if self.reducer is not None:
            self.reducer.give_up()
            self.accumulation.reset()
            self.accumulation.mark()

    @contextmanager
    def _check_pass(self, reducer: GradientReducer, order: SumOrder, weight: float) -> Iterator[None]:
        """Surrounds the backward pass of another rank's microbatch, whose gradients are digested and dropped."""
        order.check_follows(EVEN, reducer.sources.items())
        with self._all_or_nothing():
            watching = reducer.watching if weight else reducer.ignoring
            with watching(weight=weight, early=False):
                yield
            order.digest(reducer.sources.items())
            for source in reducer.sources.values():
                source._hold(None)
            self._set_buffers(self._leaf_buffers.restore)

    def _set_buffers(self, change: Callable[[Mapping[str, NDArray[Any]]], None]) -> None:
        """Has the module's buffers changed in place."""
        buffers = self._model.buffers()
        change(buffers)
        if buffers:
            self._model.buffers_given(buffers)

    def _check_forward(self, order: SumOrder) -> None:
        if self._leaf_buffers.order is not order and self._model.buffers():
            raise StepOrderError(
                f"the forward pass of {order.name} did not go through the wrapper, which sets the module's buffers for "
                "each microbatch: call the wrapped model"
            )

    def _reduce(self, root: int, *, replaces: bool = False) -> None:
        assert self.reducer is not None
        self.reducer.finish(weight=self.accumulation.rank_weight, replaces=replaces)
        self.accumulation.close()
        buffers = self._model.buffers()
        if buffers and self._group.size > 1:
            give(self._group, list(buffers.values()), root=root)
            self._model.buffers_given(buffers)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Drops all gradients if the block raises, because some of them may be reduced and some not."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.accumulation.mark()


def rows_of(dy: NDArray[Any]) -> int:
    """Returns B, from the gradient of the output, shape [B, ...]."""
    if np.ndim(dy) == 0:
        raise SizeMismatch("dy has no first axis to give the number of samples: pass weight=")
    return int(np.shape(dy)[0])


def checked_weight(weight: float) -> float:
    """Returns a user's weight as a float, if it is finite and not negative."""
    weight = float(weight)
    if not (weight >= 0 and math.isfinite(weight)):
        raise ValueError(f"a weight must be finite and not negative, not {weight!r}")
    return weight


def total_norm(spread: Sequence[SpreadParameters], group: Group, p: float) -> float:
    """Returns the p-norm of all gradients as one vector, the same bits on every rank. A missing gradient counts as 0.

    Sums and powers may differ in the last bit between CPUs and libraries, so all ranks take rank 0's result (I5). With
    `math.inf` it is the largest absolute value. The parameters are in the same order on all ranks.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013, section 3.2.
    """
    norm = 0.0
    for ranks, parameters in spread:
        part = _joined([parameter._gradient_power(p) for parameter in parameters if parameter.grad is not None], p)
        if ranks is not None:
            part = float(ranks.all_reduce(np.float64(part), op="max" if math.isinf(p) else "sum"))
        norm = float(np.maximum(norm, part)) if math.isinf(p) else norm + part
    return _agreed_norm(norm, group, p)


def _joined(powers: Sequence[float], p: float) -> float:
    return float(np.max(powers, initial=0.0)) if math.isinf(p) else sum(powers)


def _agreed_norm(norm: float, group: Group, p: float) -> float:
    """Returns rank 0's p-norm, from the sum of all powers; for infinity the greatest."""
    if not math.isinf(p):
        with np.errstate(over="ignore"):  # infinity is a valid result
            norm = float(np.power(np.float64(norm), 1 / p))
    return norm if group.size == 1 else float(group.broadcast(np.float64(norm), root=0))


def clip(parameters: Iterable[Parameter], norm: float, max_norm: float) -> None:
    """Scales gradients in place by max_norm / norm if that is below 1; leaves them if the norm is not finite."""
    if not math.isfinite(norm) or norm <= max_norm:
        return
    factor = max_norm / norm
    for parameter in parameters:
        if parameter.grad is not None:
            parameter._scale_gradient(factor)
