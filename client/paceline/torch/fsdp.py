"""FullyShardedDataParallel for torch modules; hooks drive the same core as in `paceline.FSDP` (`_sharded_autograd`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from paceline._group import Group
from paceline._parallel._optimizer_state import stands_in
from paceline._parallel._parameter import Parameter
from paceline._parallel.sharding._placement import ShardingStrategy
from paceline._parallel.sharding._sharded_model import ShardedModel
from paceline.errors import SizeMismatch, StepOrderError, UnsupportedOp
from paceline.torch._autograd import refuse_sync_batch_norm
from paceline.torch._compiling import stay_out_of_graphs
from paceline.torch._sharded_autograd import ShardedDriver
from paceline.torch._sharded_optimizer import optimizer_of, watch_optimizers
from paceline.torch._sharded_tensors import Adapter, Mirror, ModuleCall, TorchPiece, Wrapped, replaced
from paceline.torch._tensors import Tensor, array_of, tensor_of


class FSDP(Wrapped):
    """Trains one model on the samples of all ranks; each rank keeps its shard of parameters, gradients and state.

        model = paceline.torch.FSDP(net, session.group, auto_wrap=Block)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)      # of the wrapper: it trains this rank's shard
        optimizer.zero_grad()
        loss_of(model(x), t).backward()                                 # of the mean loss over this rank's samples
        optimizer.step()

    The class is `paceline.FSDP` for torch modules; that docstring's paragraphs on units, parameters and a world that
    changes hold here too. Construction communicates nothing; the first forward pass gives rank 0's
    parameters and buffers to all ranks. `loss.backward()` returns when the pieces have the gradients of all ranks.

    **Gradients** are the mean over the samples of all ranks, even if ranks have different numbers of samples: a rank's
    weight is the number of rows of the first tensor in its call of the model; `backward(loss, weight)` sets another.
    Gradients of micro-batches under `no_sync` add up, as in torch.

    **Parameters.** `parameters()` has this rank's pieces, shape [elements here]. Parameters of the wrapped module read
    as NaN while they are sharded, and have values while their unit runs and inside `unshard()`. Optimizers that work
    element by element (SGD, Adam, AdamW, RMSprop, ...) train pieces as they would the whole. Code that needs a whole
    gradient does not work: clip with `clip_grad_norm_`. torch's norms, including those in
    `torch.nn.utils.clip_grad_norm_`, are refused for sharded gradients.

    **On a device** the module runs there. Pieces, their gradients and the optimizer's state stay in host memory, as
    with torch's `CPUOffloadPolicy`, and the CPU computes the update. Over links a unit's whole parameters are copied to
    the device before it runs, and its gradients back. An engine for the device, such as NCCL, gathers and scatters
    there: each rank copies only its shard. It sums in an order of its own, so microbatches need links.

    **A world that changes.** Give `TrainState` the wrapper and one torch optimizer of it: both move. The optimizer's
    state must begin with zeros, as in SGD, Adam, AdamW, RMSprop, RAdam and Adadelta; others work only with NO_SHARD.

    **Limits.** Tied parameters must be in one unit, backward passes do not work inside `unshard`, and only calls of the
    wrapped modules work: other methods find parameters without values. Activation checkpointing, inside a unit or
    around one, and double use of a unit work. `torch.autograd.graph.saved_tensors_hooks` works inside the model, not
    around it. `torch.compile` works around the wrapper and around modules inside; it compiles wrapped modules unit by
    unit, with a break in the graph at each wrapper.

    Args:
        module: the model or a part of it, built alike on every rank; values may differ.
        group: the ranks; the same for all units.
        strategy: what is sharded.
        intra_node_size: for HYBRID_SHARD, the number of ranks in a node; see `paceline.FSDP`.
        auto_wrap: class or classes of modules inside that become units of their own; they are replaced in place.
        mixed_precision: with "bf16", units compute in bfloat16, and parameters and gradients travel in it; floating
            inputs are converted, outputs are not converted back. Pieces, their gradients and the optimizer keep all
            bits, and so do buffers: make a module that computes with buffers, such as BatchNorm, a unit of its own
            without mixed precision.
        ahead: number of units to gather before they run; 0 for none. Only the outermost wrapper's counts.
        redundancy: the number of ranks that hold each shard in `session.steps`; see `paceline.FSDP`.

    Attributes:
        module: as above.
        strategy: as above.

    Raises:
        UnsupportedOp: a parameter to train is neither float32 nor float64, has no values, or is in another unit
            already; there is no such precision; or the module has a `SyncBatchNorm`. The first forward pass raises it
            if parameters are on a device, and the group's engine cannot gather and scatter there.
        InvalidWorldSize: the ranks do not make up nodes of one size.
        ValueError: there is no such strategy, `intra_node_size` was given without HYBRID_SHARD, units have different
            groups, `ahead` is negative, or `redundancy` is not 1 to 8, or above 1 for another strategy.
    """

    def __init__(
        self,
        module: Any,
        group: Group,
        strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        intra_node_size: int | None = None,
        *,
        auto_wrap: type | tuple[type, ...] = (),
        mixed_precision: str | None = None,
        ahead: int = 1,
        redundancy: int | None = None,
    ) -> None:
        if mixed_precision not in (None, "bf16"):
            raise UnsupportedOp(f'mixed_precision must be "bf16" or None, not {mixed_precision!r}')
        super().__init__()
        watch_optimizers()
        stay_out_of_graphs()
        refuse_sync_batch_norm(module)

        def unit(part: Any) -> FSDP:
            return FSDP(
                part,
                group,
                strategy,
                intra_node_size,
                mixed_precision=mixed_precision,
                ahead=ahead,
                redundancy=redundancy,
            )

        replaced(module, auto_wrap if isinstance(auto_wrap, tuple) else (auto_wrap,), unit)
        self.module = module
        self._driver = ShardedDriver(
            Adapter(module),
            group,
            strategy,
            intra_node_size,
            narrow=mixed_precision is not None,
            ahead=ahead,
            redundancy=redundancy,
        )
        self.sharded = self._driver.sharded
        self.strategy = self.sharded.strategy

    def extra_repr(self) -> str:
        """Returns the line that torch prints above the module's tree."""
        return f"{self.strategy.name}, rank {self.sharded.group.rank} of {self.sharded.group.size}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's output. All ranks call this: it is a collective wherever parameters are sharded.

        Raises:
            PacelineError: see `prepare`; or a collective failed.
            Exception: the module raised it. The wrapper stays usable if the other ranks have come as far.
        """
        return self._driver.forward(ModuleCall(args, kwargs))

    def backward(self, loss: Any, weight: float | None = None) -> None:
        """Runs `loss.backward()` with a weight for this rank.

        Args:
            loss: this rank's mean loss.
            weight: weight of its gradient, e.g. `step.weight`; the number of samples by default. With 0 autograd runs,
                but gradients, even NaN, are dropped.

        Raises:
            ValueError: the weight is negative or not finite.
            StepOrderError: the weights of all ranks add up to 0.
            PacelineError: a collective failed.
        """
        with self._driver.weighing(weight):
            loss.backward()

    def prepare(self) -> None:
        """Agrees on the model and takes rank 0's values, a collective at first use; see `paceline.FSDP.prepare`."""
        self.sharded.prepare()

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a block in which `backward` accumulates on this rank only; the next one outside reduces the sum."""
        return self.sharded.no_sync()

    def sync_gradients(self) -> None:
        """Reduces gradients accumulated in `no_sync`, a collective; does nothing if there are none."""
        self.sharded.sync_gradients()

    def drop_gradients(self) -> None:
        """Drops all gradients, including those accumulated in `no_sync`."""
        self.sharded.drop_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does `drop_gradients`. An optimizer's `zero_grad` clears only pieces, not what `no_sync` accumulated."""
        del set_to_none
        self.drop_gradients()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scales all gradients so that their norm is at most `max_norm`; see `paceline.DDP.clip_grad_norm`."""
        return self.sharded.clip_grad_norm(max_norm, norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Does `clip_grad_norm`, under the name in torch's FSDP; returns the norm as a tensor of shape [], float64."""
        return torch.tensor(self.clip_grad_norm(max_norm, norm_type), dtype=torch.float64)

    @contextmanager
    def unshard(self) -> Iterator[dict[str, Any]]:
        """Gives the wrapped module's parameters all their values inside the block; see `paceline.FSDP.unshard`.

        Returns:
            The module's own parameters by path. Changes of them are kept if all ranks make the same ones.
        """
        with self.sharded.unshard() as whole:
            yield {path: _tensor(parameter) for path, parameter in whole.items()}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Yields this rank's pieces, `torch.nn.Parameter`s, under the paths that parameters have without wrappers."""
        seen: set[int] = set()
        for path, piece in self.sharded.named_parameters() if recurse else ():
            if not remove_duplicate or id(piece) not in seen:
                seen.add(id(piece))
                yield (f"{prefix}.{path}" if prefix else path), _tensor(piece)

    def state_dict(self, *, root: int | None = None) -> dict[str, Any]:
        """Copies all whole parameters and persistent buffers, by the paths of the bare module; a collective.

        Args:
            root: the only rank that gets the copies; every rank if None.

        Returns:
            The copies; empty on other ranks than the root.
        """
        state = self.sharded.state_dict(root=root)
        first = self._first_paths()
        whole = {path: state[first.get(path, path)] for path in [*first, *state] if state}
        passing = self._driver.module.passing_buffers()
        return {path: tensor_of(array) for path, array in whole.items() if path not in passing}

    def load_state_dict(self, saved: Mapping[str, Any], strict: bool = True) -> None:
        """Loads what `state_dict` of this or the bare module returned, in any world. Communicates nothing.

        Raises:
            SizeMismatch: paths or shapes do not fit; the error lists all, and nothing was changed.
            UnsupportedOp: `strict` is False.
            StepOrderError: called inside `unshard`.
        """
        if not strict:
            raise UnsupportedOp("a sharded model can load only a whole state: load a part into the bare module")
        first = self._first_paths()
        if missing := sorted(first.keys() - saved.keys()):
            raise SizeMismatch(f"the state does not fit this model: {missing[0]!r} is missing")
        state = {path: array_of(value) for path, value in saved.items() if first.get(path, path) == path}
        passing = self._driver.module.passing_buffers()
        state |= {path: array for path, array in self.sharded.named_buffers() if path in passing}
        self.sharded.load_state_dict(state)

    def _first_paths(self) -> dict[str, str]:
        """Returns for each path the first path of the same parameter."""
        first: dict[int, str] = {}
        return {path: first.setdefault(id(piece), path) for path, piece in self.sharded.named_parameters()}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise UnsupportedOp("FSDP has sharded this module: convert or move it (.to, .double, ...) before it is wrapped")

    def __deepcopy__(self, memo: Any) -> Any:
        raise StepOrderError("FSDP has sharded this module: copy it before it is wrapped, or its state_dict()")


def _tensor(parameter: Parameter) -> Any:
    assert isinstance(parameter, (TorchPiece, Mirror))
    return parameter.tensor


@stands_in
def _core_of(thing: Any) -> ShardedModel | None:
    return thing.sharded if isinstance(thing, FSDP) else None


stands_in(optimizer_of)
