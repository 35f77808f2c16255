"""Arrays of other frameworks: NumPy views of them, conversion to and from them, and seeds. Imports no framework."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._elastic.device_array import DeviceArray, is_on_device, memory_of, on_host
from paceline.errors import UnsupportedOp

Tree = Any
"""Nested dicts, lists and tuples of arrays and plain values."""


def view(value: Any) -> Any:
    """Returns a NumPy view of the memory of an array of any framework; a `DeviceArray` if it lies on a device."""
    if isinstance(value, np.ndarray):
        return value
    value = local_of(value)
    data = getattr(value, "data", value)
    if isinstance(data, np.ndarray):  # paceline.Parameter
        return data
    detach = getattr(value, "detach", None)
    if is_foreign(value) and is_on_device(value):
        return DeviceArray(value)
    return memory_of(value if detach is None else detach())


def local_of(value: Any) -> Any:
    """Returns the local tensor of torch's DTensor, over the same memory, and anything else as it is."""
    local = getattr(value, "_local_tensor", None)
    wait = getattr(local, "wait", None)  # a collective may still run
    return value if local is None else local if wait is None else wait()


def placement(value: Any) -> str:
    """Says how torch's DTensor is spread over the ranks of its mesh; empty for anything else."""
    mesh = getattr(value, "device_mesh", None)
    if mesh is None:
        return ""
    sizes = [
        f"{name or 'dim'}={size}"
        for name, size in zip(mesh.mesh_dim_names or [""] * mesh.ndim, mesh.shape, strict=True)
    ]
    return f"{list(value.shape)} as {', '.join(map(repr, value.placements))} over {', '.join(sizes)}"


