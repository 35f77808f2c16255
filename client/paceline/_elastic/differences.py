"""Describes in words where members differ: in the bits of their states and gradients, and in what they train."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._elastic.device_array import DeviceArray, on_host
from paceline._elastic.state import StateCore
from paceline._group import Group
from paceline._links.base import Peer
from paceline.checkpoint.tree import split
from paceline.errors import DivergenceError, PacelineError, SettingsMismatch, SizeMismatch

_MOST_NAMES = 6
"""Most array names in a text: enough to see which part of a model differs."""

_WINDOW_BYTES = 1 << 12
"""Bytes of state in one digest: few, because every step reads them from memory."""


def partial_digest(arrays: Sequence[Any], step: int) -> int:
    """Returns the CRC-32 of a window of one array: of the next array at each step, of the next window at each round."""
    if not arrays:
        return 0
    turn, which = divmod(step, len(arrays))
    array = arrays[which]
    if not array.nbytes:
        return 0
    start = turn % -(-array.nbytes // _WINDOW_BYTES) * _WINDOW_BYTES
    first, count = start // array.dtype.itemsize, _WINDOW_BYTES // array.dtype.itemsize
    if isinstance(array, DeviceArray):
        return zlib.crc32(array.parcel(first, count).view(np.uint8).data)
    if array.flags.c_contiguous:
        return zlib.crc32(array.reshape(-1).view(np.uint8)[start : start + _WINDOW_BYTES].data)
    return zlib.crc32(np.asarray(array.flat[first : first + count]).view(np.uint8).data)  # in C order too


def digests_of(state: StateCore) -> dict[str, int]:
    """Returns a 32-bit digest of each unsharded array and of the rest of each part; the same names on all members."""
    arrays = {name: crc_of(on_host(array)) for name, array in state.named().items()}
    return {**arrays, **{name: crc_of(part.rest()) for name, (_, part) in state.objects.items()}}


def where_they_differ(names: Sequence[str], digests: NDArray[np.uint32]) -> str:
    """Describes which arrays and parts are not the same on all members. Shape of `digests`: [W, number of names]."""
    odd = [name for name, differs in zip(names, (digests != digests[0]).any(axis=0), strict=True) if differs]
    if not odd:  # the word covers the state, and whether the update ran
        return "optimizer.step() ran in the previous step on only some of them"
    more = f" and {len(odd) - _MOST_NAMES} more" if len(odd) > _MOST_NAMES else ""
    return f"they differ in {', '.join(odd[:_MOST_NAMES])}{more}"


def find_minority(group: Group, state: StateCore, step: int, digest: int) -> tuple[list[int], str]:
    """Finds the ranks that do not hold what most members hold, and a sentence on where they differ. A collective.

    Raises:
        DivergenceError: without a majority no member can tell which state is right.
    """
    found: Any = group.all_gather(np.array([step << 32 | digest], np.uint64))
    digests = digests_of(state)
    theirs: Any = group.all_gather(np.array([[*digests.values()]], np.uint32))
    where = where_they_differ(list(digests), theirs)
    with contextlib.suppress(PacelineError):
        group.barrier()  # no member may end the generation before all know
    values, counts = np.unique(found, return_counts=True)
    if 2 * counts.max() <= group.size:
        text = f"before step {step}, members did not hold the same bits: {where}"
        raise DivergenceError(text, generation=group.generation)
    odd = [int(rank) for rank in np.flatnonzero(found != values[np.argmax(counts)])]
    members = ", ".join(str(group.members[rank]) for rank in odd)
    return odd, f"before step {step}, {members} did not hold the same bits as the others: {where}"


def crc_of(tree: Any) -> int:
    """Returns the CRC-32 of nested values."""
    skeleton, arrays = split(tree)
    crc = zlib.crc32(json.dumps(skeleton, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, zlib.crc32(name.encode(), crc))
    return crc


def difference(mine: bytes, theirs: bytes, donor: Peer, replica_size: int = 1) -> PacelineError:
    """Returns the error for a worker that trains something else than the line; the error names the first difference.

    `donor` has this worker's position in its replica, and another position may be the one that differs.
    """
    if replica_size > 1 and mine == theirs:
        return SettingsMismatch("another rank of this replica trains something else than its like: it says what")
    try:
        here, there = json.loads(mine), json.loads(theirs)
        found = next(_settings(here["settings"], there["settings"]), None)
        if found is not None:
            return SettingsMismatch(f"{found} on {donor} and the line's other members")
        found = next(_parts(here["parts"], there["parts"]), None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return SettingsMismatch(
            f"{donor} trains something else, and its description of it cannot be read: {error!s:.200}"
        )
    return SizeMismatch(f"{found or 'the training here differs from that'} on {donor} and the line's other members")


def _settings(here: dict[str, str], there: dict[str, str]) -> Iterator[str]:
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            yield f"{name} is {here.get(name, 'not set')} here but {there.get(name, 'not set')}"


def _parts(here: dict[str, Any], there: dict[str, Any]) -> Iterator[str]:
    for name in sorted(here.keys() | there.keys()):
        if name not in here or name not in there:
            yield f"the training state has {'no ' if name not in here else 'a '}part {name!r} here, unlike"
            continue
        (kind, arrays), (their_kind, their_arrays) = here[name], there[name]
        if kind != their_kind:
            yield f"{name} is a {kind} here but a {their_kind}"
        mine, others = ({path: described for path, *described in each} for each in (arrays, their_arrays))
        for path in [*mine, *(path for path in others if path not in mine)]:
            if mine.get(path) != others.get(path):
                yield f"{name}: {path!r} is {_words(mine.get(path))} here but {_words(others.get(path))}"


def _words(described: list[Any] | None) -> str:
    """Puts dtype and shape into words, and for a part of a DTensor also which part of what it is."""
    if described is None:
        return "not there"
    dtype, shape, *whole = described
    return f"{dtype}{shape}" + (f" of {whole[0]}" if whole else "")
