"""The sharded part of a training state: its models and optimizers, and their arrays by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from paceline._elastic.parts import StatePart
from paceline._parallel._optimizer_state import OptimizerState
from paceline._parallel._parameter import Parameter
from paceline._parallel.sharding._copies import ShardCopies
from paceline._parallel.sharding._holdings import Holding, ShardMove, holding, places_of
from paceline._parallel.sharding._placement import ShardingStrategy
from paceline._parallel.sharding._sharded_model import ShardedModel
from paceline.checkpoint.pieces import Shard
from paceline.errors import UnsupportedOp
from paceline_protocol import Share


class ShardedState:
    """The part of a `TrainState` that FSDP shards; `things` are the objects that the parts represent.

    `copies` are this member's copies of others' shards.
    """

    def __init__(self, parts: Mapping[str, StatePart], things: Mapping[str, Any]) -> None:
        self._parts = parts
        self._things = things
        self._models = [thing for thing in things.values() if isinstance(thing, ShardedModel)]
        self._optimizers = [thing for thing in things.values() if isinstance(thing, OptimizerState)]
        self.copies = ShardCopies(self._models, self._optimizers)

    @property
    def has_models(self) -> bool:
        """True if FSDP wraps a model of the state."""
        return bool(self._models)

    @property
    def is_on_device(self) -> bool:
        """True if a model has copies of its values on a device."""
        return any(flat.on_device for model in self._models for unit in model.units() for flat in unit.flats)

    @property
    def node_size(self) -> int:
        """The number of ranks that hold one copy between them: 1 if each holds all, 0 for all ranks.

        Raises:
            UnsupportedOp: models are sharded in different ways, or over nodes without a size, which a worker that
                joins later could not know.
        """
        sizes: set[int] = set()
        for part in (part for model in self._models for part in model.parts() if part.is_sharded):
            size = part.intra_node_size
            hybrid = part.strategy is ShardingStrategy.HYBRID_SHARD
            if hybrid and size is None and (part.group._core.is_elastic or part.group.size != 1):
                raise UnsupportedOp(
                    "HYBRID_SHARD needs intra_node_size= in session.steps, because a worker that joins later, or "
                    "replaces another, may be on any host"
                )
            sizes.add((size or 0) if hybrid else 0)
        if len(sizes) > 1:
            raise UnsupportedOp(
                f"units of the training state are sharded over nodes of different sizes: {sorted(sizes)}"
            )
        return sizes.pop() if sizes else 1

    @property
    def redundancy(self) -> int:
        """The number of members that hold each shard; the outermost wrappers' count.

        Raises:
            UnsupportedOp: models have different ones.
        """
        found = {model.redundancy for model in self._models if any(part.is_sharded for part in model.parts())}
        if len(found) > 1:
            raise UnsupportedOp(f"models of the training state have different redundancy: {sorted(found)}")
        return found.pop() if found else 1

    @property
    def agreed(self) -> list[int]:
        """Fingerprints of the initial values that members agreed on before the cut; see `Unit.fingerprint`."""
        return [unit.fingerprint for model in self._models for unit in model.units()]

    @property
    def share(self) -> Share:
        """The share that this member holds."""
        return Share(*self.holding().share)

    def check(self) -> None:
        """Checks that everything that is sharded can move to other ranks; not needed in a world of one."""
        ours = {id(piece) for model in self._models for _, piece in model.named_parameters()}
        is_sharded = self.node_size != 1
        gated: dict[int, str] = {}
        for name, part in self._parts.items():
            if any(id(p) not in ours and _moves(p) for p in part.sharded().values()):
                raise UnsupportedOp(f"{name} belongs to a sharded model: give the FSDP wrapper to the training state")
            if is_sharded and part.gated() is not None:
                if not isinstance(self._things[name], OptimizerState):
                    raise UnsupportedOp(
                        f"{name} cannot be sharded along with the model: use an optimizer of paceline.optim, or one of "
                        "torch.optim that has the parameters of a paceline.torch.FSDP"
                    )
                gated.setdefault(id(self._things[name]), name)
        if len(gated) > 1:  # to finish a step, a member would have to know which optimizers had run elsewhere
            raise UnsupportedOp(
                f"{' and '.join(gated.values())} are several optimizers of a sharded state, which can have only "
                "one: make one for a wrapper around all models, or use ShardingStrategy.NO_SHARD"
            )
        for optimizer in self._optimizers if self.redundancy > 1 else ():
            optimizer.check_copying()
            own = getattr(optimizer.stepper, "__dict__", {}).get("step")
            if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):  # torch's schedulers only count steps
                raise UnsupportedOp(
                    f"this {type(optimizer.stepper).__name__} has a step() of its own, but copies of other ranks' "
                    "shards are updated by that of its class: override it in a subclass, or pass FSDP redundancy=1"
                )
        self.holding()

    def holding(self, *, to_write: bool = False) -> Holding:
        """Returns the shards that this member holds; see `_parallel.sharding._holdings.holding`."""
        return holding(self._models, self._optimizers, to_write=to_write)

    def gathered(self, shard: Shard) -> NDArray[Any]:
        """Gathers the elements of an array that members hold in shards, shape [n]; a collective.

        Members must have agreed on their models in this generation, and call it for the same arrays.
        """
        ranks = next(unit.shards for model in self._models for unit in model.units() if unit.shards is not None)
        whole: NDArray[Any] = ranks.all_gather(shard.values.reshape(-1), uneven=True)
        return whole

    def gradients(self) -> list[tuple[Parameter, NDArray[Any]]]:
        """Returns the gradients that the optimizer would use now."""
        pieces = (piece for optimizer in self._optimizers for piece in optimizer.parameters.values())
        return [(piece, piece.grad) for piece in pieces if piece.grad is not None]

    def move(self, share: Share) -> ShardMove:
        """Prepares the change to another share."""
        return ShardMove(self._models, self._optimizers, share)

    def named(self, held: Holding) -> dict[str, Shard]:
        """Returns the arrays of a holding by the names that `checkpoint.tree` gives them."""
        return {
            f"parts.{name}.arrays.{path}": leaf
            for name, part in self._parts.items()
            for path, leaf in part.arrays(held).items()
            if isinstance(leaf, Shard)
        }

    def cut(self, parts: int) -> dict[str, tuple[int, int]]:
        """Returns how arrays are cut into `parts` parts, by name; see `reshard_plan.assign`."""
        places = places_of(self._models, parts)
        return {
            f"parts.{name}.arrays.{path}": places[id(piece)]
            for name, part in self._parts.items()
            for path, piece in part.sharded().items()
        }


def _moves(parameter: Parameter) -> bool:
    """True if the parameter is sharded over several ranks, now or when others join."""
    owner = parameter._owner
    return isinstance(owner, ShardedModel) and owner.group.size != 1
