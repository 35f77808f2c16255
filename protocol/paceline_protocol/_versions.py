"""The versions of the protocol that a program speaks, and the one in which several programs speak with each other.

A release speaks the version of the release before and its own. If each two of several programs have a version in
common, then all of them have one, because ranges of numbers are like that (Helly's theorem). So a newcomer is compared
with each session of its job, and with the coordinator; after that each view has a version that all its members speak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pacelinepb import FRAMES_VERSION, OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of the protocol that a program speaks: these two, and all between them."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return f"version{'s' if self.newest > self.oldest else ''} {self.oldest}" + (
            f" to {self.newest}" if self.newest > self.oldest else ""
        )

    def overlap(self, other: Versions) -> bool:
        """True if there is a version that both programs speak."""
        return self.oldest <= other.newest and other.oldest <= self.newest

    def cover(self, other: Versions) -> bool:
        """True if this program speaks all that the other one speaks."""
        return self.oldest <= other.oldest and other.newest <= self.newest


OURS = Versions(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION)
"""The versions that this release speaks."""

UNTOLD = Versions(8, 8)
"""The versions of a view if none were told or stored: coordinators of version 8 do neither."""


def spoken_by(programs: Sequence[Versions]) -> Versions:
    """Returns the versions that all of these programs speak, up to our newest. Each two must have one in common."""
    newest = min(OURS.newest, *(versions.newest for versions in programs))
    return Versions(max(versions.oldest for versions in programs), newest)


def has_our_frames(said: int, told: int) -> bool:
    """Returns True if members that speak these versions understand each other's frames, and this release speaks both.

    They may have been told of one generation by two coordinators: one of version 8 forgets the version of a view.
    `said` is what another member says, `told` what this one was told.
    """
    spoken = OURS.oldest <= said <= OURS.newest
    return spoken and (said == told or min(said, told) >= FRAMES_VERSION)
