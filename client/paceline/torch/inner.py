"""The inner optimizers of local training: each worker's own, but for the numbers in their settings.

What they keep for each parameter (AdamW's moments) is of the samples that this worker has seen. It is not alike on
members, does not travel, and a newcomer begins with none. To average it too was found to gain nothing, for three times
the bytes. Source: Douillard et al., "DiLoCo", 2023.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.errors import SizeMismatch

__all__ = ["InnerOptimizers"]


class InnerOptimizers:
    """One or more torch optimizers that take the inner steps.

    Args:
        optimizers: as the user gave them.
        after_step: called after each step of the first of them.

    Raises:
        TypeError: one is not a `torch.optim.Optimizer`.
    """

    def __init__(self, optimizers: Any, after_step: Callable[[], None]) -> None:
        self._optimizers: Sequence[Any] = tuple(optimizers) if isinstance(optimizers, Sequence) else (optimizers,)
        if not self._optimizers or not all(isinstance(one, torch.optim.Optimizer) for one in self._optimizers):
            raise TypeError(f"an inner optimizer is a torch.optim.Optimizer, not {optimizers!r:.80}")
        self._optimizers[0].register_step_post_hook(lambda *_: after_step())

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The numbers in the settings of all groups (learning rates and the like): those are the same on all members.

        Which implementation is used (`fused`, `foreach`) is the worker's own.
        """
        return {
            "groups": [
                [{name: value for name, value in group.items() if _is_number(value)} for group in one.param_groups]
                for one in self._optimizers
            ]
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes them over.

        Raises:
            SizeMismatch: there are more optimizers or groups, or fewer.
        """
        groups = saved["groups"]
        if [len(each) for each in groups] != [len(one.param_groups) for one in self._optimizers]:
            raise SizeMismatch("the inner optimizers are others: they have more groups of parameters, or fewer")
        for optimizer, theirs in zip(self._optimizers, groups, strict=True):
            for group, numbers_of in zip(optimizer.param_groups, theirs, strict=True):
                group.update(numbers_of)

    def save(self, *, state: bool) -> list[Any]:
        """A copy of all settings and, with `state`, of what is kept for each parameter; it stays in this process."""
        return [
            (
                [copy.deepcopy(_settings(group)) for group in optimizer.param_groups],
                {key: copy.deepcopy(kept) for key, kept in optimizer.state.items()} if state else None,
            )
            for optimizer in self._optimizers
        ]

    def put_back(self, saved: list[Any]) -> None:
        """Undoes all changes since `save`; its copies are used up."""
        for optimizer, (settings, state) in zip(self._optimizers, saved, strict=True):
            for group, before in zip(optimizer.param_groups, settings, strict=True):
                group.update(before)
            if state is not None:
                optimizer.state.clear()
                optimizer.state.update(state)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return isinstance(value, torch.Tensor) or (isinstance(value, numbers.Real) and not isinstance(value, bool))
