"""This rank's shards of models and their optimizers: saving them, loading them, and moving to another share.

The caller decides where values come from; only `sharded_state` communicates. Until `ShardMove.switch` a move changes
nothing, and references to the old arrays stay valid after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._group import Group
from paceline._parallel._data_parallel import DDP
from paceline._parallel._optimizer_state import OptimizerState, standing_for
from paceline._parallel._parameter import HasParameters, Parameter, buffers_of, parameters_of
from paceline._parallel.sharding._flat import Flat, Room
from paceline._parallel.sharding._sharded_model import ShardedModel
from paceline._parallel.sharding._unit import Unit
from paceline.checkpoint.pieces import Shard
from paceline.errors import SizeMismatch, UnsupportedOp


@dataclass(frozen=True)
class Holding:
    """The live arrays that a rank holds, or will hold, of the sharded state.

    Attributes:
        share: the shard's index and the number of shards; (0, 1) for everything.
        values: shards of the parameters, by the identity of the piece.
        states: shards of optimizers' arrays, by the identity of the optimizer and the keys of `live_arrays`.
    """

    share: tuple[int, int]
    values: dict[int, Shard]
    states: dict[int, dict[str, Shard]]


def holding(models: Sequence[ShardedModel], optimizers: Sequence[OptimizerState], *, to_write: bool = False) -> Holding:
    """Returns what this rank holds now; everything if nothing is cut yet and no optimizer has state.

    The models are the outermost wrappers. With `to_write`, only arrays that this rank will keep, for the caller to
    fill.
    """
    units = _units(models)
    cuts = {(unit.placement.shard, len(unit.placement.shards)) for _, unit in units if _is_cut(unit)}
    if len(cuts) > 1:
        raise UnsupportedOp(
            f"parts of the training state are sharded in different ways: {sorted(cuts)}, as (shard, number of shards)"
        )
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


class ShardMemory:
    """Memory for a share of the state. `target` are its arrays, for the caller to fill.

    The models are the outermost wrappers, with all optimizers of their pieces. `keeps_full` says whether strategies
    that keep parameters whole get memory for that too.
    """

    def __init__(
        self,
        models: Sequence[ShardedModel],
        optimizers: Sequence[OptimizerState],
        share: tuple[int, int],
        *,
        keeps_full: bool = True,
    ) -> None:
        shard, shards = share
        self.units = [(unit, model.place_of(shard, shards, keeps_full=keeps_full)) for model, unit in _units(models)]
        self.rooms = [[flat.room(place) for flat in unit.flats] for unit, place in self.units]
        values: dict[int, Shard] = {}
        for flat, room in self.pairs():
            for p, piece, (elements, start) in zip(flat.parameters, flat.pieces, room.runs(), strict=True):
                values[id(piece)] = Shard(elements, start, p.shape)
        states = {
            id(optimizer): {key: Shard(np.empty(like.values.size, array.dtype), like.start, like.shape)
                            for key, array in optimizer.live_arrays().items()
                            if (like := values.get(id(_piece(optimizer, key)))) is not None}
            for optimizer in optimizers
        }  # fmt: skip
        self.target = Holding(share, values, states)

    def pairs(self) -> Iterator[tuple[Flat, Room]]:
        """Yields each flat array with its memory."""
        for (unit, _), rooms in zip(self.units, self.rooms, strict=True):
            yield from zip(unit.flats, rooms, strict=True)

    def arrays(self, optimizer: OptimizerState) -> dict[str, NDArray[Any]]:
        """Returns the arrays of an optimizer's state, by the keys of `live_arrays`; new ones begin with zeros."""
        states = self.target.states[id(optimizer)]
        for key, array in optimizer.live_arrays().items():
            like = self.target.values.get(id(_piece(optimizer, key)))
            if like is not None and key not in states:  # of a parameter that was frozen until now
                states[key] = Shard(np.zeros(like.values.size, array.dtype), like.start, like.shape)
        return {key: shard.values for key, shard in states.items()}


