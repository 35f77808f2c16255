"""The coordinator's nouns: processes, settings, sessions, views, verdicts. Values only; nothing is decided here.

Times are seconds on the coordinator's monotonic clock unless a name says otherwise.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline_server.shares import WHOLE, Share
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = [
    "Ending",
    "JobSettings",
    "JobState",
    "Met",
    "Process",
    "Progress",
    "Report",
    "Seat",
    "Session",
    "Standing",
    "Tag",
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
    pid_namespace: int = 0
    """Number of its pid namespace, 0 where unknown."""
    node: str = ""
    """Alike for processes that can share memory, empty where it shares none."""

    @property
    def sight(self) -> tuple[str, str, int] | None:
        """Whose processes this one can see: those for which this is equal. None where it is not known."""
        known = self.host and self.boot_id and self.pid_namespace
        return (self.host, self.boot_id, self.pid_namespace) if known else None

    def is_same(self, other: Process) -> bool:
        """True if both are one incarnation, as far as both know: what one of them does not know matches anything.

        A launcher tells of a process with the pid that it has in the launcher's pid namespace, which is the worker's
        too; of a worker in a namespace of its own, as in a container, it knows no name that the worker knows.
        """
        details = (
            (self.boot_id, other.boot_id),
            (self.start_ticks, other.start_ticks),
            (self.pid_namespace, other.pid_namespace),
        )
        alike = all(mine == theirs or not mine or not theirs for mine, theirs in details)
        return alike and (self.host, self.pid) == (other.host, other.pid)


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What all members of a job agree on."""

    min_workers: int
    max_workers: int
    failure_timeout: float
    """Seconds of silence after which a member counts as lost."""
    tuning: str = ""
    """Hash of the table by which members choose among schedules."""

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between heartbeats: five may be lost or late before silence is believed."""
        return self.failure_timeout / 6


class Tag(NamedTuple):
    """Which state of a line. Equal tags are equal bits."""

    generation: int
    """Of its last step."""
    step: int
    """Its number; (0, 0) is the state before the first."""


@dataclass(frozen=True, slots=True)
class Met:
    """What a member says when it has stopped in its generation, or is ready to be taken into one."""

    generation: int
    """The one that it has stopped in, 0 for a candidate."""
    tag: Tag | None
    """The state that it holds, None for none that counts."""
    holds_base: bool
    """It got its generation's base: what it holds is the line's."""
    fingerprint: bytes = b""
    """Hash of a state that the tag does not tell apart: at (0, 0), which members build for themselves, and of what a
    member found on its disk, as long as its generation has no base."""
    manifest: bytes = b""
    """Hash of what the state consists of, and of the settings of the run."""
    leaving: bool = False
    closed: bool = False
    """No newcomer may come in now."""
    shares: tuple[Share, ...] = (WHOLE,)
    """What it holds of that state, if it is spread over members. The one that it trains on comes first."""
    node_size: int = 1
    """So many members hold one copy of the state between them, 0 for all of a view; views have a multiple of it."""
    prepared: Tag | None = None
    """A step that it may have to finish, because others may have applied it: it holds what it takes."""
    stored: bool = False
    """It holds nothing of the state yet, but can read all of it from a checkpoint."""
    unproven: bool = False
    """A candidate that has yet to show its links: it gives what it holds, and takes no seat."""
    step_timeout: float = float("inf")
    """Seconds for which it waits at most for members that compute and have not stopped."""

    @property
    def state(self) -> tuple[Tag | None, bytes]:
        """What is equal exactly if the bits are."""
        return self.tag, self.fingerprint


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a member was at its last heartbeat."""

    operation: int = 0
    """Number of the last collective that it entered, 0 for none."""
    since: float = 0.0
    """When it entered it, or left it if it is in none."""
    inside: bool = False
    """True while it waits inside."""
    step: int = 0
    """The last step whose word completed at it: all members of its generation were there then. 0 for none."""
    step_at: float = 0.0
    """When."""


class Standing(enum.Enum):
    """What a session is to its job."""

    WAITING = "waiting"
    """A candidate: in no view yet."""
    IN_VIEW = "in view"
    """A member of the live view."""
    VOID = "void"
    """A member of a view that is void: it has its verdict, and goes, or meets the others for the next view."""
    DISMISSED = "dismissed"
    """It wanted to leave and may: in no view any more."""


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
    base: Tag | None = None
    """The state that it starts from; None where members have no line, or have yet to compare what they hold."""
    newcomers: tuple[int, ...] = ()
    """Ranks that do not hold the base at the start."""
    manifest: bytes = b""
    """Hash that all members' `Met.manifest` equals, once there is a base."""
    lost: str = ""
    """What the job had trained before this line began and nobody held any more, in a sentence; empty for nothing."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a member of the view went."""

    how: str
    """Completes "rank 2 (host-b, pid 4711) ...": "left the job", "exited with code 1"."""
    orderly: bool
    """True if it said so and gave no cause: this alone voids nothing."""
    sure: bool = True
    """True if the process is known to be out of the line: it said so, or was seen to end. Silence proves nothing."""


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


