"""From one placement to another: what a rank holds of models and optimizers, memory for what it will hold, the change.

Where values come from is the caller's; nothing here communicates. Until `Move.switch` nothing has changed, and what was
held before stays with whoever refers to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.pieces import Shard
from paceline.errors import StepOrderError, UnsupportedOp
from paceline.parallel.fsdp import FSDP
from paceline.parallel.optimizer import OptimizerState
from paceline.parallel.parameter import Parameter
from paceline.parallel.sharding.unit import Unit

__all__ = ["Holding", "Move", "holding", "places_of"]


@dataclass(frozen=True)
class Holding:
    """What a rank holds, or will hold, of what is spread. Live arrays.

    Attributes:
        share: which part of how many; (0, 1) for all.
        values: of the parameters, by the identity of the piece.
        states: of optimizers' arrays, by the identity of the optimizer and the keys of `live_arrays`.
    """

    share: tuple[int, int]
    values: dict[int, Shard]
    states: dict[int, dict[str, Shard]]


def holding(models: Sequence[FSDP], optimizers: Sequence[OptimizerState], *, to_write: bool = False) -> Holding:
    """What this rank holds now. It is all of it where nothing is cut yet, and no optimizer has state.

    Args:
        models: outermost wrappers.
        optimizers: of their pieces.
        to_write: only what this rank will keep: memory to be written.

    Raises:
        UnsupportedOp: units are cut differently, or an optimizer's array has another shape than its parameter.
    """
    units = _units(models)
    cuts = {(unit.placement.part, len(unit.placement.shards)) for _, unit in units if _is_cut(unit)}
    if len(cuts) > 1:
        raise UnsupportedOp(f"parts of the training state are spread in different ways: {sorted(cuts)} (part, of)")
    whole = not cuts or (
        not to_write
        and all(unit.is_fresh for _, unit in units if _is_cut(unit))
        and all(optimizer.is_blank for optimizer in optimizers)
    )
    values: dict[int, Shard] = {}
    for model, unit in units:
        place, copies = _among(model, unit, whole=whole)
        for flat in unit.flats:
            for p, piece, start in zip(flat.parameters, flat.pieces, flat.starts, strict=True):
                cut = flat.is_spread and not whole
                data = piece.data if cut or not flat.is_spread else p.data
                values[id(piece)] = Shard(data, start if cut else 0, p.shape, place, copies)
    states = {
        id(optimizer): {key: _state_shard(key, array, optimizer, values)
                        for key, array in optimizer.live_arrays().items() if id(_piece(optimizer, key)) in values}
        for optimizer in optimizers
    }  # fmt: skip
    return Holding((0, 1) if whole else cuts.pop(), values, states)


class Move:
    """The change to another share.

    Args:
        models: outermost wrappers.
        optimizers: of their pieces; all that there are.
        share: what the rank is to hold.

    Attributes:
        target: memory to be filled.

    Raises:
        StepOrderError: inside `unshard`.
    """

    def __init__(self, models: Sequence[FSDP], optimizers: Sequence[OptimizerState], share: tuple[int, int]) -> None:
        part, parts = share
        for model in models:
            if model._units is not None and model._units.are_summoned:
                raise StepOrderError("the view changed inside unshard(): what is whole there would be lost")
        self._models = models
        self._optimizers = optimizers
        self._units = [(unit, model._place_of(part, parts)) for model, unit in _units(models)]
        self._rooms = [[flat.room(place) for flat in unit.flats] for unit, place in self._units]
        values: dict[int, Shard] = {}
        for (unit, _), rooms in zip(self._units, self._rooms, strict=True):
            for flat, room in zip(unit.flats, rooms, strict=True):
                for p, piece, (elements, start) in zip(flat.parameters, flat.pieces, room.runs(), strict=True):
                    values[id(piece)] = Shard(elements, start, p.shape)
        states = {
            id(optimizer): {key: Shard(np.empty(like.values.size, array.dtype), like.start, like.shape)
                            for key, array in optimizer.live_arrays().items()
                            if (like := values.get(id(_piece(optimizer, key)))) is not None}
            for optimizer in optimizers
        }  # fmt: skip
        self.target = Holding(share, values, states)

    def switch(self) -> None:
        """All of it at once; the memory is filled."""
        for model in self._models:
            model._expire()
        for (unit, place), rooms in zip(self._units, self._rooms, strict=True):
            unit.move_to(place, rooms)
        for optimizer in self._optimizers:
            state = self.target.states[id(optimizer)]
            optimizer.move({key: s.values.reshape(_piece(optimizer, key).shape) for key, s in state.items()})


def places_of(models: Sequence[FSDP], parts: int) -> dict[int, tuple[int, int]]:
    """Where each parameter lies if the state is cut into so many parts, by the piece's identity.

    Returns:
        The place of its first element in its flat array, and the elements in a part of that array.
    """
    places: dict[int, tuple[int, int]] = {}
    for _, unit in _units(models):
        for flat in unit.flats:
            layout = flat.laid_out(parts)
            for piece, place in zip(flat.pieces, layout.places, strict=True):
                places[id(piece)] = place.start, layout.part
    return places


def _units(models: Sequence[FSDP]) -> list[tuple[FSDP, Unit]]:
    """The units whose strategy spreads them, each with its wrapper; in a world of one too."""
    return [(part, part._unit) for model in models for part in model._parts() if part.spreads]


def _among(model: FSDP, unit: Unit, *, whole: bool) -> tuple[int, int]:
    """This rank's place among those that hold the same and write a checkpoint together, and how many they are."""
    view, rank = model._place(), model.group.rank
    if (view.part, len(view.shards)) != (unit.placement.part, len(unit.placement.shards)):
        return 0, 1  # the view that the share is for has not come yet
    alike = sorted(member for node in view.nodes for member in node) if whole else view.replicas
    return (alike.index(rank), len(alike)) if alike else (0, 1)


def _is_cut(unit: Unit) -> bool:
    return any(flat.is_spread for flat in unit.flats)


def _piece(optimizer: OptimizerState, key: str) -> Parameter:
    """What a key of `live_arrays` is the state of."""
    return optimizer.parameters[key.rpartition("/")[0]]


def _state_shard(key: str, array: NDArray[Any], optimizer: OptimizerState, values: dict[int, Shard]) -> Shard:
    piece = _piece(optimizer, key)
    if array.shape != piece.data.shape:
        raise UnsupportedOp(f"the state {key!r} of this {type(optimizer).__name__} has not its parameter's shape")
    like = values[id(piece)]
    if like.values.size != array.size:  # nothing is cut yet but this, and it is blank
        array = np.broadcast_to(np.zeros((), array.dtype), like.shape)
    return Shard(array, like.start, like.shape, like.holder, like.holders)
