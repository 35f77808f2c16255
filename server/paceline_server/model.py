"""The coordinator's nouns: processes, settings, sessions, views, verdicts. Values only; nothing is decided here.

Times are seconds on the coordinator's monotonic clock unless a name says otherwise.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = [
    "Ending",
    "JobSettings",
    "JobState",
    "Process",
    "Progress",
    "Report",
    "Seat",
    "Session",
    "Standing",
    "Verdict",
    "View",
]


@dataclass(frozen=True, slots=True)
class Process:
    """Which process on which machine."""

    host: str
    pid: int
    boot_id: str = ""
    """The kernel's boot id, empty where unknown."""
    start_ticks: int = 0
    """Start of the process in clock ticks since boot, 0 where unknown."""

    def is_same(self, other: Process) -> bool:
        """True if both are one incarnation, as far as both know: an unknown boot id or start matches any."""
        return (
            (self.host, self.pid) == (other.host, other.pid)
            and (not self.boot_id or not other.boot_id or self.boot_id == other.boot_id)
            and (not self.start_ticks or not other.start_ticks or self.start_ticks == other.start_ticks)
        )


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What all members of a job agree on."""

    min_workers: int
    max_workers: int
    failure_timeout: float
    """Seconds of silence after which a member counts as lost."""

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between heartbeats: five may be lost or late before silence is believed."""
        return self.failure_timeout / 6


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a member was at its last heartbeat."""

    operation: int = 0
    """Number of the last collective that it entered, 0 for none."""
    since: float = 0.0
    """When it entered it, or left it if it is in none."""
    inside: bool = False
    """True while it waits inside."""


class Standing(enum.Enum):
    """What a session is to its job."""

    WAITING = "waiting"
    """A candidate: in no view yet."""
    IN_VIEW = "in view"
    """A member of the live view."""
    VOID = "void"
    """A member of a view that is void: it has its verdict and will go; it never comes back in."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One member of a view, as it is stored."""

    rank: int
    member_id: str
    token_sha256: bytes
    """Only the hash is kept: the state file gives nobody's session away."""
    process: Process
    address: str
    arrival: int
    """Place in the order of arrival; the greater, the younger."""

    @property
    def label(self) -> str:
        """The member in a sentence: rank, host and pid."""
        return f"rank {self.rank} ({self.process.host}, pid {self.process.pid})"

    @property
    def short_label(self) -> str:
        """The member in a list: rank and host."""
        return f"rank {self.rank} ({self.process.host})"


@dataclass(frozen=True, slots=True)
class View:
    """A generation with its members in rank order."""

    generation: int
    settings: JobSettings
    explicit: bool
    """True if the members claimed their ranks."""
    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a member of the view went."""

    how: str
    """Completes "rank 2 (host-b, pid 4711) ...": "left the job", "exited with code 1"."""
    orderly: bool
    """True if it said so and gave no cause: this alone voids nothing."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a member saw go wrong."""

    reporter: int
    """Its rank."""
    reason: ErrorReason.ValueType
    accused: int | None
    """Rank at the other end; None when the member reports itself."""
    operation: int
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ended a generation; one for each, the same for all its members."""

    generation: int
    reason: ErrorReason.ValueType
    culprits: tuple[int, ...]
    """Ranks, ascending."""
    operation: int
    text: str


@dataclass(slots=True)
class Session:
    """One member's registration, from `register` to its end."""

    member_id: str
    token_sha256: bytes
    process: Process
    address: str
    settings: JobSettings
    claimed_rank: int | None
    generation_floor: int
    """The highest generation that it has seen evidence of."""
    arrival: int
    """Place in the order of arrival."""
    stream: int | None
    """Number of the stream that carries it, None while it has none: it is suspect then."""
    heard: float
    """When the last message came."""
    lease_from: float | None
    """Silence is counted from here: the last message, the stream's end, or the end of a stall. None: a member of a
    stored view that has not been seen since the restart; others vouch for it."""
    standing: Standing = Standing.WAITING
    generation: int = 0
    """Generation of the view that it is or was in, 0 for none."""
    rank: int | None = None
    """Its rank in that view."""
    verdict: Verdict | None = None
    """Why that view is void, None if it is not. The job may be a generation ahead of a member that has yet to go."""
    progress: Progress = Progress()
    stream_ended: float | None = None
    """When the stream ended, while it has none."""
    overdue_from: float | None = None
    """When a look at the leases first found it silent for too long; the next look decides."""
    told: str = ""
    """The sentence of the last `Waiting` that it was sent."""


@dataclass(slots=True)
class JobState:
    """All that decisions about a job rest on. `membership.Membership` alone changes it."""

    name: str
    sessions: dict[str, Session] = field(default_factory=dict)
    """Live sessions by member id, in order of arrival. What has ended is not kept."""
    generation: int = 0
    """The highest number given out or shown by a member; it never falls (I3)."""
    view: View | None = None
    """The last view, live or void, until its last member has gone."""
    verdict: Verdict | None = None
    """Why the last view is void, None if it is not; kept until the next one has formed."""
    endings: dict[int, Ending] = field(default_factory=dict)
    """Members of `view` that have gone, by rank. When all have, there is no view."""
    forming: View | None = None
    """A view that is being stored; nobody has been told of it yet."""
    last_arrival: float = float("-inf")
    """When the last candidate came (or came back)."""
    storage_trouble: str = ""
    """Why the last view could not be stored, empty if it could."""

    @property
    def live(self) -> View | None:
        """The view, if it is live."""
        return self.view if self.verdict is None else None

    def candidates(self) -> list[Session]:
        """Sessions that a view can be formed from: they wait and their stream is there; in order of arrival."""
        return [s for s in self.sessions.values() if s.standing is Standing.WAITING and s.stream is not None]

    def session_of(self, rank: int) -> Session | None:
        """The session of a member of the view, None if it has ended."""
        assert self.view is not None, "ranks are of a view"
        return self.sessions.get(self.view.seats[rank].member_id)

    def concerned(self) -> list[Session]:
        """Sessions that the job's settings bind: they wait, or are in the live view."""
        return [s for s in self.sessions.values() if s.standing is not Standing.VOID]
