"""What this rank holds of a model and its optimizer, for checkpoints that ranks write and read together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.pieces import Shard
from paceline.errors import SizeMismatch, UnsupportedOp
from paceline.links.base import Peer
from paceline.parallel.fsdp import FSDP
from paceline.parallel.module import HasParameters, buffers_of, parameters_of
from paceline.parallel.optimizer import OptimizerState, standing_for
from paceline.parallel.wrapper import Wrapper

__all__ = ["load_sharded_state", "model_shards", "optimizer_shards", "sharded_state"]

Leaf = NDArray[Any] | Shard


class _Group(Protocol):
    @property
    def members(self) -> Sequence[Peer]:
        """The members in rank order."""


def sharded_state(model: Any, optimizer: Any = None, group: _Group | None = None) -> dict[str, Any]:
    """A model and its optimizer, as `checkpoint.save_sharded` takes them and `load_sharded` wants them.

        checkpoint.save_sharded(runs, paceline.sharded_state(fsdp, optimizer), tag, session.group)
        found = checkpoint.load_sharded(runs, paceline.sharded_state(fsdp, optimizer), session.group)
        paceline.load_sharded_state(found.state, fsdp, optimizer)

    Paths and shapes are those of the whole model, whatever the world, the wrapper and the strategy. A collective as
    long as the ranks have not agreed on initial values.

    Args:
        model: a wrapped module, or a bare one; a `paceline.torch.FSDP`.
        optimizer: of it, if it shall be in the state; one of torch's for a model of torch's.
        group: the ranks that will save, if not all: replicas outside of it write nothing.

    Returns:
        {"model": by path, "optimizer": {"settings", "state": by path and name}}, live arrays and shards of them.

    Raises:
        SizeMismatch: the optimizer is of another model.
        UnsupportedOp: it is none whose state can be told apart by parameters.
        PacelineError: the ranks could not agree on initial values.
    """
    model, optimizer = standing_for(model), standing_for(optimizer)
    if isinstance(model, Wrapper):
        model.prepare()
    shards = model_shards(model, group)
    state: dict[str, Any] = {"model": shards}
    if optimizer is not None:
        state["optimizer"] = optimizer_shards(optimizer, shards)
    return state


def load_sharded_state(state: Mapping[str, Any], model: Any, optimizer: Any = None) -> None:
    """Takes over what `checkpoint.load_sharded` gave for a `sharded_state`, or `checkpoint.load` for a bare model.

    Raises:
        SizeMismatch: it does not fit; the text lists why.
    """
    model, optimizer = standing_for(model), standing_for(optimizer)
    if isinstance(model, FSDP):
        model.load_sharded_state_dict({path: _entry(leaf) for path, leaf in state["model"].items()})
    else:
        _load_whole(model, state["model"])
    if optimizer is not None:
        saved = state["optimizer"]
        values = {path: {name: _values(leaf) for name, leaf in one.items()} for path, one in saved["state"].items()}
        optimizer.load_state_dict({"settings": saved["settings"], "state": values})


def model_shards(model: HasParameters, group: _Group | None = None) -> dict[str, Leaf]:
    """Parameters by path, then buffers: live arrays, a `Shard` where other ranks have the rest."""
    leaves: dict[str, Leaf] = {path: parameter.data for path, parameter in parameters_of(model).items()}
    if isinstance(model, FSDP):
        ids = None if group is None else {member.member_id for member in group.members}
        for path, leaf in _spread(model, ids):
            leaves[path] = leaf
    return leaves | dict(buffers_of(model))


def optimizer_shards(optimizer: OptimizerState, model: Mapping[str, Leaf]) -> dict[str, Any]:
    """Settings and state of an optimizer, in the form of its `state_dict`: live arrays, sharded as `model_shards` are.

    Raises:
        SizeMismatch: it is of another model.
        UnsupportedOp: it is no optimizer of this package, and none stands for it.
    """
    if not isinstance(optimizer, OptimizerState):
        raise UnsupportedOp(f"a {type(optimizer).__name__} does not train the pieces of a model that FSDP has wrapped")
    state: dict[str, dict[str, Any]] = {path: dict(numbers) for path, numbers in optimizer.numbers().items()}
    for key, array in optimizer.live_arrays().items():
        path, _, name = key.rpartition("/")
        if path not in model:
            raise SizeMismatch(f"the optimizer trains {path!r}, which the model has not")
        like = model[path]
        if isinstance(like, Shard):
            state[path][name] = Shard(array, like.start, like.shape, like.holder, like.holders)
        else:
            state[path][name] = array
    return {"settings": dict(optimizer.settings), "state": state}


def _spread(model: FSDP, members: set[str] | None) -> list[tuple[str, Shard]]:
    paths = model._paths()
    found = []
    for unit in model._tree():
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
    """As in a sharded state dict."""
    if isinstance(leaf, Shard):
        return {"values": leaf.values.reshape(-1), "start": leaf.start, "shape": list(leaf.shape)}
    return {"values": leaf.reshape(-1), "start": 0, "shape": list(leaf.shape)}


def _values(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, Shard) else leaf


def _load_whole(model: HasParameters, saved: Mapping[str, Any]) -> None:
    here = {path: parameter.data for path, parameter in parameters_of(model).items()} | buffers_of(model)
    odd = [f"{path!r} is on one side only" for path in sorted(here.keys() ^ saved.keys())]
    odd += [
        f"{path!r} has shape {list(np.shape(saved[path]))}, not {list(here[path].shape)}"
        for path in sorted(here.keys() & saved.keys())
        if np.shape(saved[path]) != here[path].shape
    ]
    if odd:
        raise SizeMismatch(f"the state does not fit this model: {'; '.join(odd[:8])}")
    for path, array in here.items():
        array[...] = saved[path]
