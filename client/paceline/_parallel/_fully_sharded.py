"""FullyShardedDataParallel for NumPy modules: ranks share the memory of one model, and train it as one.

`FSDP` is the front; what it does is in the `ShardedModel` that it holds, as the front for torch modules does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from paceline._parallel._optimizer_state import stands_in
from paceline._parallel._parameter import Module, Parameter
from paceline._parallel._ranks import ShardRankGroup
from paceline._parallel._synchronizer import rows_of
from paceline._parallel.sharding._placement import ShardingStrategy
from paceline._parallel.sharding._sharded_model import ShardedModel
from paceline._parallel.sharding._unit import checked_wire

__all__ = ["FSDP"]


class FSDP:
    """Trains one model on the samples of all ranks; each rank keeps its shard of parameters, gradients and state.

        fsdp = paceline.FSDP(module, session.group)
        optimizer = paceline.optim.Adam(fsdp)           # of the wrapper: it trains this rank's shard
        optimizer.zero_grad()
        fsdp.backward(loss_gradient(fsdp(x), t))        # of the mean loss over this rank's samples
        optimizer.step()

    Construction communicates nothing; the first forward pass gives rank 0's values to all. Results are those of DDP,
    and of one process, to rounding; in a world of one, those of the unwrapped module, bit for bit.

    **Units.** A wrapped module may have wrapped parts. Each wrapper is a unit: its parameters lie side by side in one
    flat array, which is gathered before the unit runs forward and again before it runs backward, and freed after
    each; gradients leave as soon as the unit's backward is done. The next unit is gathered meanwhile.

        model = nn.Sequential(*(paceline.FSDP(block, group) for block in blocks))
        fsdp = paceline.FSDP(model, group)

    A model that fits on no single rank is built unit by unit: `unit = FSDP(block, group); unit.prepare()`, a
    collective, leaves this rank's shard of each block before the next is built. (A worker that waits to be admitted
    cannot do so.)

    **A world that changes.** In `session.steps` workers come and go, and shards move with them, live, if the
    `TrainState` has the model and its optimizer. A worker that waits to be admitted builds the whole model. If a worker
    crashes, its shard is lost; other ranks have it under NO_SHARD, and under HYBRID_SHARD the other nodes, for which
    `intra_node_size` must be given. Under the other strategies training goes on from the checkpoint.

    **Parameters.** `fsdp.named_parameters()` has this rank's pieces, shape [elements here], under the module's paths.
    The module's own have values only while their unit runs, and inside `unshard()`; under SHARD_GRAD_OP always, but
    what other ranks updated is old until the next forward pass or `broadcast_updated_params`. Where one rank has
    everything (NO_SHARD, a world of one), pieces keep the parameters' shapes.

    A parameter that no rank used gets no gradient, nor does a frozen one. Tied parameters (one object, several paths)
    must be in one unit. All ranks must run the same units in the same order.

    Args:
        module: the model or a part of it, built alike on every rank; values may differ.
        group: the ranks; the same for all units.
        strategy: what is sharded.
        intra_node_size: of HYBRID_SHARD: ranks in a node. With None ranks that can share memory are a node, or ranks of
            one host name where that is not known; a rank in a container of its own is one alone, and holds the model.
        communication_dtype: what wider parameters and gradients travel in, e.g. `ml_dtypes.bfloat16`; None for their
            own. The shards that are trained keep their dtype, and so does the computation; what does not travel is not
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

    def __init__(
        self,
        module: Module,
        group: ShardRankGroup,
        strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        intra_node_size: int | None = None,
        *,
        communication_dtype: DTypeLike | None = None,
        ahead: int = 1,
    ) -> None:
        self.module = module
        self.group = group
        wire = checked_wire(communication_dtype)
        self._sharded = ShardedModel(module, group, strategy, intra_node_size, wire=wire, ahead=ahead)
        self.strategy = self._sharded.strategy

    def __call__(self, x: Any) -> Any:
        """Calls `forward`."""
        return self.forward(x)

    def forward(self, x: Any) -> Any:
        """The module's output. A collective wherever parameters are sharded: all ranks call it.

        Raises:
            PacelineError: as `prepare`, or a collective failed.
            Exception: what the module raised. The wrapper stays usable, if the others have come as far.
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

        Weights, errors and accumulation are as in `paceline.DDP.backward`. On a unit inside a model, called by the
        model's backward, it returns the gradient of the unit's input.
        """
        sharded = self._sharded
        if sharded.is_empty:
            return self.module.backward(dy)
        if not sharded.is_outermost:
            with sharded.running_backward():
                return self.module.backward(dy)
        with sharded.backward_pass(rows_of(dy) if weight is None else weight) as factor, sharded.running_backward():
            # Backward is linear in dy: scaling dy, the smallest array, weights all gradients.
            self.module.backward(dy if factor in (0, 1) else dy * factor)
        return None

    def prepare(self) -> None:
        """Agrees on the model and takes rank 0's values; then each rank keeps its shard.

        A collective at first use, and again once a parameter was frozen or unfrozen; else it does nothing.

        Raises:
            SizeMismatch, SettingsMismatch, DivergenceError: the models differ; the text names ranks and parameter.
            UnsupportedOp: a parameter to train is neither float32 nor float64.
            StepOrderError: parameters were frozen or unfrozen in the middle of an accumulation.
        """
        self._sharded.prepare()

    def sync_gradients(self, weight: float | None = None) -> None:
        """Reduces pending gradients; does nothing if there are none, so it is harmless after `backward`.

        Pending gradients are those that `backward` accumulated under `no_sync`, or that lie in the module's own
        parameters, which have their full shape. Gradients that users have written there replace those of the pieces.

        Args:
            weight: weight of gradients of the module's own backward; as in `paceline.DDP.sync_gradients`.

        Raises:
            ValueError: the weight is negative or not finite.
            StepOrderError: nothing ran forward yet, and there is no gradient; both kinds are pending; or a weight was
                given for gradients that have one.
            PacelineError: a collective failed; gradients are dropped.
        """
        self._sharded.sync_gradients(weight)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the block `backward` accumulates on this rank only: gradients are kept whole until they are reduced.

        The next `backward` outside, or `sync_gradients`, reduces the sum of all micro-batches.
        """
        return self._sharded.no_sync()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scales all gradients so that their norm over the shards of all ranks is at most `max_norm`.

        A collective. Arguments, result and errors are those of `paceline.DDP.clip_grad_norm`.
        """
        return self._sharded.clip_grad_norm(max_norm, norm_type)

    def drop_gradients(self) -> None:
        """Drops all gradients, including those accumulated under `no_sync`, because their step is undone."""
        self._sharded.drop_gradients()

    def prefetch_forward_params(self) -> None:
        """Starts to gather in the background what the next forward pass begins with. All ranks call it.

        To be called after the update. What is changed afterwards is not lost: it is gathered anew.

        Raises:
            UnsupportedOp: the strategy keeps parameters whole.
            StepOrderError: called twice without a forward pass in between.
        """
        self._sharded.prefetch_forward_params()

    def has_pending_prefetch(self) -> bool:
        """True from `prefetch_forward_params` to the next pass, or change of the parameters."""
        return self._sharded.has_pending_prefetch()

    def broadcast_updated_params(self) -> None:
        """Under SHARD_GRAD_OP: gathers the updated shards on all ranks now; else does nothing. All ranks call it.

        Each forward pass does it anyway, unit by unit beside the computation; this is for reading the module's own
        parameters before.
        """
        self._sharded.broadcast_updated_params()

    def unshard(self) -> AbstractContextManager[dict[str, Parameter]]:
        """Inside the block the module's parameters have all their values, exactly. All ranks enter and leave it.

        What is changed there is kept, if all ranks change it alike. The whole model is in memory. Forward passes work
        inside, backward passes do not.

        Returns:
            A context manager of the module's own parameters by path, those of units inside included.

        Raises:
            PacelineError: a collective failed.
        """
        return self._sharded.unshard()

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """This rank's pieces, under the paths of the module's parameters."""
        yield from self._sharded.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """The module's; none if it has no such method."""
        yield from self._sharded.named_buffers()

    @property
    def is_sharded(self) -> bool:
        """True if ranks hold different shards under this strategy; in a world of one too."""
        return self._sharded.is_sharded

    def update_shards(self, flat: ArrayLike) -> None:
        """Replaces the values that this rank holds; drops its gradients. Each rank calls it for itself, all of them do.

        Args:
            flat: the elements of all pieces in the order of `named_parameters`.

        Raises:
            SizeMismatch: there are more or fewer elements; nothing was changed.
            StepOrderError: inside `unshard`.
        """
        self._sharded.update_shards(flat)

    def padded_gradients(self) -> dict[str, NDArray[Any] | None]:
        """This rank's shard of each gradient in an array of the full shape, zeros elsewhere, by path; None for none."""
        return self._sharded.padded_gradients()

    def state_dict(self, *, root: int | None = None) -> dict[str, NDArray[Any]]:
        """Copies of all parameters and buffers, whole, by path: what any world, or one process, can load. A collective.

        Args:
            root: the one rank that wants them; every rank if None.

        Returns:
            The copies; empty on other ranks than the root.
        """
        return self._sharded.state_dict(root=root)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, in any world. Each rank cuts out its shard; nothing is communicated.

        Raises:
            SizeMismatch: paths or shapes do not fit; the text lists all, and nothing was changed.
            StepOrderError: inside `unshard`.
        """
        self._sharded.load_state_dict(saved)

    def sharded_state_dict(self) -> dict[str, dict[str, Any]]:
        """Copies of what this rank holds. Communicates nothing.

        Returns:
            By path {"values": elements, shape [n]; "start": number of the first; "shape": of the whole parameter}.
        """
        return self._sharded.sharded_state_dict()

    def load_sharded_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `sharded_state_dict` gave to the same rank of a world of the same size; on all ranks.

        Raises:
            SizeMismatch: another model, world, rank or strategy made it; nothing was changed.
            StepOrderError: inside `unshard`.
        """
        self._sharded.load_sharded_state_dict(saved)


@stands_in
def _core_of(thing: Any) -> ShardedModel | None:
    return thing._sharded if isinstance(thing, FSDP) else None
