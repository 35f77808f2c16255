"""DistributedDataParallel for NumPy modules: every rank holds the whole model, and gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._collectives.choose import nodes_of, where_of
from paceline._group import Group
from paceline._parallel._agreement import ModelManifest, agree
from paceline._parallel._bucket_reducer import BucketReducer
from paceline._parallel._parameter import HasParameters, Module, Parameter, buffers_of, parameters_of, write_back
from paceline._parallel._synchronizer import GradientSynchronizer, SpreadParameters, rows_of
from paceline._parallel._transport import EngineTransport, GradientTransport, HostTransport
from paceline.compression import Codec, PowerSGD, codec_of
from paceline.errors import UnsupportedOp

_USUAL_MB = 25.0
"""Default of `bucket_mb`. Source: torch's DDP (`bucket_cap_mb`)."""

_ON_ONE_HOST_MB = 50.0
"""Default of `bucket_mb` if all ranks are on one host. There, sums take the cores that backward needs, so fewer
hand-overs to the group's thread are better.

Source: W=2 and 4 on 2 cores, torch, 12.6 and 42 M parameters: a step takes 1 to 2 % less than with 25, and up to 1 %
more than with 100; where backward leaves the cores idle, all three take the same time."""


class DDP:
    """Trains one model on the samples of all ranks, as if one process had seen them all.

    Construction communicates nothing. The first forward pass gives rank 0's parameters and buffers to all ranks. From
    then on each `backward` ends with the same gradients on every rank: the mean over all samples of all ranks, even if
    ranks have different numbers of samples. A world of one gives the results of the unwrapped module, bit for bit.

        ddp = paceline.DDP(module, session.group)
        optimizer.zero_grad()
        ddp.backward(loss_gradient(ddp(x), t))      # of the mean loss over this rank's samples
        optimizer.step()

    Gradients lie in the buckets: `Parameter.grad` is a view of memory that the next backward pass overwrites, so
    copy what you keep. From the second pass on, communication overlaps the rest of the backward pass. Buckets are sent
    in a fixed order, so a parameter that is never used (freeze it) or used late delays the buckets behind it.

    Limits: modules whose own backward calls collectives must use another group for them; frozen parameters must not be
    changed.

    Args:
        module: the model, built alike on every rank; values may differ.
        group: the ranks.
        bucket_mb: most MiB (2**20 bytes) of gradients in one message; alike on every rank. The first message is
            smaller, so that it leaves early. Default: 50 if all ranks are on one host, nothing is compressed and all
            parameters have one dtype, else 25.
        compression: "bf16", "int8" or a `paceline.compression.Codec` sends gradients in fewer bits; "powersgd" or a
            `paceline.compression.PowerSGD` sends fewer numbers. All ranks still get the same bits. Alike on every
            rank. None for no compression.
        error_feedback: with compression, adds the error that compression makes in a step's gradients to the next
            step's, so that nothing is lost, only late. Default: on with int8 and PowerSGD, off with bf16. It takes
            extra memory, twice that of the gradients. A step that `session.steps` undoes leaves no trace in it if the
            training state has this wrapper, not the bare module.
        static_graph: declares that every backward pass uses the same parameters as the first, so that an unused
            parameter delays nothing. A pass that uses another parameter raises `StepOrderError`.

    Attributes:
        module: as above.
        group: as above.

    Raises:
        ValueError: `bucket_mb` is not above 0.
        UnsupportedOp: there is no such codec.
    """

    def __init__(
        self,
        module: Module,
        group: Group,
        *,
        bucket_mb: float | None = None,
        compression: str | Codec | PowerSGD | None = None,
        error_feedback: bool | None = None,
        static_graph: bool = False,
    ) -> None:
        self.module = module
        self.group = group
        self._model = ReplicatedModel(
            module,
            group,
            bucket_mb=bucket_mb,
            compression=compression,
            error_feedback=error_feedback,
            static_graph=static_graph,
        )
        self._synchronizer = GradientSynchronizer(self._model, group)

    def __repr__(self) -> str:
        return f"<paceline.DDP of {type(self.module).__name__}, rank {self.group.rank} of {self.group.size}>"

    def __call__(self, x: Any) -> Any:
        """Calls `forward`."""
        return self.forward(x)

    def forward(self, x: Any) -> Any:
        """Returns the module's output. The first call is a collective (see `prepare`); one rank alone calls the module.

        Raises:
            PacelineError: see `prepare`.
        """
        self.prepare()
        self._synchronizer.begin_forward()
        shape = x.shape if isinstance(x, np.ndarray) else ()
        self._synchronizer.rows = shape[0] if shape else None
        return self.module.forward(x)

    def prepare(self) -> None:
        """Agrees on the model and takes rank 0's values.

        This is a collective at first use, and again after a parameter was frozen or unfrozen; else it does nothing.

        Raises:
            SizeMismatch, SettingsMismatch, DivergenceError: the models differ; the error names ranks and parameter.
            UnsupportedOp: a parameter to train is neither float32 nor float64.
            StepOrderError: parameters were frozen or unfrozen in the middle of an accumulation.
        """
        self._synchronizer.prepare()

    def backward(self, dy: NDArray[Any], weight: float | None = None) -> None:
        """Runs the module's backward and, outside of `no_sync`, leaves the mean over all ranks in every `.grad`.

        The mean is the sum of weight * gradient over all ranks and micro-batches, divided by the sum of weights. A
        gradient that was there before (no `zero_grad`) is added to the mean. Nothing is returned: the wrapper holds the
        whole model, and the gradient of its input would be scaled by the weight. Buffers are rank 0's afterwards.

        Args:
            dy: gradient of this rank's *mean* loss with respect to the output, shape [B, ...].
            weight: weight of this rank's gradient; by default B, or `micro.weight` in a microbatch. With 0 the
                module runs, but its gradients, even NaN, are dropped.

        Raises:
            ValueError: the weight is negative or not finite.
            SizeMismatch: `dy` has no first axis to take B from.
            StepOrderError: gradients were written or cleared outside of the wrapper, or one came too late.
            PacelineError: a collective failed.
            Exception: the module raised it. After this, or a failed collective, all gradients and micro-batches of the
                attempt are dropped, and all ranks together may repeat the attempt.
        """
        if weight is None:
            weight = self.group._core.gradient_weight if self.group._core.order.is_leaf else rows_of(dy)
        with self._synchronizer.backward_pass(weight) as factor:
            # Backward is linear in dy: scaling dy, the smallest array, weights all gradients.
            self.module.backward(dy if factor in (0, 1) else dy * factor)

    def sync_gradients(self, weight: float | None = None) -> None:
        """Reduces pending gradients; does nothing if there are none, so it is harmless after `backward`.

        Pending gradients are those that `backward` accumulated under `no_sync`, or that the module's own `backward`
        left.

        Args:
            weight: weight of the gradients of the module's own backward. By default the number of samples in
                the last forward pass through this wrapper, or 1 if there was none.

        Raises:
            ValueError: the weight is negative or not finite.
            StepOrderError: both sorts are pending, or a weight was given for gradients that have one.
            PacelineError: a collective failed; gradients are dropped, as in `backward`.
        """
        self._synchronizer.sync_gradients(weight)

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context manager, inside of which `backward` accumulates on this rank only.

        The next `backward` outside, or `sync_gradients`, reduces the sum of all micro-batches.
        """
        return self._synchronizer.no_sync()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scales all gradients so that their norm, taken over all parameters as one vector, is at most `max_norm`.

        This is a collective; every rank scales by the same bits.

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
        """Begins a step that may be undone: `drop_gradients` restores error feedback as it is now.

        Until the first call each reduction is final at once.
        """
        self._model.begin_step()

    def drop_gradients(self) -> None:
        """Drops all gradients, including those accumulated under `no_sync`, because their step is undone."""
        self._synchronizer.drop_gradients()

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yields the module's parameters, without a prefix: optimizer state fits the wrapped and the bare module."""
        yield from self.module.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yields the module's buffers; none if the module has no such method."""
        yield from self._model.buffers().items()


