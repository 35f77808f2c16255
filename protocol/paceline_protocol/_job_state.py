"""The coordinator's record of a job: its sessions, its last view and its last step."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from paceline_protocol._launches import Launch, Launches
from paceline_protocol._replicas import told, whole
from paceline_protocol._values import Ending, JobSettings, Meet, Process, Progress, Seat, Tag, Verdict, View
from paceline_protocol._versions import Versions

_LOOPBACK = ("127.", "[::1]:", "localhost:")
"""Beginnings of addresses that only their own machine reaches. Only the text is looked at: each pair is checked."""


class Standing(enum.Enum):
    """The part that a session plays in its job."""

    CANDIDATE = "candidate"
    """It waits for a view: it is in no view yet."""
    IN_VIEW = "in view"
    """A member of the live view."""
    VOID = "void"
    """A member of a view that is void: it has the verdict, and goes, or meets the others for the next view."""
    DISMISSED = "dismissed"
    """It wanted to leave, and was told that it may: it is in no view any more."""


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
    """Position in the order of arrival."""
    stream: int | None
    """Number of the stream that carries it, None while it has none: it is suspect then."""
    heard: float
    """When the last message came."""
    lease_from: float | None
    """Silence is counted from here: the last message, the last answer of its door, the stream's end, or the end of a
    stall. None: a member of a stored view that has not been seen since the restart; others vouch for it."""
    versions: Versions
    """The versions that its program is known to speak. Until a member of a stored view resumes: the view's."""
    replica: str = ""
    """Id of its replica, empty if it is one alone."""
    position: int = 0
    """Its position in the replica."""
    standing: Standing = Standing.CANDIDATE
    generation: int = 0
    """Generation of the view that it is or was in, 0 for none."""
    last_generation: int = 0
    """The same, but kept when that view's line is over and the member is a candidate again."""
    rank: int | None = None
    """Its rank in that view."""
    verdict: Verdict | None = None
    """Why that view is void, None if it is not. The job may be a generation ahead of a member that has yet to leave."""
    progress: Progress = field(default_factory=Progress)
    stream_ended: float | None = None
    """When the stream ended; None while there is one. Moved on by the time in which the coordinator did not run."""
    overdue_from: float | None = None
    """When a look at the leases first found it silent for too long; the next look decides."""
    asked_door: float = float("-inf")
    """When its door was last asked whether its process runs."""
    told: str = ""
    """The sentence of the last `Waiting` that it was sent."""
    met: Meet | None = None
    """Its last `Meet`, which counts while `Meet.generation` is its generation."""
    told_to_meet: object = None
    """The last order about a meeting that it was given; given once for each `Meet`."""
    catching_up: bool = False
    """True if it was told to take the base and has not answered: it may hold more than `met` says."""
    promised: tuple[Tag, int, int] | None = None
    """The seat that it was promised in a meeting: for which state, among how many members, at which rank."""
    draining: str = ""
    """Why it was told to leave, empty if it was not."""
    launch: Launch | None = None
    """The launcher that started it beside others; None if it was started alone."""
    came_back: bool = False
    """True if it was a member of the last view, or the one before: it may bring some of the state."""

    @property
    def has_met(self) -> bool:
        """True if it has stopped in its generation."""
        return self.met is not None and self.met.generation == self.generation

    @property
    def holds_a_part(self) -> bool:
        """True if it holds a share of the state that others may not hold."""
        return self.met is not None and self.met.node_size != 1 and bool(self.met.shares)

    @property
    def is_silent(self) -> bool:
        """True if it has no stream, or was silent for too long when last looked at."""
        return self.stream is None or self.overdue_from is not None


