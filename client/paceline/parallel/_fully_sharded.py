"""FullyShardedDataParallel for NumPy modules: ranks share the memory of one model, and train it as one.

The order of things in a step is `wrapper`'s; `sharding` has the parts: who holds what, memory, units, state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import index
from typing import Any

from numpy.typing import DTypeLike, NDArray

from paceline.errors import InvalidWorldSize, StepOrderError, UnsupportedOp
from paceline.parallel._agreement import Manifest
from paceline.parallel._parameter import Module, Parameter, buffers_of
from paceline.parallel._ranks import ShardRanks
from paceline.parallel._synchronizer import Share, Wrapper
from paceline.parallel.sharding._placement import Placement, ShardingStrategy, place
from paceline.parallel.sharding._runner import Units
from paceline.parallel.sharding._state_dicts import ShardedState
from paceline.parallel.sharding._unit import Unit, checked_wire, join_units

__all__ = ["FSDP"]


class FSDP(Wrapper, ShardedState):
    """Trains one model on the samples of all ranks; each rank keeps its part of parameters, gradients and state.

        fsdp = paceline.FSDP(module, session.group)
        optimizer = paceline.optim.Adam(fsdp)           # of the wrapper: it trains this rank's part
        optimizer.zero_grad()
        fsdp.backward(loss_gradient(fsdp(x), t))        # of the mean loss over this rank's samples
        optimizer.step()

    Construction communicates nothing; the first forward pass gives rank 0's values to all. Results are those of DDP,
    and of one process, to rounding; in a world of one, those of the unwrapped module, bit for bit.

    **Units.** A wrapped module may have wrapped parts. Each wrapper is a unit: its parameters lie side by side in one
    flat array, which is gathered before the unit runs forward and again before it runs backward, and dropped after
    each; gradients leave as soon as the unit's backward is done. The next unit's gather is under way meanwhile.

        model = nn.Sequential(*(paceline.FSDP(block, group) for block in blocks))
        fsdp = paceline.FSDP(model, group)

    A model that fits no rank is built unit by unit: `unit = FSDP(block, group); unit.prepare()`, a collective, leaves
    of each block this rank's part before the next is built. (A worker that waits to be taken in cannot do so.)

    **A world that changes.** In `session.steps` workers come and go, and what is spread moves with them, live, if the
    `TrainState` has the model and its optimizer. A worker that waits to be taken in builds the whole model. What an
    unannounced death takes along is there again under NO_SHARD and from HYBRID_SHARD's other nodes, for which
    `intra_node_size` must be given; under the other strategies the line goes on from its checkpoint.

    **Parameters.** `fsdp.named_parameters()` has this rank's pieces, shape [elements here], under the module's paths.
    The module's own have values only while their unit runs, and inside `unshard()`; under SHARD_GRAD_OP always, but
    what other ranks updated is old until the next forward pass or `broadcast_updated_params`. Where one rank has
    everything (NO_SHARD, a world of one), pieces keep the parameters' shapes.

    A parameter that no rank used gets no gradient, and a frozen one none either. Tied parameters (one object, several
    paths) must be in one unit. All ranks must run the same units in the same order.

    Args:
        module: the model or a part of it, built alike on every rank; values may differ.
        group: the ranks; the same for all units.
        strategy: what is spread.
        intra_node_size: of HYBRID_SHARD: ranks in a node. With None ranks that can share memory are a node, or ranks of
            one host name where that is not known; a rank in a container of its own is one alone, and holds the model.
        communication_dtype: what wider parameters and gradients travel in, e.g. `ml_dtypes.bfloat16`; None for their
            own. The parts that are trained keep their dtype, and so does the computation; what does not travel is not
            rounded. Gradients travel multiplied by their weights (B samples): float16 may overflow.
        ahead: units to gather before they run; 0 for none. The outermost wrapper's counts.

    Attributes:
        module: as above.
        group: as above.
        strategy: as above.

    Raises:
        UnsupportedOp: a parameter to train is neither float32 nor float64, is in another unit already, or the
            communication dtype cannot travel or is no float.
        InvalidWorldSize: the ranks do not make up nodes of one size; at first use where workers may come and go.
        ValueError: no such strategy, `intra_node_size` without HYBRID_SHARD, units of several groups, or `ahead` is
            negative.
    """

    group: ShardRanks
    _root: FSDP
    _computes = False
    """The module computes with values as they travel; see `Flat`."""

    def __init__(
        self,
        module: Module,
        group: ShardRanks,
        strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        intra_node_size: int | None = None,
        *,
        communication_dtype: DTypeLike | None = None,
        ahead: int = 1,
    ) -> None:
        super().__init__(module, group)
        self._root = self
        self.strategy = ShardingStrategy(strategy)
        ahead = index(ahead)
        if ahead < 0:
            raise ValueError(f"ahead is a number of units, not {ahead!r}")
        self._ahead = ahead
        self._wire = checked_wire(communication_dtype)
        self._intra_node_size = intra_node_size
        placement = self._place()
        self._placed_in = group.generation if placement.nodes else None  # else its place is to be found at first use
        own, inner = _owned(module)
        if any(part.group is not group for part in inner):
            raise ValueError("all units of a model must have the same group")
        self._unit = Unit(own, placement, self._wire, group.empty, computes=self._computes)
        self._inner = inner
        for part in inner:
            part._root = self
        self._pieces = {id(p): piece for p, piece in self._unit.pairs()}
        for p, piece in self._unit.pairs():
            p._owner = piece._owner = self
        self._is_empty = not any(part._pieces for part in self._parts())
        """Nothing to share or train: a model around it cannot find it by its parameters, and need not."""
        self._units: Units | None = None
        self._owes = False
        """A forward pass has come, and no reduction since."""
        self._ran = False

    def forward(self, x: Any) -> Any:
        """The module's output. A collective wherever parameters are spread: all ranks call it.

        Raises:
            PacelineError: as `prepare`, or a collective failed.
            Exception: what the module raised. The wrapper stays usable, if the others have come as far.
        """
        if self._is_empty:
            return self.module.forward(x)
        if self._root is not self:
            return self._run_forward(x)
        self.prepare()
        self._remember_rows(x)
        self._ran = self._owes = True
        with self._all_units().forward_pass():
            return self._run_forward(x)

    def backward(self, dy: NDArray[Any], weight: float | None = None) -> Any:
        """As `Wrapper.backward`; called on a unit by its model's backward, returns the gradient of its input."""
        if self._is_empty:
            return self.module.backward(dy)
        if self._root is not self:
            return self._run_backward(dy)
        super().backward(dy, weight)
        self._owes = self._owes and not self._syncing
        return None

    def sync_gradients(self, weight: float | None = None) -> None:
        """As `Wrapper.sync_gradients`, for gradients in the module's own parameters, which have their full shape.

        Gradients that were written there by hand replace those of the pieces.

        Raises:
            StepOrderError: nothing ran forward yet, and there is no gradient.
        """
        self._check_outermost()
        pending = any(p.grad is not None for unit in self._tree() for p, _ in unit.pairs())
        if not self._ran and not pending:
            raise StepOrderError("sync_gradients: there is nothing to reduce. Was forward() called before backward()?")
        super().sync_gradients(weight)
        self._owes = False

    def prefetch_forward_params(self) -> None:
        """Starts to gather what the next forward pass begins with, behind the caller. All ranks call it.

        To be called after the update. What is changed afterwards is not lost: it is gathered anew.

        Raises:
            UnsupportedOp: the strategy keeps parameters whole.
            StepOrderError: called twice without a forward pass in between.
        """
        self._check_outermost()
        if all(unit.placement.keeps_full for unit in self._tree()):
            raise UnsupportedOp(
                f"prefetch_forward_params is only valid for FULL_SHARD and HYBRID_SHARD, got {self.strategy.name}"
            )
        if self.has_pending_prefetch():
            raise StepOrderError("prefetch_forward_params called twice without intervening forward()")
        self.prepare()
        self._all_units().prefetch()

    def has_pending_prefetch(self) -> bool:
        """True from `prefetch_forward_params` to the next pass, or change of the parameters."""
        return self._units is not None and self._units.prefetched

    def broadcast_updated_params(self) -> None:
        """Under SHARD_GRAD_OP: gathers the updated parts on all ranks now; else does nothing. All ranks call it.

        Each forward pass does it anyway, unit by unit beside the computation; this is for reading the module's own
        parameters before.
        """
        self._check_outermost()
        self.prepare()
        kept = [unit for unit in self._tree() if unit.placement.keeps_full]
        for unit in kept:
            unit.expire()
            unit.fetch()
        for unit in kept:
            unit.wait()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As `Wrapper.no_sync`: gradients are accumulated whole, a unit's memory of them stays until they leave."""
        self._check_outermost()
        with super().no_sync():
            yield

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """As `Wrapper.clip_grad_norm`, over the parts of all ranks."""
        self._check_outermost()
        return super().clip_grad_norm(max_norm, norm_type)

    @contextmanager
    def unshard(self) -> Iterator[dict[str, Parameter]]:
        """Inside the block the module's parameters have all their values, exactly. All ranks enter and leave it.

        What is changed there is kept, if all ranks change it alike. The whole model is in memory. Forward passes work
        inside, backward passes do not.

        Returns:
            The module's own parameters, those inside of inner units too, by path.

        Raises:
            PacelineError: a collective failed.
        """
        self._check_outermost()
        self.prepare()
        whole = {id(piece): p for unit in self._tree() for p, piece in unit.pairs()}
        with self._all_units().summoned():
            yield {path: whole[piece] for piece, path in self._paths().items()}

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """This rank's pieces, under the paths of the module's parameters."""
        for path, parameter in self.module.named_parameters():
            yield path, self._pieces.get(id(parameter), parameter)

    @property
    def spreads(self) -> bool:
        """True if ranks hold different parts under this strategy; in a world of one too."""
        return self.strategy is not ShardingStrategy.NO_SHARD and self._intra_node_size != 1

    def _agree(self, *, may_change: bool) -> Units:
        paths, units = self._paths(), list(self._tree())
        for part in self._parts():
            part._follow()
        for unit in units:
            unit.align(paths)
        entries = {paths[id(piece)]: p for unit in units for p, piece in unit.pairs()}
        manifest = Manifest.of(
            entries,
            buffers_of(self.module),
            strategy=" ".join(part.strategy.name for part in self._parts()),
            nodes="; ".join(dict.fromkeys(str(unit.placement.nodes) for unit in units)),
            communication_dtype=" ".join(str(part._wire) for part in self._parts()),
            computes=" ".join(str(part._computes) for part in self._parts()),
            ahead=self._ahead,
            units=" ".join(str(len(list(unit.pairs()))) for unit in units),
        )
        begins = self._units is None or not all(unit.is_settled for unit in units)
        buffers = buffers_of(self.module) if begins else {}
        join_units(units, self.group, manifest, buffers, may_change=may_change, agreed_in=self._generation)
        if self._units is None:
            self._units = Units(units, paths, self.group, self._ahead)
        self._units.refit()
        return self._units

    def _follow(self) -> None:
        """If the group has gone on to another view, takes this rank's place there.

        Raises:
            InvalidWorldSize: the ranks of this view do not make up nodes.
        """
        if self._placed_in != self.group.generation:
            placement = place(self.strategy, self.group.rank, self.group.members, self._intra_node_size)
            self._unit.expire()
            self._unit.move(placement)
            self._placed_in = self.group.generation

    def _place(self) -> Placement:
        """Where this rank stands in the group's present view; it has all where others have yet to come or go."""
        try:
            return place(self.strategy, self.group.rank, self.group.members, self._intra_node_size)
        except InvalidWorldSize:
            size, most = self._intra_node_size or 0, self.group.most_members
            if not self.group.is_elastic or size < 1:
                raise
            if size > most:
                raise InvalidWorldSize(
                    f"HYBRID_SHARD: a node of intra_node_size={size} never comes together where at most {most} workers "
                    "train: make max_workers larger, or nodes smaller"
                ) from None
            return place(self.strategy, self.group.rank, (), self._intra_node_size)

    def _place_of(self, part: int, parts: int) -> Placement:
        """A place in a view that is to come: who the other ranks are is not known yet."""
        keeps_full = self.strategy is ShardingStrategy.SHARD_GRAD_OP
        return Placement(tuple(range(parts)), (part,), part, (), keeps_full)

    def _reduce(self, *, by_hand: bool = False) -> None:
        before: list[tuple[Parameter, NDArray[Any] | None]] = []
        if by_hand:  # they replace what pieces have, for whoever wrote them could have added; what nobody wrote stays
            before = [(piece, piece.grad) for unit in self._tree() for _, piece in unit.pairs()]
            for piece, _ in before:
                piece._hold(None)
        super()._reduce()
        for piece, gradient in before:
            if piece.grad is None:
                piece._hold(gradient)

    def _owes_gradients(self) -> bool:
        return self._owes

    def _shares(self) -> list[Share]:
        shares: dict[int, tuple[ShardRanks | None, list[Parameter]]] = {}
        for unit in self._tree():
            shares.setdefault(id(unit.shards), (unit.shards, []))[1].extend(piece for _, piece in unit.pairs())
        return list(shares.values())

    def _run_forward(self, x: Any) -> Any:
        with self._root._all_units().running_forward(self._unit):
            return self.module.forward(x)

    def _run_backward(self, dy: Any) -> Any:
        with self._root._all_units().running_backward(self._unit):
            return self.module.backward(dy)

    def _all_units(self) -> Units:
        if self._units is None:
            raise StepOrderError("this FSDP wraps a part of a model that is wrapped as a whole: call that one")
        return self._units

    def _parts(self) -> list[FSDP]:
        """This wrapper and all inside, as they run forward."""
        return [self, *self._inner]

    def _tree(self) -> list[Unit]:
        return [part._unit for part in self._parts()]

    def _paths(self) -> dict[int, str]:
        """The path of each piece, by identity; that of a tied one is its first."""
        paths: dict[int, str] = {}
        for path, piece in self.named_parameters():
            paths.setdefault(id(piece), path)
        return paths

    def _check_outermost(self) -> None:
        if self._root is not self:
            raise StepOrderError("this FSDP wraps a part of a model that is wrapped as a whole: call that one")

    def _check_changeable(self) -> None:
        self._check_outermost()
        if self._units is not None and self._units.are_summoned:
            raise StepOrderError("parameters cannot be loaded inside unshard(): what is whole would overwrite them")

    def _expire(self) -> None:
        if self._units is not None:
            self._units.expire()


def _owned(module: Module) -> tuple[dict[str, Parameter], list[FSDP]]:
    """The parameters that a wrapper of the module would hold itself, and the wrappers inside, in the order of paths."""
    own: dict[str, Parameter] = {}
    owners: dict[int, FSDP] = {}
    seen: set[int] = set()
    for path, parameter in module.named_parameters():
        owner = parameter._owner
        if isinstance(owner, FSDP):
            if parameter.has_piece:
                raise UnsupportedOp(
                    f"parameter {path!r} is in another FSDP unit already: what is tied must be wrapped together"
                )
            owners[id(owner)] = owner
        elif id(parameter) not in seen:
            seen.add(id(parameter))
            own[path] = parameter
    inner: dict[int, FSDP] = {}
    for owner in owners.values():
        for part in owner._root._parts():
            # One whose parameters are all in units inside of it owns none by which it could be found.
            if id(part) in owners or not part._pieces:
                inner.setdefault(id(part), part)
    return own, list(inner.values())
