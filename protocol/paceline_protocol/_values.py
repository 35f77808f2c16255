"""The nouns of the protocol: processes, settings, tags, shares, members, views, verdicts. Nothing is decided here.

Times are seconds on the coordinator's monotonic clock unless a name says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from paceline_protocol._versions import Versions
from pacelinepb.v1.errors_pb2 import ErrorReason


@dataclass(frozen=True, slots=True)
class Process:
    """Identifies a process: which one, on which machine."""

    host: str
    pid: int
    boot_id: str = ""
    """The kernel's boot id, empty where unknown."""
    start_ticks: int = 0
    """Start of the process in clock ticks since boot, 0 where unknown."""
    pid_namespace: int = 0
    """Number of its pid namespace, 0 where unknown."""
    node: str = ""
    """Equal for processes that can share memory; empty for a process that shares none."""

    @property
    def sight(self) -> tuple[str, str, int] | None:
        """Equal for processes that can see each other; None where that is not known."""
        known = self.host and self.boot_id and self.pid_namespace
        return (self.host, self.boot_id, self.pid_namespace) if known else None

    def is_same(self, other: Process) -> bool:
        """True if both are the same run of a process. A detail that one of them does not know matches anything.

        A launcher tells of a process with the pid that it has in the launcher's pid namespace, which is the worker's
        too; of a worker in a namespace of its own, as in a container, it knows no name that the worker knows.
        """
        if (self.host, self.pid) != (other.host, other.pid):  # nearly always: the tally asks this of all that have gone
            return False
        details = (
            (self.boot_id, other.boot_id),
            (self.start_ticks, other.start_ticks),
            (self.pid_namespace, other.pid_namespace),
        )
        return all(mine == theirs or not mine or not theirs for mine, theirs in details)


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The settings that all members of a job agree on."""

    min_workers: int
    max_workers: int
    failure_timeout: float
    """Seconds of silence after which a member counts as lost."""
    tuning: str = ""
    """Hash of the table by which members choose among schedules."""
    replica_size: int = 1
    """Number of ranks that hold one copy of the model between them. The bounds above count replicas."""

    @property
    def most(self) -> int:
        """The most ranks in a view."""
        return self.max_workers * self.replica_size

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between heartbeats: five may be lost or late before a member counts as silent."""
        return self.failure_timeout / 6


_TAG_NAME = re.compile(r"g([0-9]{1,20})-s([0-9]{1,20})", re.ASCII)


class Tag(NamedTuple):
    """Names a training state: the generation in which its last step was taken, and the number of that step.

    Equal tags are equal bits. A step number alone names nothing: the same step may be taken in two generations, with
    other bits. Tags are in the order of the training they name.
    """

    generation: int
    step: int
    """In generation 0 it names the state before the job's first step, which every member makes for itself: (0, 0), or
    (0, 20) if it has read what was trained for 20 steps elsewhere."""

    @property
    def is_origin(self) -> bool:
        """Whether it is the state before the job's first step."""
        return self.generation == 0

    def __str__(self) -> str:
        """The name of a checkpoint's folder; names sort as tags do."""
        return f"g{self.generation:08d}-s{self.step:010d}"

    @classmethod
    def parse(cls, name: str) -> Tag | None:
        """The tag that a folder's name says, None if it says none."""
        match = _TAG_NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]))


class Share(NamedTuple):
    """One of the equal parts that a state is cut into. All parts of one cut together are the state."""

    part: int
    """Number of the part, from 0."""
    parts: int
    """Number of parts; 1 if the state is not sharded."""


WHOLE = Share(0, 1)

MAX_SHARES = 64
"""Most shares that a member reports: the latest views', if it has more. Source: `Meet` in session.proto."""


def share_of(rank: int, world: int, node_size: int) -> Share:
    """Returns the share that a rank holds; see `Meet.node_size`."""
    size = node_size or world
    return Share(rank % size, size)


_NAMED = 8
"""Most missing parts that are named: the sentence is for people."""


class Lack(NamedTuple):
    """How much of a state is missing."""

    parts: int
    """Number of parts that the state is cut into."""
    missing: int
    """How many of them are missing, 0 if the whole state is there."""
    first: tuple[int, ...]
    """The first ones that are missing, a few of them."""


