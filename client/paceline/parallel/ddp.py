"""DistributedDataParallel for NumPy modules: every rank holds the whole model, and gradients are averaged.

The order of things in a step is `wrapper`'s; `reducer` has the buckets on their way.
"""

from __future__ import annotations

from typing import Any

from paceline.collectives.choose import where_of
from paceline.collectives.nodes import nodes_of
from paceline.compression import Codec, PowerSGD, codec_of
from paceline.parallel.agreement import agree
from paceline.parallel.manifest import Manifest
from paceline.parallel.module import Module, buffers_of, parameters_of
from paceline.parallel.ranks import Ranks
from paceline.parallel.reducer import Reducer
from paceline.parallel.wrapper import Wrapper

__all__ = ["DDP"]

_USUAL_MB = 25.0
"""Source: torch's DDP (`bucket_cap_mb`)."""

_ON_ONE_HOST_MB = 50.0
"""Sums on one host take the cores that backward needs: the fewer hand-overs to the group's thread, the better.

Source: W=2 and 4 on 2 cores, torch, 12.6 and 42 M parameters: a step takes 1 to 2 % less than with 25, and up to 1 %
more than with 100; the same as with either where backward leaves the cores idle."""


class DDP(Wrapper):
    """Trains one model on the samples of all ranks, as if one process had seen them all.

    Construction communicates nothing. The first forward pass gives rank 0's parameters and buffers to all ranks. From
    then on each `backward` ends with the same gradients everywhere: the mean over all samples of all ranks, uneven
    shares or not. In a world of one, results are those of the unwrapped module, bit for bit.

        ddp = paceline.DDP(module, session.group)
        optimizer.zero_grad()
        ddp.backward(loss_gradient(ddp(x), t))      # of the mean loss over this rank's samples
        optimizer.step()

    Gradients lie in the buckets: `Parameter.grad` is a view of memory that the next backward pass writes again, so
    copy what you keep. Communication overlaps the rest of the backward pass from the second pass on. It goes in a
    fixed order, so a parameter that is never used (freeze it) or used late holds up the buckets behind it.

    What DDP does not do: modules whose own backward calls collectives must use another group for them; frozen
    parameters must stay as they are.

    Args:
        module: the model, built alike on every rank; values may differ.
        group: the ranks.
        bucket_mb: most MiB (2**20 bytes) of gradients in one message; alike on every rank. The first one is smaller, so
            that it leaves early. If left out: 50 where all ranks are on one host and nothing is compressed, else 25.
        compression: "bf16", "int8" or a `paceline.compression.Codec`: gradients travel in fewer bits; "powersgd" or a
            `paceline.compression.PowerSGD`: in fewer numbers. They are the same bits everywhere still. Alike on every
            rank. None for all bits.
        error_feedback: with compression: what it takes away from a step's gradients is added to the next step's,
            so that nothing is lost, only late. If left out: with int8 and PowerSGD, not with bf16. It takes twice
            the memory of the gradients more. A step that `session.steps` undoes leaves no trace in it if the training
            state has this wrapper, not the bare module.

        static_graph: every backward pass uses the same parameters as the first: then one that is never used holds up
            nothing. One more than in the first pass is a `StepOrderError`.

    Raises:
        ValueError: `bucket_mb` is not above 0.
        UnsupportedOp: there is no such codec.
    """

    _reducer: Reducer | None
    _trains_narrow = False
    """Whether parameters in 16 bits are trained."""

    def __init__(
        self,
        module: Module,
        group: Ranks,
        *,
        bucket_mb: float | None = None,
        compression: str | Codec | PowerSGD | None = None,
        error_feedback: bool | None = None,
        static_graph: bool = False,
    ) -> None:
        if bucket_mb is not None and not bucket_mb > 0:
            raise ValueError(f"bucket_mb must be above 0 MiB, not {bucket_mb!r}")
        if compression is None and error_feedback:
            raise ValueError("error_feedback is for what compression rounds away, and there is none")
        super().__init__(module, group)
        self._bucket_mb = bucket_mb
        if compression == "powersgd":
            compression = PowerSGD()
        self._low_rank = compression if isinstance(compression, PowerSGD) else None
        self._codec = None if compression is None or isinstance(compression, PowerSGD) else codec_of(compression)
        self._feedback = error_feedback
        self._static_graph = static_graph
        self._stepwise = False

    def forward(self, x: Any) -> Any:
        """The module's output. The first call is a collective (see `prepare`): on one rank alone, call the module.

        Raises:
            PacelineError: as `prepare`.
        """
        self.prepare()
        self._remember_rows(x)
        return self.module.forward(x)

    def begin_step(self) -> None:
        """For whoever may undo steps: what error feedback has kept so far counts, and `drop_gradients` goes back to it.

        Without a first call each reduction counts at once.
        """
        self._stepwise = True
        if self._reducer is not None:
            self._reducer.stepwise = True
            self._reducer.begin_step()

    def _agree(self, *, may_change: bool) -> Reducer:
        parameters, buffers = parameters_of(self.module), buffers_of(self.module)
        arrays = [*(p.data for p in parameters.values()), *buffers.values()]
        asked = "left out" if self._bucket_mb is None else f"{self._bucket_mb:g}"
        settings = {"bucket_mb": asked, "compression": self._codec or self._low_rank}
        manifest = Manifest.of(parameters, buffers, **settings)
        agree(self.group, manifest, arrays, may_change=may_change, agreed_in=self._generation)
        cap_bytes = (self._usual_mb() if self._bucket_mb is None else self._bucket_mb) * 2**20
        if self._reducer is not None and self._reducer.serves(parameters, cap_bytes):
            self._reducer.new_generation()  # memory and what error feedback has kept stay
            return self._reducer
        codec, feedback = self._codec, self._feedback
        if feedback is None:
            feedback = self._low_rank is not None or (codec is not None and codec.feedback)
        reducer = Reducer(
            parameters,
            self.group,
            cap_bytes,
            codec=codec,
            rank=0 if self._low_rank is None else self._low_rank.rank,
            feedback=feedback,
            static=self._static_graph,
            narrow=self._trains_narrow,
        )
        reducer.stepwise = self._stepwise
        return reducer

    def _usual_mb(self) -> float:
        """The same on all ranks of a view. What compression keeps lies in its buckets, so these stay as they are."""
        compresses = self._codec is not None or self._low_rank is not None
        on_one_host = where_of(nodes_of(self.group.members)) == "one_node"
        return _ON_ONE_HOST_MB if on_one_host and not compresses else _USUAL_MB
