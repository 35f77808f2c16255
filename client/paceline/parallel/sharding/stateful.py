"""The values of a spread model from outside: dicts of them, and setting them."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.errors import InvalidRank
from paceline.parallel.module import HasParameters, Module, buffers_of, parameters_of
from paceline.parallel.ranks import ShardRanks
from paceline.parallel.sharding.state import (
    full_state,
    load_full,
    load_shards,
    padded_gradients,
    set_parts,
    shard_state,
)
from paceline.parallel.sharding.unit import Unit

__all__ = ["ShardedState"]


class ShardedState(HasParameters, abc.ABC):
    """Part of `FSDP`."""

    module: Module
    group: ShardRanks

    @abc.abstractmethod
    def prepare(self) -> None:
        """Agrees on initial values; see `Wrapper.prepare`."""

    @abc.abstractmethod
    def _tree(self) -> Sequence[Unit]:
        """All units of the model."""

    @abc.abstractmethod
    def _paths(self) -> Mapping[int, str]:
        """The path of each piece, by identity."""

    @abc.abstractmethod
    def _check_outermost(self) -> None:
        """Raises StepOrderError if this wraps a part of a model that is wrapped as a whole."""

    @abc.abstractmethod
    def _check_changeable(self) -> None:
        """Raises StepOrderError inside `unshard` too."""

    @abc.abstractmethod
    def _expire(self) -> None:
        """Parts are about to change: what is whole, or on its way, is out of date."""

    def update_shards(self, flat: ArrayLike) -> None:
        """Replaces the values that this rank holds; drops its gradients. Each rank calls it for itself, all of them do.

        Args:
            flat: the elements of all pieces in the order of `named_parameters`.

        Raises:
            SizeMismatch: there are more or fewer elements; nothing was changed.
            StepOrderError: inside `unshard`.
        """
        self._check_changeable()
        set_parts(self._tree(), parameters_of(self).values(), np.asarray(flat), self._expire)

    def padded_gradients(self) -> dict[str, NDArray[Any] | None]:
        """This rank's part of each gradient in an array of the full shape, zeros elsewhere, by path; None for none."""
        return padded_gradients(self._tree(), self._paths())

    def state_dict(self, *, root: int | None = None) -> dict[str, NDArray[Any]]:
        """Copies of all parameters and buffers, whole, by path: what any world, or one process, can load. A collective.

        Args:
            root: the one rank that wants them; every rank if None.

        Returns:
            The copies; empty on other ranks than the root.
        """
        self._check_outermost()
        self.prepare()
        if root is not None and not 0 <= root < self.group.size:
            raise InvalidRank(f"root {root} lies outside the world of {self.group.size}, at rank {self.group.rank}")
        keep = root is None or root == self.group.rank
        return full_state(self._tree(), self._paths(), buffers_of(self.module), keep=keep)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, in any world. Each rank cuts out its part; nothing is communicated.

        Raises:
            SizeMismatch: paths or shapes do not fit; the text lists all, and nothing was changed.
            StepOrderError: inside `unshard`.
        """
        self._check_changeable()
        load_full(self._tree(), self._paths(), buffers_of(self.module), saved, self._expire)

    def sharded_state_dict(self) -> dict[str, dict[str, Any]]:
        """Copies of what this rank holds. Communicates nothing.

        Returns:
            By path {"values": elements, shape [n]; "start": number of the first; "shape": of the whole parameter}.
        """
        self._check_outermost()
        return shard_state(self._tree(), self._paths(), buffers_of(self.module))

    def load_sharded_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `sharded_state_dict` gave to the same rank of a world of the same size; on all ranks.

        Raises:
            SizeMismatch: another model, world, rank or strategy made it; nothing was changed.
            StepOrderError: inside `unshard`.
        """
        self._check_changeable()
        load_shards(self._tree(), self._paths(), buffers_of(self.module), saved, self._expire)
