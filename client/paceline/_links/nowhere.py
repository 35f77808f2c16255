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


class _Outside(Fault):
    """A fault that makes every call raise, although no member has failed."""

    def __init__(self, reason: str) -> None:
        super().__init__(0, -1, 0.0)
        self._reason = reason
        self.failed = True  # every call raises

    def error(self) -> PacelineError:
        """Returns an error that says why there is no view."""
        return StepOrderError(self._reason)


class NoMesh(Mesh):
    """A mesh without peers. The text of its errors is the reason why the member is in no view."""

    def __init__(self, reason: str, kinds: LinkKinds | None = None) -> None:
        self.generation = 0
        self.rank = -1
        self.peers: Sequence[Peer] = ()
        self.fault = _Outside(reason)
        self._kinds = kinds

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an array that links will be able to lend (`Mesh.empty`): a candidate already builds its model."""
        return super().empty(shape, dtype) if self._kinds is None else self._kinds.empty(shape, dtype)

    def link(self, peer: int, purpose: Purpose, group: str = "") -> Link:
        """Raises the error, because there is no link (`Mesh.link`)."""
        raise self.fault.error()

    def linked(self, purpose: Purpose, group: str = "") -> list[int]:
        """Returns an empty list (`Mesh.linked`)."""
        return []

    def close(self, deadline: float) -> None:
        """Does nothing: there are no links (`Mesh.close`)."""

    def close_group(self, group: str, deadline: float) -> None:
        """Does nothing: there are no links (`Mesh.close_group`)."""

    def retire(self) -> None:
        """Does nothing: there are no links (`GrpcMesh.retire`)."""

    async def end(self) -> None:
        """Does nothing: there are no links (`GrpcMesh.end`)."""

    @property
    def bytes_sent(self) -> int:
        """Always 0 (`Mesh.bytes_sent`)."""
        return 0
