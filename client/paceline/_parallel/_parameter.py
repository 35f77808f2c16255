"""A trainable array with its gradient, and the protocol by which a NumPy module lists its parameters and buffers.

A module writes gradients with `Parameter.accumulate` (or by setting `Parameter.grad`) and knows nothing of ranks. A
wrapper such as DDP observes the parameters during a backward pass, and gives each gradient a *home*: a view of the
buffer that goes over the wire, so that the module's write is the only copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.errors import SizeMismatch, StepOrderError, UnsupportedOp

_CHUNK = 1 << 16
"""Number of elements that are raised to a power at once, in float64."""


class GradientObserver(Protocol):
    """An object that is notified of every write to a gradient."""

    def before_gradient(self, parameter: Parameter) -> None:
        """Called before the gradient is written. If this raises, nothing is written."""

    def after_gradient(self, parameter: Parameter) -> None:
        """Called after the gradient has been written."""


class Parameter:
    """An array that training changes.

    Args:
        data: the values; an array is shared, not copied.
        requires_grad: False freezes the parameter: it takes no gradient, and optimizers leave it alone.

    Attributes:
        shape: shape of the whole values, including elements that other ranks hold.
        dtype: dtype of the values.
        requires_grad: as above.
        writes: number of times that a gradient was written.
        clears: number of times that the gradient was set to None.
    """

    __slots__ = (
        *("_data", "_grad", "_home", "_observer", "_owner", "_pieced"),
        *("clears", "dtype", "requires_grad", "shape", "writes"),
    )

    def __init__(self, data: ArrayLike, requires_grad: bool = True) -> None:
        self._data: NDArray[Any] | None = np.asarray(data)
        self.shape: tuple[int, ...] = self._data.shape
        self.dtype: np.dtype[Any] = self._data.dtype
        self._grad: NDArray[Any] | None = None
        self._home: NDArray[Any] | None = None
        self._observer: GradientObserver | None = None
        self._owner: object = None
        self._pieced = False
        self.requires_grad = requires_grad
        self.writes = 0
        self.clears = 0

    def __repr__(self) -> str:
        frozen = "" if self.requires_grad else ", requires_grad=False"
        return f"Parameter({self.dtype} {list(self.shape)}{frozen})"

    @property
    def data(self) -> NDArray[Any]:
        """The values. Setting them writes into the existing array, because others may hold views of it.

        Raises:
            StepOrderError: FSDP has sharded the values over the ranks; they are whole only while their module runs.
        """
        if self._data is None:
            raise StepOrderError(
                f"the values of this {self} are sharded over the ranks, and whole only while its module runs: "
                "read them inside `with fsdp.unshard():`, and train them through fsdp.named_parameters()"
            )
        return self._data

    @data.setter
    def data(self, value: ArrayLike) -> None:
        self._check_shape(value, "values")
        if value is not self._data:
            self.data[...] = value

    @property
    def has_piece(self) -> bool:
        """True if FSDP trains a piece in place of this parameter; FSDP's `named_parameters` lists the piece."""
        return self._pieced

    @property
    def grad(self) -> NDArray[Any] | None:
        """The gradient, with the shape and dtype of `data`, or None. Setting an array copies it and signals."""
        return self._grad

    @grad.setter
    def grad(self, value: ArrayLike | None) -> None:
        if value is None:
            self._grad = None
            self.clears += 1
        else:
            self._write(value, add=False)

    def accumulate(self, gradient: ArrayLike) -> None:
        """Adds to the gradient, or copies if there is none, and signals the write. A frozen parameter ignores the call.

        Raises:
            SizeMismatch: the gradient does not have the shape of `data`.
            StepOrderError: the gradient is on its way to the other ranks already (raised by the wrapper).
        """
        if self.requires_grad:
            self._write(gradient, add=self._grad is not None)

    def _write(self, gradient: ArrayLike, *, add: bool) -> None:
        self._check_shape(gradient, "a gradient")
        if self._observer is not None:
            self._observer.before_gradient(self)
        if add:
            assert self._grad is not None
            np.add(self._grad, gradient, out=self._grad, casting="same_kind")
        elif gradient is not self._grad:
            # Copy even without a home: a module may give the same array to two parameters, or reuse it.
            target = np.empty(self.shape, self.dtype) if self._home is None else self._home
            np.copyto(target, gradient, casting="same_kind")
            self._grad = target
        self.writes += 1
        if self._observer is not None:
            self._observer.after_gradient(self)

    def _check_shape(self, value: ArrayLike, what: str) -> None:
        if np.shape(value) != self.shape:
            raise SizeMismatch(f"{what} of shape {np.shape(value)} does not fit a parameter of shape {self.shape}")

    # Only the wrappers of this package use the methods below.

    def _watch(self, observer: GradientObserver) -> None:
        """Tells `observer` of every write until `_unwatch`. Two observers would reduce the gradient twice: refused."""
        if self._observer is not None:
            raise StepOrderError("the parameter's gradient is already being reduced: is its module wrapped twice?")
        self._observer = observer

    def _unwatch(self, observer: GradientObserver) -> None:
        """Ends `_watch`; leaves another observer alone."""
        if self._observer is observer:
            self._observer = None

    def _hold(self, gradient: NDArray[Any] | None) -> None:
        """Makes an array the gradient, without a copy, a signal to the observer, or a change of `writes`."""
        self._grad = gradient

    def _pack(self, slot: NDArray[Any], weight: float) -> bool:
        """Moves the gradient, which is multiplied by the weight already, into a slot; returns False if there is none.

        Without a gradient the slot gets zeros.
        """
        del weight
        if self.grad is None:
            slot.fill(0)
            return False
        if self.grad is not slot:  # another wrapper has moved it
            np.copyto(slot, self.grad)
            self._hold(slot)
        return True

    def _layout(self) -> tuple[np.dtype[Any], int]:
        """Returns the dtype and the number of bytes of the values."""
        return self.data.dtype, self.data.nbytes

    def _gradient_values(self) -> NDArray[Any]:
        """Returns the values of the gradient, which is there; a view if it lies on the CPU."""
        assert self.grad is not None
        return self.grad

    def _copied_gradient(self) -> Any:
        """Returns a copy of the gradient, which is there."""
        assert self.grad is not None
        return self.grad.copy()

    def _add_to_gradient(self, more: Any) -> None:
        """Adds what `_copied_gradient` returned to the gradient, which is there."""
        assert self.grad is not None
        np.add(self.grad, more, out=self.grad)

    def _scale_gradient(self, factor: float) -> None:
        """Multiplies the gradient, which is there, in place."""
        assert self.grad is not None
        np.multiply(self.grad, factor, out=self.grad)

    def _gradient_power(self, p: float) -> float:
        """Returns `power_of` the gradient, which is there."""
        assert self.grad is not None
        return power_of(self.grad, p)

    def _cut(self, values: NDArray[Any]) -> Parameter:
        """Makes the piece that is trained in place of this parameter, with these values."""
        return Parameter(values, self.requires_grad)

    @property
    def is_on_device(self) -> bool:
        """True if the module's values are a copy of `data` on a device."""
        return False

    def _place(self, values: NDArray[Any] | None) -> None:
        """Makes an array the values, without a copy; None while they are sharded."""
        self._data = values

    def _take_back(self) -> None:
        """Copies the values on a device to `data`."""

    def _move(self, values: NDArray[Any]) -> None:
        """Makes an array of another shape the values, without a copy; drops the gradient, which no longer fits."""
        self._data, self.shape, self._grad = values, values.shape, None


