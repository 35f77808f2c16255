"""FullyShardedDataParallel for NumPy modules: ranks share the memory of one model, and train it as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from paceline._group import Group
from paceline._parallel._optimizer_state import stands_in
from paceline._parallel._parameter import Module, Parameter
from paceline._parallel._synchronizer import rows_of
from paceline._parallel.sharding._placement import ShardingStrategy
from paceline._parallel.sharding._sharded_model import ShardedModel
from paceline._parallel.sharding._unit import checked_wire


class FSDP:
    """Trains one model on the samples of all ranks; each rank keeps its shard of parameters, gradients and state.

        fsdp = paceline.FSDP(module, session.group)
        optimizer = paceline.optim.Adam(fsdp)           # of the wrapper: it trains this rank's shard
        optimizer.zero_grad()
        fsdp.backward(loss_gradient(fsdp(x), t))        # of the mean loss over this rank's samples
        optimizer.step()

    Construction communicates nothing; the first forward pass gives rank 0's values to all ranks. Results equal those of
    DDP, and of one process, except for rounding; in a world of one, those of the unwrapped module, bit for bit.

    **Units.** A wrapped module may have wrapped parts. Each wrapper is a unit: its parameters lie side by side in one
    flat array, which is gathered before the unit runs forward and again before it runs backward, and freed after
    each; gradients leave as soon as the unit's backward is done. The next unit is gathered meanwhile.

        model = nn.Sequential(*(paceline.FSDP(block, group) for block in blocks))
        fsdp = paceline.FSDP(model, group)

    A model that fits on no single rank is built unit by unit: `unit = FSDP(block, group); unit.prepare()`, a
    collective, keeps only this rank's shard of each block before the next is built. (A candidate cannot do so.)

    **A world that changes.** In `session.steps` workers come and go, and shards move between them without stopping
    training, if the `TrainState` has the model and its optimizer. A candidate builds the whole model. If a worker
    crashes, others hold its shard too: `redundancy` - 1 of them, all under NO_SHARD, and one in each other node under
    HYBRID_SHARD, which then needs `intra_node_size`. If all ranks that hold a shard are lost at once,
    training continues from the checkpoint.

    **Parameters.** `fsdp.named_parameters()` has this rank's pieces, shape [elements here], under the module's paths.
    The module's own parameters have values only while their unit runs, and inside `unshard()`. Under SHARD_GRAD_OP they
    always have values, but those that other ranks update are old until the next forward pass or
    `broadcast_updated_params`. Where one rank has everything (NO_SHARD, a world of one), pieces keep the parameters'
    shapes.

    A parameter that no rank used gets no gradient, nor does a frozen one. Tied parameters (one object, several paths)
    must be in one unit. All ranks must run the same units in the same order.

    Args:
        module: the model or a part of it, built alike on every rank; values may differ.
        group: the ranks; the same for all units.
        strategy: what is sharded.
        intra_node_size: for HYBRID_SHARD, the number of ranks in a node. With None, ranks that can share memory are a
            node, or ranks of one host name if that is not known; a rank in a container of its own is a node alone, and
            holds the whole model.
        communication_dtype: the dtype in which wider parameters and gradients travel, e.g. `ml_dtypes.bfloat16`; None
            for their own. Trained shards and the computation keep their dtype; only values that travel are rounded.
            Gradients travel multiplied by their weights (B samples), so float16 may overflow.
        ahead: number of units to gather before they run; 0 for none. Only the outermost wrapper's counts.
        redundancy: for FULL_SHARD and SHARD_GRAD_OP, the number of ranks that hold each shard in `session.steps`, 1 to
            8: one less may be lost at once. None for 2 in an elastic job of 3 and more workers, and 1 in others. Only
            the outermost wrapper's counts.

    Attributes:
        module: as above.
        group: as above.
        strategy: as above.

    Raises:
        UnsupportedOp: a parameter to train is neither float32 nor float64, or is in another unit already; or the
            communication dtype cannot travel or is not a float.
        InvalidWorldSize: the ranks do not make up nodes of one size; raised at first use if workers may come and go.
        ValueError: there is no such strategy, `intra_node_size` was given without HYBRID_SHARD, units have different
            groups, `ahead` is negative, or `redundancy` is not 1 to 8, or above 1 for another strategy.
    """

    def __init__(
        self,
        module: Module,
        group: Group,
        strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        intra_node_size: int | None = None,
        *,
        communication_dtype: DTypeLike | None = None,
        ahead: int = 1,
        redundancy: int | None = None,
    ) -> None:
        self.module = module
        self.group = group
        wire = checked_wire(communication_dtype)
        self._sharded = ShardedModel(
            module, group, strategy, intra_node_size, wire=wire, ahead=ahead, redundancy=redundancy
        )
        self.strategy = self._sharded.strategy

    def __repr__(self) -> str:
        place = f"rank {self.group.rank} of {self.group.size}"
        return f"<paceline.FSDP of {type(self.module).__name__}, {self.strategy.name}, {place}>"

    def __call__(self, x: Any) -> Any:
        """Calls `forward`."""
        return self.forward(x)

    def forward(self, x: Any) -> Any:
        """Returns the module's output. All ranks call this: it is a collective wherever parameters are sharded.

        Raises:
            PacelineError: see `prepare`; or a collective failed.
            Exception: the module raised it. The wrapper stays usable if the other ranks have come as far.
        """
        sharded = self._sharded
        if sharded.is_empty:
            return self.module.forward(x)
        if not sharded.is_outermost:
            with sharded.running_forward():
                return self.module.forward(x)
        shape = x.shape if isinstance(x, np.ndarray) else ()
        with sharded.forward_pass(shape[0] if shape else None), sharded.running_forward():
            return self.module.forward(x)

    def backward(self, dy: NDArray[Any], weight: float | None = None) -> Any:
        """Runs the module's backward and, outside of `no_sync`, leaves the mean over all ranks in the pieces.

        Weights, errors and accumulation are as in `paceline.DDP.backward`. On a unit inside a model, where the model's
        backward calls it, it returns the gradient of the unit's input.
        """
        sharded = self._sharded
        if sharded.is_empty:
            return self.module.backward(dy)
        if not sharded.is_outermost:
            with sharded.running_backward():
                return self.module.backward(dy)
        if weight is None:
            weight = self.group._core.gradient_weight if self.group._core.order.is_leaf else rows_of(dy)
        with sharded.backward_pass(weight) as factor, sharded.running_backward():
            # Backward is linear in dy: scaling dy, the smallest array, weights all gradients.
            self.module.backward(dy if factor in (0, 1) else dy * factor)
        return None

    def prepare(self) -> None:
        """Agrees on the model and takes rank 0's values; then each rank keeps its shard.

        This is a collective at first use, and again after a parameter was frozen or unfrozen; else it does nothing.

        Raises:
            SizeMismatch, SettingsMismatch, DivergenceError: the models differ; the error names ranks and parameter.
            UnsupportedOp: a parameter to train is neither float32 nor float64.
            StepOrderError: parameters were frozen or unfrozen in the middle of an accumulation.
        """
        self._sharded.prepare()

    def sync_gradients(self, weight: float | None = None) -> None:
        """Reduces pending gradients; does nothing if there are none, so it is harmless after `backward`.

        Pending gradients are those that `backward` accumulated under `no_sync`, or that lie in the module's own
        parameters, which have their full shape. Gradients that users have written there replace those of the pieces.

        Args:
            weight: weight of the gradients of the module's own backward; as in `paceline.DDP.sync_gradients`.

        Raises:
            ValueError: the weight is negative or not finite.
            StepOrderError: nothing ran forward yet, and there is no gradient; both sorts are pending; or a weight was
                given for gradients that have one.
            PacelineError: a collective failed; gradients are dropped.
        """
        self._sharded.sync_gradients(weight)

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context manager, inside of which `backward` accumulates whole gradients on this rank only.

        The next `backward` outside, or `sync_gradients`, reduces the sum of all micro-batches.
        """
        return self._sharded.no_sync()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scales all gradients so that their norm over the shards of all ranks is at most `max_norm`.

        This is a collective. Arguments, result and errors: see `paceline.DDP.clip_grad_norm`.
        """
        return self._sharded.clip_grad_norm(max_norm, norm_type)

    def drop_gradients(self) -> None:
        """Drops all gradients, including those accumulated under `no_sync`, because their step is undone."""
        self._sharded.drop_gradients()

    def prefetch_forward_params(self) -> None:
        """Starts to gather in the background the units that the next forward pass begins with. All ranks call it.

        Call it after the update. Later changes are not lost: the units are gathered again.

        Raises:
            UnsupportedOp: the strategy keeps parameters whole.
            StepOrderError: there was no forward pass since the last call.
        """
        self._sharded.prefetch_forward_params()

    def has_pending_prefetch(self) -> bool:
        """Returns True from `prefetch_forward_params` until the next pass or change of the parameters."""
        return self._sharded.has_pending_prefetch()

    def broadcast_updated_params(self) -> None:
        """Gathers the updated shards on all ranks under SHARD_GRAD_OP; else does nothing. All ranks call it.

        Each forward pass does so anyway, unit by unit beside the computation; call this to read the module's own
        parameters before.
        """
        self._sharded.broadcast_updated_params()

    def unshard(self) -> AbstractContextManager[dict[str, Parameter]]:
        """Returns a block in which the module's parameters have all their exact values. All ranks enter and leave it.

        Changes of the values are kept if all ranks make the same ones. The whole model is in memory. Forward passes
        work inside, backward passes do not.

        Returns:
            A context manager that yields the module's own parameters by path, including those of units inside.

        Raises:
            PacelineError: a collective failed.
        """
        return self._sharded.unshard()

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yields this rank's pieces, under the paths of the module's parameters."""
        yield from self._sharded.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yields the module's buffers; none if the module has no such method."""
        yield from self._sharded.named_buffers()

    @property
    def is_sharded(self) -> bool:
        """True if ranks hold different shards under this strategy, even if the world has one rank."""
        return self._sharded.is_sharded

    def update_shards(self, flat: ArrayLike) -> None:
        """Replaces the values that this rank holds, and drops its gradients. All ranks call it, each with its values.

        Args:
            flat: the elements of all pieces in the order of `named_parameters`.

        Raises:
            SizeMismatch: there are more or fewer elements; nothing was changed.
            StepOrderError: called inside `unshard`.
        """
        self._sharded.update_shards(flat)

    def padded_gradients(self) -> dict[str, NDArray[Any] | None]:
        """Returns gradients by path, in full shape: this rank's shard, zeros elsewhere; None if there is none."""
        return self._sharded.padded_gradients()

    def state_dict(self, *, root: int | None = None) -> dict[str, NDArray[Any]]:
        """Copies all whole parameters and buffers by path; any world, or one process, can load them. A collective.

        Args:
            root: the only rank that gets the copies; every rank if None.

        Returns:
            The copies; empty on other ranks than the root.
        """
        return self._sharded.state_dict(root=root)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned, in any world. Each rank cuts out its shard; nothing is communicated.

        Raises:
            SizeMismatch: paths or shapes do not fit; the error lists all, and nothing was changed.
            StepOrderError: called inside `unshard`.
        """
        self._sharded.load_state_dict(saved)

    def sharded_state_dict(self) -> dict[str, dict[str, Any]]:
        """Copies the shards that this rank holds. Communicates nothing.

        Returns:
            By path {"values": elements, shape [n]; "start": index of the first; "shape": of the whole parameter}.
        """
        return self._sharded.sharded_state_dict()

    def load_sharded_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Loads what `sharded_state_dict` returned on the same rank of a world of the same size; all ranks call it.

        Raises:
            SizeMismatch: another model, world, rank or strategy made it; nothing was changed.
            StepOrderError: called inside `unshard`.
        """
        self._sharded.load_sharded_state_dict(saved)


@stands_in
def _core_of(thing: Any) -> ShardedModel | None:
    return thing._sharded if isinstance(thing, FSDP) else None
