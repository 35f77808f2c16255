"""Messages of the coordinator about the line, kept for the training thread until it reads them.

The loop thread puts them in; nothing is decided here. Requests to stop (`summoned`, `draining`) are plain values that
the training thread reads when it begins a step.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.links.base import Mesh, Peer
from paceline_protocol import Share, Tag

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
    """Says that a view has formed with this member.

    Attributes:
        generation: its number.
        rank: this member's.
        base: the state it starts from, None if its members have yet to compare.
        newcomers: ranks that do not hold that state.
        mesh: the links to its members; None if the member list could not be fetched any more.
        member_id: this worker's member id in the view; it may have a new one since.
        lost: a sentence about steps that were trained before and are lost; empty if there are none.
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
    """Orders this member, which lags behind, to take a state from the members that hold it.

    Attributes:
        generation: the generation that the meeting follows.
        base: tag of the state.
        holders: the members that hold it, with their shares of it.
        share: the share to take of a sharded state.
        fingerprint: of the whole state, where the tag alone does not identify it.
    """

    generation: int
    base: Tag
    holders: Sequence[tuple[Peer, tuple[Share, ...]]]
    share: Share
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Misfits:
    """Says that this member trains something else than the line; `donor` has the line's manifest."""

    donor: Peer


@dataclass(frozen=True, slots=True)
class MayGo:
    """Lets this member leave, as it asked. `last`: no other member goes on."""

    last: bool


@dataclass(frozen=True, slots=True)
class NoSeat:
    """Says that the next view has no place for this member, which becomes a candidate."""

    reason: str


@dataclass(frozen=True, slots=True)
class StateGone:
    """Says that parts of the sharded state are lost, so that this member's part is of no use."""

    reason: str


@dataclass(frozen=True, slots=True)
class JobDone:
    """Says that the job is done, with its last step."""

    step: int


@dataclass(frozen=True, slots=True)
class CaughtOut:
    """Says that this member's session had ended unnoticed, and that it has a new one, as a newcomer."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Says that training runs without this worker.

    Attributes:
        generation: its latest generation.
        members: its members that have not ended; None until the list has been fetched.
    """

    generation: int
    members: Sequence[Peer] | None


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of testing whether this worker and the members of a line can connect.

    Attributes:
        members: the members that were tested.
        troubles: one text for each member that cannot connect to this worker, or it to that, with the reason.
    """

    members: Sequence[Peer]
    troubles: list[str]


@dataclass(frozen=True, slots=True)
class Waits:
    """Says what the coordinator waits for."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Says that the session is over for good, or that this member cannot go on."""

    error: BaseException


News: TypeAlias = Runs | Tried | Waits
"""Letters that only inform, and ask this member for nothing."""

Letter: TypeAlias = ViewCame | CatchUpAsked | Misfits | MayGo | NoSeat | StateGone | JobDone | CaughtOut | Lost | News


class Mail:
    """The letters of one session.

    Attributes:
        summoned: generation in which this member is to ask for a meeting, 0 for none.
        draining: why this member should leave; empty if it should not.
        connected: False while the coordinator cannot be reached.
    """

    def __init__(self) -> None:
        self.summoned = 0
        self.draining = ""
        self.connected = True
        self._letters: queue.SimpleQueue[Letter] = queue.SimpleQueue()
        self._put = self._got = 0  # letters that ask; each number is one thread's to write

    def put(self, letter: Letter) -> None:
        """Adds a letter; on the loop, or from any thread if it says that the session is over."""
        self._put += not isinstance(letter, News)
        self._letters.put(letter)

    @property
    def asks(self) -> bool:
        """True if there is an unread letter that is not merely news."""
        return self._put != self._got

    def get(self, timeout: float) -> Letter | None:
        """The next letter; None if none came in so many seconds."""
        try:
            letter = self._letters.get(timeout=timeout)
        except queue.Empty:
            return None
        self._got += not isinstance(letter, News)
        return letter