class ShardMove:
    """A move of this rank to another share of the state; `target` is memory for the caller to fill.

    The arguments are as in `ShardMemory`.
    """

    def __init__(
        self, models: Sequence[ShardedModel], optimizers: Sequence[OptimizerState], share: tuple[int, int]
    ) -> None:
        for model in models:
            model.check_not_summoned("the view changed inside unshard(): the whole parameters there would be lost")
        self._models = models
        self._optimizers = optimizers
        self._memory = ShardMemory(models, optimizers, share)
        self.target = self._memory.target

    def switch(self) -> None:
        """Makes the filled target this rank's state, all of it at once."""
        for model in self._models:
            model.expire()
        for (unit, place), rooms in zip(self._memory.units, self._memory.rooms, strict=True):
            unit.move_to(place, rooms)
        for optimizer in self._optimizers:
            state = self.target.states[id(optimizer)]
            optimizer.move({key: s.values.reshape(_piece(optimizer, key).shape) for key, s in state.items()})


def places_of(models: Sequence[ShardedModel], shards: int) -> dict[int, tuple[int, int]]:
    """Returns where each parameter lies if the state is cut into `shards` shards, by the piece's identity.

    The place is the index of its first element in its flat array, and the number of elements in a shard of that.
    """
    places: dict[int, tuple[int, int]] = {}
    for _, unit in _units(models):
        for flat in unit.flats:
            layout = flat.laid_out(shards)
            for piece, place in zip(flat.pieces, layout.places, strict=True):
                places[id(piece)] = place.start, layout.shard_size
    return places


def _units(models: Sequence[ShardedModel]) -> list[tuple[ShardedModel, Unit]]:
    """Returns the units that their strategy shards, each with its wrapper, even if the world has one rank."""
    return [(part, part.unit) for model in models for part in model.parts() if part.is_sharded]


def _among(model: ShardedModel, unit: Unit, *, whole: bool) -> tuple[int, int]:
    """Returns this rank's index among those that hold the same and write a checkpoint together, and their number."""
    view, rank = model.place_now(), model.group.rank
    if (view.shard, len(view.shards)) != (unit.placement.shard, len(unit.placement.shards)):
        return 0, 1  # the view of this share has not come yet
    alike = sorted(member for node in view.nodes for member in node) if whole else view.replicas
    return (alike.index(rank), len(alike)) if alike else (0, 1)


def _is_cut(unit: Unit) -> bool:
    return any(flat.is_spread for flat in unit.flats)


def _piece(optimizer: OptimizerState, key: str) -> Parameter:
    """Returns the piece whose state a key of `live_arrays` names."""
    return optimizer.parameters[key.rpartition("/")[0]]


def _state_shard(key: str, array: NDArray[Any], optimizer: OptimizerState, values: dict[int, Shard]) -> Shard:
    piece = _piece(optimizer, key)
    if array.shape != piece.data.shape:
        raise UnsupportedOp(f"the state {key!r} of this {type(optimizer).__name__} does not have its parameter's shape")
    like = values[id(piece)]
    if like.values.size != array.size:  # the parameter is cut, but not yet this array, which is blank
        array = np.broadcast_to(np.zeros((), array.dtype), like.shape)
    return Shard(array, like.start, like.shape, like.holder, like.holders)


Leaf = NDArray[Any] | Shard


def sharded_state(model: Any, optimizer: Any = None, group: Group | None = None) -> dict[str, Any]:
    """Returns the state of a model and its optimizer, as `checkpoint.save_sharded` and `load_sharded` take it.

        checkpoint.save_sharded(runs, paceline.sharded_state(fsdp, optimizer), tag, session.group)
        found = checkpoint.load_sharded(runs, paceline.sharded_state(fsdp, optimizer), session.group)
        paceline.load_sharded_state(found.state, fsdp, optimizer)

    Paths and shapes are those of the whole model, for any world, wrapper and strategy. The call is a collective if the
    ranks have not agreed on initial values yet.

    Args:
        model: a wrapped or bare module, or a `paceline.torch.FSDP`.
        optimizer: the model's optimizer, to include its state; a torch optimizer for a torch model.
        group: the ranks that will save, if not all: replicas outside of the group write nothing.

    Returns:
        {"model": by path, "optimizer": {"settings", "state": by path and name}}, live arrays and shards of them.

    Raises:
        SizeMismatch: the optimizer belongs to another model.
        UnsupportedOp: the optimizer's state cannot be separated by parameter.
        PacelineError: the ranks could not agree on initial values.
    """
    model, optimizer = standing_for(model), standing_for(optimizer)
    if isinstance(model, (DDP, ShardedModel)):
        model.prepare()
    shards = model_shards(model, group)
    state: dict[str, Any] = {"model": shards}
    if optimizer is not None:
        state["optimizer"] = optimizer_shards(optimizer, shards)
    return state


