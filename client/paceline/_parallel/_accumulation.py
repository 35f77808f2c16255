"""Tracks one rank's micro-batches between two reductions, and detects gradients that the user has changed.

Micro-batches accumulate from one reduction to the next. Meanwhile `Parameter.grad` holds the sum over the micro-batches
k of weight_k * gradient_k, and `weight` the sum of weight_k; the reduction divides one by the other. Nothing here
communicates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline._parallel._parameter import Parameter
from paceline.errors import StepOrderError


class Accumulation:
    """The micro-batches of one wrapper since the last reduction.

    Args:
        parameters: parameters whose gradients are reduced, by path: those that optimizers see.
        sources: parameters whose gradients backward writes, by path; the same ones unless they are sharded over ranks.
        adds_up: if True, micro-batches add up, as in torch: the mean is taken over ranks, not over micro-batches.

    Attributes:
        weight: sum of the weights of the micro-batches.
        micro_batches: number of micro-batches; 0 if nothing is accumulated.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        sources: Mapping[str, Parameter] | None = None,
        *,
        adds_up: bool = False,
    ) -> None:
        self._parameters = parameters
        self._sources = parameters if sources is None else sources
        self._adds_up = adds_up
        self._writes = dict.fromkeys(self._sources, 0)
        """Each source's number of writes at the last `mark`: a higher number means that the user has written since."""
        self._clears = dict.fromkeys(parameters, 0)
        self._carried: dict[str, Any] = {}
        """Gradients from before the accumulation, which `close` adds to it; unused if sources are other parameters."""
        self.reset()

    @property
    def rank_weight(self) -> float:
        """This rank's weight in the reduction; the gradients are divided by the sum of all ranks' weights.

        The weight is the sum over the micro-batches, or their average if they add up: with the same weight in each, the
        result is then the sum over micro-batches of the mean over ranks.
        """
        return self.weight / max(1, self.micro_batches) if self._adds_up else self.weight

    def reset(self) -> None:
        """Forgets the micro-batches."""
        self.weight = 0.0
        self.micro_batches = 0
        self._unit = 1.0
        self._carried.clear()

    def drop(self) -> None:
        """Forgets the micro-batches and their gradients."""
        if self.micro_batches:
            for source in self._sources.values():
                source._hold(None)
        self.reset()

    def open(self) -> None:
        """Prepares for a micro-batch."""
        self.drop_if_cleared()
        if (path := self.written_by_others(or_zeros=False)) is not None:
            raise StepOrderError(
                f"the gradient of {path!r} was written outside of the wrapper since the last step: "
                "call sync_gradients() to reduce it, or zero_grad() to drop it, before backward()"
            )
        if not self.micro_batches and self._sources is self._parameters:
            for path, parameter in self._parameters.items():
                if parameter.grad is not None:
                    self._carried[path] = parameter._copied_gradient()
                    parameter._hold(None)

    def add(self, weight: float, *, alone: bool) -> float:
        """Counts a micro-batch and returns the factor that its gradients must be multiplied by.

        A world of one takes the first weight as its unit. A single micro-batch then has the factor 1 and is divided
        by 1, so that training alone gives the same bits as training without a wrapper.
        """
        if alone and self.weight == 0 and weight > 0:
            self._unit = weight
        factor = weight / self._unit
        self.weight += factor
        self.micro_batches += 1
        return factor

    def close(self) -> None:
        """Ends the accumulation after its reduction, and adds the gradients from before it."""
        for path, gradient in self._carried.items():
            parameter = self._parameters[path]
            if parameter.grad is not None:
                parameter._add_to_gradient(gradient)
            else:
                parameter._hold(gradient)
        self.reset()

    def mark(self) -> None:
        """Records that all gradients are now as the wrapper left them."""
        self._writes = {path: source.writes for path, source in self._sources.items()}
        self._clears = {path: parameter.clears for path, parameter in self._parameters.items()}

    def mark_as(self, before: Accumulation) -> None:
        """Takes over the marks of an earlier accumulation of the same parameters."""
        self._writes |= {path: count for path, count in before._writes.items() if path in self._writes}
        self._clears |= {path: count for path, count in before._clears.items() if path in self._clears}

    def written_by_others(self, *, or_zeros: bool) -> str | None:
        """Returns the path of a gradient that was written since `mark`; None if there is none.

        With `or_zeros` a gradient of zeros counts. Some users clear gradients with zeros, but a rank may also compute
        zeros where other ranks do not, so decisions that all ranks must share cannot depend on zeros.
        """
        for path, source in self._sources.items():
            written = source.grad is not None and source.writes != self._writes[path]
            if written and (or_zeros or np.any(source.grad)):
                return path
        return None

    def drop_if_cleared(self) -> None:
        """Forgets the micro-batches, with their weights, if all of their gradients were cleared, not only some."""
        if not self.micro_batches:
            return
        cleared = [path for path, p in self._parameters.items() if p.clears != self._clears[path]]
        if cleared and len(cleared) < len(self._parameters):
            raise StepOrderError(
                f"the gradient of {cleared[0]!r} was cleared in the middle of an accumulation, but others "
                "were not: clear all gradients, or none"
            )
        if cleared:
            self.drop()
