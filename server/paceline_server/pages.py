"""The member list of a view in serialised pages: made once, handed to all who ask."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from paceline_server import wire
from paceline_server.model import View
from pacelinepb.v1 import session_pb2 as pb

__all__ = ["ViewPages"]


@dataclass(frozen=True, slots=True)
class ViewPages:
    """The pages of one view.

    Attributes:
        view: the view.
        pages: serialised `GetViewResponse`s with its members in rank order.
        sha256: hash of the concatenated pages.
    """

    view: View
    pages: tuple[bytes, ...]
    sha256: bytes

    @classmethod
    def of(cls, view: View, page_members: int) -> ViewPages:
        """Serialises a view, so many members to a page. The same view gives the same bytes after a restart too."""
        pages = tuple(
            pb.GetViewResponse(
                members=map(wire.write_member, view.seats[first : first + page_members])
            ).SerializeToString(deterministic=True)
            for first in range(0, len(view.seats), page_members)
        )
        return cls(view, pages, hashlib.sha256(b"".join(pages)).digest())

    def running(self) -> pb.Running:
        """What a candidate is told."""
        return pb.Running(
            generation=self.view.generation,
            world_size=len(self.view.seats),
            members_sha256=self.sha256,
            pages=len(self.pages),
        )

    def formed(self, rank: int) -> pb.ViewFormed:
        """What a member is told."""
        return pb.ViewFormed(
            generation=self.view.generation,
            world_size=len(self.view.seats),
            rank=rank,
            members_sha256=self.sha256,
            pages=len(self.pages),
            base=None if self.view.base is None else wire.write_tag(self.view.base),
            newcomers=self.view.newcomers,
        )
