"""First use of units: all ranks agree on the model and take rank 0's values, then each keeps its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from paceline.parallel.agreement import agree
from paceline.parallel.manifest import Manifest
from paceline.parallel.ranks import ShardRanks
from paceline.parallel.sharding.strategy import Placement
from paceline.parallel.sharding.unit import Unit

__all__ = ["join_units"]


def join_units(
    units: Sequence[Unit],
    group: ShardRanks,
    manifest: Manifest,
    buffers: Mapping[str, NDArray[Any]],
    *,
    may_change: bool,
) -> None:
    """Agrees on the model; settles the units that are new, and gives them their ranks. A collective.

    Args:
        units: all of a model.
        group: all ranks.
        manifest: of the model.
        buffers: those that are to be rank 0's.
        may_change: False where gradients have been computed from this rank's own values.

    Raises:
        PacelineError: as `agree`.
    """
    new = [unit for unit in units if not unit.is_settled]
    flats = [flat for unit in new for flat in unit.flats]
    given = [(flat, flat.part.copy()) for flat in flats if flat.given]
    values = [p.data for flat in flats for p in flat.parameters]
    agree(group, manifest, [*values, *buffers.values()], may_change=may_change)
    for flat, part in given:  # loaded on purpose, on each rank its own
        flat.part[...] = part
    made: dict[Placement, tuple[ShardRanks | None, ShardRanks | None]] = {}
    for unit in new:
        where = unit.placement
        if where not in made:  # equal placements share their groups
            made[where] = _part(group, where.shards, "shards"), _part(group, where.replicas, "replicas")
        unit.settle(*made[where])


def _part(group: ShardRanks, ranks: Sequence[int], name: str) -> ShardRanks | None:
    if len(ranks) == 1:
        return None
    return group if len(ranks) == group.size else group.subgroup(ranks, name=f"fsdp_{name}")
