"""Agreement at first use: all ranks have the same model, and hold rank 0's values, bit for bit (I5).

W ranks; every step here is a collective, so all ranks take it together or fail together.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DivergenceError, PacelineError, PeerRaised, StepOrderError
from paceline.links.base import Peer
from paceline.parallel.manifest import Manifest, first_difference
from paceline.parallel.ranks import Ranks

__all__ = ["NewcomerDiffers", "agree", "give"]


class NewcomerDiffers(PeerRaised):
    """A newcomer trains another model than the other members; it raises the difference, and the others raise this.

    Attributes:
        newcomer: the first of the newcomers that differ.
    """

    def __init__(self, message: str, newcomer: Peer, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message, ranks=ranks)
        self.newcomer = newcomer


def agree(
    group: Ranks, manifest: Manifest, arrays: Sequence[NDArray[Any]], *, may_change: bool, agreed_in: int = 0
) -> int:
    """Compares manifests, then gives rank 0's values to all, unless all hold them already or are known to (`vouched`).

    Args:
        group: the ranks.
        manifest: this rank's manifest.
        arrays: this rank's parameters and buffers, in the manifest's order; written in place.
        may_change: False if gradients have been computed from this rank's own values.
        agreed_in: the last generation in which this rank has agreed on the same model; 0 for none.

    Returns:
        The fingerprint of the common values; 0 if nothing was compared.

    Raises:
        SizeMismatch, SettingsMismatch, DivergenceError: manifests differ, or values still do after rank 0 gave its
            own; raised on every rank, with the same text and the ranks that differ from rank 0.
        NewcomerDiffers: raised in place of these on the other ranks, if only ranks differ that were not there when the
            others last agreed.
        StepOrderError: values differ and may not change.
    """
    if group.size == 1:
        return 0
    description = manifest.encode()
    table = _tell_all(group, [_fingerprint([np.frombuffer(description, np.uint8)]), len(description), agreed_in])
    reference = int(np.argmax(table[:, 2]))  # the first rank with the latest agreement; rank 0 if there is none
    new = table[:, 2] < table[reference, 2]
    if odd := _differ(table[:, :2], reference):
        usual = _show(group, description, root=reference, nbytes=int(table[reference, 1]))
        example = _show(group, description, root=odd[0], nbytes=int(table[odd[0], 1]))
        error = first_difference(Manifest.decode(usual), Manifest.decode(example), ranks=odd, reference=reference)
        error.ranks = tuple(group.members[rank].rank for rank in odd)  # of a part of the view too
        with contextlib.suppress(PacelineError):
            _tell_all(group, [0])  # a rank that raises may end the generation: wait until all ranks know the error
        if group.rank not in odd and new[list(odd)].all():
            newcomer = group.members[odd[0]]
            text = f"{newcomer} came in, and does not train what is trained: {error}"
            raise NewcomerDiffers(text, newcomer, ranks=error.ranks) from error
        raise error

    if group.has_same_state:
        return 0
    fingerprint = _fingerprint(arrays)
    odd = _differ(_tell_all(group, [fingerprint]))
    if not odd:
        return fingerprint
    if not may_change:
        raise StepOrderError(
            f"ranks {list(odd)} computed gradients from initial values that are not rank 0's: "
            "call the wrapped model, or prepare(), before the first backward pass",
            ranks=odd,
        )
    give(group, arrays)
    fingerprint = _fingerprint(arrays)
    if odd := _differ(_tell_all(group, [fingerprint])):
        raise DivergenceError(f"ranks {list(odd)} do not hold the values that rank 0 gave", ranks=odd)
    return fingerprint


def _tell_all(group: Ranks, row: Sequence[int]) -> NDArray[np.int64]:
    """Every rank's row, shape [W, len(row)], by one small all_reduce in which each rank fills its own row."""
    table = np.zeros((group.size, len(row)), np.int64)
    if group.size:  # in no view yet: the call says so
        table[group.rank] = row
    reduced: NDArray[np.int64] = group.all_reduce(table)
    return reduced


def _differ(table: NDArray[np.int64], reference: int = 0) -> tuple[int, ...]:
    """The ranks whose row is not the reference's."""
    return tuple(int(r) for r in np.flatnonzero((table != table[reference]).any(axis=1)))


def _show(group: Ranks, mine: bytes, *, root: int, nbytes: int) -> bytes:
    """Broadcasts the root's bytes."""
    box = np.frombuffer(mine, np.uint8) if group.rank == root else np.empty(nbytes, np.uint8)
    return bytes(group.broadcast(box, root=root))


def give(group: Ranks, arrays: Sequence[NDArray[Any]], *, root: int = 0) -> None:
    """Copies the root's values into every rank's arrays; one message, of all bytes, whatever the dtypes."""
    flat = np.empty(sum(a.nbytes for a in arrays), np.uint8)
    if group.rank == root:
        np.concatenate([_bytes_of(a) for a in arrays], out=flat)
    group.broadcast(flat, root=root, out=flat)
    start = 0
    for array in arrays:
        values = flat[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(array, values)
        start += array.nbytes


def _fingerprint(arrays: Sequence[NDArray[Any]]) -> int:
    """64 bits of BLAKE2b over the arrays' bytes, as a signed integer that fits an int64."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(_bytes_of(array).data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The elements as bytes in C order; a view where the array lies so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
