"""DiLoCo: local training whose outer step has a learning rate and a momentum."""

from __future__ import annotations

from typing import Any

from paceline.compression import Codec
from paceline.group import Group
from paceline.optim import SGD
from paceline.torch.local_training import LocalTraining

__all__ = ["DiLoCo"]


class DiLoCo(LocalTraining):
    """As `LocalSGD`, where the mean change of a round is a gradient for an outer optimizer with Nesterov momentum.

        d <- weighted mean over ranks of (global parameters - local parameters after H inner steps)
        v <- outer_momentum * v + d
        global parameters <- global parameters - outer_lr * (d + outer_momentum * v)

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, algorithm 1:
    AdamW as the inner optimizer, H = 500, and the defaults below. Outer gradients of few bits: Douillard et al.,
    "Streaming DiLoCo", 2025, and Jaghouar et al., "OpenDiLoCo", 2024.

    How it is used, what is whose, and the other arguments are those of `LocalSGD`. The momentum is alike on all
    members, and given to newcomers; it takes P numbers more of host memory, none if `outer_momentum` is 0.

    Args:
        net: as for `LocalSGD`.
        inner_optimizer: as for `LocalSGD`.
        group: as for `LocalSGD`.
        outer_lr: learning rate of the outer step; `outer_optimizer.lr` may be set between rounds.
        outer_momentum: 0 for none.
        nesterov: look ahead along the momentum.
        compression: as for `LocalSGD`.
        error_feedback: as for `LocalSGD`.
        bucket_mb: as for `LocalSGD`.
        restore_inner: as for `LocalSGD`.

    Raises:
        ValueError: a number is negative.
        UnsupportedOp, TypeError: as `LocalSGD`.
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
