"""The values of a sharded model as dicts.

Any world can load whole dicts; sharded dicts need no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline._parallel._parameter import Parameter
from paceline._parallel.sharding._unit import Unit
from paceline.errors import SizeMismatch

_Paths = Mapping[int, str]
"""Paths by the identity of the piece."""
_Buffers = Mapping[str, NDArray[Any]]


def full_state(units: Iterable[Unit], paths: _Paths, buffers: _Buffers, *, keep: bool) -> dict[str, NDArray[Any]]:
    """Copies all values by path; a collective, in which one unit is whole at a time.

    Returns an empty dict unless this rank is to `keep` the copies.
    """
    state: dict[str, NDArray[Any]] = {}
    for unit in units:
        for flat in unit.flats:
            full = flat.gather(unit.shards)
            if keep:
                for piece, view in zip(flat.pieces, flat.views(full), strict=True):
                    state[paths[id(piece)]] = view.copy()
    if not keep:
        return {}
    return {path: state[path] for path in paths.values()} | {path: buffer.copy() for path, buffer in buffers.items()}


def load_full(
    units: Iterable[Unit], paths: _Paths, buffers: _Buffers, saved: Mapping[str, Any], before: Callable[[], None]
) -> None:
    """Loads what `full_state` returned, in any world: each rank takes its shard. Communicates nothing.

    `before` is called when `saved` is known to fit, before anything is changed.

    Raises:
        SizeMismatch: paths or shapes do not fit; the error lists all, and nothing was changed.
    """
    flats = [flat for unit in units for flat in unit.flats]
    shapes = {
        paths[id(piece)]: p.shape for flat in flats for p, piece in zip(flat.parameters, flat.pieces, strict=True)
    }
    shapes |= {path: buffer.shape for path, buffer in buffers.items()}
    _check(shapes, {path: np.shape(values) for path, values in saved.items()})
    before()
    for flat in flats:
        flat.set_whole([np.asarray(saved[paths[id(piece)]]) for piece in flat.pieces])
    for path, buffer in buffers.items():
        buffer[...] = saved[path]


def shard_state(units: Iterable[Unit], paths: _Paths, buffers: _Buffers) -> dict[str, dict[str, Any]]:
    """Copies the shards that this rank holds. Communicates nothing.

    Returns by path {"values": the elements here, shape [n]; "start": index of the first; "shape": the whole's shape}.
    """
    state = {path: _entry(values, start, shape) for path, values, start, shape in _shards(units, paths)}
    state = {path: state[path] for path in paths.values()}
    return state | {path: _entry(buffer, 0, buffer.shape) for path, buffer in buffers.items()}


def load_shards(
    units: Iterable[Unit], paths: _Paths, buffers: _Buffers, saved: Mapping[str, Any], before: Callable[[], None]
) -> None:
    """Loads what `shard_state` returned on the rank with the same shard; arguments as for `load_full`.

    Raises:
        SizeMismatch: another model, world, rank or strategy made the dict; nothing was changed.
    """
    units = list(units)
    mine = {
        path: _Held(start, (values.size,), values.dtype, shape) for path, values, start, shape in _shards(units, paths)
    }
    mine |= {path: _Held(0, (buffer.size,), buffer.dtype, buffer.shape) for path, buffer in buffers.items()}
    theirs = {path: _held(entry, mine.get(path)) for path, entry in saved.items()}
    _check(
        mine,
        theirs,
        "; a sharded state fits only the world, rank and strategy that made it: use state_dict() for others",
    )
    before()
    for unit in units:
        for flat in unit.flats:
            flat.given = True
    for path, values, _, _ in _shards(units, paths):
        values[...] = np.reshape(saved[path]["values"], values.shape)
    for path, buffer in buffers.items():
        buffer[...] = np.reshape(saved[path]["values"], buffer.shape)


def set_shards(
    units: Iterable[Unit], pieces: Iterable[Parameter], values: NDArray[Any], before: Callable[[], None]
) -> None:
    """Replaces all elements that this rank holds, one piece after the other, and drops gradients.

    `before` is called when the values are known to fit, before anything is changed.
    """
    pieces = list(pieces)
    values, expected = values.reshape(-1), sum(piece.data.size for piece in pieces)
    if values.size != expected:
        raise SizeMismatch(f"update_shards: expected {expected} elements but got {values.size}")
    before()
    for unit in units:
        for flat in unit.flats:
            flat.given = True
    start = 0
    for piece in pieces:
        piece.data = values[start : start + piece.data.size].reshape(piece.shape)
        piece.grad = None
        start += piece.data.size


def padded_gradients(units: Iterable[Unit], paths: _Paths) -> dict[str, NDArray[Any] | None]:
    """Returns gradients by path, in full shape: this rank's shard, with zeros elsewhere."""
    found: dict[str, NDArray[Any] | None] = {}
    for unit in units:
        for flat in unit.flats:
            for p, piece, start in zip(flat.parameters, flat.pieces, flat.starts, strict=True):
                padded = None
                if piece.grad is not None:
                    padded = np.zeros(p.shape, p.dtype)
                    padded.reshape(-1)[start : start + piece.grad.size] = piece.grad.reshape(-1)
                found[paths[id(piece)]] = padded
    return found


def _shards(units: Iterable[Unit], paths: _Paths) -> Iterable[tuple[str, NDArray[Any], int, tuple[int, ...]]]:
    """Yields for each parameter its path, this rank's elements, the index of the first, and the whole shape."""
    for unit in units:
        for flat in unit.flats:
            for p, piece, start in zip(flat.parameters, flat.pieces, flat.starts, strict=True):
                yield paths[id(piece)], piece.data, start, p.shape


def _entry(values: NDArray[Any], start: int, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"values": values.reshape(-1).copy(), "start": start, "shape": list(shape)}


class _Held(NamedTuple):
    """The elements of an array that a rank holds."""

    start: int
    size: tuple[int, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def _told(values: Any, wanted: tuple[tuple[int, ...], np.dtype[Any]] | None) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Returns shape and dtype of a saved value; the wanted dtype if the value can be converted to it."""
    array = np.asarray(values)
    fits = wanted is not None and np.can_cast(array.dtype, wanted[1], "same_kind")
    return array.shape, wanted[1] if wanted is not None and fits else array.dtype


def _held(entry: Any, wanted: _Held | None) -> _Held | str:
    """Returns what an entry of a sharded state holds; a description of `entry` if it is no such entry."""
    try:
        size, dtype = _told(entry["values"], None if wanted is None else (wanted.size, wanted.dtype))
        return _Held(int(entry["start"]), size, dtype, tuple(map(int, entry["shape"])))
    except (KeyError, TypeError, ValueError, IndexError):
        return "an entry without valid values, start and shape"


def _check(mine: Mapping[str, Any], theirs: Mapping[str, Any], hint: str = "") -> None:
    problems = [f"{path!r} is missing" for path in sorted(mine.keys() - theirs.keys())]
    problems += [f"{path!r} is unexpected" for path in sorted(theirs.keys() - mine.keys())]
    problems += [
        f"{path!r} is {theirs[path]}, not {mine[path]}"
        for path in sorted(mine.keys() & theirs.keys())
        if theirs[path] != mine[path]
    ]
    if problems:
        raise SizeMismatch("the state does not fit this model: " + "; ".join(problems) + hint)
