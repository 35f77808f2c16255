"""What DDP and FSDP share."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SizeMismatch, StepOrderError
from paceline.parallel._accumulation import Accumulation
from paceline.parallel._agreement import give
from paceline.parallel._parameter import Module, Parameter, buffers_of, parameters_of
from paceline.parallel._ranks import Ranks

__all__ = ["GradientReducer", "Share", "Wrapper", "checked_weight", "clip", "total_norm"]


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
        """Watches the backward pass inside the block; `early`: gradients may be sent while it runs."""

    def ignoring(self, *, weight: float, early: bool) -> AbstractContextManager[None]:
        """Drops the gradients of the backward pass inside the block; sends early what other ranks send early."""

    def finish(self, *, weight: float) -> None:
        """Sends the remaining gradients, waits for all, and leaves the weighted means in the gradients."""

    def give_up(self) -> None:
        """Drops all gradients, and abandons running collectives."""


class Wrapper(abc.ABC):
    """A module whose gradients are averaged over the ranks of a group."""

    def __init__(self, module: Module, group: Ranks) -> None:
        self.module = module
        self.group = group
        self._reducer: GradientReducer | None = None
        self._round = Accumulation({})
        self._syncing = True
        self._generation = 0
        """The last generation in which all ranks agreed on the model and `_reducer` was made; 0 for none."""
        self._rows: int | None = None
        """B of the last forward pass; None if its input had no first axis."""

    def __call__(self, x: Any) -> Any:
        """Calls `forward`."""
        return self.forward(x)

    @abc.abstractmethod
    def forward(self, x: Any) -> Any:
        """The module's output."""

    def prepare(self) -> None:
        """Agrees on the model and takes rank 0's values.

        A collective at first use, and again once a parameter was frozen or unfrozen; else it does nothing.

        Raises:
            SizeMismatch, SettingsMismatch, DivergenceError: the models differ; the text names ranks and parameter.
            UnsupportedOp: a parameter to train is neither float32 nor float64.
            StepOrderError: parameters were frozen or unfrozen in the middle of an accumulation.
        """
        self._prepare(may_change=True)

    def backward(self, dy: NDArray[Any], weight: float | None = None) -> Any:
        """Runs the module's backward and, outside of `no_sync`, leaves the mean over all ranks in every `.grad`.

        The mean is the sum of weight * gradient over all ranks and micro-batches, divided by the sum of weights. A
        gradient that was there before (no `zero_grad`) is kept and added to. Nothing is returned: this wraps the whole
        model, and the gradient of its input would be scaled by the weight. Buffers are rank 0's afterwards.

        Args:
            dy: gradient of this rank's *mean* loss by the output, shape [B, ...].
            weight: weight of this rank's gradient; B by default. With 0 the module runs, but its gradients are
                dropped, even NaN.

        Raises:
            ValueError: the weight is negative or not finite.
            SizeMismatch: there is no first axis to take B from.
            StepOrderError: gradients were written or cleared outside of the wrapper, or one came too late.
            PacelineError: a collective failed.
            Exception: what the module raised. After this, or a failed collective, all gradients and micro-batches of
                the attempt are dropped, and the attempt may be repeated, on all ranks together.
        """
        with self._backward_pass(_rows_of(dy) if weight is None else weight) as factor:
            # Backward is linear in dy: scaling dy, the smallest array, weights all gradients.
            self._run_backward(dy if factor in (0, 1) else dy * factor)

    def sync_gradients(self, weight: float | None = None) -> None:
        """Reduces pending gradients; does nothing if there are none, so it is harmless after `backward`.

        Pending gradients are those that `backward` accumulated under `no_sync`, or the module's own `backward` left.

        Args:
            weight: weight of gradients of the module's own backward. By default the number of samples of
                the last forward pass through this wrapper, or 1 if there was none.

        Raises:
            ValueError: the weight is negative or not finite.
            StepOrderError: both kinds are pending, or a weight was given for gradients that have one.
            PacelineError: a collective failed; gradients are dropped, as in `backward`.
        """
        reducer = self._prepare(may_change=False)
        self._round.drop_if_cleared()
        path = self._round.written_by_others(or_zeros=True)
        if path is None and not self._round.micro_batches and not self._owes_gradients():
            return
        by_hand = not self._round.micro_batches
        if not by_hand:
            if path is not None:
                raise StepOrderError(f"the gradient of {path!r} was written outside of the wrapper in an accumulation")
            if weight is not None:
                raise StepOrderError("each micro-batch got its weight in backward(): sync_gradients() takes none")
        else:
            weight = checked_weight((1 if self._rows is None else self._rows) if weight is None else weight)
            factor = self._round.add(weight, alone=self.group.size == 1)
            for source in reducer.sources.values():
                if source.grad is not None and factor != 1:
                    source._hold(source.grad * factor if factor else None)
        with self._all_or_nothing():
            self._reduce(by_hand=by_hand)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block `backward` accumulates on this rank only.

        The next `backward` outside, or `sync_gradients`, reduces the sum of all micro-batches.
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scales all gradients so that their norm, taken over all parameters as one vector, is at most `max_norm`.

        A collective; every rank scales by the same bits.

        Args:
            max_norm: the limit; `math.inf` only measures.
            norm_type: p of the p-norm, above 0; `math.inf` for the largest absolute value.

        Returns:
            The norm before. If it is not finite, the gradients are left as they are.

        Raises:
            ValueError: `max_norm` is negative, or `norm_type` not above 0.
            PacelineError: a collective failed.
        """
        if not max_norm >= 0 or not norm_type > 0:
            raise ValueError(f"want max_norm >= 0 and norm_type > 0, not {max_norm!r} and {norm_type!r}")
        shares = self._shares()
        norm = total_norm(shares, self.group, norm_type)
        clip((parameter for _, parameters in shares for parameter in parameters), norm, max_norm)
        return norm

    def drop_gradients(self) -> None:
        """Drops all gradients, including those accumulated under `no_sync`, because their step is undone."""
        if self._reducer is not None:
            self._reducer.give_up()
        self._round.drop()
        for _, parameter in self.named_parameters():
            parameter.grad = None
        self._round.mark()

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The module's, without a prefix: an optimizer's state fits the module wrapped or not."""
        yield from self.module.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """The module's; none if it has no such method."""
        yield from buffers_of(self.module).items()

    @abc.abstractmethod
    def _agree(self, *, may_change: bool) -> GradientReducer:
        """Agrees with the other ranks on the model, and makes the reducer of its gradients."""

    def _owes_gradients(self) -> bool:
        """Whether other ranks may wait for this rank's gradients, though none was written here."""
        return False

    def _new_round(self, reducer: GradientReducer) -> Accumulation:
        return Accumulation(reducer.parameters, reducer.sources)

    @contextmanager
    def _backward_pass(self, weight: float) -> Iterator[float]:
        """Runs the module's backward inside the block; outside of `no_sync` its gradients are reduced at the end.

        Returns:
            The factor for its gradients; with 0 they are dropped.
        """
        reducer = self._prepare(may_change=False)
        weight = checked_weight(weight)
        self._round.open()
        factor = self._round.add(weight, alone=self.group.size == 1)
        with self._all_or_nothing():
            watching = reducer.watching if factor else reducer.ignoring
            with watching(weight=self._counts(), early=self._syncing):
                yield factor
            if self._syncing:
                self._reduce()

    def _counts(self) -> float:
        """This rank's weight in the reduction; see `Accumulation.counts`."""
        return self._round.counts

    def _run_backward(self, dy: Any) -> Any:
        return self.module.backward(dy)

    def _shares(self) -> Sequence[Share]:
        """This rank's parameters, and the ranks that have the rest of them."""
        return [(None, list(parameters_of(self).values()))]

    def _remember_rows(self, x: Any) -> None:
        shape = np.shape(x) if isinstance(x, np.ndarray) else ()
        self._rows = shape[0] if shape else None

    def _prepare(self, *, may_change: bool) -> GradientReducer:
        moved = self._reducer is not None and self._generation != self.group.generation
        if self._reducer is not None and not moved and self._reducer.fits():
            return self._reducer
        if moved:  # whoever has come in uses it for the first time: all begin anew, and agree that they do
            self._round.drop()
        if self._round.micro_batches:
            raise StepOrderError("a parameter was frozen or unfrozen in the middle of an accumulation")
        first_use = self._reducer is None
        self._reducer = self._agree(may_change=may_change)
        self._generation = self.group.generation
        before, self._round = self._round, self._new_round(self._reducer)
        if moved:
            self._round.mark_as(before)  # this may be sync_gradients, for what was written in the new generation
        elif not first_use:
            self._round.mark()  # gradients that are there now are the last step's
        return self._reducer

    def _reduce(self, *, by_hand: bool = False) -> None:
        """`by_hand`: the gradients were not written through this wrapper."""
        del by_hand  # where backward writes what optimizers see, they are in place already
        assert self._reducer is not None
        self._reducer.finish(weight=self._counts())
        self._round.close()
        self._give_buffers()

    def _give_buffers(self, root: int = 0) -> None:
        buffers = buffers_of(self.module)
        if buffers and self.group.size > 1:
            give(self.group, list(buffers.values()), root=root)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Drops all gradients if the block raises, because some of them may be reduced and some not."""
        assert self._reducer is not None
        try:
            yield
        except BaseException:
            self._reducer.give_up()
            self._round.reset()
            raise
        finally:
            self._round.mark()


def _rows_of(dy: NDArray[Any]) -> int:
    if np.ndim(dy) == 0:
        raise SizeMismatch("dy has no first axis that would tell the number of samples: pass weight=")
    return int(np.shape(dy)[0])


def checked_weight(weight: float) -> float:
    """A weight that a user has given.

    Raises:
        ValueError: it is negative or not finite.
    """
    weight = float(weight)
    if not (weight >= 0 and math.isfinite(weight)):
        raise ValueError(f"a weight must be finite and not negative, not {weight!r}")
    return weight


Share: TypeAlias = tuple[Ranks | None, Sequence[Parameter]]
"""Parameters, and the ranks over which they are spread; None if this rank has all of them whole."""

_CHUNK = 1 << 16
"""Elements that are raised to a power at once, in float64."""


def total_norm(shares: Sequence[Share], group: Ranks, p: float) -> float:
    """The p-norm of all gradients as one vector; the same bits on every rank. A parameter without gradient counts 0.

    Sums and powers may differ in the last bit between CPUs and libraries, so rank 0's result is everybody's (I5).

    Args:
        shares: the parts of this rank, alike on all ranks.
        group: all ranks.
        p: above 0; `math.inf` for the largest absolute value.
    """
    norm = 0.0
    for ranks, parameters in shares:
        powers = [_power(g, p) for parameter in parameters if (g := parameter.grad) is not None]
        part = float(np.max(powers, initial=0.0)) if math.isinf(p) else sum(powers)
        if ranks is not None:
            part = float(ranks.all_reduce(np.float64(part), op="max" if math.isinf(p) else "sum"))
        norm = float(np.maximum(norm, part)) if math.isinf(p) else norm + part
    if not math.isinf(p):
        with np.errstate(over="ignore"):  # infinity is an answer
            norm = float(np.power(np.float64(norm), 1 / p))
    return norm if group.size == 1 else float(group.broadcast(np.float64(norm), root=0))


def clip(parameters: Iterable[Parameter], norm: float, max_norm: float) -> None:
    """Scales gradients in place by max_norm / norm if that is below 1; leaves them if the norm is not finite."""
    if not math.isfinite(norm) or norm <= max_norm:
        return
    factor = max_norm / norm
    for parameter in parameters:
        if parameter.grad is not None:
            np.multiply(parameter.grad, factor, out=parameter.grad)


def _power(gradient: NDArray[Any], p: float) -> float:
    """Sum of |g|^p, or the largest |g|, in float64."""
    flat = gradient.reshape(-1)
    if math.isinf(p):
        return float(np.max(np.abs(flat), initial=0.0))
    total = 0.0
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK].astype(np.float64)
        total += float(part @ part) if p == 2 else float(np.sum(np.abs(part) ** p))
    return total