class Sessions(dict[str, Session]):
    """Live sessions by member id, in order of arrival, which also counts those that are alike in something.

    It also finds the sessions of a process. A session counts as it was when it was added, or as `learn` says. Sessions
    are added and removed one by one: `sessions[id] = session` and `del sessions[id]` keep the counts, other methods
    of a dict do not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._traits: dict[str, tuple[Hashable, ...]] = {}
        self._counts: Counter[Hashable] = Counter()
        self._spoken: Counter[Versions] = Counter()
        self._by_process: dict[tuple[str, int], list[Session]] = {}
        self._by_replica: dict[str, list[Session]] = {}

    def __setitem__(self, member_id: str, session: Session) -> None:
        if member_id in self:
            del self[member_id]
        super().__setitem__(member_id, session)
        place = (session.process.host, session.process.boot_id)
        traits: list[Hashable] = [(session.settings, session.claimed_rank is None), session.claimed_rank, place]
        if is_loopback(session.address):
            traits += ["loopback", ("loopback", place)]
        self._traits[member_id] = tuple(traits)
        self._counts.update(traits)
        self._spoken[session.versions] += 1
        self._by_process.setdefault((session.process.host, session.process.pid), []).append(session)
        if session.replica:
            self._by_replica.setdefault(session.replica, []).append(session)

    def __delitem__(self, member_id: str) -> None:
        session = self[member_id]
        super().__delitem__(member_id)
        self._forget(session.versions)
        name = (session.process.host, session.process.pid)
        self._by_process[name].remove(session)
        if not self._by_process[name]:
            del self._by_process[name]
        if session.replica:
            self._by_replica[session.replica].remove(session)
            if not self._by_replica[session.replica]:
                del self._by_replica[session.replica]
        for trait in self._traits.pop(member_id):
            self._counts[trait] -= 1
            if not self._counts[trait]:
                del self._counts[trait]

    def learn(self, session: Session, versions: Versions) -> None:
        """Notes what a member's program speaks."""
        self._forget(session.versions)
        session.versions = versions
        self._spoken[versions] += 1

    def _forget(self, versions: Versions) -> None:
        self._spoken[versions] -= 1
        if not self._spoken[versions]:
            del self._spoken[versions]

    def all_understand(self, versions: Versions) -> bool:
        """True if each of them has a version of the protocol in common with a program that speaks these."""
        return all(spoken.overlap(versions) for spoken in self._spoken)

    def of(self, process: Process) -> list[Session]:
        """The sessions of a process."""
        alike = self._by_process.get((process.host, process.pid), ())
        return [session for session in alike if session.process.is_same(process)]

    def of_replica(self, replica: str) -> list[Session]:
        """The sessions of the ranks of a replica."""
        return list(self._by_replica.get(replica, ()))

    def all_agree(self, settings: JobSettings, *, explicit: bool) -> bool:
        """True if all have these settings, and have claimed a rank or not as `explicit` says."""
        return self._counts[settings, not explicit] == len(self)

    def is_claimed(self, rank: int) -> bool:
        """True if one of them claims this rank."""
        return self._counts[rank] > 0

    def are_in_reach(self, process: Process, address: str) -> bool:
        """True if each of them advertises no loopback address, or is on that machine, and the other way round.

        Machines are told apart by name and boot id. False says little: a name may be missing, or differ in a container.
        """
        place = (process.host, process.boot_id)
        if is_loopback(address):
            return self._counts[place] == len(self)
        return self._counts["loopback", place] == self._counts["loopback"]


def is_loopback(address: str) -> bool:
    """True if only its own machine reaches "host:port". A name other than localhost is not looked up."""
    return address.startswith(_LOOPBACK)


