"""The member list of a view in pages, which are serialised once for all callers.

Usually few members change from one view to the next. A member that has the list of the previous view gets only the
changes: with the whole list for each of W members, the bytes of a view would grow as W^2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from paceline_protocol import Seat, View, lane
from paceline_protocol.messages import MemberList
from paceline_protocol.translation import write_member
from pacelinepb.v1 import session_pb2 as pb


@dataclass(frozen=True, slots=True)
class ViewPages:
    """The pages of one lane of a view: serialised `GetViewResponse`s with the members in rank order.

    `seats` has the seats of the ranks with one position in their replicas; without replicas, all of them.

    `sha256` is the hash of the concatenated pages, and `known_sha256` the previous view's hash, empty if that view is
    not known. `changes` is for members that have the list of the previous view.
    """

    view: View
    seats: tuple[Seat, ...]
    pages: tuple[bytes, ...]
    sha256: bytes
    known_sha256: bytes = b""
    changes: bytes = b""

    @classmethod
    def of(cls, view: View, position: int, page_members: int, before: ViewPages | None = None) -> ViewPages:
        """Serialises a view. The same view gives the same bytes after a restart too."""
        seats = tuple(lane(view, position))
        pages = tuple(
            pb.GetViewResponse(members=map(write_member, seats[first : first + page_members])).SerializeToString(
                deterministic=True
            )
            for first in range(0, len(seats), page_members)
        )
        sha256 = hashlib.sha256(b"".join(pages)).digest()
        if before is None:
            return cls(view, seats, pages, sha256)
        changes = pb.GetViewResponse(stretches=_stretches(before.seats, seats)).SerializeToString()
        if len(changes) > len(pages[0]):  # the changes must fit into one message
            return cls(view, seats, pages, sha256)
        return cls(view, seats, pages, sha256, before.sha256, changes)

    def page(self, number: int, known_sha256: bytes) -> bytes | None:
        """Returns a page for a worker that has the list with this hash (empty: no list); None if there is none."""
        if number == 0 and known_sha256 and known_sha256 == self.known_sha256:
            return self.changes
        return self.pages[number] if number < len(self.pages) else None

    @property
    def announced(self) -> MemberList:
        """The announcement of the list, for the messages about the view."""
        return MemberList(self.view.generation, len(self.seats), self.sha256, len(self.pages))


def _stretches(before: Sequence[Seat], seats: Sequence[Seat]) -> list[pb.Stretch]:
    """Describes a list of seats by stretches of the previous list and by new members."""
    places = {(seat.member_id, seat.process, seat.address): place for place, seat in enumerate(before)}
    stretches = [pb.Stretch()]
    for seat in seats:
        place, last = places.get((seat.member_id, seat.process, seat.address)), stretches[-1]
        if place is None:
            last.members.append(write_member(seat))
        elif last.count and place == last.first + last.count and not last.members:
            last.count += 1
        else:
            stretches.append(pb.Stretch(first=place, count=1))
    return stretches
