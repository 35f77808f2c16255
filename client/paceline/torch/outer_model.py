"""The global model of local training: a module whose gradient is how far the local parameters have come from it.

With that everything that data-parallel training has serves an outer step too: `paceline.DDP` brings pseudo-gradients
together (weights, buckets, compression, agreement), and an optimizer of `paceline.optim` takes the outer step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import UnsupportedOp
from paceline.parallel.parameter import Parameter

__all__ = ["OuterModel"]

_GLOBAL = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""In which dtype the global value of a parameter is kept: the mean of numbers of 16 bits has more of them."""

_AS_BITS = {1: torch.uint8, 2: torch.int16}
"""What NumPy has no dtype for is given as it lies."""


class OuterModel:
    """The global values of a torch module's parameters, in host memory; what is not trained stays where it is.

    Args:
        net: the module that is trained; what is frozen now stays so.
        differences: what `backward` gives: by how much a parameter lies above its local value, or that value itself.

    Raises:
        UnsupportedOp: a parameter to train is neither float64, float32, bfloat16 nor float16.
    """

    def __init__(self, net: Any, *, differences: bool) -> None:
        self._net = net
        self._differences = differences
        self._tensors: dict[str, Any] = dict(net.named_parameters())
        self._parameters: dict[str, Parameter] = {}
        self._staged: dict[str, NDArray[Any]] = {}
        """Copies of frozen parameters and buffers that lie on another device, by path."""
        for path, tensor in self._tensors.items():
            if not tensor.requires_grad:
                self._parameters[path] = Parameter(self._as_it_lies(path, tensor), requires_grad=False)
            elif tensor.dtype in _GLOBAL:
                self._parameters[path] = Parameter(_on_host(tensor).copy())
            else:
                raise UnsupportedOp(f"parameter {path!r} is {tensor.dtype}: only floats of 16, 32, 64 bits are trained")

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The global values, by the net's paths."""
        yield from self._parameters.items()

    def named_buffers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """The net's own; on another device, as `fetch` found them, until `push`."""
        for path, tensor in self._net.named_buffers():  # looked up each time: a module may put others in their place
            yield path, self._as_it_lies(path, tensor)

    def forward(self, x: Any) -> Any:
        """The net's output."""
        return self._net(x)

    def backward(self, dy: NDArray[Any]) -> None:
        """Gives each parameter its gradient: see `differences`. Reads the net's parameters and buffers.

        Args:
            dy: what to multiply it by, shape [1].

        Raises:
            UnsupportedOp: a parameter was frozen or unfrozen since.
        """
        self._fetch_buffers()
        factor = float(dy[0])
        for path, parameter in reversed(self._parameters.items()):
            tensor = self._tensors[path]
            if tensor.requires_grad != parameter.requires_grad:
                raise UnsupportedOp(f"parameter {path!r} was frozen or unfrozen since local training began")
            if parameter.requires_grad:
                parameter.grad = self._contribution(tensor, parameter, factor)

    def push(self) -> None:
        """Gives the net the global values, rounded to its own dtypes."""
        with torch.no_grad():
            for path, tensor in self._tensors.items():
                if self._parameters[path].requires_grad:
                    tensor.copy_(torch.from_numpy(self._parameters[path].data))
            for path, tensor in self._elsewhere():
                _bits(tensor).copy_(torch.from_numpy(self._staged[path]))

    def _contribution(self, tensor: Any, parameter: Parameter, factor: float) -> NDArray[Any]:
        value, start = _on_host(tensor), torch.from_numpy(parameter.data)
        if tensor.dtype != start.dtype:  # the net began the round at the rounded value: the rest was not unlearned
            rest = start - start.to(tensor.dtype)
            value = value + rest.numpy()
        if self._differences:
            value = parameter.data - value
        return value if factor == 1 else value * factor

    def _fetch_buffers(self) -> None:
        for path, tensor in self._elsewhere():
            np.copyto(self._staged[path], _bits(tensor).cpu().numpy())

    def _elsewhere(self) -> Iterator[tuple[str, Any]]:
        """What is not trained and lies on another device."""
        for path, tensor in self._tensors.items():
            if path in self._staged:
                yield path, tensor.detach()
        for path, tensor in self._net.named_buffers():
            if path in self._staged:
                yield path, tensor

    def _as_it_lies(self, path: str, tensor: Any) -> NDArray[Any]:
        """A view of a tensor's memory; of another device's, the copy that stands for it."""
        if tensor.device.type == "cpu":
            return _bits(tensor).numpy()  # type: ignore[no-any-return]
        if path not in self._staged:
            self._staged[path] = _bits(tensor).cpu().numpy()
        return self._staged[path]


def _on_host(tensor: Any) -> NDArray[Any]:
    """The values in the dtype of the global ones: a view of memory where that can be."""
    return tensor.detach().to("cpu", _GLOBAL[tensor.dtype]).numpy()  # type: ignore[no-any-return]


def _bits(tensor: Any) -> Any:
    """The tensor, without its graph; as whole numbers where NumPy lacks its dtype."""
    flat = tensor.detach()
    known = flat.dtype in (torch.float16, torch.float32, torch.float64) or not flat.dtype.is_floating_point
    return flat if known else flat.view(_AS_BITS[flat.itemsize])