@dataclass(slots=True)
class JobState:
    """Everything that decisions about a job rest on. `Membership` alone changes it."""

    name: str
    sessions: Sessions = field(default_factory=Sessions)
    generation: int = 0
    """The highest number given out or shown by a member; it never falls (I3)."""
    view: View | None = None
    """The last view, live or void, until its last member has gone."""
    verdict: Verdict | None = None
    """Why the last view is void, None if it is not; kept until the next one has formed."""
    endings: dict[int, Ending] = field(default_factory=dict)
    """Members of `view` that have gone, by rank. When all have, there is no view."""
    launches: Launches = field(default_factory=Launches)
    """Until when the first view waits for workers that launchers have started."""
    astray: dict[tuple[str, int], Seat] = field(default_factory=dict)
    """Ranks of replicas that are only silent while their mates are here, by replica and position."""
    forming: View | None = None
    """A view that is being stored; no member has been told of it yet."""
    last_arrival: float = float("-inf")
    """When the last candidate came (or came back)."""
    last_parting: float = float("-inf")
    """When a member of a view last left by itself, or a view became void with members still there: they may come
    again, as candidates."""
    storage_trouble: str = ""
    """Why the last view could not be stored, empty if it could."""
    finished: int | None = None
    """The last step of a job that is done; None while there is something to do."""
    finishing: int | None = None
    """The same, while it is being stored: no member is told before it is durable."""
    reached: int | None = None
    """How many steps the last line is known to have committed, at least; None if there was none, or it was done."""
    restored: bool = False
    """The view is as the storage had it, and no other has formed since."""
    restored_at: float = float("-inf")
    """When the job was read from the storage. That may be an older copy, so members of a later generation have until
    `failure_timeout` later to come back; see `patient_until`."""
    patient_until: float = float("-inf")
    """No view forms of fewer than `max_workers` candidates before: members of a generation that this coordinator has
    never heard of are on their way back."""
    vouched_at: float = float("-inf")
    """When a step word last completed in the view. Every member was alive then."""

    @property
    def is_at_rest(self) -> bool:
        """True if nothing is left of the job but its last generation number, and whether it is done."""
        return not self.sessions and self.view is None and self.forming is None and self.finishing is None

    @property
    def live(self) -> View | None:
        """The view, if it is live."""
        return self.view if self.verdict is None else None

    def candidates(self) -> list[Session]:
        """Candidates with a stream, in order of arrival: a view can be formed of them."""
        return [s for s in self.sessions.values() if s.standing is Standing.CANDIDATE and s.stream is not None]

    @property
    def is_elastic(self) -> bool:
        """True if the view belongs to a line: it has a base, or members that meet to find one."""
        if self.view is None:
            return False
        return self.view.base is not None or any(s.has_met for s in self.present())

    def present(self) -> list[Session]:
        """The view's members whose sessions are alive and that were not let go, in rank order.

        A rank whose replica is not all there does not count: nobody waits for it, and the line cannot go on from it.
        """
        return whole(self.of_view())

    def of_view(self) -> list[Session]:
        """The same, with ranks whose replicas are not all there."""
        assert self.view is not None
        found = (self.sessions.get(seat.member_id) for seat in self.view.seats)
        return [session for session in found if session is not None and self.is_present(session)]

    def is_present(self, session: Session) -> bool:
        """True if it is a member of the view and has not been let go."""
        assert self.view is not None
        return session.generation == self.view.generation and session.standing is not Standing.DISMISSED

    def met_candidates(self) -> list[Session]:
        """Candidates that have said what they hold, in order of arrival."""
        return [s for s in self.candidates() if s.met is not None and s.met.generation == 0]

    def proven(self) -> list[Session]:
        """Candidates that could enter a line's next generation, in order of arrival."""
        return whole(s for s in self.met_candidates() if s.met is not None and not s.met.unproven)

    def returning(self) -> list[Session]:
        """Former members that wait as candidates and have not yet said which state they hold."""
        waiting = (s for s in self.sessions.values() if s.standing is Standing.CANDIDATE)
        return [s for s in waiting if s.came_back and s.met is None]

    def session_of(self, rank: int) -> Session | None:
        """The session of a member of the view, None if it has ended."""
        assert self.view is not None, "ranks are of a view"
        return self.sessions.get(self.view.seats[rank].member_id)

    def concerned(self) -> list[Session]:
        """Sessions with which a newcomer's settings must agree: candidates, and members of the live view."""
        elastic = self.is_elastic
        idle = (Standing.DISMISSED,) if elastic else (Standing.DISMISSED, Standing.VOID)
        return [s for s in self.sessions.values() if s.standing not in idle]


def restore(
    now: float,
    name: str,
    *,
    generation: int,
    view: View | None = None,
    verdict: Verdict | None = None,
    endings: Mapping[int, Ending] | None = None,
    finished: int | None = None,
    reached: int | None = None,
) -> JobState:
    """Returns the state of a stored job after a restart of the coordinator.

    Members of the stored view are members again, without a stream; each proves itself by `Resumed` and its token. What
    was not stored is forgotten: candidates (they register anew) and barriers in progress (members enter them again).
    Nothing before `now` counts as silence. `generation` is the highest number used.
    """
    state = JobState(name, generation=generation, finished=finished, reached=reached)
    state.last_arrival = state.restored_at = now
    gone = dict(endings or {})
    if view is None:
        return state
    if len(gone) == len(view.seats) and (view.base is None or all(ending.sure for ending in gone.values())):
        return state  # its line is over
    state.view, state.verdict, state.endings, state.restored = view, verdict, gone, True
    for seat in view.seats:
        if seat.rank in gone:
            continue
        state.sessions[seat.member_id] = Session(
            member_id=seat.member_id,
            token_sha256=seat.token_sha256,
            process=seat.process,
            address=seat.address,
            settings=view.settings,
            claimed_rank=seat.rank if view.explicit else None,
            generation_floor=0,
            arrival=seat.arrival,
            stream=None,
            heard=now,
            # Training goes on without the coordinator: members of a live view were not silent because it was away.
            lease_from=None if verdict is None else now,
            versions=view.versions,
            standing=Standing.IN_VIEW if verdict is None else Standing.VOID,
            generation=view.generation,
            last_generation=view.generation,
            rank=seat.rank,
            verdict=None if verdict is None else told(verdict, view.settings),
            replica=seat.replica,
            position=seat.rank % seat.replica_size,
        )
    return state
