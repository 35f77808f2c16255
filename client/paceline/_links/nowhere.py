"""The mesh of a member that is in no view: it has no peers, and every collective is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._links.base import Link, Mesh, Peer, Purpose
from paceline._links.fault import Fault
from paceline._links.registry import LinkKinds
from paceline.errors import PacelineError, StepOrderError

__all__ = ["NoMesh"]


class _Outside(Fault):
    """Fails every call, for a reason that is no failure of anybody's."""

    def __init__(self, reason: str) -> None:
        super().__init__(0, -1, 0.0)
        self._reason = reason
        self.failed = True  # nothing can be done here

    def error(self) -> PacelineError:
        """Says why."""
        return StepOrderError(self._reason)


class NoMesh(Mesh):
    """A mesh without peers.

    Args:
        reason: why the member is in no view, for the errors.
        kinds: the kinds of links that it will have once it is in one.
    """

    def __init__(self, reason: str, kinds: LinkKinds | None = None) -> None:
        self.generation = 0
        self.rank = -1
        self.peers: Sequence[Peer] = ()
        self.fault = _Outside(reason)
        self._kinds = kinds

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array that the links will lend (`Mesh.empty`): a candidate builds what it will train."""
        return super().empty(shape, dtype) if self._kinds is None else self._kinds.empty(shape, dtype)

    def link(self, peer: int, purpose: Purpose, group: str = "") -> Link:
        """There is none (`Mesh.link`)."""
        raise self.fault.error()

    def linked(self, purpose: Purpose, group: str = "") -> list[int]:
        """None (`Mesh.linked`)."""
        return []

    def close(self, deadline: float) -> None:
        """Nothing to close (`Mesh.close`)."""

    def close_group(self, group: str, deadline: float) -> None:
        """Nothing to close (`Mesh.close_group`)."""

    def retire(self) -> None:
        """Nothing to retire (`GrpcMesh.retire`)."""

    async def end(self) -> None:
        """Nothing to end (`GrpcMesh.end`)."""

    @property
    def bytes_sent(self) -> int:
        """None (`Mesh.bytes_sent`)."""
        return 0
