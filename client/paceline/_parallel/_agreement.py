"""Checks at first use that all ranks have the same model, and gives them rank 0's values, bit for bit (I5).

The ranks compare *manifests*: descriptions of their models. Ranks with equal manifests build equal buckets, so
their collectives meet. W ranks; every step of `agree` is a collective, so all ranks take it together or fail together.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._group import Group
from paceline._links.base import Peer
from paceline._parallel._parameter import Parameter
from paceline.errors import (
    DivergenceError,
    PacelineError,
    PeerRaised,
    SettingsMismatch,
    SizeMismatch,
    StepOrderError,
    UnsupportedOp,
)


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One parameter or buffer."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    """"trained", "frozen" or "buffer"."""

    def __str__(self) -> str:
        return f"{self.kind} {self.path!r} {self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """Everything about a model that must be the same on all ranks for their gradients to meet. Pure.

    The settings are the wrapper's, as pairs of name and text, in the same order on all ranks. The entries are the
    parameters in order, then the buffers.
    """

    settings: tuple[tuple[str, str], ...]
    entries: tuple[ManifestEntry, ...]

    @classmethod
    def of(
        cls, parameters: Mapping[str, Parameter], buffers: Mapping[str, NDArray[Any]], **settings: object
    ) -> ModelManifest:
        """Makes the manifest of a model; `str` of each setting must tell its value."""
        arrays = [(path, p, "trained" if p.requires_grad else "frozen") for path, p in parameters.items()]
        listed: list[tuple[str, Parameter | NDArray[Any], str]] = [*arrays]
        listed += [(path, buffer, "buffer") for path, buffer in buffers.items()]
        for path, array, kind in listed:
            if array.dtype.hasobject:
                raise UnsupportedOp(f"{kind} {path!r} holds Python objects, which cannot be sent to other ranks")
        # The name says more than `str` (which is '<V2' for bfloat16), but hides a foreign byte order.
        names = [array.dtype.name if array.dtype.isnative else array.dtype.str for _, array, _ in listed]
        entries = [
            ManifestEntry(path, name, a.shape, kind) for (path, a, kind), name in zip(listed, names, strict=True)
        ]
        return cls(tuple((name, str(value)) for name, value in settings.items()), tuple(entries))

    def encode(self) -> bytes:
        """Returns the manifest as canonical JSON; equal manifests give equal bytes."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> ModelManifest:
        """Reads a manifest that `encode` wrote on another rank; nothing is evaluated (I9)."""
        fields = json.loads(data)
        entries = [ManifestEntry(e["path"], e["dtype"], tuple(e["shape"]), e["kind"]) for e in fields["entries"]]
        return cls(tuple((name, value) for name, value in fields["settings"]), tuple(entries))


def first_difference(
    mine: ModelManifest, theirs: ModelManifest, *, ranks: tuple[int, ...], reference: int = 0
) -> PacelineError:
    """Returns the error for two manifests that differ; it names the first difference.

    `mine` is the manifest of the reference, the rank whose model the others must have; `theirs` is the one of the
    first of `ranks`, which all differ from it.
    """
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"rank {ranks[0]} (ranks that differ: {list(ranks)})"
    usual = f"rank {reference}"
    for (name, value), (_, other_value) in zip(mine.settings, theirs.settings, strict=True):
        if value != other_value:
            return SettingsMismatch(f"{name} is {other_value} on {who} and {value} on {usual}", ranks=ranks)
    for a, b in zip(mine.entries, theirs.entries, strict=False):
        if a != b:
            text = f"the model of {who} differs from {usual}'s: it has {b} where {usual} has {a}"
            only_shape = (a.path, a.dtype, a.kind) == (b.path, b.dtype, b.kind)
            return (SizeMismatch if only_shape else DivergenceError)(text, ranks=ranks)
    common = min(len(mine.entries), len(theirs.entries))
    more, owner = (theirs, who) if len(theirs.entries) > common else (mine, usual)
    other = usual if more is theirs else who
    return DivergenceError(f"{owner} has {more.entries[common]}, which {other} does not have", ranks=ranks)


