"""Rounds of local training: LocalSGD and DiLoCo.

In a round each worker takes some inner steps alone, starting from the same global parameters, and then all workers take
one outer step together. In `session.steps` a round is one step of the job.

There are P parameters, W ranks, and H inner steps in a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._elastic.parts import StatePart
from paceline._elastic.state import Gate
from paceline._group import Group
from paceline._microbatch.microbatch import Microbatch
from paceline._parallel._data_parallel import DDP
from paceline._parallel._parameter import Parameter
from paceline.compression import Codec
from paceline.errors import PacelineError, StepOrderError, UnsupportedOp
from paceline.optim import SGD, Optimizer
from paceline.torch._autograd import refuse_sync_batch_norm
from paceline.torch._local_state import InnerOptimizers, OuterModel, RoundPart


class LocalTraining:
    """The common base of `LocalSGD` and `DiLoCo`.

    Args:
        make_outer: makes the outer optimizer.
        differences: True to send the global parameters minus the local ones, False to send the local ones.

    Attributes:
        net: the module that is trained.
        group: the ranks.
        outer_optimizer: the optimizer of `paceline.optim` that takes the outer step. Its `lr` may be set between
            rounds, on all ranks alike.
    """

    def __init__(
        self,
        net: Any,
        inner_optimizer: Any,
        group: Group,
        make_outer: Callable[[OuterModel], Optimizer],
        *,
        differences: bool,
        compression: str | Codec | None,
        error_feedback: bool | None,
        bucket_mb: float,
        restore_inner: bool,
    ) -> None:
        refuse_sync_batch_norm(net)
        self.net = net
        self.group = group
        self._model = OuterModel(net, differences=differences)
        self._wrapper = DDP(
            self._model, group, bucket_mb=bucket_mb, compression=compression, error_feedback=error_feedback
        )
        self.outer_optimizer = make_outer(self._model)
        self._inner = InnerOptimizers(inner_optimizer, self._took_inner_step)
        self._restores_inner = restore_inner
        self._inner_steps = 0
        self.gate: Gate | None = None
        """In `session.steps`: says whether the round will be undone, and so need not be finished."""

    def prepare(self) -> None:
        """Gives rank 0's parameters and buffers to all ranks; a collective at first use and in a new generation.

        Call it before the first round if ranks may have built different values. It is not needed inside of
        `session.steps`, which has compared the members' states.

        Raises:
            SizeMismatch, SettingsMismatch, DivergenceError: the models differ; the error names ranks and parameter.
            StepOrderError: a round has begun, which the call would undo on this rank.
        """
        if self._inner_steps:
            raise StepOrderError(
                f"prepare() came after {self._inner_steps} inner steps of a round: call it before the first"
            )
        self._wrapper.prepare()
        self._model.push()

    @staticmethod
    def batches(indices: NDArray[np.intp], steps: int) -> Iterator[NDArray[np.intp]]:
        """Cuts this rank's samples of a round into batches, one for each inner step.

        Args:
            indices: indices of the samples, as in `step.indices`, shape [n].
            steps: H. If there are fewer than H samples, each gets a batch of its own.

        Yields:
            The indices of a batch, shape [n // H] or one more.

        Raises:
            ValueError: H is below 1.
        """
        if steps < 1:
            raise ValueError(f"a round must have at least one inner step, not {steps}")
        yield from np.array_split(indices, min(steps, len(indices)) or 1)

    def replica_batches(self, micro: Microbatch, steps: int) -> Iterator[NDArray[np.intp]]:
        """Trains the replica of one microbatch of a round: yields its batches, one for each inner step; see `batches`.

        The replica begins with the global parameters, the buffers of the round's beginning, no gradients, and inner
        optimizers without state. When the loop over the batches ends, the change of its parameters is set aside for
        `outer_step`. So take the inner step of a batch before you take the next batch.

        Args:
            micro: one of `step.microbatches`, inside of its block.
            steps: H.

        Yields:
            The indices of a batch.

        Raises:
            StepOrderError: it is not inside of the microbatch's block, or a setting of the inner optimizer has changed.
            ValueError: H is below 1.
            UnsupportedOp: with compression.
            PacelineError: a collective failed; the last microbatch of a rank ends with one. In a replica of several
                ranks `outer_step` raises it.
        """
        order = self.group._core.order
        if not order.is_leaf or order.name != f"microbatch {micro.number}":
            raise StepOrderError("replica_batches() belongs inside of `with micro:`")
        if order.is_first or order.is_check:
            self.outer_optimizer.zero_grad()
        self._wrapper._synchronizer.begin_forward()
        self._model.push()
        self._inner.forget()
        settings = self._inner.numbers()
        yield from self.batches(micro.indices, steps)
        if self._inner.numbers() != settings:
            raise StepOrderError(
                f"a setting of the inner optimizer, such as its learning rate, changed in {order.name}, so it "
                "would depend on the number of workers: change settings between rounds"
            )
        try:
            self._wrapper.backward(np.ones(1))
        except PacelineError:
            if self.gate is None or not (self.gate.has_mates and self.group._core.mesh.fault.failed):
                raise  # else the gate does, on all ranks of the replica: they may be in a collective of torch now

    def outer_step(self, weight: float | None = None) -> None:
        """Ends a round: combines the local parameters of all ranks, and continues from the result; a collective.

        Afterwards all ranks hold the same bits of the parameters, and the buffers of rank 0, or of microbatch 0. In
        `session.steps` this takes the place of `optimizer.step()`: it changes the global parameters only once the round
        is sure to commit, and no other collective may come between it and the end of the block.

        Args:
            weight: weight of this rank's round in the mean. In `session.steps` pass `step.weight`, which is 0 for a
                rank that only repeats another's sample because there are too few. By default the number of inner
                steps. With 0 the rank's parameters, even NaN, are dropped. Leave it out with microbatches: each has its
                own weight.

        Raises:
            ValueError: the weight is negative or not finite.
            StepOrderError: the ranks began with different parameters (see `prepare`), or all weights are 0; or a
                microbatch of the round was not trained with `replica_batches`.
            UnsupportedOp: a parameter was frozen or unfrozen since this object was made; or a weight was given in a
                round in microbatches.
            PacelineError: a collective failed. The net then keeps its local parameters; `session.steps` undoes the
                round.
        """
        if not self.group._core.order.leaves:
            self.outer_optimizer.zero_grad()
            self._wrapper.backward(np.ones(1), float(self._inner_steps) if weight is None else weight)
        elif weight is not None:
            raise UnsupportedOp(
                "outer_step(weight) in a round in microbatches: each has its own weight, so leave it out"
            )
        self.outer_optimizer.step()  # inside of session.steps this is the gate
        self._model.push()
        self._inner_steps = 0

    def as_part(self) -> StatePart:
        """Returns the part of a training state: global parameters, outer optimizer, buffers, inner settings."""
        return RoundPart(type(self).__name__, self._wrapper, self.outer_optimizer, self._inner, self)

    # Called by the training state.

    def begin_round(self) -> Any:
        """Sets the net to the global parameters; returns what `undo_round` takes."""
        self._model.push()
        self._inner_steps = 0
        return self._inner.save(state=self._restores_inner)

    def undo_round(self, saved: Any) -> None:
        """Restores the net and the inner optimizers as they were when the round began."""
        self._inner.put_back(saved)
        self._model.push()
        self._inner_steps = 0

    def drop_gradients(self) -> None:
        """Drops the local gradients."""
        self._inner.zero_grad()

    def push(self) -> None:
        """Copies global parameters, which another worker has sent, to the net."""
        self._model.push()

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The net's parameters, by path."""
        return self._model.tensors

    def _took_inner_step(self) -> None:
        self._inner_steps += 1
        if self.gate is None:
            return
        if self.gate.has_mates or self.group._core.order.is_first:  # else what comes after the first microbatch is kept
            self.gate.check()  # do not finish a round that will be undone


class LocalSGD(LocalTraining):
    """Trains in rounds: each worker takes H inner steps alone, then all take the weighted mean of their parameters.

    Use it if links are too slow to carry gradients at every step: the bytes of one data-parallel step are sent once in
    H steps. A world of one gives the results of the inner optimizer alone, bit for bit.

        local = paceline.torch.LocalSGD(net, inner, session.group)
        state = paceline.TrainState(model=local, sampler=paceline.ElasticSampler(n, global_batch=H * batch))
        for step in session.steps(state, total=rounds):
            with step:
                for batch in local.batches(step.indices, H):
                    loss(net(x[batch]), t[batch]).backward()
                    inner.step()
                    inner.zero_grad()
                local.outer_step(step.weight)

    In `session.steps` a round is one step: if a member is lost during a round, all others undo the round and run it
    again without that member. They notice the loss at their next inner step, and all ranks of a replica leave at the
    same one. A worker that has finished waits for the slowest one, for at most `step_timeout` (10 min by default). Give
    `local` to the training state, and neither `net` nor the inner optimizer. Outside of `session.steps` call
    `local.prepare()`, then `local.outer_step()` after every H inner steps.

    The net is set to the global parameters when a round begins, so load initial values before you make this object.
    Tied and frozen parameters, buffers and 16-bit parameters (whose global values are float32) work.

    **Shared state.** All members hold the same, and newcomers get: the global parameters, buffers (rank 0's after
    each outer step), the outer optimizer, and the numbers in the inner optimizers' settings, such as the learning rate.
    The inner optimizers' state for each parameter is the worker's own. A newcomer starts without it; checkpoints do not
    contain it; when a round is undone, it is restored as it was when the round began. A scheduler of the inner
    learning rate is a separate part of the training state: `TrainState(model=local, schedule=scheduler, ...)`.

    **Replicas.** The net may be spread over the ranks of a replica (`join(replica=...)`) by FSDP2 or tensor
    parallelism. Replicas then take the place of workers, and each rank has the global parameters and the outer
    momentum of what it holds of the net. All ranks of a replica take equally many inner steps.

    **Memory.** Besides the net, its gradients and the inner optimizer, host memory holds the global parameters and the
    values to send, P numbers each. Error feedback takes another 2 P. In `session.steps` there is a copy of the inner
    optimizer's state, on its device: 2 P for AdamW.

    **Microbatches.** If the sampler has microbatches, the bits do not depend on the number of workers: each trains a
    replica of the net, which takes H inner steps from the global parameters with inner optimizers that begin without
    state.

        for step in session.steps(state, total=rounds):
            with step:
                for micro in step.microbatches:
                    with micro:
                        for batch in local.replica_batches(micro, H):
                            loss(net(x[batch]), t[batch]).backward()
                            inner.step()
                            inner.zero_grad()
                local.outer_step()

    A rank trains V / W replicas one after the other. Change the inner learning rate between rounds only.

    Args:
        net: a torch module, not wrapped.
        inner_optimizer: any `torch.optim.Optimizer` of the net's parameters, or several, each for some of them.
        group: the ranks.
        compression: "int8", "bf16" or a `paceline.compression.Codec` sends changes of parameters in fewer bits; all
            ranks still get the same bits. Alike on every rank. None for no compression.
        error_feedback: with compression, adds the rounding error of a round in the next one. Default: the codec's
            choice, on with int8, off with bf16. A round that is undone leaves no trace in it.
        bucket_mb: most MiB in one message; alike on every rank.
        restore_inner: whether to restore the inner optimizers' state when a round is undone. If False, they keep their
            changed state, and no copy is made; their settings are restored in either case.

    Raises:
        UnsupportedOp: a parameter to train is not a float of 16, 32 or 64 bits, or there is no such codec.
        TypeError: an inner optimizer is not a torch optimizer.
    """

    def __init__(
        self,
        net: Any,
        inner_optimizer: Any,
        group: Group,
        *,
        compression: str | Codec | None = None,
        error_feedback: bool | None = None,
        bucket_mb: float = 25.0,
        restore_inner: bool = True,
    ) -> None:
        super().__init__(
            net,
            inner_optimizer,
            group,
            _Averaging if compression is None else _unit_steps,
            differences=compression is not None,  # differences are smaller, and so are their rounding errors
            compression=compression,
            error_feedback=error_feedback,
            bucket_mb=bucket_mb,
            restore_inner=restore_inner,
        )


class _Averaging(Optimizer):
    """Sets each parameter to the mean of the local ones.

    Except for rounding, that is a step of SGD with the learning rate 1 on differences.
    """

    def _fresh(self, parameter: Parameter) -> dict[str, Any]:
        return {}

    def _update(self, data: NDArray[Any], grad: NDArray[Any], state: dict[str, Any], scratch: NDArray[Any]) -> None:
        np.copyto(data, grad)


def _unit_steps(model: OuterModel) -> Optimizer:
    return SGD(model, lr=1.0)


class DiLoCo(LocalTraining):
    """Trains like `LocalSGD`, but uses a round's mean change as gradient of an outer optimizer with Nesterov momentum.

        d <- weighted mean over ranks of (global parameters - local parameters after H inner steps)
        v <- outer_momentum * v + d
        global parameters <- global parameters - outer_lr * (d + outer_momentum * v)

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, algorithm 1:
    AdamW as the inner optimizer, H = 500, and the defaults below. Outer gradients of few bits: Douillard et al.,
    "Streaming DiLoCo", 2025, and Jaghouar et al., "OpenDiLoCo", 2024.

    Use, shared state and the other arguments are as for `LocalSGD`. The momentum is the same on all members, and
    newcomers get it; it takes another P numbers of host memory, none if `outer_momentum` is 0.

    Args:
        net: as for `LocalSGD`.
        inner_optimizer: as for `LocalSGD`.
        group: as for `LocalSGD`.
        outer_lr: learning rate of the outer step; `outer_optimizer.lr` may be set between rounds.
        outer_momentum: 0 for none.
        nesterov: whether to look ahead along the momentum.
        compression: as for `LocalSGD`.
        error_feedback: as for `LocalSGD`.
        bucket_mb: as for `LocalSGD`.
        restore_inner: as for `LocalSGD`.

    Raises:
        ValueError: a number is negative.
        UnsupportedOp, TypeError: see `LocalSGD`.
    """

    def __init__(
        self,
        net: Any,
        inner_optimizer: Any,
        group: Group,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        compression: str | Codec | None = None,
        error_feedback: bool | None = None,
        bucket_mb: float = 25.0,
        restore_inner: bool = True,
    ) -> None:
        super().__init__(
            net,
            inner_optimizer,
            group,
            lambda model: SGD(model, outer_lr, outer_momentum, nesterov=nesterov and outer_momentum > 0),
            differences=True,
            compression=compression,
            error_feedback=error_feedback,
            bucket_mb=bucket_mb,
            restore_inner=restore_inner,
        )
