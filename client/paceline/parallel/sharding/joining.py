"""First use of units: all ranks agree on the model and take rank 0's values, then each keeps its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from numpy.typing import NDArray

from paceline.parallel.agreement import agree
from paceline.parallel.manifest import Manifest
from paceline.parallel.ranks import ShardRanks
from paceline.parallel.sharding.unit import Unit

__all__ = ["join_units"]


def join_units(
    units: Sequence[Unit],
    group: ShardRanks,
    manifest: Manifest,
    buffers: Mapping[str, NDArray[Any]],
    *,
    may_change: bool,
    agreed_in: int,
) -> None:
    """Agrees on the model; settles the units that are new, and gives those their ranks that lack them. A collective.

    Args:
        units: all of a model.
        group: all ranks.
        manifest: of the model.
        buffers: those that are to be rank 0's.
        may_change: False where gradients have been computed from this rank's own values.
        agreed_in: the last generation in which this rank has agreed on the model; 0 for none.

    Raises:
        PacelineError: as `agree`.
    """
    new = [unit for unit in units if not unit.is_settled]
    flats = [flat for unit in new for flat in unit.flats]
    given = [(flat, flat.part.copy()) for flat in flats if flat.given and flat.is_spread]
    values = [view for flat in flats for view in flat.initial()]
    agreed = agree(group, manifest, [*values, *buffers.values()], may_change=may_change, agreed_in=agreed_in)
    for unit in new:
        unit.agreed = agreed
    for flat, part in given:  # loaded on purpose, on each rank its own
        flat.part[...] = part
    for number, unit in enumerate(units):
        for kind, flat in enumerate(unit.flats):
            flat.label = f"unit{number}-{kind}" if kind else f"unit{number}"
        if not unit.has_ranks:
            where = unit.placement
            unit.settle(_part(group, where.shards, "fsdp_shards"), _part(group, where.replicas, "fsdp_replicas"))


_parts: WeakKeyDictionary[ShardRanks, WeakValueDictionary[tuple[int, tuple[int, ...], str], ShardRanks]] = (
    WeakKeyDictionary()
)
"""Of each group the parts that were made, by (generation, ranks, name): units that are placed alike share theirs."""


def _part(group: ShardRanks, ranks: tuple[int, ...], name: str) -> ShardRanks | None:
    if len(ranks) == 1:
        return None
    if len(ranks) == group.size:
        return group
    made = _parts.setdefault(group, WeakValueDictionary())
    key = group.generation, ranks, name
    if (part := made.get(key)) is None:
        part = made[key] = group.subgroup(ranks, name=name)
    return part
