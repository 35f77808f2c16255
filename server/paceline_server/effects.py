"""What is to be done about an event: the outputs of `membership.Membership`, orders to the shell as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_server.errors import Refused
from paceline_server.model import Ending, Process, Seat, Tag, Verdict, View
from paceline_server.shares import Share
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = [
    "Effect",
    "EndSession",
    "FailBarrier",
    "ForgetView",
    "PassBarrier",
    "PushCatchUp",
    "PushDismissed",
    "PushDrain",
    "PushFinished",
    "PushMisfit",
    "PushMissing",
    "PushRunning",
    "PushSpare",
    "PushStateLost",
    "PushSummons",
    "PushVerdict",
    "PushView",
    "PushWaiting",
    "StoreEnding",
    "StoreFinished",
    "StoreReached",
    "StoreVerdict",
    "StoreView",
    "Welcome",
]


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer `register` or `resume`."""

    member_id: str
    heartbeat_interval: float


@dataclass(frozen=True, slots=True)
class PushWaiting:
    """Tell a candidate what is being waited for."""

    member_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PushView:
    """Tell a member that its view has formed."""

    member_id: str
    view: View
    rank: int


@dataclass(frozen=True, slots=True)
class PushVerdict:
    """Tell a member why its generation is void."""

    member_id: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class PushRunning:
    """Tell a candidate that the line runs without it."""

    member_id: str
    view: View
    ended: tuple[int, ...]
    """Ranks of members that have ended: the candidate need not reach them."""


@dataclass(frozen=True, slots=True)
class PushSummons:
    """Have a member ask the others to meet."""

    member_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class PushCatchUp:
    """Tell a member in a meeting what state to take, and who has it."""

    member_id: str
    generation: int
    base: Tag
    donors: tuple[tuple[Seat, tuple[Share, ...]], ...]
    """Who has it, each with the shares that it holds."""
    share: Share | None
    """What to take of a spread state; None: all that it has not, or the step that it is prepared for."""
    fingerprint: bytes = b""
    """Of the base; see `Met.fingerprint`."""


@dataclass(frozen=True, slots=True)
class PushMisfit:
    """Tell a member that its manifest is not the line's, and who has that one."""

    member_id: str
    donor: Seat


@dataclass(frozen=True, slots=True)
class PushMissing:
    """Ask a candidate whether these processes of its host are still there."""

    member_id: str
    processes: tuple[Process, ...]


@dataclass(frozen=True, slots=True)
class PushDrain:
    """Tell a member to leave at its next step boundary."""

    member_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PushDismissed:
    """Tell a member that it may go."""

    member_id: str
    last: bool


@dataclass(frozen=True, slots=True)
class PushSpare:
    """Tell a member that the next view has no seat for it: it waits as a candidate."""

    member_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class PushStateLost:
    """Tell a member that nobody has all of the line's state any more: its own part of it is of no use."""

    member_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PushFinished:
    """Tell a member that the line is done."""

    member_id: str
    step: int


@dataclass(frozen=True, slots=True)
class PassBarrier:
    """Answer an arrival: everyone is there."""

    member_id: str
    call: int


@dataclass(frozen=True, slots=True)
class FailBarrier:
    """Answer an arrival: it is withdrawn."""

    member_id: str
    call: int
    reason: ErrorReason.ValueType
    text: str
    culprits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EndSession:
    """The session is no more: forget its token and its waiters, close its stream."""

    member_id: str
    refusal: Refused | None
    """How the stream ends; None: in good order, with `left`."""


@dataclass(frozen=True, slots=True)
class StoreView:
    """Store the view durably, then say `ViewStored`. Nobody may hear of it before."""

    view: View


@dataclass(frozen=True, slots=True)
class ForgetView:
    """Store that the view of this generation is no more: all have gone, or it never began. Its number stays used."""

    generation: int


@dataclass(frozen=True, slots=True)
class StoreEnding:
    """Store that a member of the view has gone. Nobody waits for it."""

    generation: int
    rank: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class StoreFinished:
    """Store that the line is done (after that step), or is not (None)."""

    step: int | None


@dataclass(frozen=True, slots=True)
class StoreReached:
    """Store how many steps a line that is over is known to have committed. Nobody waits for it."""

    step: int


@dataclass(frozen=True, slots=True)
class StoreVerdict:
    """Store that the view is void. Nobody waits for it: stopping must not wait for a disk."""

    verdict: Verdict


Effect = (
    Welcome
    | PushWaiting
    | PushView
    | PushVerdict
    | PassBarrier
    | FailBarrier
    | EndSession
    | StoreView
    | ForgetView
    | StoreEnding
    | StoreFinished
    | StoreReached
    | StoreVerdict
    | PushRunning
    | PushSummons
    | PushCatchUp
    | PushMisfit
    | PushMissing
    | PushDrain
    | PushDismissed
    | PushSpare
    | PushStateLost
    | PushFinished
)
