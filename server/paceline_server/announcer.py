"""Who is told the waiting sentence, and when? Pure; part of a job's membership.

A newcomer hears it at once. The others hear a changed sentence at most once in `announce_interval`: each arrival of W
workers changes it, and telling all of them each time would make W^2 messages.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline_server.effects import Effect, PushWaiting
from paceline_server.model import Session

__all__ = ["Announcer"]

_NEVER = float("inf")


class Announcer:
    """Remembers what the candidates of a job were told.

    Args:
        interval: least seconds between two rounds to all.

    Attributes:
        announce_at: when the next round is due, infinity for never.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._last_round = -_NEVER
        self.announce_at = _NEVER

    def announce(self, now: float, reason: str, waiting: Iterable[Session], newcomer: Session | None) -> list[Effect]:
        """What to send now that the sentence is `reason`.

        Args:
            now: the time, in seconds.
            reason: the policy's sentence.
            waiting: the members and candidates that wait.
            newcomer: the one among them that has just come (back).
        """
        effects: list[Effect] = []
        if newcomer is not None:
            newcomer.told = reason
            effects.append(PushWaiting(newcomer.member_id, reason))
        due = self._last_round + self._interval
        if now < due:
            self.announce_at = due if any(session.told != reason for session in waiting) else _NEVER
            return effects
        others = [session for session in waiting if session.told != reason]
        for session in others:
            session.told = reason
            effects.append(PushWaiting(session.member_id, reason))
        if others:
            self._last_round = now
        self.announce_at = _NEVER
        return effects