def lacking(shares: Iterable[Share]) -> Lack:
    """The missing parts of the cut that lacks the fewest.

    The parts are counted and not listed, because members say how many there are.
    """
    cuts: dict[int, set[int]] = {}
    for part, parts in shares:
        cuts.setdefault(parts, set()).add(part)
    least = min(cuts, key=lambda parts: parts - len(cuts[parts]), default=1)
    there = cuts.get(least, set())
    first = islice((part for part in range(least) if part not in there), _NAMED)
    return Lack(least, least - len(there), tuple(first))


@dataclass(frozen=True, slots=True)
class Meet:
    """The report of a member that has stopped between steps, or is ready to enter its first view."""

    generation: int
    """The generation that it has stopped in, 0 for a candidate."""
    tag: Tag | None
    """The state that it holds, None if it holds none that is usable."""
    holds_base: bool
    """True if it got its generation's base, so that what it holds is the line's."""
    leaving: bool = False
    """True if it wants to leave."""
    closed: bool = False
    """True if no newcomer may be admitted now."""
    node_size: int = 1
    """Number of members that hold one copy of the state between them, 0 for all of a view; views have a multiple of
    it."""
    shares: tuple[Share, ...] = (WHOLE,)
    """Its shares of that state. The one that it trains on comes first."""
    prepared: Tag | None = None
    """A step that others may have applied, and that this member can finish, with all its shares."""
    stored: bool = False
    """True if it holds nothing of the state yet, but can read all of it from a checkpoint."""
    unproven: bool = False
    """True for a candidate that has not yet shown that it can connect to all members: it gives what it holds, and gets
    no seat."""
    fingerprint: bytes = b""
    """Hash of a state that the tag does not identify: (0, 0), which members make for themselves, and what a member
    found on its disk, as long as its generation has no base."""
    manifest: bytes = b""
    """Hash of what the state consists of, and of the settings of the run."""
    step_timeout: float = float("inf")
    """Seconds for which it waits at most for members that compute and have not stopped."""

    @property
    def state(self) -> tuple[Tag | None, bytes]:
        """Equal for two members exactly if the bits of their states are."""
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
    """When that word completed."""
    doing: str = ""
    """Kind of the operation that it is inside, empty if it is in none."""


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of a member since it joined, as of its last heartbeat. Nothing is decided by it."""

    committed: int = 0
    undone: int = 0
    samples: int = 0
    """Samples of its share in the committed steps."""
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that it has sent to other members, by kind of link."""
    in_collectives: float = 0.0
    """Seconds that it has waited in collectives."""
    checkpoint_step: int = 0
    """Step of the last checkpoint that it has written, 0 for none."""
    checkpoints: int = 0
    checkpoint_failures: int = 0
    checkpoint_time: float = 0.0
    """Seconds that all those which it has written took."""
    state_bytes: int = 0
    """Bytes of training state that it has fetched from other members."""
    state_time: float = 0.0
    """Seconds that it has spent in fetching them."""
    speed: float = 0.0
    """Samples that it computes in a second now; 0 while that is not known."""
    share: float = 0.0
    """Its part of a batch now, 0 to 1."""
    total: int = 0
    """The last step that its loop is to take, 0 without such a loop."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """The last values that its script has logged, by name."""
    cpu: float = 0.0
    """Processor time that it uses now, in cores; 0 if that is not known."""
    memory: int = 0
    """Bytes of its memory now; 0 if that is not known."""
    operations: int = 0
    """Collectives and messages that it has begun, also in parts of its group."""
    part: str = ""
    """The operation of a part of its group in which it waits now, as text for people; empty if it waits in none."""


@dataclass(frozen=True, slots=True)
class Report:
    """A member's report of a failure in its generation."""

    reporter: int
    reason: ErrorReason.ValueType
    accused: int | None
    """Rank at the other end; None when the member reports itself."""
    operation: int
    text: str
    unopened: bool = False
    """True for a lost link that this member could never open in this generation."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a view, as others are told of it."""

    rank: int
    """Its rank; means nothing if it is a candidate."""
    member_id: str
    process: Process
    address: str
    """Where its door is, "host:port"."""


