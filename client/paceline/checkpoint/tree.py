"""Splits a state of nested Python values into arrays and a JSON skeleton, and joins them again.

Nothing is pickled or evaluated (I9). Dicts, lists, tuples, text, bytes, numbers, None and arrays come back as they
were, with their exact types; anything else is refused, and the error names its path.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline._base.arrays import dtype_name
from paceline.checkpoint.pieces import Shard
from paceline.errors import UnsupportedOp

Skeleton: TypeAlias = Any
"""JSON. A value that JSON lacks is an object with one key that begins with "$"."""

Leaf: TypeAlias = NDArray[Any] | Shard
"""An array, or this rank's shard of one."""

_MAX_DEPTH = 100


def split(state: Any) -> tuple[Skeleton, dict[str, NDArray[Any]]]:
    """Splits a state into its skeleton and its arrays by name: the path at which each stands, made unique.

    Raises UnsupportedOp if a value cannot be saved; the text has its path.
    """
    skeleton, leaves = split_shards(state)
    arrays = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, Shard)}
    if odd := leaves.keys() - arrays.keys():
        raise UnsupportedOp(
            f"{min(odd)} is sharded over the ranks, which must save and load it together: use save_sharded"
        )
    return skeleton, arrays


def split_shards(state: Any) -> tuple[Skeleton, dict[str, Leaf]]:
    """Splits like `split`; a `Shard` may stand in place of an array. The skeleton describes the whole state.

    Raises UnsupportedOp also if a shard has the path of another array, so that ranks could not tell them apart.
    """
    leaves: dict[str, Leaf] = {}
    return _split(state, "", leaves, _MAX_DEPTH), leaves


def join(skeleton: Skeleton, arrays: Mapping[str, Any]) -> Any:
    """Joins a state again; raises ValueError if the skeleton is malformed, or names an array that `arrays` lacks."""
    try:
        return _join(skeleton, arrays, _MAX_DEPTH)
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"the skeleton of the state is damaged: {type(error).__name__}: {error}") from error


def _split(value: Any, path: str, arrays: dict[str, Leaf], depth: int) -> Skeleton:
    if not depth:
        raise UnsupportedOp(f"{path or 'the state'} is nested more than {_MAX_DEPTH} deep")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if np.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic | Shard):
        array = value.values if isinstance(value, Shard) else np.asarray(value)
        try:
            dtype_name(array.dtype)
        except UnsupportedOp as error:
            raise UnsupportedOp(f"{path or 'the state'}: {error}") from None
        name = path or "state"
        while name in arrays:
            if isinstance(value, Shard) or isinstance(arrays[name], Shard):
                raise UnsupportedOp(f"{name} is the path of two arrays, and one of them is sharded over the ranks")
            name += "'"
        arrays[name] = value if isinstance(value, Shard) else array
        return {"$scalar" if isinstance(value, np.generic) else "$array": name}
    if kind is list:
        return [_split(item, f"{path}.{n}".lstrip("."), arrays, depth - 1) for n, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": _split(list(value), path, arrays, depth)}
    if isinstance(value, Mapping):
        pairs = [(key, _split(item, f"{path}.{key}".lstrip("."), arrays, depth - 1)) for key, item in value.items()]
        if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [[_split(key, f"{path} (a key)", arrays, depth - 1), item] for key, item in pairs]}
    raise UnsupportedOp(
        f"{path or 'the state'} is a {kind.__name__}: a checkpoint can keep only plain values and arrays"
    )


def _join(value: Skeleton, arrays: Mapping[str, Any], depth: int) -> Any:
    if not depth:
        raise ValueError(f"the skeleton of the state is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_join(item, arrays, depth - 1) for item in value]
    if not isinstance(value, dict):
        return value
    special = next((key for key in value if key.startswith("$")), None)
    if special is None:
        return {key: _join(item, arrays, depth - 1) for key, item in value.items()}
    (inner,) = value.values()
    match special:
        case "$float":
            return float(inner)
        case "$bytes":
            return base64.b64decode(inner, validate=True)
        case "$array":
            return arrays[inner]
        case "$scalar":
            return arrays[inner][()]
        case "$tuple":
            return tuple(_join(inner, arrays, depth))
        case "$dict":
            return {_join(key, arrays, depth - 1): _join(item, arrays, depth - 1) for key, item in inner}
    raise ValueError(f"the skeleton of the state has an unknown kind {special!r}")
