"""Fuses nested dicts, lists and tuples of arrays into one vector for each dtype, and rebuilds them.

Dicts are walked in the order of their keys as text, so that ranks agree even if they filled theirs in another order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline._base.arrays import Array, as_array, as_flat, dtype_name


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields pairs of path ("layer/0/weight") and leaf, in an order that depends on the paths alone."""
    if isinstance(tree, dict):
        for key in sorted(tree, key=str):
            yield from leaves(tree[key], f"{path}/{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from leaves(item, f"{path}/{index}" if path else str(index))
    else:
        yield path, tree


class Fusion:
    """The arrays of a tree, copied into one vector for each dtype, in the order of the dtypes' names.

    `digest`, 8 hexadecimal digits, is of all paths, dtypes and shapes, for ranks to compare.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        named = [(path, as_array(leaf)) for path, leaf in leaves(tree)]
        self._shapes = [array.shape for _, array in named]
        self._dtypes = [dtype_name(array.dtype) for _, array in named]
        words = [f"{path} {dtype_name(array.dtype)}{array.shape}" for path, array in named]
        self.digest = f"{zlib.crc32('; '.join(words).encode()):08x}"
        self._names = sorted(set(self._dtypes))
        self.vectors = [
            np.concatenate([as_flat(array) for _, array in named if dtype_name(array.dtype) == name])
            for name in self._names
        ]

    def rebuild(self, vectors: list[Array]) -> Any:
        """Returns the tree with other numbers: its arrays are views of these vectors."""
        at = dict.fromkeys(self._names, 0)
        by_name = dict(zip(self._names, vectors, strict=True))
        arrays = []
        for name, shape in zip(self._dtypes, self._shapes, strict=True):
            n = int(np.prod(shape))
            arrays.append(by_name[name][at[name] : at[name] + n].reshape(shape))
            at[name] += n
        return _fill(self._tree, iter(arrays))


def _fill(tree: Any, new: Iterator[Array]) -> Any:
    if isinstance(tree, dict):
        filled = {key: _fill(tree[key], new) for key in sorted(tree, key=str)}
        return {key: filled[key] for key in tree}
    if isinstance(tree, list):
        return [_fill(item, new) for item in tree]
    if isinstance(tree, tuple):
        items = [_fill(item, new) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return next(new)