def placed_like(local: Any, like: Any) -> Any:
    """Returns a DTensor with this local tensor and the placements of another one; the tensor itself for a plain one."""
    if not placement(like):
        return local
    return type(like.data).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def place_state(optimizer: Any) -> None:
    """Makes the loaded state of a torch optimizer DTensors where its parameters are: it was loaded as local tensors."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if placement(parameter):
            state, local = optimizer.state.get(parameter, {}), local_of(parameter)
            for name, value in state.items():
                if is_foreign(value) and not placement(value) and value.ndim and value.shape == local.shape:
                    state[name] = placed_like(value, parameter)


def store(target: Any, values: Any) -> None:
    """Copies values into what `view` returned."""
    if isinstance(target, DeviceArray):
        target.write(values)
    else:
        np.copyto(target, values)


def marks_of(value: Any) -> set[int]:
    """Returns marks that identify an array and others over the same memory: its id, and the address of its memory."""
    try:
        memory = view(value)
        address = memory.address if isinstance(memory, DeviceArray) else memory.__array_interface__["data"][0]
        return {id(value), address}
    except UnsupportedOp:
        return {id(value)}


def is_foreign(value: Any) -> bool:
    """True for an array of a framework."""
    return not isinstance(value, np.ndarray) and callable(getattr(value, "detach", None)) and hasattr(value, "numpy")


def to_arrays(
    tree: Tree, frameworks: list[str], into: Tree = None, *, take: Callable[[Any, Any], Any] | None = None
) -> Tree:
    """Returns a copy of nested values with NumPy arrays in place of a framework's.

    Args:
        tree: the values.
        frameworks: gets for each array the name of its framework, "" for NumPy.
        into: an earlier copy, whose memory is reused where it fits.
        take: returns what stands for an array; gets a view of it and what `into` has there. By default `copied`.
    """
    take = copied if take is None else take
    if is_foreign(tree):
        frameworks.append(type(tree).__module__.partition(".")[0])
        return take(view(tree), into)
    if isinstance(tree, Mapping):
        before = into if isinstance(into, dict) else {}
        return {key: to_arrays(value, frameworks, before.get(key), take=take) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        ones = into if isinstance(into, list | tuple) and len(into) == len(tree) else [None] * len(tree)
        return type(tree)(to_arrays(value, frameworks, one, take=take) for value, one in zip(tree, ones, strict=True))
    if isinstance(tree, np.ndarray):
        frameworks.append("")
        return take(tree, into)
    return copy.deepcopy(tree)


def copied(array: Any, into: Any) -> NDArray[Any]:
    """Returns a copy of an array: in `into` if that has the same shape and dtype, else in a new array."""
    if not isinstance(into, np.ndarray) or not _fits(into, array):
        return array.copy()  # type: ignore[no-any-return]
    np.copyto(into, on_host(array))
    return into


def from_arrays(tree: Tree, frameworks: Iterator[str]) -> Tree:
    """Returns a copy of nested values with a framework's arrays restored; undoes `to_arrays`."""
    if isinstance(tree, np.ndarray):
        framework = next(frameworks, "")
        return _made(framework, tree.copy()) if framework else tree.copy()
    if isinstance(tree, dict):
        return {key: from_arrays(value, frameworks) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(from_arrays(value, frameworks) for value in tree)
    return copy.deepcopy(tree)


_ARRAY_OF = "paceline: array of "
"""Followed by a framework's name: the only key of the dict that represents one of its arrays."""


def to_plain(tree: Tree) -> Tree:
    """Returns a copy of nested values in which the framework of each array is marked; `taken` reads it."""
    if is_foreign(tree):
        return {_ARRAY_OF + type(tree).__module__.partition(".")[0]: view(tree).copy()}
    if isinstance(tree, Mapping):
        return {key: to_plain(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(to_plain(value) for value in tree)
    return copy.deepcopy(tree)


def taken(plain: Tree, here: Tree) -> Tree:
    """Writes what `to_plain` returned into existing arrays, dicts and lists where they fit.

    Returns `here`, or a new object to put in its place. `plain` is neither changed nor kept.
    """
    if isinstance(plain, dict):
        name = next(iter(plain)) if len(plain) == 1 else None
        if isinstance(name, str) and name.startswith(_ARRAY_OF):
            values = plain[name]
            if is_foreign(here) and _fits(view(here), values):
                store(view(here), values)
                return here
            return _made(name.removeprefix(_ARRAY_OF), values.copy())
        into = here if isinstance(here, dict) else {}
        for key in into.keys() - plain.keys():
            del into[key]
        for key, value in plain.items():
            into[key] = taken(value, into.get(key))
        return into
    if type(plain) in (list, tuple):
        ones = here if type(here) is type(plain) and len(here) == len(plain) else [None] * len(plain)
        new = [taken(value, one) for value, one in zip(plain, ones, strict=True)]
        if type(plain) is list and ones is here:
            here[:] = new
            return here
        return type(plain)(new)
    if isinstance(plain, np.ndarray) and isinstance(here, np.ndarray) and _fits(here, plain):
        np.copyto(here, plain)  # other references to the array see the values
        return here
    return copy.deepcopy(plain)


def _fits(here: Any, values: NDArray[Any]) -> bool:
    return (here.shape, here.dtype) == (values.shape, values.dtype)


def _made(framework: str, array: NDArray[Any]) -> Any:
    """Makes a framework's array over the same memory."""
    module = sys.modules.get(framework)
    make: Callable[[NDArray[Any]], Any] | None = getattr(module, "from_numpy", None)
    if make is None:
        raise UnsupportedOp(f"the state holds arrays of {framework!r}, which this process has not imported")
    if array.dtype.name == "bfloat16":
        return make(array.view(np.int16)).view(module.bfloat16)  # type: ignore[union-attr]
    return make(array)


def seed_frameworks(*numbers: int) -> None:
    """Seeds the generators that torch draws from by default (dropout, `torch.rand`), on devices in use too."""
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    if generator is None:
        return
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])  # torch's generator on the CPU takes 32 bits
    generator.manual_seed(seed)
    for device in (getattr(torch, "cuda", None), getattr(torch, "xpu", None)):
        if device is not None and device.is_initialized():
            device.manual_seed_all(seed)
