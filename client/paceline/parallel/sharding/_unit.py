"""A unit: the parameters that one FSDP wrapper holds itself, and that are gathered and freed together.

`join_units` is the first use: all ranks agree on the model and take rank 0's values, then each keeps its shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
from numpy.typing import DTypeLike, NDArray

from paceline.errors import UnsupportedOp
from paceline.parallel._agreement import Manifest, agree
from paceline.parallel._buckets import Empty
from paceline.parallel._parameter import Parameter, ignoring_gradients
from paceline.parallel._ranks import ShardRanks
from paceline.parallel.sharding._flat import Flat, Room
from paceline.parallel.sharding._placement import Placement
from paceline.signature import dtype_name

__all__ = ["Unit", "checked_wire", "join_units"]


class Unit:
    """Parameters, in a flat array for each dtype; the frozen ones in arrays of their own, which need no gradients.

    Args:
        parameters: by path; each belongs to this unit alone.
        placement: of this rank.
        wire: dtype in which they travel; None for their own.
        empty: where the memory of what travels comes from.
        computes: the module computes with values as they travel.

    Attributes:
        flats: the arrays; most units have one.
        placement: as above.
        shards: the ranks that hold one copy between them; None where this rank has it alone. Set by `assign_ranks`.
        replicas: the ranks that hold the same part; None where there is no other.
        is_agreed: initial values have been agreed on.
        fingerprint: their fingerprint, and that of what was agreed on with them; 0 where nothing was compared.
        has_ranks: `shards` and `replicas` are of the view that the placement is for.
        runs: how often it ran in the last forward pass.
        left: how often it has still to run in this backward pass, if each run forward has one.
        inside: how many runs it is in the middle of.

    Raises:
        UnsupportedOp: a parameter to train is neither float32 nor float64.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        placement: Placement,
        wire: np.dtype[Any] | None,
        empty: Empty,
        *,
        computes: bool = False,
    ) -> None:
        kinds: dict[tuple[np.dtype[Any], bool], dict[str, Parameter]] = {}
        for path, parameter in parameters.items():
            if parameter.requires_grad:
                _check_trainable(path, parameter)
            if parameter.dtype.hasobject:
                raise UnsupportedOp(f"parameter {path!r} holds Python objects: they cannot be given to other ranks")
            kinds.setdefault((parameter.dtype, parameter.requires_grad), {})[path] = parameter
        self.placement = placement
        self.flats = [Flat(group, placement, wire, empty, computes=computes) for group in kinds.values()]
        self.shards: ShardRanks | None = None
        self.replicas: ShardRanks | None = None
        self.is_agreed = self.has_ranks = False
        self.fingerprint = 0
        self.runs = self.left = self.inside = 0
        self._known = [piece.requires_grad for _, piece in self.pairs()]

    def assign_ranks(self, shards: ShardRanks | None, replicas: ShardRanks | None) -> None:
        """Initial values are all ranks': keeps this rank's part, and takes the ranks of the placement."""
        self.shards, self.replicas = shards, replicas
        if not self.is_agreed:
            for flat in self.flats:
                flat.keep_shard()
        self.is_agreed = self.has_ranks = True

    def move(self, placement: Placement) -> None:
        """There is a new view: the ranks are others. Values that are whole here are to be agreed on again.

        Raises:
            UnsupportedOp: another part of the values would be this rank's, which it has not.
        """
        before = self.placement
        if (len(placement.shards), placement.part) != (len(before.shards), before.part):
            raise UnsupportedOp(
                f"this rank has part {before.part} of {len(before.shards)}, and would have part {placement.part} of "
                f"{len(placement.shards)} in the new view: what is spread moves in session.steps alone, where the "
                "TrainState has the model and its optimizer; elsewhere use ShardingStrategy.NO_SHARD"
            )
        self._stand(placement)

    def move_to(self, placement: Placement, rooms: Sequence[Room]) -> None:
        """There will be a new view, in which this rank has what lies in these rooms, one for each flat array."""
        for flat, room in zip(self.flats, rooms, strict=True):
            flat.move(room)
        self.is_agreed = True
        self._stand(placement)

    def _stand(self, placement: Placement) -> None:
        self.placement = placement
        self.shards = self.replicas = None
        self.has_ranks = False
        if len(placement.shards) == 1:
            self.is_agreed = False

    @property
    def is_fresh(self) -> bool:
        """True while this rank has all that is to be spread: initial values are not agreed on, and none was loaded."""
        return not self.is_agreed and not any(flat.given for flat in self.flats)

    def held(self) -> Iterator[tuple[Parameter, NDArray[Any], int]]:
        """Of each piece the elements that are here and count, and the number of the first."""
        for flat in self.flats:
            for p, piece, start in zip(flat.parameters, flat.pieces, flat.starts, strict=True):
                yield (piece, p.data, 0) if self.is_fresh and flat.is_spread else (piece, piece.data, start)

    def pairs(self) -> Iterator[tuple[Parameter, Parameter]]:
        """The module's parameters, each with this rank's piece of it."""
        for flat in self.flats:
            yield from zip(flat.parameters, flat.pieces, strict=True)

    def fits(self) -> bool:
        """False once a parameter was frozen or unfrozen, in the module or through its piece, and not agreed on."""
        return all(
            p.requires_grad == piece.requires_grad == known
            for (p, piece), known in zip(self.pairs(), self._known, strict=True)
        )

    def align(self, paths: Mapping[int, str]) -> None:
        """A parameter was frozen or unfrozen in the module or through its piece: makes the other like it.

        Args:
            paths: of the pieces, by identity.

        Raises:
            UnsupportedOp: one that is unfrozen is neither float32 nor float64.
        """
        for (p, piece), known in zip(self.pairs(), self._known, strict=True):
            now = known if p.requires_grad == piece.requires_grad == known else not known
            if now:
                _check_trainable(paths[id(piece)], p)
            p.requires_grad = piece.requires_grad = now

    def refit(self) -> None:
        """What is frozen and what is not has been agreed on."""
        self._known = [piece.requires_grad for _, piece in self.pairs()]

    def fetch(self) -> None:
        """Starts to gather what is not whole."""
        if self.shards is not None:
            for flat in self.flats:
                flat.fetch(self.shards)

    def wait(self) -> None:
        """Gathers what is not whole, and waits for it."""
        self.fetch()
        for flat in self.flats:
            flat.wait()

    def release(self) -> None:
        """The unit does not run any more."""
        for flat in self.flats:
            flat.release()

    def drop(self) -> None:
        """Forgets what is on its way, and what is whole and not kept."""
        for flat in self.flats:
            flat.drop()

    def expire(self) -> None:
        """Values have changed: what is whole is out of date."""
        for flat in self.flats:
            flat.expire()

    @contextmanager
    def taking_gradients(self, *, ignore: bool) -> Iterator[None]:
        """For the unit's backward pass inside the block; `ignore`: its gradients must not count."""
        if ignore:
            with ignoring_gradients(p for flat in self.flats for p in flat.parameters):
                yield
            return
        for flat in self.flats:
            flat.gradients.open()
        yield


