"""LocalSGD: every worker trains by itself, and now and then all go on from the mean of their parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.compression import Codec
from paceline.group import Group
from paceline.optim import SGD, Optimizer
from paceline.parallel.parameter import Parameter
from paceline.torch.local_training import LocalTraining
from paceline.torch.outer_model import OuterModel

__all__ = ["LocalSGD"]


class LocalSGD(LocalTraining):
    """Trains by rounds: H inner steps of each worker alone, then all take the weighted mean of their parameters.

    For links that are too slow to carry gradients at every step: the bytes of one step of data-parallel training go out
    once in H steps. In a world of one results are those of the inner optimizer alone, bit for bit.

        local = paceline.torch.LocalSGD(net, inner, session.group)
        state = paceline.TrainState(model=local, sampler=paceline.ElasticSampler(n, global_batch=H * batch))
        for step in session.steps(state, total=rounds):
            with step:
                for batch in local.batches(step.indices, H):
                    loss(net(x[batch]), t[batch]).backward()
                    inner.step()
                    inner.zero_grad()
                local.outer_step(step.weight)

    In `session.steps` a round is a step of the line: if a member is lost in it, all others undo it and run it again
    without that member. They hear of the loss at their next inner step. Who is done first waits for the slowest, for
    `step_timeout` (10 min unless set otherwise). Give `local` to the training state, and neither `net` nor the inner
    optimizer. Outside of `session.steps` call `local.prepare()`, then `local.outer_step()` after every H inner steps.

    The net is set to the global parameters when a round begins, so load what it shall begin with before this is made.
    Tied and frozen parameters, buffers, parameters of 16 bits (the global ones are float32 then) are all right.

    **What is whose.** Alike on all members, and given to newcomers: the global parameters, buffers (rank 0's after each
    outer step), the outer optimizer, and the numbers in the inner optimizers' settings, such as their learning rate.
    This worker's own: what inner optimizers keep for each parameter. A newcomer starts without; it is not in
    checkpoints; when a round is undone it is put back to what it was when the round began. A scheduler of the inner
    learning rate is a part of the training state of its own: `TrainState(model=local, schedule=scheduler, ...)`.

    **Memory**, in host memory, on top of the net, its gradients and the inner optimizer: the global parameters, and
    what is sent, P numbers each. With error feedback 2 P more. In `session.steps` a copy of the inner optimizer's
    state, where that lies: AdamW has 2 P.

    Args:
        net: a torch module, not wrapped.
        inner_optimizer: of its parameters, any `torch.optim.Optimizer`; or several, which share the parameters out.
        group: the ranks.
        compression: "int8", "bf16" or a `paceline.compression.Codec`: changes of parameters travel in fewer bits, and
            are the same bits everywhere still. Alike on every rank. None for all bits.
        error_feedback: with compression: what rounding takes away in a round is added in the next one. As the codec
            says if left out: with int8, not with bf16. A round that is undone leaves no trace in it.
        bucket_mb: most MiB in one message; alike on every rank.
        restore_inner: put the inner optimizers' state back when a round is undone. Without it they go on with what they
            have seen, and the copy is saved; the settings are put back all the same.

    Raises:
        UnsupportedOp: a parameter to train is no float of 16, 32 or 64 bits, or there is no such codec.
        TypeError: an inner optimizer is not one of torch.
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
            differences=compression is not None,  # the error of rounding goes with the size of what is rounded
            compression=compression,
            error_feedback=error_feedback,
            bucket_mb=bucket_mb,
            restore_inner=restore_inner,
        )


class _Averaging(Optimizer):
    """Puts what was brought together in a parameter's place.

    The same as a step of SGD with the learning rate 1 on differences, but for its rounding.
    """

    def _fresh(self, parameter: Parameter) -> dict[str, Any]:
        return {}

    def _update(self, data: NDArray[Any], grad: NDArray[Any], state: dict[str, Any], scratch: NDArray[Any]) -> None:
        np.copyto(data, grad)


def _unit_steps(model: OuterModel) -> Optimizer:
    return SGD(model, lr=1.0)
