"""The members of a group, and what needs no arrays: the base of the group that users hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import numpy as np
import numpy.typing as npt

from paceline._base.arrays import Array
from paceline._base.work import Work
from paceline._collectives.tasks import barrier_task
from paceline._group.group_core import GroupCore
from paceline._links.base import Peer


class GroupFace:
    """The members of a group: their ranks, sizes and addresses, and calls that need no arrays."""

    def __init__(self, core: GroupCore) -> None:
        self._core = core

    def __repr__(self) -> str:
        core = getattr(self, "_core", None)  # None while the group is being made
        if core is None or not core.mesh.size:
            return "<Group in no view>"
        bound, mesh, part = core.bound, core.mesh, ""
        if bound.name:
            first = ", ".join(str(peer.rank) for peer in mesh.peers[:8])
            part = f" (ranks {first}{', ...' if mesh.size > 8 else ''} of the view)"
        stale = ", stale" if bound.stale else ""
        return f"<Group rank {mesh.rank} of {mesh.size}{part}, generation {mesh.generation}{stale}>"

    @property
    def rank(self) -> int:
        """This member's rank in the group."""
        return self._core.mesh.rank

    @property
    def size(self) -> int:
        """World size W: number of the group's members."""
        return self._core.mesh.size

    @property
    def ranks(self) -> Sequence[int]:
        """Each member's rank in the view."""
        return tuple(peer.rank for peer in self._core.mesh.peers)

    @property
    def members(self) -> Sequence[Peer]:
        """The members in the order of their ranks in the group."""
        return self._core.mesh.peers

    @property
    def generation(self) -> int:
        """The generation of the group's members."""
        return self._core.mesh.generation

    @property
    def bytes_sent(self) -> int:
        """Bytes that this member has sent to the others in this generation, in all groups."""
        return self._core.mesh.bytes_sent

    def global_rank(self, rank: int) -> int:
        """Returns the rank in the view of the member with this rank in the group.

        Raises:
            InvalidRank: there is no such member.
        """
        self._core.check_rank("rank", rank)
        return self._core.mesh.peers[rank].rank

    def group_rank(self, rank: int) -> int | None:
        """Returns the rank in the group of the member with this rank in the view; None if it is not in the group."""
        return next((place for place, peer in enumerate(self._core.mesh.peers) if peer.rank == rank), None)

    @overload
    def barrier(self, timeout: float | None = ..., *, async_op: Literal[False] = ...) -> None: ...
    @overload
    def barrier(self, timeout: float | None = ..., *, async_op: Literal[True]) -> Work[None]: ...
    def barrier(self, timeout: float | None = None, *, async_op: bool = False) -> Work[None] | None:
        """Waits until all ranks have called it.

        Args:
            timeout: seconds.
            async_op: return a `Work`, which ends when all ranks have called.

        Raises:
            PacelineError: the generation has failed.
        """
        return self._core.issue(lambda bound: barrier_task(bound.engine, self._core.choose), timeout, async_op)

    def hand_over(self, *, to_all: bool = False) -> None:
        """Lets another thread continue with collectives of this group: the next thread that calls one owns them.

        Args:
            to_all: any thread may call collectives at any time in this generation. The caller must ensure that all
                ranks call them in one order.
        """
        self._core.bound.lane.hand_over(to_all=to_all)

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
        """Returns a new array that links can use without a copy; its contents are undefined.

        The array outlives the generation. Without shared memory, or if none is left, it is an ordinary array. A forked
        child shares its memory, instead of having a copy.
        """
        return self._core.mesh.empty(shape, np.dtype(dtype))
