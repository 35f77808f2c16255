"""The norm of gradients that lie on several ranks, and clipping by it.

Source: Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.parallel.parameter import Parameter
from paceline.parallel.ranks import Ranks

__all__ = ["Share", "clip", "total_norm"]

Share: TypeAlias = tuple[Ranks | None, Sequence[Parameter]]
"""Parameters, and the ranks over which they are spread; None if this rank has all of them whole."""

_CHUNK = 1 << 16
"""Elements that are raised to a power at once, in float64."""


def total_norm(shares: Sequence[Share], group: Ranks, p: float) -> float:
    """The p-norm of all gradients as one vector; the same bits on every rank. A parameter without gradient counts 0.

    Sums and powers may differ in the last bit between CPUs and libraries, so rank 0's result is everybody's (I5).

    Args:
        shares: the parts of this rank, alike on all ranks.
        group: all ranks.
        p: above 0; `math.inf` for the largest absolute value.
    """
    norm = 0.0
    for ranks, parameters in shares:
        powers = [_power(g, p) for parameter in parameters if (g := parameter.grad) is not None]
        part = float(np.max(powers, initial=0.0)) if math.isinf(p) else sum(powers)
        if ranks is not None:
            part = float(ranks.all_reduce(np.float64(part), op="max" if math.isinf(p) else "sum"))
        norm = float(np.maximum(norm, part)) if math.isinf(p) else norm + part
    if not math.isinf(p):
        with np.errstate(over="ignore"):  # infinity is an answer
            norm = float(np.power(np.float64(norm), 1 / p))
    return norm if group.size == 1 else float(group.broadcast(np.float64(norm), root=0))


def clip(parameters: Iterable[Parameter], norm: float, max_norm: float) -> None:
    """Scales gradients in place by max_norm / norm if that is below 1; leaves them if the norm is not finite."""
    if not math.isfinite(norm) or norm <= max_norm:
        return
    factor = max_norm / norm
    for parameter in parameters:
        if parameter.grad is not None:
            np.multiply(parameter.grad, factor, out=parameter.grad)


def _power(gradient: NDArray[Any], p: float) -> float:
    """Sum of |g|^p, or the largest |g|, in float64."""
    flat = gradient.reshape(-1)
    if math.isinf(p):
        return float(np.max(np.abs(flat), initial=0.0))
    total = 0.0
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK].astype(np.float64)
        total += float(part @ part) if p == 2 else float(np.sum(np.abs(part) ** p))
    return total