class NewcomerDiffers(PeerRaised):
    """Raised on the members of a job if a newcomer trains another model; the newcomer's own error names the difference.

    `newcomer` is the first of the newcomers that differ.
    """

    def __init__(self, message: str, newcomer: Peer, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message, ranks=ranks)
        self.newcomer = newcomer


def agree(
    group: Group, manifest: ModelManifest, arrays: Sequence[NDArray[Any]], *, may_change: bool, agreed_in: int = 0
) -> int:
    """Compares manifests, then gives rank 0's values to all, unless all hold them already (`Group.has_same_state`).

    The arrays are this rank's parameters and buffers, in the manifest's order; they are written in place. `may_change`
    is False if gradients have been computed from this rank's own values. `agreed_in` is the last generation in which
    this rank has agreed on the same model; 0 for none. Returns the fingerprint of the common values; 0 if nothing was
    compared.

    Raises:
        SizeMismatch, SettingsMismatch, DivergenceError: manifests differ, or values still differ after rank 0 sent its
            own; raised on every rank, with the same text and the ranks that differ from rank 0.
        NewcomerDiffers: raised instead on the other ranks, if all ranks that differ have come since the others last
            agreed.
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
        error = first_difference(
            ModelManifest.decode(usual), ModelManifest.decode(example), ranks=odd, reference=reference
        )
        error.ranks = tuple(group.members[rank].rank for rank in odd)  # the group may be a part of the view
        with contextlib.suppress(PacelineError):
            _tell_all(group, [0])  # a rank that raises may end the generation: wait until all ranks know the error
        if group.rank not in odd and new[list(odd)].all():
            newcomer = group.members[odd[0]]
            text = f"{newcomer} joined, but does not train what the other members train: {error}"
            raise NewcomerDiffers(text, newcomer, ranks=error.ranks) from error
        raise error

    if group._core.has_same_state:
        return 0
    fingerprint = _fingerprint(arrays)
    odd = _differ(_tell_all(group, [fingerprint]))
    if not odd:
        return fingerprint
    if not may_change:
        raise StepOrderError(
            f"ranks {list(odd)} computed gradients from initial values that differ from rank 0's: "
            "call the wrapped model, or prepare(), before the first backward pass",
            ranks=odd,
        )
    give(group, arrays)
    fingerprint = _fingerprint(arrays)
    if odd := _differ(_tell_all(group, [fingerprint])):
        raise DivergenceError(f"ranks {list(odd)} do not hold the values that rank 0 broadcast", ranks=odd)
    return fingerprint


def _tell_all(group: Group, row: Sequence[int]) -> NDArray[np.int64]:
    """Returns every rank's row, shape [W, len(row)], by one small all_reduce in which each rank fills its own row."""
    table = np.zeros((group.size, len(row)), np.int64)
    if group.size:  # without a view yet, the call itself raises
        table[group.rank] = row
    reduced: NDArray[np.int64] = group.all_reduce(table)
    return reduced


def _differ(table: NDArray[np.int64], reference: int = 0) -> tuple[int, ...]:
    """Returns the ranks whose rows differ from the reference's."""
    return tuple(int(r) for r in np.flatnonzero((table != table[reference]).any(axis=1)))


def _show(group: Group, mine: bytes, *, root: int, nbytes: int) -> bytes:
    """Broadcasts the root's bytes."""
    box = np.frombuffer(mine, np.uint8) if group.rank == root else np.empty(nbytes, np.uint8)
    return bytes(group.broadcast(box, root=root))


def give(group: Group, arrays: Sequence[NDArray[Any]], *, root: int = 0) -> None:
    """Copies the root's values into every rank's arrays, all of them in one message, whatever their dtypes."""
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
    """Returns 64 bits of BLAKE2b over the arrays' bytes, as a signed integer that fits an int64."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(_bytes_of(array).data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns the elements as bytes in C order; a view if the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
