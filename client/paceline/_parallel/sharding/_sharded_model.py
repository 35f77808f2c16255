"""A model whose parameters are sharded over the ranks: the core of FSDP, for NumPy and for torch modules.

Each wrapper of a user's model holds one `ShardedModel`; it owns the unit of the parameters that no wrapper inside it
owns. The outermost one also holds the `UnitRunner` of all units and the `GradientSynchronizer`. The fronts say when
units run forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline._group import Group
from paceline._parallel._accumulation import Accumulation
from paceline._parallel._agreement import ModelManifest
from paceline._parallel._parameter import HasParameters, Parameter, buffers_of, parameters_of, power_of, write_back
from paceline._parallel._synchronizer import GradientSynchronizer, SpreadParameters
from paceline._parallel.sharding._flat_transport import MakeTransport
from paceline._parallel.sharding._placement import Placement, ShardingStrategy, place
from paceline._parallel.sharding._runner import UnitRunner
from paceline._parallel.sharding._state_dicts import (
    full_state,
    load_full,
    load_shards,
    padded_gradients,
    set_shards,
    shard_state,
)
from paceline._parallel.sharding._unit import Unit, join_units
from paceline.errors import InvalidRank, InvalidWorldSize, StepOrderError, UnsupportedOp

MAX_REDUNDANCY = 8
"""Each copy costs a message and an update in every step."""


class ShardedModel:
    """One FSDP wrapper, for any framework; the `SynchronizedModel` of FSDP.

    Args:
        module: the model or a part of it; where a wrapper inside owns a parameter, it lists the piece.
        group, strategy, intra_node_size, ahead, redundancy: as for `paceline.FSDP`.
        wire: dtype of values and gradients on the wire; None for their own.
        computes: whether the module computes with values in the dtype `wire`.
        make_transport: makes the transport of each flat array; None for links.
        accumulation, agreed: as for `GradientSynchronizer`.
        interrupted: called before any use of the gradients, to end a backward pass that its framework has silently
            given up.

    Attributes:
        unit: the parameters that this wrapper owns.
        synchronizer: the synchronizer of the whole model, if this is the outermost wrapper.
        is_empty: True if there is nothing to shard or train, so that no outer wrapper finds this one by parameters.
        outermost: the outermost wrapper around this one, or itself.
        driver: the object that runs the passes of a framework with callbacks; None for NumPy modules.
    """

    def __init__(
        self,
        module: HasParameters,
        group: Group,
        strategy: ShardingStrategy,
        intra_node_size: int | None,
        *,
        wire: np.dtype[Any] | None = None,
        computes: bool = False,
        ahead: int = 1,
        redundancy: int | None = None,
        make_transport: MakeTransport = lambda ranks, parameters: None,
        accumulation: Callable[[Mapping[str, Parameter], Mapping[str, Parameter]], Accumulation] = Accumulation,
        agreed: Callable[[UnitRunner], None] = lambda runner: None,
        interrupted: Callable[[], None] = lambda: None,
    ) -> None:
        self.module = module
        self.group = group
        self.strategy = ShardingStrategy(strategy)
        self.intra_node_size = intra_node_size
        self.outermost = self
        self.driver: object = None
        self.synchronizer = GradientSynchronizer(self, group, accumulation=accumulation, agreed=agreed)
        ahead = index(ahead)
        if ahead < 0:
            raise ValueError(f"ahead must be a number of units, 0 or more, not {ahead!r}")
        self._ahead = ahead
        self._redundancy = None if redundancy is None else index(redundancy)
        self._wire = wire
        self._computes = computes
        self._make_transport = make_transport
        self._interrupted = interrupted
        placement = self.place_now()
        self._placed_in = group.generation if placement.nodes else None  # otherwise first use finds its place
        own, inner = _owned(module)
        if any(part.group is not group for part in inner):
            raise ValueError("all units of a model must have the same group")
        self.unit = Unit(own, placement, wire, group.empty, computes=computes)
        self._inner = inner
        for part in inner:
            part.outermost = self
        self._check_redundancy()
        self._pieces = {id(p): piece for p, piece in self.unit.pairs()}
        for p, piece in self.unit.pairs():
            p._owner = piece._owner = self
        self.is_empty = not any(part._pieces for part in self.parts())
        self._runner: UnitRunner | None = None
        self._owes = False
        """True after a forward pass until the next reduction."""
        self._ran = False

    # Its parts --------------------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """True if ranks hold different shards under this strategy, even if the world has one rank."""
        return self.strategy is not ShardingStrategy.NO_SHARD and self.intra_node_size != 1

    @property
    def redundancy(self) -> int:
        """The number of ranks that hold each shard: as given, or 2 where losing one rank must not lose a shard."""
        if self._redundancy is not None:
            return self._redundancy
        return 2 if self._spreads and self.group._core.is_elastic and self.group._core.most_members > 2 else 1

    @property
    def _spreads(self) -> bool:
        """True if a part of the model is cut into as many shards as there are ranks."""
        every = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
        return any(part.strategy in every for part in self.parts())

    def _check_redundancy(self) -> None:
        if self._redundancy is None:
            return
        if not 1 <= self._redundancy <= MAX_REDUNDANCY:
            raise ValueError(f"redundancy must be 1 to {MAX_REDUNDANCY}, not {self._redundancy}")
        if self._redundancy > 1 and not self._spreads:
            raise ValueError(
                f"redundancy={self._redundancy} is for FULL_SHARD and SHARD_GRAD_OP: under HYBRID_SHARD each other "
                "node holds a shard too, and under NO_SHARD all ranks hold everything"
            )

    @property
    def is_outermost(self) -> bool:
        """True unless another wrapper is around this one."""
        return self.outermost is self

    def parts(self) -> list[ShardedModel]:
        """Returns this wrapper and all inside it, in the order in which they run forward."""
        return [self, *self._inner]

    def units(self) -> list[Unit]:
        """The units of the whole model."""
        return [part.unit for part in self.parts()]

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yields this rank's pieces, under the paths of the module's parameters."""
        for path, parameter in self.module.named_parameters():
            yield path, self._pieces.get(id(parameter), parameter)

    def named_buffers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yields the module's buffers; none if the module has no such method."""
        yield from buffers_of(self.module).items()

    def buffers(self) -> Mapping[str, NDArray[Any]]:
        """Returns the module's buffers, by path."""
        return buffers_of(self.module)

    def buffers_given(self, buffers: Mapping[str, NDArray[Any]]) -> None:
        """See `SynchronizedModel`."""
        write_back(self.module, {}, buffers)

    def paths(self) -> dict[int, str]:
        """Returns the path of each piece, by identity; for a tied piece its first path."""
        paths: dict[int, str] = {}
        for path, piece in self.named_parameters():
            paths.setdefault(id(piece), path)
        return paths

    def spread_parameters(self) -> list[SpreadParameters]:
        """Returns this rank's pieces, with the ranks that have the other shards of them."""
        spread: dict[int, tuple[Group | None, list[Parameter]]] = {}
        for unit in self.units():
            spread.setdefault(id(unit.shards), (unit.shards, []))[1].extend(piece for _, piece in unit.pairs())
        return list(spread.values())

    # Passes -----------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Agrees on the model and takes rank 0's values; see `paceline.FSDP.prepare`."""
        self._interrupted()
        self.synchronizer.prepare()

    @contextmanager
    def forward_pass(self, rows: int | None) -> Iterator[None]:
        """Surrounds a forward pass of the whole model; `rows` is B of its input, None if that has no first axis."""
        self.prepare()
        self.synchronizer.begin_forward()
        self.synchronizer.rows = rows
        self._ran = self._owes = True
        with self.runner().forward_pass():
            yield

    @contextmanager
    def backward_pass(self, weight: float) -> Iterator[float]:
        """Surrounds a backward pass of the whole model; see `GradientSynchronizer.backward_pass`."""
        with self.synchronizer.backward_pass(weight) as factor:
            yield factor
        self._owes = self._owes and not self.synchronizer.reduces

    def running_forward(self) -> AbstractContextManager[None]:
        """Keeps this wrapper's own unit whole while it runs forward."""
        return self.outermost.runner().running_forward(self.unit)

    def running_backward(self) -> AbstractContextManager[None]:
        """Keeps this wrapper's own unit whole while it runs backward, and sends its gradients afterwards."""
        return self.outermost.runner().running_backward(self.unit)

    def runner(self) -> UnitRunner:
        """The runner of all units, once something has run; only the outermost wrapper has it."""
        if self._runner is None:
            raise StepOrderError("this FSDP wraps a part of a model that another FSDP wraps as a whole: call that one")
        return self._runner

    def sync_gradients(self, weight: float | None = None) -> None:
        """See `paceline.FSDP.sync_gradients`."""
        self.check_outermost()
        self._interrupted()
        pending = any(p.grad is not None for unit in self.units() for p, _ in unit.pairs())
        if not self._ran and not pending:
            raise StepOrderError("sync_gradients: there is nothing to reduce. Was forward() called before backward()?")
        self.synchronizer.sync_gradients(weight, owed=self._owes)
        self._owes = False

    def drop_gradients(self) -> None:
        """Drops all gradients, including those accumulated under `no_sync`, because their step is undone."""
        self._interrupted()
        self.synchronizer.drop_gradients()

    def no_sync(self) -> AbstractContextManager[None]:
        """See `paceline.FSDP.no_sync`."""
        self.check_outermost()
        return self.synchronizer.no_sync()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """See `paceline.FSDP.clip_grad_norm`."""
        self.check_outermost()
        return self.synchronizer.clip_grad_norm(
            max_norm, norm_type, self._whole_powers if self.group._core.order.leaves else None
        )

    def _whole_powers(self, p: float) -> list[float]:
        """Returns `power_of` the gradient of each whole parameter, in the order of paths; a collective.

        The powers of shards would be added up in an order that depends on the number of ranks.
        """
        powers: dict[int, float] = {}
        for unit in self.units():
            for flat in unit.flats:
                gradients = flat.gathered_gradients(unit.shards)
                for piece, gradient in zip(flat.pieces, gradients or (), strict=False):
                    if piece.grad is not None:
                        powers[id(piece)] = power_of(gradient, p)
        return [powers[piece] for piece in self.paths() if piece in powers]

    def keeps_reducer(self) -> bool:
        """See `SynchronizedModel`: sums are over the ranks of one generation."""
        return False

    def agree(self, *, may_change: bool, agreed_in: int) -> UnitRunner:
        """See `SynchronizedModel`."""
        paths, units = self.paths(), self.units()
        for part in self.parts():
            part._follow()
        for unit in units:
            unit.align(paths)
        entries = {paths[id(piece)]: p for unit in units for p, piece in unit.pairs()}
        manifest = ModelManifest.of(
            entries,
            self.buffers(),
            strategy=" ".join(part.strategy.name for part in self.parts()),
            nodes="; ".join(dict.fromkeys(str(unit.placement.nodes) for unit in units)),
            communication_dtype=" ".join(str(part._wire) for part in self.parts()),
            computes=" ".join(str(part._computes) for part in self.parts()),
            ahead=self._ahead,
            units=" ".join(str(len(list(unit.pairs()))) for unit in units),
        )
        begins = self._runner is None or not all(unit.is_agreed for unit in units)
        buffers = self.buffers() if begins else {}
        join_units(
            units, self.group, manifest, buffers, self._make_transport, may_change=may_change, agreed_in=agreed_in
        )
        if buffers:
            self.buffers_given(buffers)
        if self._runner is None:
            self._runner = UnitRunner(units, paths, self.group, self._ahead)
        self._runner.refit()
        return self._runner

    # Whole parameters -------------------------------------------------------------------------------------------------

    def prefetch_forward_params(self) -> None:
        """See `paceline.FSDP.prefetch_forward_params`."""
        self.check_outermost()
        if all(unit.placement.keeps_full for unit in self.units()):
            raise UnsupportedOp(
                f"prefetch_forward_params is only valid for FULL_SHARD and HYBRID_SHARD, got {self.strategy.name}"
            )
        if self.has_pending_prefetch():
            raise StepOrderError("prefetch_forward_params called twice without intervening forward()")
        self.prepare()
        self.runner().prefetch()

    def has_pending_prefetch(self) -> bool:
        """Returns True from `prefetch_forward_params` until the next pass or change of the parameters."""
        return self._runner is not None and self._runner.prefetched

    def broadcast_updated_params(self) -> None:
        """See `paceline.FSDP.broadcast_updated_params`."""
        self.check_outermost()
        self.prepare()
        kept = [unit for unit in self.units() if unit.placement.keeps_full]
        for unit in kept:
            unit.expire()
            unit.fetch()
        for unit in kept:
            unit.wait()

    @contextmanager
    def unshard(self) -> Iterator[dict[str, Parameter]]:
        """See `paceline.FSDP.unshard`."""
        self.check_outermost()
        self.prepare()
        whole = {id(piece): p for unit in self.units() for p, piece in unit.pairs()}
        with self.runner().summoned():
            yield {path: whole[piece] for piece, path in self.paths().items()}

    # State ------------------------------------------------------------------------------------------------------------

    def update_shards(self, flat: ArrayLike) -> None:
        """See `paceline.FSDP.update_shards`."""
        self._check_changeable()
        set_shards(self.units(), parameters_of(self).values(), np.asarray(flat), self.expire)

    def padded_gradients(self) -> dict[str, NDArray[Any] | None]:
        """See `paceline.FSDP.padded_gradients`."""
        return padded_gradients(self.units(), self.paths())

    def state_dict(self, *, root: int | None = None) -> dict[str, NDArray[Any]]:
        """See `paceline.FSDP.state_dict`."""
        self.check_outermost()
        self.prepare()
        if root is not None and not 0 <= root < self.group.size:
            raise InvalidRank(f"root {root} lies outside the world of {self.group.size}, at rank {self.group.rank}")
        keep = root is None or root == self.group.rank
        return full_state(self.units(), self.paths(), self.buffers(), keep=keep)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """See `paceline.FSDP.load_state_dict`."""
        self._check_changeable()
        buffers = self.buffers()
        load_full(self.units(), self.paths(), buffers, saved, self.expire)
        self.buffers_given(buffers)

    def sharded_state_dict(self) -> dict[str, dict[str, Any]]:
        """See `paceline.FSDP.sharded_state_dict`."""
        self.check_outermost()
        return shard_state(self.units(), self.paths(), self.buffers())

    def load_sharded_state_dict(self, saved: Mapping[str, Any]) -> None:
        """See `paceline.FSDP.load_sharded_state_dict`."""
        self._check_changeable()
        buffers = self.buffers()
        load_shards(self.units(), self.paths(), buffers, saved, self.expire)
        self.buffers_given(buffers)

    def expire(self) -> None:
        """Frees whole arrays and drops running gathers, because shards are about to change."""
        if self._runner is not None:
            self._runner.expire()

    def will_load(self, *, values: bool) -> None:
        """Prepares for shards to be overwritten in place.

        `values` says that there are values for this rank. If the ranks have not agreed on initial values yet, this
        rank's shards then keep these.
        """
        self.expire()
        for unit in self.units():
            if unit.is_fresh and values:
                for flat in unit.flats:
                    flat.given = True

    # This rank's placement --------------------------------------------------------------------------------------------

    def place_now(self) -> Placement:
        """Returns this rank's place in the group's present view; without a view yet, the rank holds everything."""
        try:
            return place(self.strategy, self.group.rank, self.group.members, self.intra_node_size)
        except InvalidWorldSize:
            size, most = self.intra_node_size or 0, self.group._core.most_members
            if not self.group._core.is_elastic or size < 1:
                raise
            if size > most:
                raise InvalidWorldSize(
                    f"HYBRID_SHARD: at most {most} workers train, so a node of intra_node_size={size} can never form: "
                    "raise max_workers or lower intra_node_size"
                ) from None
            return place(self.strategy, self.group.rank, (), self.intra_node_size)

    def place_of(self, shard: int, shards: int, *, keeps_full: bool = True) -> Placement:
        """Returns a place in a future view, whose other ranks are not known yet.

        Without `keeps_full` it is the place of a shard alone, whatever the strategy.
        """
        keeps_full = keeps_full and self.strategy is ShardingStrategy.SHARD_GRAD_OP
        return Placement(tuple(range(shards)), (shard,), shard, (), keeps_full)

    def check_not_summoned(self, message: str) -> None:
        """Raises `StepOrderError` with the message inside `unshard`."""
        if self._runner is not None and self._runner.are_summoned:
            raise StepOrderError(message)

    def check_outermost(self) -> None:
        """Raises `StepOrderError` if another wrapper is around this one."""
        if not self.is_outermost:
            raise StepOrderError("this FSDP wraps a part of a model that another FSDP wraps as a whole: call that one")

    def _follow(self) -> None:
        """Takes this rank's place in the new view, if the group has moved to another one."""
        if self._placed_in != self.group.generation:
            placement = place(self.strategy, self.group.rank, self.group.members, self.intra_node_size)
            self.unit.expire()
            self.unit.move(placement)
            self._placed_in = self.group.generation

    def _check_changeable(self) -> None:
        self.check_outermost()
        self.check_not_summoned(
            "parameters cannot be loaded inside unshard(): the whole parameters there would overwrite them"
        )


def _owned(module: HasParameters) -> tuple[dict[str, Parameter], Sequence[ShardedModel]]:
    """Returns the parameters that a wrapper of the module would own, and the wrappers inside, in order of paths."""
    own: dict[str, Parameter] = {}
    owners: dict[int, ShardedModel] = {}
    seen: set[int] = set()
    for path, parameter in module.named_parameters():
        owner = parameter._owner
        if isinstance(owner, ShardedModel):
            if parameter.has_piece:
                raise UnsupportedOp(
                    f"parameter {path!r} is already in another FSDP unit: tied parameters must be wrapped together"
                )
            owners[id(owner)] = owner
        elif id(parameter) not in seen:
            seen.add(id(parameter))
            own[path] = parameter
    inner: dict[int, ShardedModel] = {}
    for owner in owners.values():
        for part in owner.outermost.parts():
            # A wrapper whose parameters are all in units inside it owns no parameter by which to find it.
            if id(part) in owners or not part._pieces:
                inner.setdefault(id(part), part)
    return own, list(inner.values())