@dataclass(slots=True, eq=False)
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
    last_generation: int = 0
    """The same, but kept when that view's line is over and the member is a newcomer again."""
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
    met: Met | None = None
    """What it said last about a meeting; it counts while `Met.generation` is its generation."""
    told_to_meet: object = None
    """The last order about a meeting that it was given; given once for each `Met`."""
    told_missing: frozenset[str] = frozenset()
    """Members of its host that it was asked to look for."""
    catching_up: bool = False
    """It was told to take the base, and has not said since what it holds: `met` may be less than that."""
    promised: tuple[Tag, int, int] | None = None
    """The seat that a meeting has in mind for it: to hold which state, among how many, at which rank."""
    draining: str = ""
    """Why it was told to leave, empty if it was not."""
    came_back: bool = False
    """It was a member of the last view, or the one before: it may bring what it holds of the state."""

    @property
    def has_met(self) -> bool:
        """True if it has stopped in its generation."""
        return self.met is not None and self.met.generation == self.generation

    @property
    def holds_a_part(self) -> bool:
        """True if it has some of a spread state, which others may not have."""
        return self.met is not None and self.met.node_size != 1 and bool(self.met.shares)

    @property
    def is_silent(self) -> bool:
        """True if it has no stream, or was silent for too long when last looked at."""
        return self.stream is None or self.overdue_from is not None


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
    last_parting: float = float("-inf")
    """When a member of a view last left by itself, or a view became void with members still there: they may come again,
    as new ones."""
    storage_trouble: str = ""
    """Why the last view could not be stored, empty if it could."""
    finished: int | None = None
    """The last step of the line that is done; None while there is something to do."""
    finishing: int | None = None
    """The same, while it is being stored: nobody is told before it is durable."""
    reached: int | None = None
    """How many steps the last line is known to have committed, at least; None if there was none."""
    restored: bool = False
    """The view is as the storage had it, and no other has formed since."""
    restored_at: float = float("-inf")
    """When the job was read from the storage. That may be an older copy, so members of a later generation have until
    `failure_timeout` later to come back; see `patient_until`."""
    patient_until: float = float("-inf")
    """No view forms of fewer than `max_workers` candidates before: members of a generation that this coordinator has
    never heard of are on their way back."""
    vouched_at: float = float("-inf")
    """When a step word last completed in the view: every member of it was alive then."""

    @property
    def is_at_rest(self) -> bool:
        """True if nothing is left of the job but its number, and whether it is done."""
        return not self.sessions and self.view is None and self.forming is None and self.finishing is None

    @property
    def live(self) -> View | None:
        """The view, if it is live."""
        return self.view if self.verdict is None else None

    def candidates(self) -> list[Session]:
        """Sessions that a view can be formed from: they wait and their stream is there; in order of arrival."""
        return [s for s in self.sessions.values() if s.standing is Standing.WAITING and s.stream is not None]

    @property
    def is_elastic(self) -> bool:
        """True if the view is of a line: it has a base, or members that meet to find one."""
        if self.view is None:
            return False
        return self.view.base is not None or any(s.has_met for s in self.present())

    def present(self) -> list[Session]:
        """The sessions of the view's members that are there, by rank."""
        assert self.view is not None
        found = (self.sessions.get(seat.member_id) for seat in self.view.seats)
        return [session for session in found if session is not None and self.is_present(session)]

    def is_present(self, session: Session) -> bool:
        """True if it is a member of the view and has not been let go."""
        assert self.view is not None
        return session.generation == self.view.generation and session.standing is not Standing.DISMISSED

    def bringing(self) -> list[Session]:
        """Candidates that have said what they hold, in order of arrival."""
        return [s for s in self.candidates() if s.met is not None and s.met.generation == 0]

    def ready(self) -> list[Session]:
        """Candidates that could enter a line's next generation, in order of arrival."""
        return [s for s in self.bringing() if s.met is not None and not s.met.unproven]

    def returning(self) -> list[Session]:
        """Former members that wait as candidates and have not yet said which state they hold."""
        waiting = (s for s in self.sessions.values() if s.standing is Standing.WAITING)
        return [s for s in waiting if s.came_back and s.met is None]

    def session_of(self, rank: int) -> Session | None:
        """The session of a member of the view, None if it has ended."""
        assert self.view is not None, "ranks are of a view"
        return self.sessions.get(self.view.seats[rank].member_id)

    def concerned(self) -> list[Session]:
        """Sessions that the job's settings bind: they wait, or are in the live view."""
        elastic = self.is_elastic
        idle = (Standing.DISMISSED,) if elastic else (Standing.DISMISSED, Standing.VOID)
        return [s for s in self.sessions.values() if s.standing not in idle]
