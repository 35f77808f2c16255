"""Runs of the elements of arrays that are spread over members: what is held, what is missing, who can give it. Pure.

A `Share` is part p of P equal parts of every flat array (`parallel.sharding.layout`).

What a member is to hold of a state that is spread, and what of it must come from others.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.pieces import Shard
from paceline.checkpoint.reading import Reader
from paceline.elastic.share import Share

__all__ = ["assign", "checksum", "fill", "ReshardPlan", "ElementRun"]

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class ElementRun:
    """Elements of an array, in C order.

    Attributes:
        name: of the array.
        start: number of the first.
        count: how many, at least one.
    """

    name: str
    start: int
    count: int

    def __str__(self) -> str:
        return f"elements {self.start} to {self.start + self.count - 1} of {self.name}"


def checksum(runs: Sequence[ElementRun]) -> int:
    """CRC-32 of which runs they are (`Parcel` in peer.proto)."""
    words = (run.name.encode() + struct.pack("<QQ", run.start, run.count) for run in runs)
    return zlib.crc32(b"".join(words))


def fill(targets: Mapping[str, Shard], sources: Iterable[Mapping[str, Shard]]) -> list[ElementRun]:
    """Copies into the targets what the sources have of them.

    Args:
        targets: by name; their values are written.
        sources: by name; all hold the same state. Where several have an element, the first counts.

    Returns:
        What none of them has.
    """
    missing = [ElementRun(name, shard.start, shard.values.size) for name, shard in targets.items() if shard.values.size]
    for held in sources:
        rest: list[ElementRun] = []
        for run in missing:
            source, target = held.get(run.name), targets[run.name]
            common = None if source is None else _overlap(run, source.start, source.values.size)
            if common is None or source is None:
                rest.append(run)
                continue
            into = slice(common.start - target.start, common.start - target.start + common.count)
            values = source.values.reshape(-1)  # a view: what is held is contiguous, or one element repeated
            np.copyto(target.values.reshape(-1)[into], values[common.start - source.start :][: common.count])
            rest += _without(run, common)
        missing = rest
    return missing


def assign(
    missing: Iterable[ElementRun],
    held: Mapping[K, Iterable[Share]],
    cut: Callable[[int], Mapping[str, tuple[int, int]]],
) -> dict[K, list[ElementRun]]:
    """Who is to give which of the missing runs; what several have is asked of whoever has less to give so far.

    Args:
        missing: what is wanted.
        held: for each holder the shares that it holds.
        cut: how arrays are cut into so many parts: by name the place of the first element in the flat array that is
            cut, and the elements in a part of that.

    Returns:
        For each holder the runs, cut to what lies in one of its shares.

    Raises:
        LookupError: nobody has a run; it is the error's argument.
    """
    having: dict[int, dict[int, list[K]]] = {}
    for holder, shares in held.items():
        for part, parts in shares:
            having.setdefault(parts, {}).setdefault(part, []).append(holder)
    cuts = {parts: cut(parts) for parts in having}
    given: dict[K, list[ElementRun]] = {holder: [] for holder in held}
    load = dict.fromkeys(held, 0)
    for run in missing:
        start, end = run.start, run.start + run.count
        while start < end:
            found: list[tuple[int, K, int]] = []
            nobody = end
            for parts, holders in having.items():
                place, size = cuts[parts][run.name]
                part = (place + start) // size
                stop = min((part + 1) * size - place, end)
                nobody = min(nobody, stop)
                found += [(load[holder], holder, stop) for holder in holders.get(part, ())]
            if not found:
                raise LookupError(ElementRun(run.name, start, nobody - start))
            _, holder, stop = min(found, key=lambda one: one[0])  # the first of those who have as little
            given[holder].append(ElementRun(run.name, start, stop - start))
            load[holder] += stop - start
            start = stop
    return given


def _overlap(run: ElementRun, start: int, count: int) -> ElementRun | None:
    low, high = max(run.start, start), min(run.start + run.count, start + count)
    return ElementRun(run.name, low, high - low) if low < high else None


def _without(run: ElementRun, part: ElementRun) -> list[ElementRun]:
    before = ElementRun(run.name, run.start, part.start - run.start)
    end = part.start + part.count
    after = ElementRun(run.name, end, run.start + run.count - end)
    return [piece for piece in (before, after) if piece.count]


class ReshardPlan:
    """A change to another share, prepared: memory for it, with what this member has filled in already.

    Args:
        share: what is to be held.
        own: what this member holds is of the same state.
        targets: the memory, by the arrays' names.
        wanted: what of it must come from others.
        cut: how arrays are cut into so many parts, as `runs.assign` takes it.
        switch: makes it what is held.

    Attributes:
        share, own, wanted, cut, switch: as above.
    """

    def __init__(
        self,
        share: Share,
        own: bool,
        targets: Mapping[str, Shard],
        wanted: list[ElementRun],
        cut: Callable[[int], Mapping[str, tuple[int, int]]],
        switch: Callable[[], None],
    ) -> None:
        self.share = share
        self.own = own
        self.wanted = wanted
        self.cut = cut
        self.switch = switch
        self._targets = targets

    def into(self, run: ElementRun) -> NDArray[Any]:
        """Where elements are to be written, shape [run.count]."""
        target = self._targets[run.name]
        return target.values.reshape(-1)[run.start - target.start :][: run.count]

    def load(self, folder: Path) -> Any:
        """Fills all of it out of a checkpoint, whoever wrote that.

        Returns:
            The rest of the state: nested values, None in place of each array that is spread.

        Raises:
            CheckpointDamaged: other bytes were read than were written.
            SizeMismatch: it is of another model.
        """
        tree = Reader(folder).state(self._targets)
        for name, part in tree["parts"].items():
            for path, leaf in part["arrays"].items():
                if isinstance(leaf, Shard):
                    np.copyto(self._targets[f"parts.{name}.arrays.{path}"].values, leaf.values, casting="same_kind")
                    part["arrays"][path] = None
        self.wanted = []
        return tree