def load_sharded_state(state: Mapping[str, Any], model: Any, optimizer: Any = None) -> None:
    """Loads what `checkpoint.load_sharded` returned for a `sharded_state`, or `checkpoint.load` for a bare model.

    Raises:
        SizeMismatch: the state does not fit; the error lists the reasons.
    """
    model, optimizer = standing_for(model), standing_for(optimizer)
    if isinstance(model, ShardedModel):
        model.load_sharded_state_dict({path: _entry(leaf) for path, leaf in state["model"].items()})
    else:
        _load_whole(model, state["model"])
    if optimizer is not None:
        saved = state["optimizer"]
        values = {path: {name: _values(leaf) for name, leaf in one.items()} for path, one in saved["state"].items()}
        optimizer.load_state_dict({"settings": saved["settings"], "state": values})


def model_shards(model: HasParameters, group: Group | None = None) -> dict[str, Leaf]:
    """Returns parameters by path, then buffers: live arrays, or a `Shard` where other ranks have the rest."""
    leaves: dict[str, Leaf] = {path: parameter.data for path, parameter in parameters_of(model).items()}
    if isinstance(model, ShardedModel):
        ids = None if group is None else {member.member_id for member in group.members}
        for path, leaf in _spread(model, ids):
            leaves[path] = leaf
    return leaves | dict(buffers_of(model))


def optimizer_shards(optimizer: OptimizerState, model: Mapping[str, Leaf]) -> dict[str, Any]:
    """Returns settings and state of an optimizer like its `state_dict`: live arrays, sharded as `model_shards` are."""
    if not isinstance(optimizer, OptimizerState):
        raise UnsupportedOp(f"a {type(optimizer).__name__} cannot train the shards of a model that FSDP has wrapped")
    state: dict[str, dict[str, Any]] = {path: dict(numbers) for path, numbers in optimizer.numbers().items()}
    for key, array in optimizer.live_arrays().items():
        path, _, name = key.rpartition("/")
        if path not in model:
            raise SizeMismatch(f"the optimizer trains {path!r}, which the model does not have")
        like = model[path]
        if isinstance(like, Shard):
            state[path][name] = Shard(array, like.start, like.shape, like.holder, like.holders)
        else:
            state[path][name] = array
    return {"settings": dict(optimizer.settings), "state": state}


def _spread(model: ShardedModel, members: set[str] | None) -> list[tuple[str, Shard]]:
    paths = model.paths()
    found = []
    for unit in model.units():
        if len(unit.placement.shards) == 1:
            continue
        everyone = model.group.members
        holders = [r for r in unit.placement.replicas if members is None or everyone[r].member_id in members]
        holder = holders.index(model.group.rank)
        for flat in unit.flats:
            for p, piece, start in zip(flat.parameters, flat.pieces, flat.starts, strict=True):
                found.append((paths[id(piece)], Shard(piece.data, start, p.shape, holder, len(holders))))
    return found


def _entry(leaf: Leaf) -> dict[str, Any]:
    """Returns a leaf in the form of a sharded state dict."""
    if isinstance(leaf, Shard):
        return {"values": leaf.values.reshape(-1), "start": leaf.start, "shape": list(leaf.shape)}
    return {"values": leaf.reshape(-1), "start": 0, "shape": list(leaf.shape)}


def _values(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, Shard) else leaf


def _load_whole(model: HasParameters, saved: Mapping[str, Any]) -> None:
    here = {path: parameter.data for path, parameter in parameters_of(model).items()} | buffers_of(model)
    odd = [f"{path!r} is in only one of them" for path in sorted(here.keys() ^ saved.keys())]
    odd += [
        f"{path!r} has shape {list(np.shape(saved[path]))}, not {list(here[path].shape)}"
        for path in sorted(here.keys() & saved.keys())
        if np.shape(saved[path]) != here[path].shape
    ]
    if odd:
        raise SizeMismatch(f"the state does not fit this model: {'; '.join(odd[:8])}")
    for path, array in here.items():
        array[...] = saved[path]
