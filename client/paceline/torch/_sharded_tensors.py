"""Adapts torch's modules, parameters and gradients to the sharded core; both use the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from paceline._parallel._parameter import Parameter
from paceline._parallel.sharding._sharded_model import ShardedModel
from paceline.errors import UnsupportedOp
from paceline.torch._device_streams import streams_of
from paceline.torch._tensors import array_of, on_host, placeholder_like, tensor_of, values_of, values_of_all, write_all

_NORMS = frozenset({torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, torch._foreach_norm})


class GradientShard(torch.Tensor):  # type: ignore[misc]  # torch is not there where types are checked
    """This rank's shard of a gradient: a plain tensor, except that it refuses to compute its norm.

    A shard's norm is not the gradient's, and `torch.nn.utils.clip_grad_norm_` would silently scale by another factor on
    each rank. Results computed from a `GradientShard` are plain tensors.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls `func` as if its arguments were plain tensors, unless it is a norm."""
        if func in _NORMS:
            raise UnsupportedOp(
                "FSDP shards this gradient over the ranks, so the norm of this rank's shard is not that of the "
                "whole, and torch.nn.utils.clip_grad_norm_ would scale by a different factor on each rank: call "
                "model.clip_grad_norm_(max_norm) of the outermost FSDP, on all ranks (with math.inf it only measures). "
                "The norm of this rank's shard alone is p.grad.detach().norm()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_MARK = "_paceline_parameter"
"""Name of the attribute of a tensor that holds its only mirror, even if it is tied or its module wrapped again."""


class Mirror(Parameter):
    """A module's parameter. Its memory lies in its unit's flat array while that is whole; otherwise it has none.

    On a device it has a copy of these values. Autograd accumulates into `tensor.grad` as always. `take_gradient` takes
    the gradient from there, so that gradients accumulate, wait and are sent like those of NumPy modules. If a
    `FlatTransport` moves them, `_home` and `grad` are tensors on the device, and so is the unit's flat array.
    """

    __slots__ = ("_handle", "_slot", "_written", "is_here", "tensor")

    is_here: bool
    """True if the tensor has its values."""

    def __init__(self, tensor: Any, name: str) -> None:
        self.tensor = tensor
        self._handle: Any = None
        self._written: Any = None
        """The stream that has written the home on a device last, or allocated it; None if others have waited for it."""
        self.is_here = True
        super().__init__(values_of(tensor, f"parameter {name!r}"), tensor.requires_grad)

    @property
    def requires_grad(self) -> bool:
        """True if the tensor requires a gradient."""
        return bool(self.tensor.requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.tensor.requires_grad_(value)

    @property
    def is_on_device(self) -> bool:
        """See `Parameter`."""
        return not on_host(self.tensor)

    @property
    def _home(self) -> Any:
        return self._slot

    @_home.setter
    def _home(self, slot: Any) -> None:
        self._slot = slot
        if isinstance(slot, torch.Tensor):
            self._written = streams_of(self.tensor.device).current()

    def watch(self, written: Callable[[Mirror], None]) -> None:
        """Calls `written` for each gradient that autograd leaves in the tensor; a second call does nothing."""
        if self._handle is None:
            self._handle = self.tensor.register_post_accumulate_grad_hook(lambda tensor: written(self))

    def take_gradient(self, factor: float) -> None:
        """Takes the gradient that autograd has left, times a factor; with 0 the gradient, even NaN, is dropped."""
        gradient, self.tensor.grad = self.tensor.grad, None
        if factor == 0:
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.dtype == torch.bfloat16:
            gradient = gradient.float()  # micro-batches are summed in full precision
        if factor != 1:
            gradient.mul_(factor)
        if not isinstance(self._home, torch.Tensor):
            self.accumulate(values_of_all([gradient])[0])
        elif self.requires_grad:
            self._accumulate_there(gradient)

    def _accumulate_there(self, gradient: Any) -> None:
        """Adds to the gradient on the device; see `accumulate`."""
        present: Any = self._grad
        self._await_written()
        with torch.no_grad():
            if present is None:
                self._home.copy_(gradient)
                self._hold(self._home)
            else:
                present.add_(gradient)
        self.writes += 1

    def _pack(self, slot: Any, weight: float) -> bool:
        """See `Parameter._pack`; on a device enqueued in the calling thread's stream, which waits for the gradient."""
        if not isinstance(slot, torch.Tensor):
            return super()._pack(slot, weight)
        present: Any = self._grad
        self._await_written()
        if present is None:
            slot.zero_()
            return False
        if present is not slot:  # an array if autograd has written it before its unit's backward pass has begun
            slot.copy_(present if isinstance(present, torch.Tensor) else tensor_of(present))
            self._hold(slot)
        return True

    def _await_written(self) -> None:
        """Has the calling thread's stream wait for the one that has written before; it is the one that writes now."""
        streams = streams_of(self.tensor.device)
        written, self._written = self._written, streams.current()
        if written not in (None, self._written):
            streams.wait_for(streams.mark(written))

    def _cut(self, values: NDArray[Any]) -> Parameter:
        return TorchPiece(values, self.requires_grad)

    def _place(self, values: Any) -> None:
        on_device = isinstance(values, torch.Tensor)
        super()._place(None if on_device else values)
        self.is_here = values is not None
        # Give the same object other memory, because modules, optimizers and autograd refer to the object.
        if values is None:
            self.tensor.data = placeholder_like(self.tensor)
        elif on_device:
            # Some kernels need, and most are faster with, values that begin at a multiple of 16 bytes.
            self.tensor.data = values.clone() if values.data_ptr() % 16 else values
        elif self.is_on_device:
            host = tensor_of(values)
            self.tensor.data = torch.empty_like(host, device=self.tensor.device).copy_(host)
        else:
            self.tensor.data = tensor_of(values)

    def _take_back(self) -> None:
        if self._data is not None:
            self._data[...] = values_of(self.tensor)


