"""Adapts torch's optimizers to `OptimizerState`, so that their state can be saved, moved and compared.

An optimizer that works element by element treats a piece of a parameter as it would the whole. Its state then consists
of tensors of the piece's shape, which are cut as the parameter is, and values that are the same on all ranks, such as
the number of steps.

torch's optimizers create their state in their first step. Here it is created at once, because newcomers need memory to
receive it: zeros, provided that the optimizer itself has zeros after a step with gradients of zero. So its first real
step finds the state that it would have created.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline._parallel._optimizer_state import CopiedPiece, OptimizerState
from paceline._parallel._parameter import Parameter
from paceline._parallel.sharding._sharded_model import ShardedModel
from paceline.errors import StepOrderError, UnsupportedOp
from paceline.torch._sharded_tensors import TorchPiece, mirror_in, piece_of
from paceline.torch._tensors import array_of, tensor_of

_KEPT = "_paceline_state"
"""Name of the attribute of a torch optimizer that holds its `TorchOptimizer`."""

_PLAIN = (bool, int, float, str)


class TorchOptimizer(OptimizerState):
    """The adapter of a torch optimizer of pieces, whose state must begin with zeros, for each parameter by itself."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._is_loaded = False
        self._begun: set[str] = set()
        paths: dict[int, str] = {}
        self._pieces: dict[str, TorchPiece] = {}
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                piece = piece_of(tensor)
                owner = None if piece is None else piece._owner
                if piece is None or not isinstance(owner, ShardedModel):
                    raise UnsupportedOp(
                        f"this {self._kind} has shards of a model that FSDP has wrapped, and other parameters too"
                    )
                paths = paths if id(piece) in paths else paths | owner.outermost.paths()
                self._pieces[paths[id(piece)]] = piece
        self._trained()

    @property
    def is_new(self) -> bool:
        """True until a step is taken or state is loaded."""
        return not self._is_loaded and not any(v for one in self.numbers().values() for v in one.values())

    @is_new.setter
    def is_new(self, value: bool) -> None:
        self._is_loaded = not value

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Returns the pieces that the optimizer trains, by path."""
        return self._trained()

    @property
    def settings(self) -> dict[str, Any]:
        """Returns the plain values of its groups, by "number of the group/name"."""
        return {f"{number}/{name}": _plain(value) for number, name, value in self._settings()}

    @property
    def stepper(self) -> Any:
        """Returns the torch optimizer."""
        return self._optimizer

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Loads settings that `settings` returned."""
        for number, name, value in self._settings():
            new = settings.get(f"{number}/{name}", value)
            if isinstance(value, torch.Tensor):
                value.fill_(new)
            else:
                self._optimizer.param_groups[number][name] = tuple(new) if isinstance(value, tuple) else new

    def live_arrays(self) -> dict[str, NDArray[Any]]:
        """Returns the tensors of its state as arrays over the same memory, by "path/name"."""
        return {
            f"{path}/{name}": array_of(value)
            for path, piece in self._trained().items()
            for name, value in self._state(piece).items()
            if _is_cut(name, value)
        }

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Returns everything else in its state, by path."""
        return {
            path: {name: _plain(value) for name, value in self._state(piece).items() if not _is_cut(name, value)}
            for path, piece in self._trained().items()
        }

    def load_numbers(self, numbers: Mapping[str, Mapping[str, Any]]) -> None:
        """Loads values that `numbers` returned."""
        for path, values in numbers.items():
            state = self._state(self._pieces[path])
            for name, value in values.items():
                if isinstance(state.get(name), torch.Tensor):
                    state[name].fill_(value)
                else:
                    state[name] = value

    def move(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Replaces the live arrays, because the pieces have other shapes now."""
        self.is_new = False
        for key, array in arrays.items():
            path, _, name = key.rpartition("/")
            self._state(self._pieces[path])[name] = tensor_of(array)

    def check_copying(self) -> None:
        """Raises `UnsupportedOp` if the optimizer has hooks around its step, which a copy's update does not run."""
        kept = vars(self._optimizer)
        if kept.get("_optimizer_step_pre_hooks") or kept.get("_optimizer_step_post_hooks"):
            raise UnsupportedOp(
                f"this {self._kind} has hooks around its step, which may change what it does on one rank alone: remove "
                "them, or pass FSDP redundancy=1, without copies of other ranks' shards"
            )

    def update_copy(self, pieces: Mapping[str, CopiedPiece], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Updates copies of what another rank has, as that rank's next step will; see `OptimizerState`."""
        copies: dict[int, Any] = {}
        state: dict[Any, dict[str, Any]] = defaultdict(dict)
        for path, (values, gradient) in pieces.items():
            original = self._pieces[path].tensor
            copies[id(original)] = copied = torch.nn.Parameter(tensor_of(values), requires_grad=original.requires_grad)
            copied.grad = None if gradient is None else tensor_of(gradient)
            for name, value in self._state(self._pieces[path]).items():
                array = arrays.get(f"{path}/{name}")
                state[copied][name] = _copied(value) if array is None else tensor_of(array)
        groups = [
            {**group, "params": [copies[id(tensor)] for tensor in group["params"] if id(tensor) in copies]}
            for group in self._optimizer.param_groups
        ]
        _step(self._like([group for group in groups if group["params"]], state))
        for path in pieces:  # an optimizer may have put other tensors in the place of its state's
            for name, value in state[copies[id(self._pieces[path].tensor)]].items():
                array = arrays.get(f"{path}/{name}")
                if array is not None and (new := array_of(value)).ctypes.data != array.ctypes.data:
                    array[...] = new

    def zero_grad(self) -> None:
        """Sets every gradient to None."""
        self._optimizer.zero_grad(set_to_none=True)

    def _state(self, piece: TorchPiece) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state[piece.tensor]
        return state

    def _settings(self) -> Iterator[tuple[int, str, Any]]:
        for number, group in enumerate(self._optimizer.param_groups):
            for name, value in group.items():
                if name != "params" and _is_plain(value):
                    yield number, name, value

    @property
    def _kind(self) -> str:
        return type(self._optimizer).__name__

    def _trained(self) -> dict[str, TorchPiece]:
        """Returns the pieces that take gradients or have state; creates missing state, for all of them or for none."""
        kept = self._optimizer.state
        trained = {path: piece for path, piece in self._pieces.items() if piece.requires_grad or kept.get(piece.tensor)}
        if new := [path for path in trained if path not in self._begun]:
            groups = {id(tensor): group for group in self._optimizer.param_groups for tensor in group["params"]}
            tensors = [trained[path].tensor for path in new]
            states = [kept.get(tensor) or self._first(groups[id(tensor)], tensor) for tensor in tensors]
            for tensor, state in zip(tensors, states, strict=True):
                self._check(state, tensor)
            for tensor, state in zip(tensors, states, strict=True):
                kept[tensor] = state
            self._begun.update(new)
        return trained

    def _first(self, group: Mapping[str, Any], tensor: Any) -> dict[str, Any]:
        """Returns the state that the optimizer's first step would create for a tensor."""
        if group.get("momentum") and group.get("dampening"):
            raise UnsupportedOp(f"{self._kind} with dampening is not supported: its first step differs from all others")
        first: dict[str, Any] = {}
        for name, value in self._after_a_step(group, tensor).items():
            if isinstance(value, torch.Tensor):
                if name != "step" and value.any():
                    raise UnsupportedOp(f"{self._kind} is not supported: its state {name!r} does not begin with zeros")
                like = tensor if _is_cut(name, value) else value
                # Use NumPy: its zeros take no memory until written, and a newcomer builds more than it keeps.
                first[name] = tensor_of(np.zeros(tuple(like.shape), array_of(value).dtype))
            elif value is None or name == "step":
                first[name] = None if value is None else type(value)(0)
            else:
                raise UnsupportedOp(
                    f"{self._kind} is not supported: the initial value of its state {name!r} is not known"
                )
        return first

    def _after_a_step(self, group: Mapping[str, Any], like: Any) -> dict[str, Any]:
        """Returns the state that such an optimizer has for a single zero after a step with gradient zero."""
        probe = torch.nn.Parameter(torch.zeros(1, dtype=like.dtype))
        probe.grad = torch.zeros_like(probe)
        twin = self._like([{**group, "params": [probe]}], defaultdict(dict))
        try:
            _step(twin)
        except TypeError as error:
            raise UnsupportedOp(f"a {self._kind} does not step by itself: {error}") from error
        state: dict[str, Any] = twin.state[probe]
        return state

    def _like(self, groups: list[dict[str, Any]], state: dict[Any, dict[str, Any]]) -> Any:
        """Returns an optimizer of the same kind with copies of these groups and with this state, without hooks."""
        kind = type(self._optimizer)
        twin = object.__new__(kind)
        twin.__dict__ = {
            **self._optimizer.__dict__,
            "state": state,
            "param_groups": [
                {name: value if name == "params" else _copied(value) for name, value in group.items()}
                for group in groups
            ],
            "_optimizer_step_pre_hooks": OrderedDict(),
            "_optimizer_step_post_hooks": OrderedDict(),
        }
        twin.__dict__.pop("step", None)  # a scheduler's wrapper that counts steps
        return twin

    def _check(self, state: Mapping[str, Any], tensor: Any) -> None:
        for name, value in state.items():
            is_tensor = isinstance(value, torch.Tensor)
            is_number = value is None or type(value) in _PLAIN or (is_tensor and value.ndim == 0)
            if not (is_tensor and value.shape == tensor.shape if _is_cut(name, value) else is_number):
                raise UnsupportedOp(
                    f"{self._kind} is not supported: its {name!r} is neither a number nor of its parameter's shape"
                )


def optimizer_of(thing: Any) -> TorchOptimizer | None:
    """Returns the adapter of a torch optimizer of pieces; None for anything else, or if its state need not be known.

    Raises:
        StepOrderError: the optimizer would train nothing, because it was made before the module was wrapped.
    """
    if not isinstance(thing, torch.optim.Optimizer):
        return None
    _check_trains(thing)
    tensors = [tensor for group in thing.param_groups for tensor in group["params"]]
    owners = [piece._owner for tensor in tensors if (piece := piece_of(tensor))]
    if not owners:
        return None
    found = getattr(thing, _KEPT, None)
    if found is None:
        try:
            found = TorchOptimizer(thing)
        except UnsupportedOp:
            if any(isinstance(owner, ShardedModel) and owner.is_sharded for owner in owners):
                raise
            return None
        setattr(thing, _KEPT, found)
    assert isinstance(found, TorchOptimizer)
    return found


@functools.cache
def watch_optimizers() -> None:
    """Makes `step` of an optimizer raise `StepOrderError` if FSDP has replaced one of its parameters by a piece.

    Such a parameter gets no more gradients, and torch's optimizers silently skip parameters without gradients.
    """
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _check_trains(optimizer))


def _check_trains(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            mirror = mirror_in(tensor)
            if mirror is not None and mirror.has_piece:
                raise StepOrderError(
                    f"FSDP trains shards of the parameters that this {type(optimizer).__name__} has: wrap the module "
                    "first, then give the optimizer model.parameters()"
                )


def _is_cut(name: str, value: Any) -> bool:
    """Returns True if a value of the state has its parameter's shape, so that it is cut as the parameter is."""
    return isinstance(value, torch.Tensor) and name != "step" and (value.ndim > 0 or value.dtype.is_floating_point)


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.ndim == 0)
    return type(value) in _PLAIN or (type(value) is tuple and all(type(one) in _PLAIN for one in value))


def _step(optimizer: Any) -> None:
    """Calls the `step` of an optimizer's class, without the hooks that torch runs around every optimizer's."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    step(optimizer)


def _copied(value: Any) -> Any:
    """Copies a number of the state or of the settings, which may be a tensor."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
