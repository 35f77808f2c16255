"""The messages of the coordinator to a member about training, one type for each message of `session.proto`.

The coordinator's state machine makes them, and the training thread gets them as they are. `translation` writes them to
protobuf and reads them. Messages that only open, keep or end a session (`Registered`, `Alive`, `NewDoorSecret`,
`Asked`, `Left`) are the shells' business and have no type here.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_protocol._replicas import in_lane
from paceline_protocol._values import Member, Process, Share, Tag, Verdict, View
from paceline_protocol._versions import UNTOLD
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = [
    "BarrierFailed",
    "BarrierPassed",
    "CatchUp",
    "Dismissed",
    "Drain",
    "Finished",
    "MemberList",
    "Message",
    "Mismatch",
    "Missing",
    "Running",
    "Spare",
    "StateLost",
    "Summons",
    "Verdict",
    "ViewFormed",
    "Waiting",
]


@dataclass(frozen=True, slots=True)
class MemberList:
    """Announces the members of a generation, whose list the receiver fetches in pages (`GetView`)."""

    generation: int
    world_size: int
    sha256: bytes = b""
    """Hash of the pages, one after another."""
    pages: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """The receiver is in no view yet, or waits for the next one."""

    reason: str


@dataclass(frozen=True, slots=True)
class ViewFormed:
    """A view has formed with the receiver in it."""

    members: View | MemberList
    """The view, at the coordinator; the announcement of its list, at a member."""
    rank: int
    base: Tag | None = None
    """The state that the generation starts from; None if its members have yet to compare what they hold."""
    newcomers: tuple[int, ...] = ()
    """Ranks that do not hold the base."""
    lost: str = ""
    """A sentence about earlier training that is lost; empty if there is none."""
    version: int = UNTOLD.newest
    """The version of the protocol that the members of this generation speak with each other."""
    position: int = 0
    """The receiver's position in its replica. What it is told is about the ranks with the same one."""

    @classmethod
    def of(cls, view: View, rank: int) -> ViewFormed:
        """Makes the message for the member with this rank of the view."""
        number, position = divmod(rank, size := view.settings.replica_size)
        newcomers = in_lane((each for each in view.newcomers if each % size == position), size)
        return cls(view, number, view.base, newcomers, view.lost, view.version, position)

    @property
    def generation(self) -> int:
        """Number of the view."""
        return self.members.generation


@dataclass(frozen=True, slots=True)
class Running:
    """The line runs without the receiver, which must be able to reach all members that have not ended."""

    members: View | MemberList
    """See `ViewFormed.members`."""
    ended: tuple[int, ...]
    """Ranks of members that have ended."""
    position: int = 0
    """See `ViewFormed.position`."""

    @property
    def generation(self) -> int:
        """The line's latest generation."""
        return self.members.generation


@dataclass(frozen=True, slots=True)
class Summons:
    """The receiver must ask the others of its generation to meet, in its next step word."""

    generation: int


@dataclass(frozen=True, slots=True)
class CatchUp:
    """The receiver lags behind in a meeting, and must take a state."""

    generation: int
    """The generation that the meeting follows, 0 for a candidate."""
    base: Tag
    holders: tuple[tuple[Member, tuple[Share, ...]], ...]
    """The members that hold it, each with its shares."""
    share: Share | None
    """The share to take of a sharded state. None: all that it has not, or the step that it is prepared for."""
    fingerprint: bytes = b""
    """The fingerprint of the base; see `Meet.fingerprint`."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The receiver's manifest differs from the line's."""

    donor: Member
    """A member that has the line's."""


@dataclass(frozen=True, slots=True)
class Missing:
    """The receiver must check whether these processes of its host still exist."""

    processes: tuple[Process, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """The receiver must leave at its next step boundary."""

    reason: str
    """The person or tool that asked for it, to be shown."""


@dataclass(frozen=True, slots=True)
class Dismissed:
    """The receiver, which wanted to leave, may go."""

    last: bool
    """True if no member stays."""


@dataclass(frozen=True, slots=True)
class Spare:
    """The next view has no seat for the receiver: it is a candidate again."""

    reason: str
    generation: int
    """The number of that view."""


@dataclass(frozen=True, slots=True)
class StateLost:
    """The line's state is no longer complete, so that the receiver's share of it is useless."""

    reason: str
    """Which part is lost, for people."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The job is done."""

    step: int


@dataclass(frozen=True, slots=True)
class BarrierPassed:
    """Everyone is at the barrier."""

    call: int


@dataclass(frozen=True, slots=True)
class BarrierFailed:
    """The receiver's arrival at a barrier is withdrawn."""

    call: int
    reason: ErrorReason.ValueType
    text: str
    culprits: tuple[int, ...] = ()
    """Ranks to blame, ascending."""


Message = (
    Waiting
    | ViewFormed
    | Verdict
    | Running
    | Summons
    | CatchUp
    | Mismatch
    | Missing
    | Drain
    | Dismissed
    | Spare
    | StateLost
    | Finished
    | BarrierPassed
    | BarrierFailed
)
