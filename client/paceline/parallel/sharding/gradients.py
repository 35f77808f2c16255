"""Gradients of one flat array while they are this rank's alone: whole, side by side, in the places of the values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.parallel.buckets import Empty
from paceline.parallel.parameter import Parameter
from paceline.parallel.sharding.layout import Layout

__all__ = ["Gradients"]


class Gradients:
    """Gives each gradient its place in one array, so that the module's write is the only copy.

    The memory is there from the unit's backward pass until its gradients leave: under `no_sync` until a later one.

    Args:
        parameters: the module's, of one dtype.
        layout: where they lie; S and W are its letters.
        empty: where the memory comes from.
    """

    def __init__(self, parameters: Sequence[Parameter], layout: Layout, empty: Empty) -> None:
        self._parameters = parameters
        self._layout = layout
        self._empty = empty
        self._array: NDArray[Any] | None = None

    @property
    def are_wanted(self) -> bool:
        """True if any parameter takes a gradient."""
        return any(p.requires_grad for p in self._parameters)  # for the others count as unused, whatever they have

    def open(self) -> None:
        """Makes the places, unless they are there; what has a gradient already moves in."""
        if self._array is None and self.are_wanted:
            self._array = self._empty(self._layout.padded, self._parameters[0].dtype)
            for parameter, slot in self._slots(self._array):
                if not parameter.requires_grad:
                    continue
                if parameter.grad is not None:
                    np.copyto(slot, parameter.grad)
                    parameter._hold(slot)
                parameter._home = slot

    def used_flags(self) -> list[bool]:
        """For each parameter, whether it takes a gradient and has one here."""
        return [p.requires_grad and p.grad is not None for p in self._parameters]

    def take(self) -> NDArray[Any]:
        """All of them, shape [W * S], zeros where there is none. The parameters have none any more."""
        self.open()
        array = self._array
        assert array is not None
        for parameter, slot in self._slots(array):
            if parameter.grad is None or not parameter.requires_grad:
                slot.fill(0)
            elif parameter.grad is not parameter._home:
                np.copyto(slot, parameter.grad)
        array[self._layout.size :] = 0
        self.drop()
        return array

    def drop(self) -> None:
        """Forgets them."""
        self._array = None
        for parameter in self._parameters:
            parameter._hold(None)
            parameter._home = None

    def _slots(self, array: NDArray[Any]) -> Iterator[tuple[Parameter, NDArray[Any]]]:
        for parameter, place in zip(self._parameters, self._layout.places, strict=True):
            yield parameter, array[place].reshape(parameter.shape)
