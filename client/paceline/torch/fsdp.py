"""FullyShardedDataParallel for torch modules: ranks share the memory of one model, and train it as one.

`FSDP` is the front. Hooks of autograd drive the same core as that of `paceline.FSDP`; see `_sharded_autograd`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from paceline._parallel._optimizer_state import stands_in
from paceline._parallel._parameter import Parameter
from paceline._parallel._ranks import ShardRankGroup
from paceline._parallel.sharding._placement import ShardingStrategy
from paceline._parallel.sharding._sharded_model import ShardedModel
from paceline.errors import SizeMismatch, StepOrderError, UnsupportedOp
from paceline.torch._compiling import stay_out_of_graphs
from paceline.torch._sharded_autograd import ShardedDriver
from paceline.torch._sharded_optimizer import optimizer_of, watch_optimizers
from paceline.torch._sharded_tensors import Adapter, Mirror, ModuleCall, TorchPiece, Wrapped, replaced
from paceline.torch._tensors import Tensor, array_of, tensor_of

__all__ = ["FSDP"]


class FSDP(Wrapped):
    """Trains one model on the samples of all ranks; each rank keeps its shard of parameters, gradients and state.

        model = paceline.torch.FSDP(net, session.group, auto_wrap=Block)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)      # of the wrapper: it trains this rank's shard
        optimizer.zero_grad()
        loss_of(model(x), t).backward()                                 # of the mean loss over this rank's samples
        optimizer.step()

    It is `paceline.FSDP` for torch modules on the CPU; what its docstring says about units, parameters and a world that
    changes holds here. Construction communicates nothing; the first forward pass gives rank 0's parameters and
    buffers to all. `loss.backward()` returns when the gradients of all ranks are in the pieces.

    **Gradients** are the mean over the samples of all ranks, uneven shares or not: a rank's weight is the number of
    rows of the first tensor that it calls the model with; `backward(loss, weight)` gives another. Gradients of
    micro-batches under `no_sync` add up, as in torch.

    **Parameters.** `parameters()` has this rank's pieces, shape [elements here]; those of the wrapped module read as
    NaN while they are sharded, and have values while their unit runs and inside `unshard()`. Optimizers that work
    element by element (SGD, Adam, AdamW, RMSprop, ...) train pieces as they would the whole. Whatever needs a whole
    gradient does not work: clip with `clip_grad_norm_`; the norms of torch, those of `torch.nn.utils.clip_grad_norm_`
    too, are refused for sharded gradients.

    **A world that changes.** Give `TrainState` the wrapper and one torch optimizer of it: both move. The optimizer's
    state must begin with zeros, as that of SGD, Adam, AdamW, RMSprop, RAdam and Adadelta does; others are for NO_SHARD.

    **Limits.** Tied parameters must be in one unit, `unshard` takes no backward pass, and modules are called as
    wrapped: another method of theirs finds parameters without values. Activation checkpointing, inside a unit or around
    one, and double use of a unit work; the hooks of `torch.autograd.graph.saved_tensors_hooks` do inside the model, not
    around it. `torch.compile` works around the wrapper and around modules inside; what is wrapped is compiled unit by
    unit, with a break in the graph at each wrapper.

    Args:
        module: the model or a part of it, built alike on every rank; values may differ.
        group: the ranks; the same for all units.
        strategy: what is sharded.
        intra_node_size: of HYBRID_SHARD: ranks in a node; see `paceline.FSDP`.
        auto_wrap: class or classes of modules inside that are to be units of their own; they are replaced in place.
        mixed_precision: "bf16": units compute in bfloat16, and parameters and gradients travel so; floating inputs are
            converted, outputs are not converted back. Pieces, their gradients and the optimizer keep all bits, and so
            do buffers: a module that computes with buffers, such as BatchNorm, is to be a unit of its own without it.
        ahead: units to gather before they run; 0 for none. The outermost wrapper's counts.

    Attributes:
        module: as above.
        strategy: as above.

    Raises:
        UnsupportedOp: a parameter to train is neither float32 nor float64, not on the CPU, in another unit already, or
            there is no such precision.
        InvalidWorldSize: the ranks do not make up nodes of one size.
        ValueError: no such strategy, `intra_node_size` without HYBRID_SHARD, units of several groups, or `ahead` is
            negative.
    """

    def __init__(
        self,
        module: Any,
        group: ShardRankGroup,
        strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        intra_node_size: int | None = None,
        *,
        auto_wrap: type | tuple[type, ...] = (),
        mixed_precision: str | None = None,
        ahead: int = 1,
    ) -> None:
        if mixed_precision not in (None, "bf16"):
            raise UnsupportedOp(f'mixed_precision is "bf16" or None, not {mixed_precision!r}')
        super().__init__()
        watch_optimizers()
        stay_out_of_graphs()

        def unit(part: Any) -> FSDP:
            return FSDP(part, group, strategy, intra_node_size, mixed_precision=mixed_precision, ahead=ahead)

        replaced(module, auto_wrap if isinstance(auto_wrap, tuple) else (auto_wrap,), unit)
        self.module = module
        self._driver = ShardedDriver(
            Adapter(module), group, strategy, intra_node_size, narrow=mixed_precision is not None, ahead=ahead
        )
        self.sharded = self._driver.sharded
        self.strategy = self.sharded.strategy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output. A collective wherever parameters are sharded: all ranks call it.

        Raises:
            PacelineError: as `prepare`, or a collective failed.
            Exception: what the module raised. The wrapper stays usable, if the others have come as far.
        """
        return self._driver.forward(ModuleCall(args, kwargs))

    def backward(self, loss: Any, weight: float | None = None) -> None:
        """Runs `loss.backward()` with a weight for this rank.

        Args:
            loss: this rank's mean loss.
            weight: weight of its gradient, e.g. `step.weight`; the number of samples by default. With 0 autograd runs,
                but gradients are dropped, even NaN.

        Raises:
            ValueError: the weight is negative or not finite.
            StepOrderError: the weights of all ranks add up to 0.
            PacelineError: a collective failed.
        """
        with self._driver.weighing(weight):
            loss.backward()

    def prepare(self) -> None:
        """Agrees on the model and takes rank 0's values; see `paceline.FSDP.prepare`. A collective at first use."""
        self.sharded.prepare()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the block `backward` accumulates on this rank only; the next one outside reduces the sum."""
        return self.sharded.no_sync()

    def sync_gradients(self) -> None:
        """Reduces what `no_sync` has accumulated; does nothing if there is nothing. A collective."""
        self.sharded.sync_gradients()

    def drop_gradients(self) -> None:
        """Drops all gradients, including those that `no_sync` has accumulated."""
        self.sharded.drop_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `drop_gradients`. An optimizer's `zero_grad` clears pieces only, not what `no_sync` has accumulated."""
        del set_to_none
        self.drop_gradients()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scales all gradients so that their norm is at most `max_norm`; see `paceline.DDP.clip_grad_norm`."""
        return self.sharded.clip_grad_norm(max_norm, norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`clip_grad_norm`, named as in the FSDP of torch; the norm is a tensor of shape [], float64."""
        return torch.tensor(self.clip_grad_norm(max_norm, norm_type), dtype=torch.float64)

    @contextmanager
    def unshard(self) -> Iterator[dict[str, Any]]:
        """Inside the block the wrapped module's parameters have all their values; see `paceline.FSDP.unshard`.

        Returns:
            The module's own parameters by path. What is changed in them is kept, if all ranks change it alike.
        """
        with self.sharded.unshard() as whole:
            yield {path: _tensor(parameter) for path, parameter in whole.items()}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """This rank's pieces, `torch.nn.Parameter`s, under the paths that parameters have without wrappers."""
        seen: set[int] = set()
        for path, piece in self.sharded.named_parameters() if recurse else ():
            if not remove_duplicate or id(piece) not in seen:
                seen.add(id(piece))
                yield (f"{prefix}.{path}" if prefix else path), _tensor(piece)

    def state_dict(self, *, root: int | None = None) -> dict[str, Any]:
        """Copies of all parameters and persistent buffers, whole, by the paths that the bare module has. A collective.

        Args:
            root: the one rank that wants them; every rank if None.

        Returns:
            The copies; empty on other ranks than the root.
        """
        state = self.sharded.state_dict(root=root)
        first = self._first_paths()
        whole = {path: state[first.get(path, path)] for path in [*first, *state] if state}
        passing = self._driver.module.passing_buffers()
        return {path: tensor_of(array) for path, array in whole.items() if path not in passing}

    def load_state_dict(self, saved: Mapping[str, Any], strict: bool = True) -> None:
        """Loads what `state_dict` returned, of this or the bare module, in any world. Communicates nothing.

        Raises:
            SizeMismatch: paths or shapes do not fit; the text lists all, and nothing was changed.
            UnsupportedOp: not strict.
            StepOrderError: inside `unshard`.
        """
        if not strict:
            raise UnsupportedOp("a sharded model takes its whole state: load a part of it into the bare module")
        first = self._first_paths()
        if missing := sorted(first.keys() - saved.keys()):
            raise SizeMismatch(f"the state does not fit this model: {missing[0]!r} is missing")
        state = {path: array_of(value) for path, value in saved.items() if first.get(path, path) == path}
        passing = self._driver.module.passing_buffers()
        state |= {path: array for path, array in self.sharded.named_buffers() if path in passing}
        self.sharded.load_state_dict(state)

    def _first_paths(self) -> dict[str, str]:
        """For each path the first path of the same parameter."""
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
