"""The events of a job, and the effects by which the coordinator responds.

Events are the inputs of `Membership.handle`, effects its outputs: orders to the shell. Both are plain values, so a test
reads: given these events, expect exactly these effects.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from paceline_protocol._launches import Launch
from paceline_protocol._refusals import Refused
from paceline_protocol._values import (
    Counters,
    Ending,
    JobSettings,
    Meet,
    Process,
    Progress,
    Report,
    Verdict,
    View,
)
from paceline_protocol._versions import Versions
from paceline_protocol.messages import Message


@dataclass(frozen=True, slots=True)
class Registered:
    """A worker asks to become a member. Refused by raising; then nothing has changed."""

    member_id: str
    token_sha256: bytes
    stream: int
    process: Process
    address: str
    settings: JobSettings
    claimed_rank: int | None
    generation_floor: int
    versions: Versions
    former_member_id: str = ""
    """Which member this process was before, empty for none."""
    former_token_sha256: bytes = b""
    """Hash of that member's token: the proof that this process was that member."""
    replica: str = ""
    """Id of its replica, empty if it is one alone."""
    position: int = 0
    """Its position in the replica."""
    launch: Launch | None = None
    """The launcher that started it beside others; None if it was started alone."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A member takes its session up again on a new stream. Refused by raising; then nothing has changed."""

    member_id: str
    token_sha256: bytes
    stream: int
    generation: int
    """The generation that it knows to be in, 0 for none."""
    versions: Versions


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A stream has ended without `LeftJob`. That is a suspicion, no more: the member may resume its session."""

    member_id: str
    stream: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat."""

    member_id: str
    progress: Progress
    counters: Counters = field(default_factory=Counters)
    """For those who watch the job; `Membership` does not look at them."""


@dataclass(frozen=True, slots=True)
class BarrierEntered:
    """A member arrives at a named barrier."""

    member_id: str
    call: int
    generation: int
    name: str
    round: int
    timeout: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Reported:
    """A member saw something go wrong in its generation. `Membership` fills in `report.reporter`."""

    member_id: str
    generation: int
    report: Report


@dataclass(frozen=True, slots=True)
class ExitReported:
    """A launcher saw a process end, or another worker of its host found it gone."""

    process: Process
    exit_code: int
    """Exit code, or the negated number of the signal that killed it."""
    found_gone: bool = False
    """True if no process saw it end, but another one on its host found that it no longer exists."""
    launch_id: str = ""
    """Id of its launch; empty if its launcher does not say."""
    output: str = field(default="", repr=False)
    """The last lines that it printed, for people: no decision and no state has them."""

    @property
    def how(self) -> str:
        """Completes "rank 2 (host-b, pid 4711) ..."."""
        if self.found_gone:
            return "is gone, as a worker on its host reported"
        if self.exit_code >= 0:
            return f"exited with code {self.exit_code}"
        try:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"was killed by signal {-self.exit_code}"


@dataclass(frozen=True, slots=True)
class AddressRefused:
    """Nobody listens at the address of a member whose stream has ended: it is dead."""

    member_id: str


@dataclass(frozen=True, slots=True)
class DoorAnswered:
    """The process of a member that had sent nothing for some time has answered at its address: it runs."""

    member_id: str


@dataclass(frozen=True, slots=True)
class LeftJob:
    """A member leaves the job for good."""

    member_id: str
    cause: str
    """Its own error, empty for an orderly end."""


@dataclass(frozen=True, slots=True)
class MetOthers:
    """A member has stopped in its generation, or a candidate is ready."""

    member_id: str
    met: Meet


@dataclass(frozen=True, slots=True)
class FinishedLine:
    """A member saw the closing word complete, so all members have applied the last step."""

    member_id: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """An operator wants members to leave at their next step boundary."""

    member_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RestartAsked:
    """An operator says that the members of the last view are dead, or that a finished job must start again."""


@dataclass(frozen=True, slots=True)
class ViewStored:
    """The view of this generation is durable."""

    generation: int


@dataclass(frozen=True, slots=True)
class FinishStored:
    """It is durable that the job is done after this step."""

    step: int


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The view of this generation could not be stored."""

    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""

    slept: float = 0.0
    """Seconds for which the coordinator itself did not run just before, at least."""


Event = (
    Registered
    | Resumed
    | StreamEnded
    | Heard
    | BarrierEntered
    | Reported
    | ExitReported
    | AddressRefused
    | DoorAnswered
    | LeftJob
    | MetOthers
    | FinishedLine
    | DrainAsked
    | RestartAsked
    | FinishStored
    | ViewStored
    | StoreFailed
    | Ticked
)


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer `Registered` or `Resumed`: the session is live."""

    member_id: str
    heartbeat_interval: float


@dataclass(frozen=True, slots=True)
class AskDoor:
    """Find out whether the process of a member runs: `DoorAnswered` follows if its door answers."""

    member_id: str
    address: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send a member this message."""

    member_id: str
    message: Message


@dataclass(frozen=True, slots=True)
class EndSession:
    """End a session: forget its token and its waiters, and close its stream."""

    member_id: str
    refusal: Refused | None
    """The error with which the stream ends; None for an end in good order."""


@dataclass(frozen=True, slots=True)
class StoreView:
    """Store the view durably, then tell `ViewStored`. No member may be told of the view before that."""

    view: View


@dataclass(frozen=True, slots=True)
class ForgetView:
    """Store that the view of this generation is over: all have gone, or it never began. Its number stays used."""

    generation: int


@dataclass(frozen=True, slots=True)
class StoreEnding:
    """Store that a member of the view has gone. Nobody waits until that is durable."""

    generation: int
    rank: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class StoreFinished:
    """Store that the job is done after this step, or that it is not (None)."""

    step: int | None


@dataclass(frozen=True, slots=True)
class StoreReached:
    """Store how many steps a line that is over is known to have committed. Nobody waits until that is durable.

    None if the next line has nothing to go on from: the one before was done.
    """

    step: int | None


@dataclass(frozen=True, slots=True)
class StoreVerdict:
    """Store that the view is void. Nobody waits until that is durable: stopping must not wait for a disk."""

    verdict: Verdict


Effect = (
    Welcome
    | AskDoor
    | Send
    | EndSession
    | StoreView
    | ForgetView
    | StoreEnding
    | StoreFinished
    | StoreReached
    | StoreVerdict
)