def power_of(gradient: NDArray[Any], p: float) -> float:
    """Returns the sum of |g|^p over a gradient, in float64; for infinity the largest |g|."""
    flat = gradient.reshape(-1)
    if math.isinf(p):
        return float(np.max(np.abs(flat), initial=0.0))
    total = 0.0
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK].astype(np.float64)
        total += float(part @ part) if p == 2 else float(np.sum(np.abs(part) ** p))
    return total


@contextmanager
def ignoring_gradients(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Drops gradients that are written inside the block; keeps those from before."""
    kept = [(p, p.grad, p._home) for p in parameters]
    for parameter, _, _ in kept:
        parameter._hold(None)
        parameter._home = None
    try:
        yield
    finally:
        for parameter, gradient, home in kept:
            parameter._home = home
            parameter._hold(gradient)


class HasParameters(Protocol):
    """Anything with parameters: a module, or a wrapped one."""

    def named_parameters(self) -> Iterable[tuple[str, Parameter]]:
        """Returns pairs of path and parameter, in the same order on every rank, first layer first."""


class Module(HasParameters, Protocol):
    """A NumPy module. It may also have `named_buffers()`: pairs of path and array, state that is not trained."""

    def forward(self, x: Any) -> Any:
        """Returns the output for a batch; keeps what `backward` needs."""

    def backward(self, dy: Any) -> Any:
        """Accumulates parameter gradients, last layer first; `dy` is the gradient of the loss by the output."""


def parameters_of(module: HasParameters) -> dict[str, Parameter]:
    """Returns parameters by path. A tied one (one object under several paths) is listed once, by its first path."""
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    for path, parameter in module.named_parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found[path] = parameter
    return found


def buffers_of(module: object) -> dict[str, NDArray[Any]]:
    """Returns buffers by path; none for a module without `named_buffers`."""
    pairs = getattr(module, "named_buffers", None)
    found: dict[str, NDArray[Any]] = dict(pairs()) if pairs is not None else {}
    for path, buffer in found.items():
        if not isinstance(buffer, np.ndarray):
            raise UnsupportedOp(f"buffer {path!r} must be an array that can be written in place, not {type(buffer)}")
    return found


def write_back(module: object, parameters: Mapping[str, NDArray[Any]], buffers: Mapping[str, NDArray[Any]]) -> None:
    """Gives a module the values that were read from it as `Parameter.data` and `buffers_of`, and changed in place.

    Only a module on a device needs it: there these arrays are copies, and the module has a method `write_back`.
    """
    write = getattr(module, "write_back", None)
    if write is not None:
        write(parameters, buffers)
