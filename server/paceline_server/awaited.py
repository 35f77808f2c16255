"""Whom does a meeting wait for? Pure: members are crossed off one by one, without looking at all others each time.

Each of W members says that it has stopped, and then perhaps that it has taken the base. To convene the meeting anew
whenever one of them says so would cost W^2 for each change of generation. As long as others are left, only the sentence
changes. This rests on nothing else having changed since the meeting was convened: any other event convenes it anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from paceline_server.meeting import Meeting, has_caught_up, names
from paceline_server.model import Met, Session, View

__all__ = ["Awaited"]


class Awaited:
    """The members that a meeting waits for.

    Args:
        view: of the generation that is over.
        meeting: what was decided about it.
        present: how many of its members are there.

    Attributes:
        meeting: as it was when it was convened.
    """

    def __init__(self, view: View, meeting: Meeting, present: int) -> None:
        self.meeting = meeting
        self._view = view
        self._present = present
        # If another tag was in question, a member that drops it may change which state is the base.
        self._left = OrderedDict.fromkeys(meeting.late or (meeting.laggards if meeting.firm else ()))

    def __iter__(self) -> Iterator[Session]:
        return iter(self._left)

    def __contains__(self, session: object) -> bool:
        return session in self._left

    def cross_off(self, session: Session, before: Met | None) -> str | None:
        """Takes in what a member has said.

        Args:
            session: the member.
            before: what it had said last.

        Returns:
            The sentence that the meeting has now; None if the meeting must be convened anew.
        """
        if session not in self._left or not session.has_met or session.is_silent:
            return None
        if self.meeting.late or session.met != before:  # else nobody gave it the base, and it is still behind
            if len(self._left) == 1 or not self._is_done(session, before):
                return None
            del self._left[session]
        return self.meeting.wording.format(names(self._view, self._left))

    def _is_done(self, session: Session, before: Met | None) -> bool:
        if not self.meeting.late:
            return before is not None and has_caught_up(self._view, self.meeting, session, before)
        # When half of the members have stopped the time begins that the others have: `stragglers` must see that.
        return not 2 * (len(self._left) - 1) <= self._present < 2 * len(self._left)
