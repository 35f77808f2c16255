"""The coordinator's nouns: processes, settings, sessions, views, verdicts. Values only; nothing is decided here.

Times are seconds on the coordinator's monotonic clock unless a name says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = [
    "ProtocolSettings",
    "Ending",
    "JobSettings",
    "Meet",
    "Process",
    "Progress",
    "Report",
    "Seat",
    "Share",
    "Tag",
    "Verdict",
    "View",
    "WHOLE",
    "lacking",
    "share_of",
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


_TAG_NAME = re.compile(r"g([0-9]{1,20})-s([0-9]{1,20})", re.ASCII)


class Tag(NamedTuple):
    """Names a training state: the generation in which its last step was taken, and the number of that step.

    Equal tags are equal bits. A step number alone names nothing: the same step may be taken in two generations, with
    other bits. Tags are in the order of the training they name.
    """

    generation: int
    step: int
    """(0, 0) is the state before the first step, which every member makes for itself."""

    def __str__(self) -> str:
        """The name of a checkpoint's folder; names sort as tags do."""
        return f"g{self.generation:08d}-s{self.step:010d}"

    @classmethod
    def parse(cls, name: str) -> Tag | None:
        """The tag that a folder's name says, None if it says none."""
        match = _TAG_NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]))


class Share(NamedTuple):
    """One of the parts that a state is cut into; all parts together, and of one cut, are the state."""

    part: int
    """From 0."""
    parts: int
    """How many there are; 1 where the state is whole."""


WHOLE = Share(0, 1)


def share_of(rank: int, world: int, node_size: int) -> Share:
    """What a rank is to hold.

    Args:
        rank: the rank.
        world: ranks in the view.
        node_size: so many ranks hold one copy of the state between them: 1 where each holds it whole, 0 for all ranks.
    """
    size = node_size or world
    return Share(rank % size, size)


def lacking(shares: Iterable[Share]) -> tuple[Share, ...]:
    """What is not there of the cut that lacks least; nothing if the state is there."""
    there = set(shares)
    cuts = {share.parts for share in there} or {1}
    lacks = [tuple(Share(part, parts) for part in range(parts) if Share(part, parts) not in there) for parts in cuts]
    return min(lacks, key=len)


@dataclass(frozen=True, slots=True)
class Meet:
    """What a member tells the coordinator when it has stopped between steps, or is ready to enter its first view."""

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
    """A step that others may have applied, and that this member can finish: it has all that it takes."""
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
    """When."""


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
    """Hash that all members' `Meet.manifest` equals, once there is a base."""
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
class Verdict:
    """What ended a generation; one for each, the same for all its members."""

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
    may be a little behind. Well below the 0.5 s (`failure_timeout` / 6) for which members wait for the verdict."""

    announce_interval: float = 0.5
    """Least seconds between two rounds of `Waiting` to all candidates of a job: W arrivals would send W^2 messages."""

    max_open_barriers: int = 1_000
    """Named barriers that wait at one time in one job; as many passed names are remembered for repeats."""
