"""A mesh over some members of another mesh: the links of one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._links.base import Link, Mesh, Purpose


class SubMesh(Mesh):
    """The mesh of a group. A rank is a place in the group; peers, and so errors, keep their rank in the view.

    `members` are ranks of the other mesh, this member's among them. `name` is the same at all of them.
    """

    def __init__(self, mesh: Mesh, members: Sequence[int], name: str) -> None:
        self.generation = mesh.generation
        self.rank = members.index(mesh.rank)
        self.peers = tuple(mesh.peers[member] for member in members)
        self.fault = mesh.fault
        self.version = mesh.version
        self.name = name
        self._mesh = mesh
        self._members = tuple(members)
        self._places = {member: place for place, member in enumerate(members)}

    def link(self, peer: int, purpose: Purpose, group: str = "") -> Link:
        """Returns the link to a place (`Mesh.link`)."""
        return self._mesh.link(self._members[peer], purpose, self._full(group))

    def linked(self, purpose: Purpose, group: str = "") -> list[int]:
        """Returns the places with a link (`Mesh.linked`)."""
        ranks = self._mesh.linked(purpose, self._full(group))
        return sorted(self._places[rank] for rank in ranks if rank in self._places)

    def close(self, deadline: float) -> None:
        """Closes the group's links only (`Mesh.close`)."""
        self.close_group("", deadline)

    def close_group(self, group: str, deadline: float) -> None:
        """Closes the links of a group within this one (`Mesh.close_group`)."""
        self._mesh.close_group(self._full(group), deadline)

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an array that the links can lend (`Mesh.empty`)."""
        return self._mesh.empty(shape, dtype)

    @property
    def encrypted(self) -> bool:
        """As in the whole mesh (`Mesh.encrypted`)."""
        return self._mesh.encrypted

    @property
    def neighbours(self) -> int:
        """The neighbours of the whole mesh (`Mesh.neighbours`)."""
        return self._mesh.neighbours

    @property
    def bytes_sent(self) -> int:
        """Bytes that this member has sent in all groups (`Mesh.bytes_sent`)."""
        return self._mesh.bytes_sent

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """Bytes that this member has sent in all groups (`Mesh.sent_bytes`)."""
        return self._mesh.sent_bytes

    def _full(self, group: str) -> str:
        return f"{self.name}/{group}" if group else self.name
