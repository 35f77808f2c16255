"""What the coordinator says about the line, kept for the training thread until it asks.

The loop thread puts things in; nothing here decides. Requests to stop (`summoned`, `draining`) are plain values that
the training thread looks at when it begins a step.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.checkpoint.tag import Tag
from paceline.elastic.share import Share
from paceline.links.base import Mesh, Peer

__all__ = [
    "CaughtOut",
    "CatchUpAsked",
    "JobDone",
    "Letter",
    "Lost",
    "Mail",
    "MayGo",
    "Misfits",
    "NoSeat",
    "Runs",
    "StateGone",
    "ViewCame",
    "Waits",
]


@dataclass(frozen=True, slots=True)
class ViewCame:
    """A view has formed with this member.

    Attributes:
        generation: its number.
        rank: this member's.
        base: the state it starts from, None if its members have yet to compare.
        newcomers: ranks that do not hold it.
        mesh: the links to its members; None if the member list could not be had any more.
        member_id: which member of it this worker is; it may have become another one since.
        lost: what was trained before its line began and is lost, in a sentence; empty for nothing.
    """

    generation: int
    rank: int
    base: Tag | None
    newcomers: frozenset[int]
    mesh: Mesh | None
    member_id: str
    lost: str = ""


@dataclass(frozen=True, slots=True)
class CatchUpAsked:
    """This member lags: it is to take that state from those who hold it.

    Attributes:
        generation: that the meeting is after.
        base: which state.
        holders: who holds it, and which shares of it.
        share: what to take of a state that is spread.
        fingerprint: of the whole of it, where the tag does not tell it apart.
    """

    generation: int
    base: Tag
    holders: Sequence[tuple[Peer, tuple[Share, ...]]]
    share: Share
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Misfits:
    """What this member trains is not what the line trains; that one's manifest is the line's."""

    donor: Peer


@dataclass(frozen=True, slots=True)
class MayGo:
    """This member wanted to leave, and may. `last`: nobody goes on."""

    last: bool


@dataclass(frozen=True, slots=True)
class NoSeat:
    """The next view has no seat for this member: it is a candidate."""

    reason: str


@dataclass(frozen=True, slots=True)
class StateGone:
    """Nobody has all of the state any more: what this member has of it is of no use."""

    reason: str


@dataclass(frozen=True, slots=True)
class JobDone:
    """The line's last step was this one."""

    step: int


@dataclass(frozen=True, slots=True)
class CaughtOut:
    """The session had ended behind this member's back; it has got a new one, as a newcomer."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The line runs without this worker.

    Attributes:
        generation: its latest.
        members: its members that have not ended; None while the list is on its way.
    """

    generation: int
    members: Sequence[Peer] | None


@dataclass(frozen=True, slots=True)
class Tried:
    """Whether there is a way between this worker and the members of a line.

    Attributes:
        members: who was asked.
        troubles: between which of them and this worker there is none, each with why.
    """

    members: Sequence[Peer]
    troubles: list[str]


@dataclass(frozen=True, slots=True)
class Waits:
    """What is being waited for."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The session is over and will not come back, or this member cannot go on."""

    error: BaseException


News: TypeAlias = Runs | Tried | Waits
"""Letters that tell how things are, and ask for nothing."""

Letter: TypeAlias = ViewCame | CatchUpAsked | Misfits | MayGo | NoSeat | StateGone | JobDone | CaughtOut | Lost | News


class Mail:
    """The letters of one session.

    Attributes:
        summoned: generation in which this member is to ask for a meeting, 0 for none.
        draining: why this member is to leave, empty if it is not.
        connected: False while the coordinator is away.
    """

    def __init__(self) -> None:
        self.summoned = 0
        self.draining = ""
        self.connected = True
        self._letters: queue.SimpleQueue[Letter] = queue.SimpleQueue()
        self._put = self._got = 0  # letters that ask; each number is one thread's to write

    def put(self, letter: Letter) -> None:
        """Adds a letter, on the loop; one that the session is over, from any thread."""
        self._put += not isinstance(letter, News)
        self._letters.put(letter)

    @property
    def asks(self) -> bool:
        """True if there is a letter that asks for something, and does not merely tell how things are."""
        return self._put != self._got

    def get(self, timeout: float) -> Letter | None:
        """The next letter; None if none came in so many seconds."""
        try:
            letter = self._letters.get(timeout=timeout)
        except queue.Empty:
            return None
        self._got += not isinstance(letter, News)
        return letter