class ReplicatedModel:
    """A model that every rank holds whole: the `SynchronizedModel` of DDP, for NumPy and for torch modules.

    The module has parameters, and perhaps buffers; with `trains_narrow`, those in 16 bits are trained too. `reducer` is
    the one made at the last agreement; None before the first. Other arguments are as in `DDP`.
    """

    def __init__(
        self,
        module: HasParameters,
        group: Group,
        *,
        bucket_mb: float | None,
        compression: str | Codec | PowerSGD | None,
        error_feedback: bool | None,
        static_graph: bool,
        trains_narrow: bool = False,
        carried: Callable[[Group], GradientTransport] = EngineTransport,
        over_links: type[HostTransport] = HostTransport,
    ) -> None:
        if bucket_mb is not None and not bucket_mb > 0:
            raise ValueError(f"bucket_mb must be above 0 MiB, not {bucket_mb!r}")
        if compression is None and error_feedback:
            raise ValueError("error_feedback keeps the rounding errors of compression, so it needs compression=")
        self.module = module
        self.reducer: BucketReducer | None = None
        self._group = group
        self._bucket_mb = bucket_mb
        if compression == "powersgd":
            compression = PowerSGD()
        self._low_rank = compression if isinstance(compression, PowerSGD) else None
        self._codec = None if compression is None or isinstance(compression, PowerSGD) else codec_of(compression)
        if error_feedback is None:
            error_feedback = self._low_rank is not None or (self._codec is not None and self._codec.feedback)
        self._feedback = error_feedback
        self._static_graph = static_graph
        self._trains_narrow = trains_narrow
        self._carried = carried
        self._over_links = over_links
        self._stepwise = False
        if group._core.engine_name != "links" and compression is not None:
            raise UnsupportedOp(
                f"compression={compression!r} with the engine {group._core.engine_name!r}: engines do not compress, so "
                "leave out one of the two"
            )

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yields the module's parameters."""
        yield from self.module.named_parameters()

    def buffers(self) -> Mapping[str, NDArray[Any]]:
        """The module's buffers, by path."""
        return buffers_of(self.module)

    def buffers_given(self, buffers: Mapping[str, NDArray[Any]]) -> None:
        """See `SynchronizedModel`."""
        write_back(self.module, {}, buffers)

    def spread_parameters(self) -> list[SpreadParameters]:
        """Returns all parameters, which this rank has whole."""
        return [(None, list(parameters_of(self.module).values()))]

    def agree(self, *, may_change: bool, agreed_in: int) -> BucketReducer:
        """See `SynchronizedModel`."""
        parameters, buffers = parameters_of(self.module), buffers_of(self.module)
        group = self._group
        compares = group.size > 1 and not group._core.has_same_state
        values = {path: p.data for path, p in parameters.items()} if compares else {}
        asked = "left out" if self._bucket_mb is None else f"{self._bucket_mb:g}"
        engine = self._group._core.engine_name
        settings = {"bucket_mb": asked, "compression": self._codec or self._low_rank, "engine": engine}
        manifest = ModelManifest.of(parameters, buffers, **settings)
        arrays = [*values.values(), *buffers.values()]
        agree(group, manifest, arrays, may_change=may_change, agreed_in=agreed_in)
        if compares:
            write_back(self.module, values, buffers)
        if engine != "links":
            self._group._core.open_engine()  # it connects while the model computes
        cap_bytes = self._cap_bytes(parameters)
        if self.reducer is not None and self.reducer.serves(parameters, cap_bytes):
            self.reducer.new_generation()  # keeps the memory, and the errors for feedback
            return self.reducer
        low_rank = 0 if self._low_rank is None else self._low_rank.rank
        transport: GradientTransport = (
            self._over_links(self._group, self._codec, low_rank, feedback=self._feedback)
            if engine == "links"
            else self._carried(self._group)
        )
        self.reducer = BucketReducer(
            parameters, transport, cap_bytes, static=self._static_graph, narrow=self._trains_narrow
        )
        self.reducer.stepwise = self._stepwise
        return self.reducer

    def keeps_reducer(self) -> bool:
        """See `SynchronizedModel`."""
        parameters = parameters_of(self.module)
        return self.reducer is not None and self.reducer.serves(parameters, self._cap_bytes(parameters))

    def begin_step(self) -> None:
        """See `DDP.begin_step`."""
        self._stepwise = True
        if self.reducer is not None:
            self.reducer.stepwise = True
            self.reducer.begin_step()

    def _cap_bytes(self, parameters: Mapping[str, Parameter]) -> float:
        return (self._usual_mb(parameters) if self._bucket_mb is None else self._bucket_mb) * 2**20

    def _usual_mb(self, parameters: Mapping[str, Parameter]) -> float:
        """The default of `bucket_mb`, the same on all ranks of a view; in two cases the same in all views.

        With compression, the errors for feedback lie in the buckets, which must then keep their sizes. And with
        parameters of several dtypes, the sizes decide which dtype the first bucket has, in which weights are summed:
        the bits of a run with microbatches would depend on the hosts.
        """
        compresses = self._codec is not None or self._low_rank is not None
        mixed = len({p.dtype for p in parameters.values() if p.requires_grad}) > 1
        on_one_host = where_of(nodes_of(self._group.members)) == "one_node"
        return _ON_ONE_HOST_MB if on_one_host and not compresses and not mixed else _USUAL_MB
