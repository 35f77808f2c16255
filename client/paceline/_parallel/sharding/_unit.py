"""A unit: the parameters that one FSDP wrapper owns itself, and that are gathered and freed together.

`join_units` runs at first use: all ranks agree on the model and take rank 0's values, then each keeps its shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
from numpy.typing import DTypeLike, NDArray

from paceline._base.arrays import dtype_name
from paceline._group import Group
from paceline._parallel._agreement import ModelManifest, agree
from paceline._parallel._buckets import Empty
from paceline._parallel._parameter import Parameter, ignoring_gradients
from paceline._parallel.sharding._flat import Flat, Room
from paceline._parallel.sharding._flat_transport import MakeTransport
from paceline._parallel.sharding._placement import Placement
from paceline.errors import UnsupportedOp


class Unit:
    """The parameters that one wrapper owns: a flat array for each dtype; frozen ones have arrays without gradients.

    Args:
        parameters: the parameters by path; each belongs to this unit alone.
        wire, empty, computes: as for `Flat`.

    Attributes:
        flats: the arrays; most units have one.
        shards: the ranks that hold one copy between them; None if this rank holds it alone. `assign_ranks` sets it.
        replicas: the ranks that hold the same shard; None if no other rank does.
        is_agreed: whether the ranks have agreed on initial values.
        fingerprint: fingerprint of all values that were agreed on together; 0 if nothing was compared.
        has_ranks: whether `shards` and `replicas` belong to the placement's view.
        runs: number of runs in the last forward pass.
        left: number of runs still to come in this backward pass, if each run forward has one.
        inside: number of runs in progress.
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
                raise UnsupportedOp(f"parameter {path!r} holds Python objects, which cannot be sent to other ranks")
            kinds.setdefault((parameter.dtype, parameter.requires_grad), {})[path] = parameter
        self.placement = placement
        self.flats = [Flat(group, placement, wire, empty, computes=computes) for group in kinds.values()]
        self.shards: Group | None = None
        self.replicas: Group | None = None
        self.is_agreed = self.has_ranks = False
        self.fingerprint = 0
        self.runs = self.left = self.inside = 0
        self._known = [piece.requires_grad for _, piece in self.pairs()]

    def assign_ranks(self, shards: Group | None, replicas: Group | None, make_transport: MakeTransport) -> None:
        """Takes the ranks of the placement; after the first agreement keeps only this rank's shard."""
        self.shards, self.replicas = shards, replicas
        for flat in self.flats:
            flat.transport = None
            if shards is not None and flat.is_spread:
                flat.transport = make_transport(shards, flat.parameters)
        if not self.is_agreed:
            for flat in self.flats:
                flat.keep_shard()
        self.is_agreed = self.has_ranks = True

    def move(self, placement: Placement) -> None:
        """Moves to a new view, which has other ranks. If this rank has whole values, the ranks agree on them again."""
        before = self.placement
        if (len(placement.shards), placement.shard) != (len(before.shards), before.shard):
            raise UnsupportedOp(
                f"this rank has shard {before.shard} of {len(before.shards)}, and would have shard {placement.shard} "
                f"of {len(placement.shards)} in the new view: shards move only in session.steps, and only if "
                "the TrainState has the model and its optimizer; elsewhere use ShardingStrategy.NO_SHARD"
            )
        self._stand(placement)

    def move_to(self, placement: Placement, rooms: Sequence[Room]) -> None:
        """Moves to a future view, in which this rank holds these rooms, one for each flat array."""
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
        """True while this rank has everything: initial values are neither agreed on nor loaded."""
        return not self.is_agreed and not any(flat.given for flat in self.flats)

    def held(self) -> Iterator[tuple[Parameter, NDArray[Any], int]]:
        """Yields for each piece its elements that are here and valid, and the index of the first."""
        for flat in self.flats:
            for p, piece, start in zip(flat.parameters, flat.pieces, flat.starts, strict=True):
                yield (piece, p.data, 0) if self.is_fresh and flat.is_spread else (piece, piece.data, start)

    def pairs(self) -> Iterator[tuple[Parameter, Parameter]]:
        """Yields the module's parameters, each with this rank's piece of it."""
        for flat in self.flats:
            yield from zip(flat.parameters, flat.pieces, strict=True)

    def fits(self) -> bool:
        """False once a parameter was frozen or unfrozen, in the module or through its piece, without agreement."""
        return all(
            p.requires_grad == piece.requires_grad == known
            for (p, piece), known in zip(self.pairs(), self._known, strict=True)
        )

    def align(self, paths: Mapping[int, str]) -> None:
        """Freezes and unfreezes parameters and pieces alike, after the user did so to one of them."""
        for (p, piece), known in zip(self.pairs(), self._known, strict=True):
            now = known if p.requires_grad == piece.requires_grad == known else not known
            if now:
                _check_trainable(paths[id(piece)], p)
            p.requires_grad = piece.requires_grad = now

    def refit(self) -> None:
        """Records that the ranks have agreed on which parameters are frozen."""
        self._known = [piece.requires_grad for _, piece in self.pairs()]

    def fetch(self) -> None:
        """Starts to gather the arrays that are not whole."""
        if self.shards is not None:
            for flat in self.flats:
                flat.fetch(self.shards)

    def wait(self) -> None:
        """Gathers the arrays that are not whole, and waits for them."""
        self.fetch()
        for flat in self.flats:
            flat.wait()

    def release(self) -> None:
        """Frees whole arrays after the unit has run."""
        for flat in self.flats:
            flat.release()

    def drop(self) -> None:
        """Drops running gathers, and frees whole arrays that are not kept."""
        for flat in self.flats:
            flat.drop()

    def expire(self) -> None:
        """Frees whole arrays, which are out of date because values have changed."""
        for flat in self.flats:
            flat.expire()

    @contextmanager
    def taking_gradients(self, *, ignore: bool) -> Iterator[None]:
        """Takes the gradients of the unit's backward pass inside the block; with `ignore`, drops them."""
        if ignore:
            with ignoring_gradients(p for flat in self.flats for p in flat.parameters):
                yield
            return
        for flat in self.flats:
            flat.gradients.open()
        yield