class TorchPiece(Parameter):
    """This rank's piece of a parameter, which torch's optimizers train.

    `tensor` is a `torch.nn.Parameter` over the same elements; its gradient is the piece's.
    """

    __slots__ = ("tensor",)

    def __init__(self, values: NDArray[Any], requires_grad: bool) -> None:
        self.tensor = torch.nn.Parameter(tensor_of(values), requires_grad=requires_grad)
        setattr(self.tensor, _MARK, self)
        super().__init__(values, requires_grad)

    @property
    def requires_grad(self) -> bool:
        """True if the tensor requires a gradient."""
        return bool(self.tensor.requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.tensor.requires_grad_(value)

    @property
    def _grad(self) -> NDArray[Any] | None:
        gradient = self.tensor.grad  # which users may have cleared or replaced
        return None if gradient is None else array_of(gradient)

    @_grad.setter
    def _grad(self, value: NDArray[Any] | None) -> None:
        gradient = None if value is None else tensor_of(value)
        if gradient is not None and isinstance(self._owner, ShardedModel) and self._owner.is_sharded:
            gradient = gradient.as_subclass(GradientShard)
        self.tensor.grad = gradient

    def _place(self, values: NDArray[Any] | None) -> None:
        super()._place(values)
        assert values is not None
        self.tensor.data = tensor_of(values)

    def _move(self, values: NDArray[Any]) -> None:
        self.tensor.grad = None
        super()._move(values)
        self.tensor.data = tensor_of(values)


def mirror_of(tensor: Any, name: str) -> Mirror:
    """Returns the mirror of a module's parameter; makes it at first use. The name is for errors."""
    found = getattr(tensor, _MARK, None)
    if found is None:
        found = Mirror(tensor, name)
        setattr(tensor, _MARK, found)
    assert isinstance(found, Mirror)
    return found


def mirror_in(tensor: Any) -> Mirror | None:
    """Returns the mirror of the parameter whose present memory contains a tensor; None if there is none."""
    parameter = tensor if tensor._base is None else tensor._base
    mirror = getattr(parameter, _MARK, None)
    if not isinstance(mirror, Mirror) or (tensor is not parameter and _address(tensor) != _address(parameter)):
        return None
    return mirror if tensor.dtype == parameter.dtype else None  # a view with another dtype is saved as it is


def piece_of(tensor: Any) -> TorchPiece | None:
    """Returns the piece to which a tensor belongs; None if it is not a piece's tensor."""
    piece = getattr(tensor, _MARK, None)
    return piece if isinstance(piece, TorchPiece) else None


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


class ModuleCall(NamedTuple):
    """The arguments of a call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Wrapped(torch.nn.Module):  # type: ignore[misc]
    """A wrapped module, as the modules around it see it, and the core that shards it."""

    module: Any
    sharded: ShardedModel


class Adapter:
    """A torch module as the core sees it: parameters and buffers by the paths that they have without wrappers."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yields mirrors of its parameters, and pieces of those in units inside; a tied parameter under each path."""
        yield from _parameters(self.module, "")

    def named_buffers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yields its buffers: arrays over the same memory, and copies of those on a device."""
        buffers = {path: tensor for path, tensor, _ in _buffers(self.module, "")}
        yield from zip(buffers, values_of_all(list(buffers.values())), strict=True)

    def write_back(self, parameters: Mapping[str, NDArray[Any]], buffers: Mapping[str, NDArray[Any]]) -> None:
        """Writes buffers that were copied from a device; see `paceline._parallel._parameter.write_back`."""
        del parameters
        write_all({path: tensor for path, tensor, _ in _buffers(self.module, "") if path in buffers}, buffers)

    def passing_buffers(self) -> set[str]:
        """Returns the paths of buffers that are not in its state dict."""
        return {path for path, _, persistent in _buffers(self.module, "") if not persistent}

    def forward(self, call: ModuleCall) -> Any:
        """Returns the module's output."""
        return self.module(*call.args, **call.kwargs)


def replaced(module: Any, kinds: tuple[type, ...], make: Callable[[Any], Any]) -> None:
    """Replaces each module of some classes inside another one by the unit that `make` makes of it, inner ones first.

    A module that occurs in several places is replaced by the same unit in all. Modules inside a unit stay, and so does
    the outer module.
    """
    _replace(module, kinds, make, {})


def tensors_in(value: Any) -> Iterator[Any]:
    """Yields the tensors in nested tuples, lists, dicts and dataclasses."""
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
    """Returns the same nested values with changed tensors; values without tensors inside are the same objects."""
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
        for field in fields(value):  # frozen dataclasses too
            object.__setattr__(changed, field.name, mapped(getattr(value, field.name), change))
        return changed
    return value


def _parameters(module: Any, prefix: str) -> Iterator[tuple[str, Parameter]]:
    if isinstance(module, Wrapped):
        yield from ((prefix + path, parameter) for path, parameter in module.sharded.named_parameters())
        return
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield prefix + name, mirror_of(tensor, prefix + name)
    for name, child in module._modules.items():
        if child is not None:
            yield from _parameters(child, f"{prefix}{name}.")


def _buffers(module: Any, prefix: str) -> Iterator[tuple[str, Any, bool]]:
    """Yields path, tensor, and whether it is in the module's state dict."""
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
