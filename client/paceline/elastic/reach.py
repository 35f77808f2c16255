"""When does a candidate try whether it and the members of a line reach each other? Pure: time and chance are arguments.

A pair of hosts that cannot talk to each other would break every generation that has both in it. So whoever wants in
shows first that there is a way to everyone, and from everyone, and tries again later and later until there is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from paceline.links.base import Peer

__all__ = ["Reach"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Between two tries, at most: doubled each time, and made up to a half shorter by chance, for many who were cut off
together shall not all knock together."""


class Reach:
    """One candidate's tries.

    Args:
        chance: shortens the pauses.

    Attributes:
        is_alone: True while nobody has said that a line is running.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.is_alone = True
        self._members: Sequence[Peer] | None = None
        self._pause = FIRST_PAUSE_S
        self._again_at = float("-inf")

    def hear(self, members: Sequence[Peer] | None) -> None:
        """A line is running with these members, None until they are known. A list that has changed is tried at once."""
        self.is_alone = False
        if members is not None:
            known = {member.member_id for member in self._members or ()}
            if self._members is None or {member.member_id for member in members} != known:
                self._members, self._again_at = members, float("-inf")

    def due(self, now: float) -> Sequence[Peer] | None:
        """Whom to try now; None for nobody yet, or while they are being tried."""
        if now < self._again_at or self._members is None:
            return None
        self._again_at = float("inf")
        return self._members

    def is_latest(self, members: Sequence[Peer]) -> bool:
        """True if the line has these members as far as is known, and nobody else."""
        return members is self._members

    def failed(self, now: float) -> float:
        """Some could not be reached; returns the seconds until the next try."""
        pause = self._chance.uniform(0.5, 1.0) * self._pause
        self._pause = min(LONGEST_PAUSE_S, 2 * self._pause)
        self._again_at = now + pause
        return pause
