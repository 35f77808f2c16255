"""What Paceline asks of a NumPy module, and the one way in which its parameters and buffers are listed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UnsupportedOp
from paceline.parallel.parameter import Parameter

__all__ = ["HasParameters", "Module", "buffers_of", "parameters_of"]


class HasParameters(Protocol):
    """Anything with parameters: a module, or a wrapped one."""

    def named_parameters(self) -> Iterable[tuple[str, Parameter]]:
        """Pairs of path and parameter, in the same order on every rank, first layer first."""


class Module(HasParameters, Protocol):
    """A NumPy module. It may also have `named_buffers()`: pairs of path and array, state that is not trained."""

    def forward(self, x: Any) -> Any:
        """The output for a batch; keeps what `backward` needs."""

    def backward(self, dy: Any) -> Any:
        """Accumulates gradients into the parameters, last layer first, from the gradient of the loss by the output."""


def parameters_of(module: HasParameters) -> dict[str, Parameter]:
    """Parameters by path. One that is tied (the same object under several paths) is listed once, by its first path."""
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    for path, parameter in module.named_parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found[path] = parameter
    return found


def buffers_of(module: object) -> dict[str, NDArray[Any]]:
    """Buffers by path; empty for a module without `named_buffers`.

    Raises:
        UnsupportedOp: a buffer is not an array, so it could not be changed in place.
    """
    pairs = getattr(module, "named_buffers", None)
    found: dict[str, NDArray[Any]] = dict(pairs()) if pairs is not None else {}
    for path, buffer in found.items():
        if not isinstance(buffer, np.ndarray):
            raise UnsupportedOp(f"buffer {path!r} must be an array that can be written in place, not {type(buffer)}")
    return found
