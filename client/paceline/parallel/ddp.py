"""DistributedDataParallel for NumPy modules: every rank holds the whole model, and gradients are averaged.

Owns the order of things in a step. The parts: `accumulation` (weights and micro-batches of this rank), `reducer`
(buckets on their way), `agreement` (the same model and values everywhere at first use).

B samples in this rank's batch, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SizeMismatch, StepOrderError
from paceline.parallel.accumulation import Accumulation
from paceline.parallel.agreement import agree
from paceline.parallel.manifest import Manifest
from paceline.parallel.module import Module, buffers_of, parameters_of
from paceline.parallel.parameter import Parameter
from paceline.parallel.ranks import Ranks
from paceline.parallel.reducer import Reducer

__all__ = ["DDP"]


class DDP:
    """Trains one model on the samples of all ranks, as if one process had seen them all.

    Construction communicates nothing. The first forward pass gives rank 0's parameters and buffers to all ranks. From
    then on each `backward` ends with the same gradients everywhere: the mean over all samples of all ranks, uneven
    shares or not. In a world of one, results are those of the unwrapped module, bit for bit.

        ddp = paceline.DDP(module, session.group)
        optimizer.zero_grad()
        ddp.backward(loss_gradient(ddp(x), t))      # of the mean loss over this rank's samples
        optimizer.step()

    Gradients lie in the buckets: `Parameter.grad` is a view of memory that the next backward pass writes again, so
    copy what you keep. Communication overlaps the rest of the backward pass from the second pass on. It goes in a
    fixed order, so a parameter that is never used (freeze it) or used late holds up the buckets behind it.

    What DDP does not do: buffers that forward changes (running statistics) drift apart after first use; modules whose
    own backward calls collectives must use another group for them; frozen parameters must stay as they are.

    Args:
        module: the model, built alike on every rank; values may differ.
        group: the ranks.
        bucket_mb: most MiB (2**20 bytes) of gradients in one message; alike on every rank.

    Raises:
        ValueError: `bucket_mb` is not above 0.
    """

    def __init__(self, module: Module, group: Ranks, *, bucket_mb: float = 25.0) -> None:
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb must be above 0 MiB, not {bucket_mb!r}")
        self.module = module
        self.group = group
        self._bucket_mb = bucket_mb
        self._reducer: Reducer | None = None
        self._round = Accumulation({})
        self._syncing = True
        self._rows: int | None = None
        """B of the last forward pass, where its input had a first axis."""

    def __call__(self, x: Any) -> Any:
        """`forward`."""
        return self.forward(x)

    def forward(self, x: Any) -> Any:
        """The module's output. The first call is a collective (see `prepare`): on one rank alone, call the module.

        Raises:
            PacelineError: as `prepare`.
        """
        self.prepare()
        shape = np.shape(x) if isinstance(x, np.ndarray) else ()
        self._rows = shape[0] if shape else None
        return self.module.forward(x)

    def prepare(self) -> None:
        """Agrees on the model and takes rank 0's values.

        A collective at first use, and again once a parameter was frozen or unfrozen; else it does nothing.

        Raises:
            SizeMismatch, SettingsMismatch, DivergenceError: the models differ; the text names ranks and parameter.
            UnsupportedOp: a parameter to train is neither float32 nor float64.
            StepOrderError: parameters were frozen or unfrozen in the middle of an accumulation.
        """
        self._prepare(may_change=True)

    def backward(self, dy: NDArray[Any], weight: float | None = None) -> None:
        """Runs the module's backward and, outside of `no_sync`, leaves the mean over all ranks in every `.grad`.

        The mean is the sum of weight * gradient over all ranks and micro-batches, divided by the sum of weights. A
        gradient that was there before (no `zero_grad`) is kept and added to. Nothing is returned: DDP wraps the whole
        model, and the gradient of its input would be scaled by the weight.

        Args:
            dy: gradient of this rank's *mean* loss by the output, shape [B, ...].
            weight: what this rank's gradient counts; B by default. With 0 the module runs, but its gradients are
                dropped, even NaN.

        Raises:
            ValueError: the weight is negative or not finite.
            SizeMismatch: there is no first axis to take B from.
            StepOrderError: gradients were written or cleared behind DDP's back, or one came after its bucket was sent.
            PacelineError: a collective failed.
            Exception: what the module raised. After this, or a failure on the way to the other ranks, all gradients
                and micro-batches of the attempt are dropped, and all ranks may try again: all, for what one has sent
                already, the others will meet.
        """
        reducer = self._prepare(may_change=False)
        weight = _checked(_rows_of(dy) if weight is None else weight)
        self._round.open()
        factor = self._round.add(weight, alone=self.group.size == 1)
        with self._all_or_nothing():
            if factor == 0:
                with reducer.ignoring():
                    self.module.backward(dy)
            else:
                # Backward is linear in dy: scaling dy, the smallest array, weights all gradients.
                with reducer.watching(weight=self._round.weight, early=self._syncing):
                    self.module.backward(dy if factor == 1 else dy * factor)
            if self._syncing:
                self._reduce()

    def sync_gradients(self, weight: float | None = None) -> None:
        """Reduces what is pending; does nothing if nothing is, so it is harmless after `backward`.

        Pending is what `backward` accumulated under `no_sync`, or what the module's own `backward` left.

        Args:
            weight: for gradients of the module's own backward: what they count. By default the number of samples of
                the last forward pass through this wrapper, or 1 if there was none.

        Raises:
            ValueError: the weight is negative or not finite.
            StepOrderError: both kinds are pending, or a weight was given for what has weights.
            PacelineError: a collective failed; gradients are dropped, as in `backward`.
        """
        reducer = self._prepare(may_change=False)
        self._round.drop_if_cleared()
        path = self._round.written_by_others(or_zeros=True)
        if path is None and not self._round.micro_batches:
            return
        if self._round.micro_batches:
            if path is not None:
                raise StepOrderError(f"the gradient of {path!r} was written outside of the wrapper in an accumulation")
            if weight is not None:
                raise StepOrderError("each micro-batch had its weight in backward(): there is no place for another")
        else:
            weight = _checked((1 if self._rows is None else self._rows) if weight is None else weight)
            factor = self._round.add(weight, alone=self.group.size == 1)
            for parameter in reducer.parameters.values():
                if parameter.grad is not None and factor != 1:
                    parameter._hold(parameter.grad * factor if factor else None)
        with self._all_or_nothing():
            self._reduce()

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

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The module's, without a prefix: an optimizer's state fits the module wrapped or not."""
        yield from self.module.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """The module's; none if it has no such method."""
        yield from buffers_of(self.module).items()

    def _prepare(self, *, may_change: bool) -> Reducer:
        if self._reducer is not None and self._reducer.fits():
            return self._reducer
        if self._round.micro_batches:
            raise StepOrderError("a parameter was frozen or unfrozen in the middle of an accumulation")
        parameters, buffers = parameters_of(self.module), buffers_of(self.module)
        arrays = [*(p.data for p in parameters.values()), *buffers.values()]
        agree(self.group, Manifest.of(parameters, buffers, self._bucket_mb), arrays, may_change=may_change)
        first_use = self._reducer is None
        self._reducer = Reducer(parameters, self.group, self._bucket_mb * 2**20)
        self._round = Accumulation(self._reducer.parameters)
        if not first_use:
            self._round.mark()  # gradients that are there now are the last step's
        return self._reducer

    def _reduce(self) -> None:
        assert self._reducer is not None
        self._reducer.finish(weight=self._round.weight)
        self._round.close()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """An attempt that fails leaves no gradient, for part of it may be reduced and part not."""
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


def _checked(weight: float) -> float:
    weight = float(weight)
    if not (weight >= 0 and math.isfinite(weight)):
        raise ValueError(f"a weight must be finite and not negative, not {weight!r}")
    return weight
