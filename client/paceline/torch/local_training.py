"""Rounds of local training: what LocalSGD and DiLoCo share.

A round is some inner steps that each worker takes by itself, from the same global parameters, and one outer step that
all take together. In `session.steps` a round is one step of the line.

P parameters, W ranks, H inner steps of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.compression import Codec
from paceline.elastic.parts import StatePart
from paceline.errors import StepOrderError
from paceline.group import Group
from paceline.optim import Optimizer
from paceline.parallel.ddp import DDP
from paceline.torch.inner import InnerOptimizers
from paceline.torch.outer_model import OuterModel
from paceline.torch.round_part import RoundPart

__all__ = ["LocalTraining"]


class LocalTraining:
    """See `LocalSGD` and `DiLoCo`.

    Args:
        make_outer: makes what takes the outer step.
        differences: what travels: by how much the global parameters lie above the local ones, or those themselves.

    Attributes:
        net: the module that is trained.
        group: the ranks.
        outer_optimizer: takes the outer step, of `paceline.optim`; its `lr` may be set between rounds, on all ranks
            alike.
    """

    def __init__(
        self,
        net: Any,
        inner_optimizer: Any,
        group: Group,
        make_outer: Callable[[OuterModel], Optimizer],
        *,
        differences: bool,
        compression: str | Codec | None,
        error_feedback: bool | None,
        bucket_mb: float,
        restore_inner: bool,
    ) -> None:
        self.net = net
        self.group = group
        self._model = OuterModel(net, differences=differences)
        self._wrapper = DDP(
            self._model, group, bucket_mb=bucket_mb, compression=compression, error_feedback=error_feedback
        )
        self.outer_optimizer = make_outer(self._model)
        self._inner = InnerOptimizers(inner_optimizer, self._took_inner_step)
        self._restores_inner = restore_inner
        self._inner_steps = 0
        self._watches = False
        """A round has begun that can be undone: it need not go on if it will be."""

    def prepare(self) -> None:
        """Gives rank 0's parameters and buffers to all ranks. A collective at first use, and in a new generation.

        To be called before the first round, if ranks may have built different values. Inside of `session.steps` it is
        not needed: there the members' states have been compared.

        Raises:
            SizeMismatch, SettingsMismatch, DivergenceError: the models differ; the text names ranks and parameter.
            StepOrderError: a round has begun, which this would undo on this rank.
        """
        if self._inner_steps:
            raise StepOrderError(f"prepare() after {self._inner_steps} inner steps of a round: call it before them")
        self._wrapper.prepare()
        self._model.push()

    @staticmethod
    def batches(indices: NDArray[np.intp], steps: int) -> Iterator[NDArray[np.intp]]:
        """Cuts this rank's samples of a round into batches, one for each inner step.

        Args:
            indices: as `step.indices`, shape [n].
            steps: H. Where there are fewer samples, that many batches of one.

        Yields:
            Shape [n // H] or one more.

        Raises:
            ValueError: H is below 1.
        """
        if steps < 1:
            raise ValueError(f"a round has at least one inner step, not {steps}")
        yield from np.array_split(indices, min(steps, len(indices)) or 1)

    def outer_step(self, weight: float | None = None) -> None:
        """Ends a round: brings the local parameters of all ranks together, and goes on from there. A collective.

        All ranks hold the same bits of the parameters afterwards. Buffers are rank 0's. In `session.steps` this is what
        `optimizer.step()` is elsewhere: it changes the global parameters when it is sure that the round counts, and no
        other collective may come between it and the end of the block.

        Args:
            weight: what this rank's round counts in the mean. In `session.steps` give `step.weight`: it is 0 for a rank
                that has another's sample for want of one. By default the number of inner steps. With 0 the parameters
                are dropped, even NaN.

        Raises:
            ValueError: the weight is negative or not finite.
            StepOrderError: the ranks began with different parameters (see `prepare`), or all weights are 0.
            UnsupportedOp: a parameter was frozen or unfrozen since this was made.
            PacelineError: a collective failed. The net keeps its local parameters then; `session.steps` undoes the
                round.
        """
        self.outer_optimizer.zero_grad()
        self._wrapper.backward(np.ones(1), float(self._inner_steps) if weight is None else weight)
        self.outer_optimizer.step()  # inside of session.steps the gate
        self._model.push()
        self._end_round()

    def as_part(self) -> StatePart:
        """What a training state takes of it: the global parameters, the outer optimizer, buffers, inner settings."""
        return RoundPart(type(self).__name__, self._wrapper, self.outer_optimizer, self._inner, self)

    # For the training state.

    def begin_round(self) -> Any:
        """The net goes out from the global parameters; returns what `undo_round` takes."""
        self._model.push()
        self._end_round()
        self._watches = True
        return self._inner.save(state=self._restores_inner)

    def undo_round(self, saved: Any) -> None:
        """The net and the inner optimizers are as when the round began."""
        self._inner.put_back(saved)
        self._model.push()
        self._end_round()

    def drop_gradients(self) -> None:
        """Drops the local gradients."""
        self._inner.zero_grad()

    def push(self) -> None:
        """Others' global parameters have come."""
        self._model.push()

    def _end_round(self) -> None:
        self._inner_steps = 0
        self._watches = False

    def _took_inner_step(self) -> None:
        self._inner_steps += 1
        if self._watches:
            self.group.mesh.fault.check()  # who goes on alone to the end of the round works for nothing
