"""Arrays of other frameworks: NumPy views of their memory, and the way there and back. Imports no framework."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UnsupportedOp

__all__ = ["from_arrays", "is_foreign", "to_arrays", "view"]

Tree = Any
"""Nested dicts, lists and tuples of arrays and plain values."""


def view(value: Any) -> NDArray[Any]:
    """The memory of an array of any framework."""
    data = getattr(value, "data", value)
    if isinstance(value, np.ndarray):
        return value
    if isinstance(data, np.ndarray):  # paceline.Parameter
        return data
    detach = getattr(value, "detach", None)
    memory = value if detach is None else detach()
    if _is_bfloat16(memory):
        import ml_dtypes  # here, because few jobs need it and it costs start-up time

        return view(memory.view(_module(value).int16)).view(ml_dtypes.bfloat16)
    numpy = getattr(memory, "numpy", None)
    array = numpy() if callable(numpy) else None
    if not isinstance(array, np.ndarray):
        raise UnsupportedOp(f"the memory of a {type(value).__name__} cannot be read as an array")
    return array


def _is_bfloat16(value: Any) -> bool:
    """Of a framework: NumPy has it from `ml_dtypes`, and frameworks need not know of that."""
    return is_foreign(value) and str(getattr(value, "dtype", "")).endswith(".bfloat16")


def _module(value: Any) -> Any:
    """The framework whose array it is."""
    return sys.modules[type(value).__module__.partition(".")[0]]


def is_foreign(value: Any) -> bool:
    """True for an array of a framework."""
    return not isinstance(value, np.ndarray) and callable(getattr(value, "detach", None)) and hasattr(value, "numpy")


def to_arrays(tree: Tree, frameworks: list[str]) -> Tree:
    """A copy with NumPy arrays in place of a framework's; notes for each array whose it was, "" for NumPy's."""
    if is_foreign(tree):
        frameworks.append(type(tree).__module__.partition(".")[0])
        return view(tree).copy()
    if isinstance(tree, Mapping):
        return {key: to_arrays(value, frameworks) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(to_arrays(value, frameworks) for value in tree)
    if isinstance(tree, np.ndarray):
        frameworks.append("")
    return copy.deepcopy(tree)


def from_arrays(tree: Tree, frameworks: Iterator[str]) -> Tree:
    """A copy with a framework's arrays where they were; undoes `_to_arrays`."""
    if isinstance(tree, np.ndarray):
        framework = next(frameworks, "")
        return _made(framework, tree.copy()) if framework else tree.copy()
    if isinstance(tree, dict):
        return {key: from_arrays(value, frameworks) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(from_arrays(value, frameworks) for value in tree)
    return copy.deepcopy(tree)


def _made(framework: str, array: NDArray[Any]) -> Any:
    """A framework's array of the same memory, if the framework is loaded here."""
    module = sys.modules.get(framework)
    make: Callable[[NDArray[Any]], Any] | None = getattr(module, "from_numpy", None)
    if make is None:
        raise UnsupportedOp(f"the state holds arrays of {framework!r}, which this process has not imported")
    if array.dtype.name == "bfloat16":
        return make(array.view(np.int16)).view(module.bfloat16)  # type: ignore[union-attr]
    return make(array)
