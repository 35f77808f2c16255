"""The FSDP for NumPy modules, driven by torch: forward by calls, backward by autograd's hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import ml_dtypes
import torch

from paceline.errors import StepOrderError
from paceline.parallel.fsdp import FSDP
from paceline.parallel.ranks import ShardRanks
from paceline.parallel.sharding.strategy import ShardingStrategy
from paceline.parallel.sharding.units import Units
from paceline.parallel.wrapper import GradientReducer
from paceline.torch.sharding.mirror import Mirror
from paceline.torch.sharding.modules import Adapter, Call, mapped, tensors_in
from paceline.torch.sharding.passes import Pass, Run
from paceline.torch.sharding.saved import saving

__all__ = ["Engine"]


class Engine(FSDP):
    """Spreads one torch module.

    The gradients of micro-batches under `no_sync` are added up, as torch does it; the mean is taken over ranks.

    Args:
        module: as NumPy modules are seen.
        narrow: compute with, and send, bfloat16.
        others: as those of `FSDP`.
    """

    module: Adapter
    _root: Engine

    def __init__(
        self,
        module: Adapter,
        group: ShardRanks,
        strategy: ShardingStrategy,
        intra_node_size: int | None,
        *,
        narrow: bool,
        ahead: int,
    ) -> None:
        self._computes = narrow
        self._pass: Pass | None = None
        self._given: float | None = None
        """The weight of the next backward pass, if it is not B."""
        wire = ml_dtypes.bfloat16 if narrow else None
        super().__init__(module, group, strategy, intra_node_size, communication_dtype=wire, ahead=ahead)

    @contextmanager
    def weighing(self, weight: float | None) -> Iterator[None]:
        """For a backward pass inside the block that counts so much; None for its number of samples."""
        self._given = weight
        try:
            yield
        finally:
            self._given = None

    def drop_gradients(self) -> None:
        """As `Wrapper.drop_gradients`."""
        self._drop_dead_pass()
        super().drop_gradients()

    def _prepare(self, *, may_change: bool) -> GradientReducer:
        self._drop_dead_pass()
        return super()._prepare(may_change=may_change)

    def _agree(self, *, may_change: bool) -> Units:
        units = super()._agree(may_change=may_change)
        for source in units.sources.values():
            assert isinstance(source, Mirror)
            source.watch(_take)
        return units

    def _counts(self) -> float:
        return self._round.weight / max(self._round.micro_batches, 1)

    def _remember_rows(self, x: Call) -> None:
        shapes = (tensor.shape for tensor in tensors_in((x.args, x.kwargs)))
        self._rows = next((shape[0] for shape in shapes if shape), None)

    def _run_forward(self, x: Call) -> Any:
        run = Run(partial(self._enter, self._rows), self._leave)
        keeping = saving(_need) if self._root is self and torch.is_grad_enabled() else nullcontext()
        with self._root._all_units().running_forward(self._unit), keeping:
            call = run.of_inputs(x)
            if self._computes:
                call = Call(*mapped(tuple(call), _narrowed))
            return run.of_outputs(self.module.forward(call))

    def _enter(self, rows: int | None) -> None:
        """A run backward begins; `rows`: of the forward pass that it belongs to, if this is the outermost unit."""
        if self._root is self:
            self._rows = rows
        with self._root._running_pass() as running:
            running.enter(self._unit)

    def _leave(self) -> None:
        with self._root._running_pass() as running:
            running.leave(self._unit)

    @contextmanager
    def _running_pass(self) -> Iterator[Pass]:
        """The backward pass that torch is in; it begins with the first call. An error inside of the block ends it."""
        self._drop_dead_pass()
        if self._pass is None:
            weight = (1 if self._rows is None else self._rows) if self._given is None else self._given
            self._pass = Pass(self._backward_pass(weight), self._all_units().running_backward, self._end_pass)
        try:
            yield self._pass
        except BaseException:
            self._drop_pass()
            raise

    def _end_pass(self) -> None:
        with self._running_pass() as running:
            running.end()
        self._pass = None
        self._owes = self._owes and not self._syncing

    def _drop_pass(self) -> None:
        if self._pass is not None:
            dropped, self._pass = self._pass, None
            dropped.abandon()

    def _drop_dead_pass(self) -> None:
        if self._pass is not None and self._pass.is_dead:
            self._drop_pass()


def _take(mirror: Mirror) -> None:
    """Autograd has left a gradient."""
    owner = mirror._owner
    assert isinstance(owner, Engine)
    with owner._root._running_pass() as running:
        mirror.take_gradient(running.factor)


def _need(mirror: Mirror) -> None:
    """Autograd reads a parameter of a unit that it has not entered: what that returned was not looked into."""
    owner = mirror._owner
    assert isinstance(owner, Engine)
    owner._enter(owner._rows)
    if not mirror.is_here:
        raise StepOrderError("the backward pass needs a parameter that is spread over the ranks, after its unit's end")


def _narrowed(tensor: Any) -> Any:
    return tensor.bfloat16() if tensor.dtype in (torch.float32, torch.float64) else tensor