def _check_trainable(path: str, parameter: Parameter) -> None:
    """Checks that gradients can be summed and averaged in the parameter's dtype.

    Raises:
        UnsupportedOp: it is neither float32 nor float64.
    """
    if parameter.dtype not in (np.float32, np.float64):
        raise UnsupportedOp(f"parameter {path!r} is {parameter.dtype}; only float32 and float64 can be trained")


def checked_wire(dtype: DTypeLike | None) -> np.dtype[Any] | None:
    """The dtype in which values are to travel.

    Raises:
        UnsupportedOp: it cannot travel, or is no float.
    """
    if dtype is None:
        return None
    wire = np.dtype(dtype)
    dtype_name(wire)
    if wire.kind != "f" and wire.name != "bfloat16":
        raise UnsupportedOp(f"communication_dtype must be a type of floats, not {wire}")
    return wire


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
    new = [unit for unit in units if not unit.is_agreed]
    flats = [flat for unit in new for flat in unit.flats]
    given = [(flat, flat.part.copy()) for flat in flats if flat.given and flat.is_spread]
    values = [view for flat in flats for view in flat.initial()]
    agreed = agree(group, manifest, [*values, *buffers.values()], may_change=may_change, agreed_in=agreed_in)
    for unit in new:
        unit.fingerprint = agreed
    for flat, part in given:  # loaded on purpose, on each rank its own
        flat.part[...] = part
    for number, unit in enumerate(units):
        for kind, flat in enumerate(unit.flats):
            flat.label = f"unit{number}-{kind}" if kind else f"unit{number}"
        if not unit.has_ranks:
            where = unit.placement
            unit.assign_ranks(_part(group, where.shards, "fsdp_shards"), _part(group, where.replicas, "fsdp_replicas"))


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
