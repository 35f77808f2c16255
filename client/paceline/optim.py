"""Optimizers for NumPy modules, wrapped or not: SGD and Adam, after torch.optim's formulas.

State is keyed by the path of a parameter, so it can be loaded in a new process, a wrapped module or a new world.
Updates change `Parameter.data` in place. A parameter that has no gradient or is frozen does not change, and neither
does its state: momentum does not move an unused parameter.
"""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._parallel._optimizer_state import CopiedPiece, OptimizerState
from paceline._parallel._parameter import HasParameters, Parameter, parameters_of
from paceline.errors import StepOrderError

__all__ = ["SGD", "Adam", "Optimizer"]

_State = dict[str, Any]
"""The state of one parameter: arrays of the parameter's shape, and numbers."""


class Optimizer(OptimizerState):
    """Base of optimizers: the loop over parameters, clearing, saving and loading.

    Args:
        module: the module to train. Parameters that are frozen now get no state, and are never trained.
        settings: numbers of the formula, by name.

    Attributes:
        is_new: True until a step is taken or a state is loaded.

    Raises:
        StepOrderError: FSDP has wrapped the module: give the optimizer the wrapper.
    """

    def __init__(self, module: HasParameters, **settings: float) -> None:
        for name, value in settings.items():
            if not value >= 0:
                raise ValueError(f"{name} must not be negative: {value!r}")
        self._settings = settings
        self._parameters = {path: p for path, p in parameters_of(module).items() if p.requires_grad}
        self._check_own()
        self._state = {path: self._fresh(p) for path, p in self._parameters.items()}
        self._scratch = self._new_scratch()
        self.is_new = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.settings.items())})"

    @property
    def lr(self) -> float:
        """Learning rate; may be set between steps."""
        return self.settings["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        self.settings["lr"] = value

    def step(self) -> None:
        """Updates every parameter that has a gradient. Gradients are read only.

        Raises:
            StepOrderError: FSDP has wrapped the module since: give the optimizer the wrapper.
        """
        self._check_own()
        self.is_new = False
        for path, parameter in self._parameters.items():
            if parameter.requires_grad and parameter.grad is not None:
                data = parameter.data
                scratch = self._scratch[data.dtype][: data.size].reshape(data.shape)
                self._update(data, parameter.grad, self._state[path], scratch)

    def zero_grad(self) -> None:
        """Sets every gradient to None, so that an unused parameter is seen to be unused."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Copies settings and state: {"settings": {name: number}, "state": {path: {name: array or number}}}."""
        state = {path: {name: np.copy(v) if isinstance(v, np.ndarray) else v for name, v in one.items()}
                 for path, one in self._state.items()}  # fmt: skip
        return {"settings": dict(self.settings), "state": state}

    @property
    def settings(self) -> dict[str, float]:
        """Numbers of the formula, by name; may be set between steps."""
        return self._settings

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Sets settings that `settings` has returned."""
        self._settings.update(settings)

    def live_arrays(self) -> dict[str, NDArray[Any]]:
        """Returns the state's arrays, not copies, by "path/name"; only `step` changes them."""
        return {
            f"{path}/{name}": value
            for path, state in self._state.items()
            for name, value in state.items()
            if isinstance(value, np.ndarray)
        }

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Returns a copy of the state's values other than arrays, by path."""
        return {
            path: {name: value for name, value in state.items() if not isinstance(value, np.ndarray)}
            for path, state in self._state.items()
        }

    def load_numbers(self, numbers: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets values that `numbers` has returned."""
        for path, values in numbers.items():
            self._state[path].update(values)

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The parameters that are trained, by path."""
        return self._parameters

    def move(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Replaces arrays that `live_arrays` returned, because the parameters have other shapes now."""
        self.is_new = False
        for key, array in arrays.items():
            path, _, name = key.rpartition("/")
            self._state[path][name] = array
        self._scratch = self._new_scratch()

    def update_copy(self, pieces: Mapping[str, CopiedPiece], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Updates copies of what another rank has, as that rank's next `step` will; see `OptimizerState`."""
        twin = copy.copy(self)
        vars(twin).pop("step", None)  # the session's wrapper, which would ask for leave again
        twin._settings, twin._parameters, twin._state = dict(self._settings), {}, {}
        for path, (values, gradient) in pieces.items():
            twin._parameters[path] = parameter = Parameter(values, self._parameters[path].requires_grad)
            parameter._hold(gradient)
            twin._state[path] = {name: arrays.get(f"{path}/{name}", v) for name, v in self._state[path].items()}
        for dtype, size in _largest(twin._parameters.values()).items():
            if dtype not in self._scratch or self._scratch[dtype].size < size:
                self._scratch[dtype] = np.empty(size, dtype)
        twin.step()

    def _new_scratch(self) -> dict[np.dtype[Any], NDArray[Any]]:
        """Returns memory for intermediate results: for each dtype, as much as its largest parameter needs."""
        return {dtype: np.empty(size, dtype) for dtype, size in _largest(self._parameters.values()).items()}

    def _check_own(self) -> None:
        """Raises if FSDP trains a parameter through a piece: this optimizer would never see a gradient of it."""
        for path, parameter in self._parameters.items():
            if parameter.has_piece:
                raise StepOrderError(
                    f"FSDP trains a shard in place of {path!r}: wrap the module first, "
                    f"then give the optimizer the wrapper, {type(self).__name__}(fsdp, ...)"
                )

    @abc.abstractmethod
    def _fresh(self, parameter: Parameter) -> _State:
        """Returns a parameter's state before the first step."""

    @abc.abstractmethod
    def _update(self, data: NDArray[Any], grad: NDArray[Any], state: _State, scratch: NDArray[Any]) -> None:
        """Updates `data` and `state` in place; may write to `scratch`, but not to `grad`. All have one shape."""


class SGD(Optimizer):
    """Stochastic gradient descent.

        g <- grad + weight_decay * data
        v <- momentum * v + g
        data <- data - lr * (g + momentum * v  if nesterov,  else v)

    Source: Sutskever et al., ICML 2013, in the form of torch.optim.SGD (the learning rate outside of v).

    Args:
        module: the module to train.
        lr: learning rate.
        momentum: 0 for none, which needs no state.
        weight_decay: L2 penalty.
        nesterov: look ahead along the momentum, which must be above 0.

    Raises:
        ValueError: a setting is negative, or `nesterov` comes without momentum.
    """

    def __init__(
        self,
        module: HasParameters,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        if nesterov and not momentum > 0:
            raise ValueError("nesterov needs a momentum above 0")
        super().__init__(module, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)

    def _fresh(self, parameter: Parameter) -> _State:
        return {"momentum": _zeros(parameter)} if self.settings["momentum"] else {}

    def _update(self, data: NDArray[Any], grad: NDArray[Any], state: _State, scratch: NDArray[Any]) -> None:
        lr, momentum = self.settings["lr"], self.settings["momentum"]
        grad = _decayed(grad, data, self.settings["weight_decay"], scratch)
        if not momentum:
            np.multiply(grad, lr, out=scratch)
            np.subtract(data, scratch, out=data)
            return
        velocity = state["momentum"]
        np.multiply(velocity, momentum, out=velocity)
        np.add(velocity, grad, out=velocity)
        if self.settings["nesterov"]:
            np.multiply(grad, lr, out=scratch)
            np.subtract(data, scratch, out=data)
            lr *= momentum
        np.multiply(velocity, lr, out=scratch)
        np.subtract(data, scratch, out=data)


class Adam(Optimizer):
    """Adam, with bias correction.

        g <- grad + weight_decay * data
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        data <- data - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)        t: updates of this parameter

    Source: Kingma and Ba, "Adam", ICLR 2015, algorithm 1; the L2 penalty as in torch.optim.Adam.

    Args:
        module: the module to train.
        lr: learning rate.
        betas: decay of the running means of g and g^2.
        eps: keeps the division finite.
        weight_decay: L2 penalty.

    Raises:
        ValueError: a setting is negative, or a beta is not below 1.
    """

    def __init__(
        self,
        module: HasParameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not max(betas) < 1:
            raise ValueError(f"betas must be below 1: {betas!r}")
        super().__init__(module, lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)

    def _fresh(self, parameter: Parameter) -> _State:
        return {"mean": _zeros(parameter), "square": _zeros(parameter), "updates": 0}

    def _update(self, data: NDArray[Any], grad: NDArray[Any], state: _State, scratch: NDArray[Any]) -> None:
        beta1, beta2, decay = (self.settings[name] for name in ("beta1", "beta2", "weight_decay"))
        mean, square = state["mean"], state["square"]
        state["updates"] += 1

        np.multiply(_decayed(grad, data, decay, scratch), 1 - beta1, out=scratch)
        np.multiply(mean, beta1, out=mean)
        np.add(mean, scratch, out=mean)

        g = _decayed(grad, data, decay, scratch)  # computed again: cheaper than a second scratch
        np.multiply(g, g, out=scratch)
        np.multiply(scratch, 1 - beta2, out=scratch)
        np.multiply(square, beta2, out=square)
        np.add(square, scratch, out=square)

        np.sqrt(square, out=scratch)
        np.divide(scratch, math.sqrt(1 - beta2 ** state["updates"]), out=scratch)
        np.add(scratch, self.settings["eps"], out=scratch)
        np.divide(mean, scratch, out=scratch)
        np.multiply(scratch, self.settings["lr"] / (1 - beta1 ** state["updates"]), out=scratch)
        np.subtract(data, scratch, out=data)


def _largest(parameters: Iterable[Parameter]) -> dict[np.dtype[Any], int]:
    """Returns for each dtype the size of the largest of its parameters."""
    largest: dict[np.dtype[Any], int] = {}
    for parameter in parameters:
        largest[parameter.dtype] = max(largest.get(parameter.dtype, 0), parameter.data.size)
    return largest


def _zeros(parameter: Parameter) -> NDArray[Any]:
    """Returns zeros like the values, for which memory is taken when written: a newcomer builds more than it keeps."""
    return np.zeros(parameter.data.shape, parameter.dtype)


def _decayed(grad: NDArray[Any], data: NDArray[Any], decay: float, scratch: NDArray[Any]) -> NDArray[Any]:
    """Returns the gradient plus its L2 penalty, in `scratch`; the gradient itself if the penalty is 0."""
    if not decay:
        return grad
    np.multiply(data, decay, out=scratch)
    np.add(scratch, grad, out=scratch)
    return scratch
