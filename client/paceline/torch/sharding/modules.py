"""A tree of torch modules: what is in it by path, what to wrap in it, and the tensors that go in and come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from paceline.errors import UnsupportedOp
from paceline.parallel.fsdp import FSDP
from paceline.parallel.parameter import Parameter
from paceline.torch.sharding.mirror import mirror_of
from paceline.torch.tensors import array_of

__all__ = ["Adapter", "Call", "Wrapped", "mapped", "replaced", "tensors_in"]


class Call(NamedTuple):
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Wrapped(torch.nn.Module):  # type: ignore[misc]
    """A wrapped module, as modules around it see it.

    Attributes:
        module: what is wrapped.
        engine: what spreads it.
    """

    module: Any
    engine: FSDP


class Adapter:
    """A torch module as a NumPy module; paths are those it has without wrappers.

    Args:
        module: the module.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Mirrors of its parameters; pieces of those that are in units inside. A tied one under each of its paths."""
        yield from _parameters(self.module, "")

    def named_buffers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """The memory of its buffers."""
        for path, tensor, _ in _buffers(self.module, ""):
            yield path, array_of(tensor, f"buffer {path!r}")

    def passing_buffers(self) -> set[str]:
        """Paths of buffers that are no part of its state."""
        return {path for path, _, persistent in _buffers(self.module, "") if not persistent}

    def forward(self, call: Call) -> Any:
        """What the module returns."""
        return self.module(*call.args, **call.kwargs)

    def backward(self, dy: Any) -> Any:
        """Autograd runs it.

        Raises:
            UnsupportedOp: always.
        """
        raise UnsupportedOp("torch runs the backward pass: loss.backward()")


def replaced(module: Any, kinds: tuple[type, ...], make: Callable[[Any], Any]) -> None:
    """Puts a unit in the place of each module of some classes inside another one, inner ones first.

    A module that stands in several places is replaced by the same unit in all. What is in a unit already stays.

    Args:
        module: itself it stays.
        kinds: the classes.
        make: makes a unit of a module.
    """
    _replace(module, kinds, make, {})


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nested values with other tensors; what has none inside is the same object."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if next(tensors_in(value), None) is None:
        return value
    if isinstance(value, tuple):
        parts = [mapped(one, change) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if type(value) is list:
        return [mapped(one, change) for one in value]
    if type(value) is dict:
        return {key: mapped(one, change) for key, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changed = copy(value)
        for field in fields(value):  # frozen or not
            object.__setattr__(changed, field.name, mapped(getattr(value, field.name), change))
        return changed
    return value


def _parameters(module: Any, prefix: str) -> Iterator[tuple[str, Parameter]]:
    if isinstance(module, Wrapped):
        yield from ((prefix + path, parameter) for path, parameter in module.engine.named_parameters())
        return
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield prefix + name, mirror_of(tensor, prefix + name)
    for name, child in module._modules.items():
        if child is not None:
            yield from _parameters(child, f"{prefix}{name}.")


def _buffers(module: Any, prefix: str) -> Iterator[tuple[str, Any, bool]]:
    """Path, tensor, and whether it is part of the module's state."""
    if isinstance(module, Wrapped):
        yield from _buffers(module.module, prefix)
        return
    for name, tensor in module._buffers.items():
        if tensor is not None:
            yield prefix + name, tensor, name not in module._non_persistent_buffers_set
    for name, child in module._modules.items():
        if child is not None:
            yield from _buffers(child, f"{prefix}{name}.")


def _replace(module: Any, kinds: tuple[type, ...], make: Callable[[Any], Any], made: dict[int, Any]) -> None:
    for name, child in list(module._modules.items()):
        if child is None or isinstance(child, Wrapped):
            continue
        _replace(child, kinds, make, made)
        if isinstance(child, kinds):
            if id(child) not in made:
                made[id(child)] = make(child)
            setattr(module, name, made[id(child)])