@dataclass(frozen=True, slots=True)
class Seat(Member):
    """One member of a view, as it is stored."""

    token_sha256: bytes
    """Only the hash is kept, so the state file reveals no session."""
    arrival: int
    """Position in the order of arrival; the greater, the younger."""
    replica: str = ""
    """Id of its replica, empty if it is one alone."""
    replica_size: int = 1
    """Number of ranks of its replica. They have consecutive ranks in the view, in the order of their positions."""

    @property
    def number(self) -> int:
        """Number of its replica in the view."""
        return self.rank // self.replica_size

    @property
    def label(self) -> str:
        """Names the member in a sentence: rank, host and pid."""
        return f"{rank_name(self.rank, self.replica_size)} ({self.process.host}, pid {self.process.pid})"

    @property
    def short_label(self) -> str:
        """Names the member in a list: rank and host."""
        return f"{rank_name(self.rank, self.replica_size)} ({self.process.host})"


def rank_name(rank: int, replica_size: int) -> str:
    """Names a rank of a view: "rank 2", or "rank 0 of replica 1"."""
    return f"rank {rank}" if replica_size == 1 else f"rank {rank % replica_size} of replica {rank // replica_size}"


@dataclass(frozen=True, slots=True)
class View:
    """A generation with its members in rank order."""

    generation: int
    settings: JobSettings
    explicit: bool
    """True if the members claimed their ranks."""
    seats: tuple[Seat, ...]
    versions: Versions
    """The versions of the protocol that all its members speak, up to the coordinator's newest. They are decided once,
    when the view forms."""
    base: Tag | None = None
    """The state that it starts from; None where members have no line, or have yet to compare what they hold."""
    newcomers: tuple[int, ...] = ()
    """Ranks that do not hold the base at the start."""
    manifest: bytes = b""
    """Hash that all members' `Meet.manifest` equals, once there is a base."""
    lost: str = ""
    """A sentence about steps that the job had trained before this line, and that are lost; empty if there are none."""

    @property
    def world_size(self) -> int:
        """Number of its members."""
        return len(self.seats)

    @property
    def version(self) -> int:
        """The version that its members speak with each other."""
        return self.versions.newest

    def __repr__(self) -> str:  # short: a view of 1,000 members has a long list of seats, with hashes of tokens
        return f"<View generation {self.generation}, {len(self.seats)} member{'s' * (len(self.seats) != 1)}>"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a member of the view went."""

    how: str
    """Completes "rank 2 (host-b, pid 4711) ...": "left the job", "exited with code 1"."""
    orderly: bool
    """True if it said that it leaves and gave no error as the cause: that alone voids no generation."""
    sure: bool = True
    """True if it surely trains no more: it said so, or somebody saw it end. Silence proves nothing."""
    lives: bool = False
    """True if only its session has ended, and the process registers anew. That is not stored."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a generation is void: one verdict for each, the same for all its members."""

    generation: int
    reason: ErrorReason.ValueType
    culprits: tuple[int, ...]
    """Ranks, ascending."""
    operation: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolSettings:
    """The coordinator's times and limits that decisions rest on. A job's own are in `JobSettings`."""

    settle_time: float = 0.2
    """Seconds without an arrival after which a view forms with fewer than `max_workers`."""

    gather_time: float = 0.02
    """Seconds for which reports gather before they are judged: neighbours of one death report within milliseconds."""

    doubt_time: float = 0.1
    """Seconds before a broken link between two members that both seem well is judged: the news that one of them died
    may be a little behind. At most half of `JobSettings.heartbeat_interval`, because members wait for the verdict for
    0.5 s or one interval, whichever is less. A member that lives reports the link, too, or sends a heartbeat when a
    peer tells it of the failure."""

    announce_interval: float = 0.5
    """Least seconds between two rounds of `Waiting` to all candidates of a job: W arrivals would send W^2 messages."""

    pace: float = 20e-6
    """Seconds for each worker of a job between two decisions about its next view, at least: a decision looks at all of
    them, which takes some 3 us for each. What happens meanwhile counts at the next one."""

    max_silence: float = 3_600.0
    """The longest `failure_timeout` that a job may ask for, in seconds; a day at most. No session without a stream
    is kept for longer, whoever vouches for it: members choose what they say, and a member that has hung up must not
    keep its place."""

    max_open_barriers: int = 1_000
    """Named barriers that wait at one time in one job; as many passed names are remembered for repeats."""
