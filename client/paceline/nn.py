"""A few layers with their own backward pass: enough for the examples, and a pattern for your own modules.

B samples, I inputs, O outputs, C classes. Arrays are float32 or float64. A layer keeps the input of its last `forward`,
so it may occur in a network once, and `backward` refers to the last `forward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from paceline._parallel._parameter import Module, Parameter
from paceline.errors import SizeMismatch

__all__ = ["Linear", "ReLU", "Sequential", "softmax_cross_entropy"]


class _Layer:
    """A module that may be called: `layer(x)` is `layer.forward(x)`, as for `paceline.DDP`."""

    def __call__(self, x: Any) -> Any:
        return self.forward(x)

    def forward(self, x: Any) -> Any:
        raise NotImplementedError


class Linear(_Layer):
    """y = x W^T + b.

    Args:
        inputs: I.
        outputs: O.
        rng: draws the initial weights, normal with variance 2 / I, which keeps the variance of activations through
            ReLUs. Source: He et al., "Delving Deep into Rectifiers", ICCV 2015, equation 10.
        dtype: the parameters' dtype.

    Attributes:
        weight: shape [O, I].
        bias: shape [O], zeros at first.
    """

    def __init__(self, inputs: int, outputs: int, *, rng: np.random.Generator, dtype: DTypeLike = np.float32) -> None:
        scale = np.sqrt(2 / max(inputs, 1))
        self.weight = Parameter((rng.standard_normal((outputs, inputs)) * scale).astype(dtype))
        self.bias = Parameter(np.zeros(outputs, dtype))
        self._x: NDArray[Any] | None = None

    def __repr__(self) -> str:
        outputs, inputs = self.weight.shape
        return f"Linear({inputs}, {outputs})"

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yields weight and bias."""
        yield "weight", self.weight
        yield "bias", self.bias

    def forward(self, x: NDArray[Any]) -> NDArray[Any]:
        """Maps x, shape [B, I], to y, shape [B, O]."""
        self._x = x
        y: NDArray[Any] = x @ self.weight.data.T
        y += self.bias.data
        return y

    def backward(self, dy: NDArray[Any]) -> NDArray[Any]:
        """Maps dy, shape [B, O], to dx, shape [B, I]. Gradients come first, so that they are sent during the rest."""
        assert self._x is not None, "backward without forward"
        self.bias.accumulate(dy.sum(axis=0))
        self.weight.accumulate(dy.T @ self._x)
        dx: NDArray[Any] = dy @ self.weight.data
        return dx


class ReLU(_Layer):
    """y = max(x, 0), element by element."""

    def __init__(self) -> None:
        self._positive: NDArray[np.bool_] | None = None

    def __repr__(self) -> str:
        return "ReLU()"

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yields nothing."""
        yield from ()

    def forward(self, x: NDArray[Any]) -> NDArray[Any]:
        """Maps x of any shape to y of that shape."""
        self._positive = x > 0
        y: NDArray[Any] = np.maximum(x, 0)
        return y

    def backward(self, dy: NDArray[Any]) -> NDArray[Any]:
        """Maps dy to dx of the same shape; the slope at 0 is taken to be 0."""
        assert self._positive is not None, "backward without forward"
        dx: NDArray[Any] = dy * self._positive
        return dx


class Sequential(_Layer):
    """Modules one after the other. Parameters are named "0.weight", "0.bias", "2.weight", ...

    Args:
        modules: first to last.
    """

    def __init__(self, *modules: Module) -> None:
        self.modules = modules

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(repr, self.modules))})"

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yields the parameters of all modules, first to last."""
        for number, module in enumerate(self.modules):
            for path, parameter in module.named_parameters():
                yield f"{number}.{path}", parameter

    def named_buffers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yields the buffers of the modules that have some, first to last."""
        for number, module in enumerate(self.modules):
            for path, buffer in getattr(module, "named_buffers", tuple)():
                yield f"{number}.{path}", buffer

    def forward(self, x: Any) -> Any:
        """Runs the modules first to last."""
        for module in self.modules:
            x = module.forward(x)
        return x

    def backward(self, dy: Any) -> Any:
        """Runs the modules' backward passes last to first."""
        for module in reversed(self.modules):
            dy = module.backward(dy)
        return dy


def softmax_cross_entropy(logits: NDArray[Any], labels: NDArray[Any]) -> tuple[float, NDArray[Any]]:
    """Computes the mean over the batch of -log softmax(logits)[label], in nats, and its gradient by the logits.

    Args:
        logits: shape [B, C].
        labels: shape [B], integers in [0, C).

    Returns:
        The loss, and (softmax - onehot) / B, shape [B, C].

    Raises:
        SizeMismatch: there is no sample, or there is not one label for each.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not len(labels):
        raise SizeMismatch(
            f"labels of shape {labels.shape} do not fit logits of shape {logits.shape}; want [B], [B, C]"
        )
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)  # exp cannot overflow; the softmax does not change
    exponentials = np.exp(shifted)
    sums = exponentials.sum(axis=1, keepdims=True)
    loss = float((np.log(sums[:, 0]) - shifted[rows, labels]).mean())
    dlogits: NDArray[Any] = exponentials / sums
    dlogits[rows, labels] -= 1
    dlogits /= len(labels)
    return loss, dlogits
