"""Plans how a member gets a new shard of a sharded state: what it holds, what it lacks, which member gives what.

The planning is pure. A `Share` is part p of P equal parts of every flat array (`FlatLayout` in `_parallel.sharding`).
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
from paceline_protocol import Share

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class ElementRun:
    """Consecutive elements of an array, in C order, from number `start` on; at least one."""

    name: str
    start: int
    count: int

    def __str__(self) -> str:
        return f"elements {self.start} to {self.start + self.count - 1} of {self.name}"


def checksum(runs: Sequence[ElementRun]) -> int:
    """Returns the CRC-32 of the names and positions of runs (`Parcel` in peer.proto)."""
    words = (run.name.encode() + struct.pack("<QQ", run.start, run.count) for run in runs)
    return zlib.crc32(b"".join(words))


def fill(targets: Mapping[str, Shard], sources: Iterable[Mapping[str, Shard]]) -> list[ElementRun]:
    """Copies into the targets the elements that the sources have; returns the runs that no source has.

    All are shards of one state. The first source that has an element gives it.
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
            values = source.values.reshape(-1)  # a view, since shards are contiguous, or one element repeated
            np.copyto(target.values.reshape(-1)[into], values[common.start - source.start :][: common.count])
            rest += _without(run, common)
        missing = rest
    return missing


def assign(
    missing: Iterable[ElementRun],
    held: Mapping[K, Iterable[Share]],
    cut: Callable[[int], Mapping[str, tuple[int, int]]],
) -> dict[K, list[ElementRun]]:
    """Decides which holder gives which of the missing runs. If several have a run, the least loaded one gives it.

    `held` has the shares of each holder; each run that is returned lies within one of them. `cut` says how arrays are
    cut into a number of parts: by name, the position of the array's first element in the flat array that is cut, and
    the number of elements in a part of that. Raises LookupError, with the run, if no holder has it.
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
            _, holder, stop = min(found, key=lambda one: one[0])  # of equal ones, the first
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
    """A prepared change to another share: memory for it, filled in part from what this member holds already.

    Attributes:
        own: True if this member holds shares of the same state.
        targets: the memory, by the arrays' names.
        wanted: the runs that must come from other members.
        cut: how arrays are cut into parts, as `assign` takes it.
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
        """Returns a view of the memory that a run is written to, shape [run.count]."""
        target = self._targets[run.name]
        return target.values.reshape(-1)[run.start - target.start :][: run.count]

    def load(self, folder: Path) -> Any:
        """Fills the whole plan from a checkpoint, which a world of any size may have written.

        Returns the rest of the state: nested values, None in place of each sharded array.
        """
        tree = Reader(folder).state(self._targets)
        for name, part in tree["parts"].items():
            for path, leaf in part["arrays"].items():
                if isinstance(leaf, Shard):
                    np.copyto(self._targets[f"parts.{name}.arrays.{path}"].values, leaf.values, casting="same_kind")
                    part["arrays"][path] = None
        self.wanted = []
        return tree