def _check_trainable(path: str, parameter: Parameter) -> None:
    """Checks that gradients can be summed and averaged in the parameter's dtype."""
    if parameter.dtype not in (np.float32, np.float64):
        raise UnsupportedOp(f"parameter {path!r} is {parameter.dtype}; only float32 and float64 can be trained")


def checked_wire(dtype: DTypeLike | None) -> np.dtype[Any] | None:
    """Returns the dtype in which values travel."""
    if dtype is None:
        return None
    wire = np.dtype(dtype)
    dtype_name(wire)
    if wire.kind != "f" and wire.name != "bfloat16":
        raise UnsupportedOp(f"communication_dtype must be a floating-point type, not {wire}")
    return wire


def join_units(
    units: Sequence[Unit],
    group: Group,
    manifest: ModelManifest,
    buffers: Mapping[str, NDArray[Any]],
    make_transport: MakeTransport,
    *,
    may_change: bool,
    agreed_in: int,
) -> None:
    """Agrees on the model, and gives their ranks to units that are new or in a new view. A collective.

    The buffers take rank 0's values. See `agree` for the rest and the errors.
    """
    new = [unit for unit in units if not unit.is_agreed]
    flats = [flat for unit in new for flat in unit.flats]
    given = [(flat, flat.shard.copy()) for flat in flats if flat.given and flat.is_spread]
    values = [view for flat in flats for view in flat.initial()]
    agreed = agree(group, manifest, [*values, *buffers.values()], may_change=may_change, agreed_in=agreed_in)
    for unit in new:
        unit.fingerprint = agreed
    for flat, shard in given:  # each rank has loaded its own values on purpose
        flat.shard[...] = shard
    for number, unit in enumerate(units):
        for kind, flat in enumerate(unit.flats):
            flat.label = f"unit{number}-{kind}" if kind else f"unit{number}"
        if not unit.has_ranks:
            where = unit.placement
            unit.assign_ranks(
                _subgroup(group, where.shards, "fsdp_shards"),
                _subgroup(group, where.replicas, "fsdp_replicas"),
                make_transport,
            )


_subgroups: WeakKeyDictionary[Group, WeakValueDictionary[tuple[int, tuple[int, ...], str], Group]] = WeakKeyDictionary()
"""For each group its subgroups by (generation, ranks, name): units with the same placement share them."""


def _subgroup(group: Group, ranks: tuple[int, ...], name: str) -> Group | None:
    if len(ranks) == 1:
        return None
    if len(ranks) == group.size:
        return group
    made = _subgroups.setdefault(group, WeakValueDictionary())
    key = group.generation, ranks, name
    if (found := made.get(key)) is None:
        found = made[key] = group.subgroup(ranks, name=name)
    return found
