"""From which members does a laggard take the state? Pure: a few of those that hold it, other ones for each laggard.

To name all of them in each order would make an order as long as the job is wide, and each laggard would dial them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline_server.model import Seat, Session
from paceline_server.shares import WHOLE, Share

__all__ = ["Donor", "Donors", "seat_of"]

Donor = tuple[Seat, tuple[Share, ...]]
"""A member that holds a state, with the shares that it holds."""

_NAMED = 16
"""So many donors are named in an order. A state comes from all of them at once, and one of them suffices."""

_LEAST = 2
"""So many are named for each part of a spread state if there are more parts than fit: one may be about to die. Where
each member holds a part of its own all of them are named."""


class Donors:
    """The members that hold a state.

    Args:
        donors: these members, in any order.
    """

    def __init__(self, donors: Sequence[Session]) -> None:
        by_share: dict[Share, list[Session]] = {}
        for donor in donors:
            for share in donor.met.shares or (WHOLE,) if donor.met is not None else ():
                by_share.setdefault(share, []).append(donor)
        self._all = dict.fromkeys(donors)
        self._most = max(_LEAST, _NAMED // max(1, len(by_share)))
        # A member without a stream may be dead.
        attached = ([donor for donor in group if donor.stream is not None] or group for group in by_share.values())
        self._groups = list(attached)
        self._few = all(len(group) <= self._most for group in by_share.values())
        self._everyone = tuple(map(_donor, donors)) if self._few else ()

    def some(self, session: Session, turn: int) -> tuple[Donor, ...]:
        """The donors that are named to one member. Consecutive turns name other ones, until all have been named.

        Args:
            session: the member. If it holds some of the state itself, it is named too: that part it need not take.
            turn: a number from 0, another one for each order.
        """
        if self._few:
            return self._everyone
        chosen = {session: None} if session in self._all else {}
        for group in self._groups:
            step = max(1, len(group) // self._most)  # far apart: neighbours share a host, and its fate
            for place in range(min(self._most, len(group))):
                chosen[group[(turn + place * step) % len(group)]] = None
        return tuple(map(_donor, chosen))


def seat_of(session: Session) -> Seat:
    """Where a member is reached; a candidate has no rank, and is as good as any."""
    rank = session.rank or 0
    return Seat(rank, session.member_id, session.token_sha256, session.process, session.address, session.arrival)


def _donor(session: Session) -> Donor:
    assert session.met is not None
    return seat_of(session), session.met.shares
