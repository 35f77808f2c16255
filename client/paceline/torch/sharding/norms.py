"""Gradients of which a rank has one part: their norm is refused, for a part's norm is not the gradient's.

`torch.nn.utils.clip_grad_norm_` would scale the gradients of each rank by another factor, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.errors import UnsupportedOp

__all__ = ["PartOfGradient"]

_NORMS = frozenset({torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, torch._foreach_norm})


class PartOfGradient(torch.Tensor):  # type: ignore[misc]  # torch is not there where types are checked
    """This rank's part of a gradient: a tensor like any other, but that it refuses to tell its norm.

    What is computed from it is a plain tensor.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls `func` as if these were plain tensors.

        Raises:
            UnsupportedOp: `func` is a norm.
        """
        if func in _NORMS:
            raise UnsupportedOp(
                "FSDP spreads this gradient over the ranks, so this rank's part of it has another norm than the whole, "
                "and torch.nn.utils.clip_grad_norm_ would scale by another factor on each rank: call "
                "model.clip_grad_norm_(max_norm) of the outermost FSDP, on all ranks (with math.inf it only measures). "
                "The norm of this rank's part alone is p.grad.detach().norm()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
