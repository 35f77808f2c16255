"""The manifest: what a model consists of, in a form that ranks can compare. Pure.

Two ranks with equal manifests build equal buckets, so their collectives meet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from numpy.typing import NDArray

from paceline.errors import DivergenceError, PacelineError, SettingsMismatch, SizeMismatch, UnsupportedOp
from paceline.parallel.parameter import Parameter

__all__ = ["Entry", "Manifest", "first_difference"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter or buffer."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    """"trained", "frozen" or "buffer"."""

    def __str__(self) -> str:
        return f"{self.kind} {self.path!r} {self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that must be alike on all ranks for their gradients to meet.

    Attributes:
        settings: of the wrapper, as pairs of name and value in words, in the same order everywhere.
        entries: parameters in order, then buffers.
    """

    settings: tuple[tuple[str, str], ...]
    entries: tuple[Entry, ...]

    @classmethod
    def of(
        cls, parameters: Mapping[str, Parameter], buffers: Mapping[str, NDArray[Any]], **settings: object
    ) -> Manifest:
        """The manifest of a model; settings must say in words what they are.

        Raises:
            UnsupportedOp: an array holds Python objects, which have no bytes to give.
        """
        arrays = [(path, p, "trained" if p.requires_grad else "frozen") for path, p in parameters.items()]
        listed: list[tuple[str, Parameter | NDArray[Any], str]] = [*arrays]
        listed += [(path, buffer, "buffer") for path, buffer in buffers.items()]
        for path, array, kind in listed:
            if array.dtype.hasobject:
                raise UnsupportedOp(f"{kind} {path!r} holds Python objects: they cannot be given to other ranks")
        # The name says more than `str` ('<V2' is all that bfloat16 has there), but hides a foreign byte order.
        names = [array.dtype.name if array.dtype.isnative else array.dtype.str for _, array, _ in listed]
        entries = [Entry(path, name, a.shape, kind) for (path, a, kind), name in zip(listed, names, strict=True)]
        return cls(tuple((name, str(value)) for name, value in settings.items()), tuple(entries))

    def encode(self) -> bytes:
        """The manifest as canonical JSON; equal manifests give equal bytes."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest that `encode` wrote, on another rank: read, never evaluated (I9)."""
        fields = json.loads(data)
        entries = [Entry(e["path"], e["dtype"], tuple(e["shape"]), e["kind"]) for e in fields["entries"]]
        return cls(tuple((name, value) for name, value in fields["settings"]), tuple(entries))


def first_difference(mine: Manifest, theirs: Manifest, *, ranks: tuple[int, ...], reference: int = 0) -> PacelineError:
    """The error for two manifests that differ, naming the first difference.

    Args:
        mine: the reference's.
        theirs: that of the first of `ranks`.
        ranks: all ranks that differ from the reference.
        reference: the rank whose model the others are to have.
    """
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"rank {ranks[0]} (and {list(ranks)} in all)"
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
    return DivergenceError(f"{owner} has {more.entries[common]}, which {other} has not", ranks=ranks)
