"""DistributedDataParallel for torch modules; hooks drive the same core as in `paceline.DDP` (`_autograd`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from paceline._group import Group
from paceline._parallel._agreement import give
from paceline._parallel._parameter import buffers_of, parameters_of, write_back
from paceline.compression import Codec, PowerSGD
from paceline.errors import StepOrderError
from paceline.torch._autograd import AutogradDriver, TorchParameter, refuse_sync_batch_norm
from paceline.torch._compiling import stay_out_of_graphs
from paceline.torch._device_parameter import DeviceParameter
from paceline.torch._tensor_transports import DeviceTransport, TensorTransport
from paceline.torch._tensors import Tensor, on_host


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
    buffers to all ranks. From then on each `loss.backward()` ends with the same gradients on every rank: the mean over
    all ranks, weighted by each rank's share of the step's samples, or equally outside of `session.steps`. So compute
    the loss as the mean over this rank's samples, and do not scale it. If a collective fails, `loss.backward()` raises
    a `PacelineError`, and leaves no gradients. Buffers are rank 0's after each reduction. A world of one gives the
    results of the unwrapped module, bit for bit.

    Gradients lie in the buckets: `Tensor.grad` is a view of memory that the next backward pass overwrites, so copy
    what you keep. Gradients add up from pass to pass until they are cleared, as always in torch. From the second pass
    on, communication overlaps the rest of the backward pass. Every backward pass that reaches the parameters is
    reduced, even through the bare module; inside `no_sync` it accumulates on this rank only.

    Parameters have the paths of the bare module, without a prefix: optimizers and checkpoints fit the wrapped and the
    bare module. A parameter that is used late delays the buckets behind it, and so does one that is never used, except
    with `static_graph`.

    Limits: there are no gradients of gradients; sparse gradients are made dense; freezing and unfreezing parameters
    takes effect at the next forward pass; `torch.utils.checkpoint` needs `use_reentrant=False`.

    `torch.compile` works around the wrapper and inside of it. It compiles the module, and breaks the graph at the
    wrapper, so `fullgraph=True` works only for the bare module. Compile in place, with `model.compile()`: the model
    that `torch.compile(model)` returns has other paths of parameters.

    Args:
        module: the model, built alike on every rank; values may differ. It is on the CPU or on a device
            (docs/how-to/devices.md). float32 and float64; float16 and bfloat16 gradients are added up in float32.
        group: the ranks.
        bucket_mb: as for `paceline.DDP`.
        compression: "bf16", "int8", "powersgd", a `paceline.compression.Codec` or `PowerSGD`, as for `paceline.DDP`:
            in place of the communication hooks of torch's own DDP.
        error_feedback: as for `paceline.DDP`.
        static_graph: declares that every backward pass uses the same parameters as the first, so that an unused
            parameter delays nothing. A pass that uses another parameter raises `StepOrderError`.

    Raises:
        ValueError: `bucket_mb` is not above 0.
        UnsupportedOp: there is no such codec, or the module has a `SyncBatchNorm`.
    """

    def __init__(
        self,
        module: Any,
        group: Group,
        *,
        bucket_mb: float | None = None,
        compression: str | Codec | PowerSGD | None = None,
        error_feedback: bool | None = None,
        static_graph: bool = False,
    ) -> None:
        super().__init__()
        stay_out_of_graphs()
        refuse_sync_batch_norm(module)
        self.module = module
        self.group = group
        carries = group._core.engine_name != "links"
        self._driver = AutogradDriver(
            module,
            group,
            make=DeviceParameter if carries else _parameter,
            carried=TensorTransport,
            over_links=DeviceTransport,
            bucket_mb=bucket_mb,
            compression=compression,
            error_feedback=error_feedback,
            static_graph=static_graph,
        )
        self._synchronizer = self._driver.synchronizer

    def extra_repr(self) -> str:
        """Returns the line that torch prints above the module's tree."""
        return f"rank {self.group.rank} of {self.group.size}"

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Returns the module's output. With gradients, the first call is a collective (see `prepare`).

        Raises:
            PacelineError: see `prepare`.
        """
        if torch.is_grad_enabled():
            self._driver.before_forward()
        self._synchronizer.begin_forward()
        return self.module(*inputs, **named)

    def prepare(self) -> None:
        """Agrees on the model and takes rank 0's values.

        This is a collective at first use, and again after a parameter was frozen or unfrozen; else it does nothing.

        Raises:
            SizeMismatch, SettingsMismatch, DivergenceError: the models differ; the error names ranks and parameter.
            UnsupportedOp: a parameter's dtype cannot be trained, or it is not dense.
            StepOrderError: parameters were frozen or unfrozen in the middle of an accumulation.
        """
        self._synchronizer.prepare()

    def backward(self, loss: Tensor, weight: float | None = None, *, retain_graph: bool = False) -> None:
        """Runs `loss.backward()` with a weight for this rank's gradient, relative to the other ranks'.

        Unlike `loss.backward()`, it takes part in the reduction even if the loss depends on no parameter.

        Args:
            loss: the mean over this rank's samples, one element.
            weight: 0 or above; with 0 gradients, even NaN, are dropped. By default the weight of `loss.backward()`.
            retain_graph: whether to keep the graph for another backward pass.

        Raises:
            ValueError: the weight is negative or not finite.
            PacelineError: a collective failed.
        """
        with self._driver.weighing(weight):
            if loss.requires_grad:
                loss.backward(retain_graph=retain_graph)

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context manager, inside of which backward passes accumulate on this rank only.

        The next one outside, or `sync_gradients`, reduces the sum of all.
        """
        return self._synchronizer.no_sync()

    def sync_gradients(self) -> None:
        """Reduces the gradients that passes in `no_sync` have left; does nothing if there are none.

        Raises:
            PacelineError: a collective failed; gradients are dropped.
        """
        self._synchronizer.sync_gradients()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Allows ranks different numbers of inputs inside the block; all ranks enter it.

        A rank that runs out of inputs takes part in the others' reductions with weight 0, until no rank has any. Then
        all take the parameters and buffers of a rank that ran out last. Each reduction costs one more small message.
        `session.steps` does not need this: its sampler gives every rank a sample in every step.

        Raises:
            StepOrderError: the step has microbatches, which the sampler divides among the ranks.
            PacelineError: a collective failed.
        """
        driver, uneven = self._driver, self._driver.uneven
        if self.group._core.order.leaves:
            raise StepOrderError("join() in a step with microbatches: the sampler gives every rank its own")
        self._synchronizer.prepare()
        uneven.open()
        try:
            yield
            while uneven.others_go_on():
                driver.reduce_without_input()
            if uneven.reductions and self.group.size > 1:
                parameters = {path: p.data for path, p in parameters_of(driver.module).items()}
                buffers = buffers_of(driver.module)
                give(self.group, [*parameters.values(), *buffers.values()], root=uneven.root)
                write_back(driver.module, parameters, buffers)
        finally:
            uneven.close()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scales all gradients so that their norm, taken over all parameters as one vector, is at most `max_norm`.

        This is a collective; every rank scales by the same bits. `torch.nn.utils.clip_grad_norm_` guarantees that only
        on equal processors.

        Args:
            max_norm: the limit; `math.inf` only measures.
            norm_type: p of the p-norm, above 0; `math.inf` for the largest absolute value.

        Returns:
            The norm before scaling. If it is not finite, the gradients are left as they are.

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
        """Yields the module's parameters, without a prefix."""
        yield from self.module.named_parameters(*args, **named)

    def named_buffers(self, *args: Any, **named: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields the module's buffers, without a prefix."""
        yield from self.module.named_buffers(*args, **named)

    def state_dict(self, *args: Any, **named: Any) -> dict[str, Any]:
        """Returns the module's state dict, without a prefix."""
        found: dict[str, Any] = self.module.state_dict(*args, **named)
        return found

    def load_state_dict(self, *args: Any, **named: Any) -> Any:
        """Loads a state dict into the module."""
        return self.module.load_state_dict(*args, **named)


def _parameter(tensor: Tensor) -> TorchParameter:
    """Makes the core's object for a parameter whose gradient travels over links."""
    return TorchParameter(tensor) if on_host(tensor) else DeviceParameter(tensor)
