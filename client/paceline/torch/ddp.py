"""DistributedDataParallel for torch modules: every rank holds the whole model, and gradients are averaged.

`DDP` is the front. Hooks of autograd drive the same core as that of `paceline.DDP`; see `_autograd`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from paceline._parallel._agreement import give
from paceline._parallel._parameter import buffers_of, parameters_of
from paceline._parallel._ranks import RankGroup
from paceline.compression import Codec, PowerSGD
from paceline.torch._autograd import AutogradDriver
from paceline.torch._compiling import stay_out_of_graphs
from paceline.torch._tensors import Tensor

__all__ = ["DDP"]


class DDP(torch.nn.Module):  # type: ignore[misc]  # torch is not there where types are checked
    """Trains one model on the samples of all ranks, as if one process had seen them all.

        model = paceline.torch.DDP(net, session.group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        for step in session.steps(state, total=1000):
            with step:
                loss = cross_entropy(model(x[step.indices]), t[step.indices])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    Construction communicates nothing. The first forward pass that records gradients gives rank 0's parameters and
    buffers to all ranks. From then on each `loss.backward()` ends with the same gradients everywhere: the mean over all
    ranks, to which each counts its share of the step's samples, or 1 outside of `session.steps`. So losses are means
    over this rank's samples, and are not scaled. A failure comes out of `loss.backward()`, as a `PacelineError`, and
    leaves no gradients. Buffers are rank 0's after each reduction. In a world of one, results are those of the
    unwrapped module, bit for bit.

    Gradients lie in the buckets: `Tensor.grad` is a view of memory that the next backward pass writes again, so copy
    what you keep. They add up from pass to pass until they are cleared, as always in torch. Communication overlaps the
    rest of the backward pass from the second pass on. Every backward pass that reaches the parameters counts, through
    the bare module too; in `no_sync` on this rank only.

    Parameters are found by the paths of the bare module, without a prefix: optimizers and checkpoints fit the module
    wrapped or not. A parameter that is used late holds up the buckets behind it, and so does one that is never used,
    except with `static_graph`.

    What DDP does not do: gradients of gradients; sparse gradients are made dense; frozen and unfrozen parameters take
    effect with the next forward pass; `torch.utils.checkpoint` wants `use_reentrant=False`.

    `torch.compile` works around the wrapper and inside of it; it compiles the module, and leaves a break in the graph
    where the wrapper is, so `fullgraph=True` is for the module alone. Compile in place, by `model.compile()`: what
    `torch.compile(model)` returns has other paths of parameters.

    Args:
        module: the model, on the CPU, built alike on every rank; values may differ. float32 and float64; float16 and
            bfloat16 gradients are added up in float32.
        group: the ranks.
        bucket_mb: as for `paceline.DDP`.
        compression: "bf16", "int8", "powersgd", a `paceline.compression.Codec` or `PowerSGD`, as for `paceline.DDP`:
            the communication hooks of torch's own DDP.
        error_feedback: as for `paceline.DDP`.
        static_graph: every backward pass uses the same parameters as the first: then a parameter that is never used
            holds up nothing. One more than in the first pass is a `StepOrderError`.

    Raises:
        ValueError: `bucket_mb` is not above 0.
        UnsupportedOp: there is no such codec.
    """

    def __init__(
        self,
        module: Any,
        group: RankGroup,
        *,
        bucket_mb: float | None = None,
        compression: str | Codec | PowerSGD | None = None,
        error_feedback: bool | None = None,
        static_graph: bool = False,
    ) -> None:
        super().__init__()
        stay_out_of_graphs()
        self.module = module
        self.group = group
        self._driver = AutogradDriver(
            module,
            group,
            bucket_mb=bucket_mb,
            compression=compression,
            error_feedback=error_feedback,
            static_graph=static_graph,
        )
        self._synchronizer = self._driver.synchronizer

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's output. With gradients, the first call is a collective (see `prepare`).

        Raises:
            PacelineError: as `prepare`.
        """
        if torch.is_grad_enabled():
            self._driver.before_forward()
        return self.module(*inputs, **named)

    def prepare(self) -> None:
        """Agrees on the model and takes rank 0's values.

        A collective at first use, and again once a parameter was frozen or unfrozen; else it does nothing.

        Raises:
            SizeMismatch, SettingsMismatch, DivergenceError: the models differ; the text names ranks and parameter.
            UnsupportedOp: a parameter is of no dtype that can be trained, or not dense on the CPU.
            StepOrderError: parameters were frozen or unfrozen in the middle of an accumulation.
        """
        self._synchronizer.prepare()

    def backward(self, loss: Tensor, weight: float | None = None, *, retain_graph: bool = False) -> None:
        """Runs `loss.backward()` with a weight for this rank's gradient, beside the other ranks'.

        It also takes part in the reduction if the loss depends on no parameter, which `loss.backward()` cannot notice.

        Args:
            loss: the mean over this rank's samples, one element.
            weight: 0 or above; with 0 gradients are dropped, even NaN. By default what `loss.backward()` takes.
            retain_graph: keep the graph for another backward pass.

        Raises:
            ValueError: the weight is negative or not finite.
            PacelineError: a collective failed.
        """
        with self._driver.weighing(weight):
            if loss.requires_grad:
                loss.backward(retain_graph=retain_graph)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside the block accumulate on this rank only.

        The next one outside, or `sync_gradients`, reduces the sum of all.
        """
        return self._synchronizer.no_sync()

    def sync_gradients(self) -> None:
        """Reduces what passes in `no_sync` have left; does nothing if there is nothing.

        Raises:
            PacelineError: a collective failed; gradients are dropped.
        """
        self._synchronizer.sync_gradients()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Inside the block ranks may have different numbers of inputs; all ranks enter it.

        A rank that runs out of inputs takes part in the others' reductions with weight 0, until none has any. Then all
        take the parameters and buffers of a rank that ran out last. Each reduction costs one more small message.
        `session.steps` does not need this: its sampler gives every rank something in every step.

        Raises:
            PacelineError: a collective failed.
        """
        driver, uneven = self._driver, self._driver.uneven
        self._synchronizer.prepare()
        uneven.open()
        try:
            yield
            while uneven.others_go_on():
                driver.reduce_without_input()
            if uneven.reductions and self.group.size > 1:
                parameters = [p.data for p in parameters_of(driver.module).values()]
                give(self.group, [*parameters, *buffers_of(driver.module).values()], root=uneven.root)
        finally:
            uneven.close()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scales all gradients so that their norm, taken over all parameters as one vector, is at most `max_norm`.

        A collective; every rank scales by the same bits, which `torch.nn.utils.clip_grad_norm_` promises only on equal
        processors.

        Args:
            max_norm: the limit; `math.inf` only measures.
            norm_type: p of the p-norm, above 0; `math.inf` for the largest absolute value.

        Returns:
            The norm before. If it is not finite, the gradients are left as they are.

        Raises:
            ValueError: `max_norm` is negative, or `norm_type` not above 0.
            PacelineError: a collective failed.
        """
        return self._synchronizer.clip_grad_norm(max_norm, norm_type)

    def begin_step(self) -> None:
        """Begins a step that may be undone: see `paceline.DDP.begin_step`."""
        self._driver.model.begin_step()

    def drop_gradients(self) -> None:
        """Drops all gradients, because their step is undone."""
        self._driver.drop_gradients()

    # As in the bare module --------------------------------------------------------------------------------------------

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's, without a prefix."""
        yield from self.module.named_parameters(*args, **named)

    def named_buffers(self, *args: Any, **named: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's, without a prefix."""
        yield from self.module.named_buffers(*args, **named)

    def state_dict(self, *args: Any, **named: Any) -> dict[str, Any]:
        """The module's, without a prefix."""
        found: dict[str, Any] = self.module.state_dict(*args, **named)
        return found

    def load_state_dict(self, *args: Any, **named: Any) -> Any:
        """The module's."""
        return self.module.load_state_dict(*args, **named)
