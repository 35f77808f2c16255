"""The mesh of a member that is in no view: it has no peers, and every collective is refused."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import PacelineError, StepOrderError
from paceline.links.base import Link, Mesh, Peer, Purpose
from paceline.links.fault import Fault

__all__ = ["NoMesh"]


class _Outside(Fault):
    """Fails every call, for a reason that is no failure of anybody's."""

    def __init__(self, reason: str) -> None:
        super().__init__(0, -1, 0.0)
        self._reason = reason

    @property
    def failed(self) -> bool:
        """True: nothing can be done here."""
        return True

    def error(self) -> PacelineError:
        """Says why."""
        return StepOrderError(self._reason)


class NoMesh(Mesh):
    """No links to nobody.

    Args:
        reason: why the member is in no view, for the errors.
    """

    def __init__(self, reason: str) -> None:
        self.generation = 0
        self.rank = -1
        self.peers: Sequence[Peer] = ()
        self.fault = _Outside(reason)

    def link(self, peer: int, purpose: Purpose, group: str = "") -> Link:
        """There is none (`Mesh.link`)."""
        raise self.fault.error()

    def linked(self, purpose: Purpose, group: str = "") -> list[int]:
        """Nobody (`Mesh.linked`)."""
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
