"""The inside of a group: its binding to one generation, its parts, its owner's settings, and how calls are issued.

Users hold the outside, `Group`, whose `_core` this is.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from paceline._base.activity import FlightRecorder, MemberCounters
from paceline._base.sum_order import EVEN, SumOrder
from paceline._base.work import Lane, Progress, Work
from paceline._collectives.choose import choose as choose_by_rules
from paceline._collectives.engine import CollectiveCall, Engine
from paceline._collectives.mailbox import Mailbox
from paceline._collectives.tasks import Chooser, Task
from paceline._links.base import MAX_GROUP_NAME, Mesh, Peer
from paceline._links.submesh import SubMesh
from paceline.config import Config, checked_timeout
from paceline.engines import DataEngine
from paceline.errors import (
    ConcurrentUse,
    InvalidRank,
    LimitExceeded,
    PacelineError,
    StaleGeneration,
    StepOrderError,
    UnsupportedOp,
)
from pacelinepb.debug.records import group_name

PIGGYBACK_SIZE = 26
"""Most numbers in a piggyback."""


class Binding:
    """The state of a group in one generation, with this member's links to the group's members.

    Members must agree on `label`, for signatures. `first_rank` is the lowest rank in the view among them. `parts` has
    how many parts have been made, by name. `stale` is True once the group has moved on to another generation. `carrier`
    is the group's engine (`paceline.engines`); None until it is opened, or if links carry everything.
    """

    def __init__(self, mesh: Mesh, name: str, label: str, recorder: FlightRecorder, counters: MemberCounters) -> None:
        self.mesh = mesh
        self.name = name
        ranks = tuple(peer.rank for peer in mesh.peers)
        self.first_rank = min(ranks, default=0)
        recorder.know_group(name, ranks)
        self.engine = Engine(mesh, partial(recorder.find, mesh.generation, name), label)
        self.lane = Lane(self.engine.abort, exclusive=mesh.size > 1, counters=counters)
        self.stale = False
        self.parts: Counter[str] = Counter()
        self.carrier: DataEngine | None = None
        self._lock = threading.Lock()
        self._mailbox: Mailbox | None = None

    @property
    def mailbox(self) -> Mailbox:
        """Messages between the members; made on first use."""
        with self._lock:
            if self._mailbox is None:
                self._mailbox = Mailbox(self.mesh)
            return self._mailbox

    def end_lane(self, deadline: float) -> None:
        """Ends running operations; the caller closes the links. Idempotent."""
        self.lane.close(deadline)
        if self.carrier is not None:
            self.mesh.fault.forget(self.carrier.abort)
            self.carrier.close(deadline)
        if self._mailbox is not None:
            self._mailbox.close()

    def abandon(self) -> None:
        """Notes that the group has moved on; the links end with the mesh."""
        self.stale = True
        self.end_lane(monotonic())


T = TypeVar("T")

Around: TypeAlias = Callable[[Callable[[], Any], float], Any]
"""Runs an operation when its turn comes: gets a function that does, and the deadline as a `time.monotonic()` value.
Returns what that function returns."""

Rule: TypeAlias = Callable[[Sequence[Peer], int], list[int]]
"""Maps all members and the own rank to the ranks of the members of a part, in order."""

_LABEL = re.compile(r"[\w-]{1,40}", re.ASCII)


class _OwnerState:
    """Settings by the owner of a group (the session, or the loop over steps); all parts of the group share them.

    Attributes:
        ban_reason: why no collective may be called now; empty if collectives are allowed.
        same_state_in: the last generation whose members are all known to hold the same state.
        piggyback: numbers that wait to be sent in the next bucket of gradients.
        piggyback_taken_in: the last generation in which a reducer asked for a piggyback.
        most: the most members that a generation may have; None if all generations have as many as this one.
        gradient_weight: weight of this member's gradients relative to the others'.
        order: the order in which gradients are summed over the ranks.
    """

    def __init__(self) -> None:
        self.ban_reason = ""
        self.same_state_in = 0
        self.piggyback: Piggyback | None = None
        self.piggyback_taken_in = 0
        self.most: int | None = None
        self.gradient_weight = 1.0
        self.order = EVEN


class Piggyback(Protocol):
    """A few numbers that travel in another all_reduce, so that they need no message of their own.

    They are small whole numbers to be summed over all ranks; their sums are exact in any float dtype.
    """

    values: npt.NDArray[np.float64]
    """This rank's numbers, at most PIGGYBACK_SIZE."""

    def arrive(self, sums: npt.NDArray[Any]) -> None:
        """Receives the sums over all ranks; the array belongs to the caller."""


class GroupCore:
    """The inside of a group, which the rest of the library uses.

    Args:
        mesh: this member's links.
        config: timeouts.
        choose: picks schedules; must be the same function on all ranks.
        parent: the group that this one is a part of; None for the view.
        name: name of the part, unique within the parent; "" for the view.
        label: text on which the members of a part must agree, for signatures.

    Attributes:
        choose: picks schedules; may be set, to the same on all ranks, while no collective is under way.
        recorder: the last 1,000 operations of this member, in this group and its parts.
        counters: what this member has counted, in this group and its parts.
        on_abort: called with the error when the generation has failed, in the thread that raises it.
        parent: as above.
        bound: the group's binding to the present generation.
    """

    def __init__(
        self,
        mesh: Mesh,
        config: Config,
        *,
        choose: Chooser = choose_by_rules,
        parent: GroupCore | None = None,
        name: str = "",
        label: str = "",
    ) -> None:
        self._config = config
        self._step_timeout = checked_timeout(config.step_timeout)
        self.choose = choose
        self.parent = parent
        self._name = name
        self._label = label
        self._lock = threading.Lock()
        self._rule: Rule | None = None
        self._parts: set[GroupCore] = set()  # those that are not closed
        self._splits = 0
        self._in_thread = threading.local()
        self.recorder: FlightRecorder = FlightRecorder() if parent is None else parent.recorder
        self.counters: MemberCounters = MemberCounters() if parent is None else parent.counters
        self.on_abort: Callable[[BaseException], None] | None = None if parent is None else parent.on_abort
        self._owner: _OwnerState = _OwnerState() if parent is None else parent._owner
        full = f"{parent.bound.name}/{name}" if parent is not None and parent.bound.name else name
        if len(full) > MAX_GROUP_NAME:
            raise LimitExceeded(f"too many nested groups: their names together may have {MAX_GROUP_NAME} bytes")
        self.bound: Binding = Binding(mesh, full, label, self.recorder, self.counters)

    @property
    def mesh(self) -> Mesh:
        """This member's links in the current generation; for tests, tools and the group's owner."""
        return self.bound.mesh

    @property
    def has_same_state(self) -> bool:
        """True if all members are known to hold the same state, because `session.steps` has checked it."""
        return self._owner.same_state_in == self.mesh.generation

    def confirm_same_state(self) -> None:
        """Notes that all members of this generation hold the same state. For the group's owner."""
        self._owner.same_state_in = self.mesh.generation

    @property
    def is_elastic(self) -> bool:
        """True if the job lets members come and go: another generation may have more or fewer."""
        return self._owner.most is not None

    @property
    def most_members(self) -> int:
        """The largest number of members that any generation can have."""
        return self.mesh.size if self._owner.most is None else self._owner.most

    def make_elastic(self, most: int) -> None:
        """Notes that members may come and go, up to `most` of them. For the group's owner."""
        self._owner.most = most

    def add_piggyback(self, piggyback: Piggyback) -> None:
        """Sends numbers along in the next bucket of gradients. For the group's owner, on all ranks alike."""
        self._owner.piggyback = piggyback

    def cancel_piggyback(self, piggyback: Piggyback) -> bool:
        """Cancels numbers that `add_piggyback` was given; returns False if they were already sent."""
        waits = self._owner.piggyback is piggyback
        self._owner.piggyback = None
        return waits

    @property
    def takes_piggybacks(self) -> bool:
        """True if a reducer has asked for a piggyback in this generation."""
        return self._owner.piggyback_taken_in == self.mesh.generation

    def take_piggyback(self) -> Piggyback | None:
        """Returns the waiting numbers once, then None."""
        self._owner.piggyback_taken_in = self.mesh.generation
        piggyback, self._owner.piggyback = self._owner.piggyback, None
        return piggyback

    @property
    def engine_name(self) -> str:
        """The carrier of the gradients of wrappers: "links", or the name of an engine (`Config.engine`)."""
        return self._config.engine

    @property
    def pinned_bytes(self) -> int:
        """The most pinned memory for gradients on their way from a device and back (`Config.pinned`)."""
        return self._config.pinned << 20

    @property
    def gradient_weight(self) -> float:
        """Weight of this member's gradients relative to the others': its share of a step's samples, else 1."""
        return self._owner.gradient_weight

    def set_gradient_weight(self, weight: float) -> None:
        """Sets the weight of this member's gradients from now on. For the group's owner."""
        self._owner.gradient_weight = weight

    @property
    def order(self) -> SumOrder:
        """The order in which gradients are summed over the ranks at present."""
        return self._owner.order

    def set_order(self, order: SumOrder) -> None:
        """Sets the order in which gradients are summed from now on. For the group's owner."""
        self._owner.order = order

    def ban_collectives(self, reason: str) -> None:
        """Refuses every collective of the group and its parts, until called with an empty reason. For the owner."""
        self._owner.ban_reason = reason

    @property
    def ban_reason(self) -> str:
        """Why no collective may be called now; empty if collectives are allowed."""
        return self._owner.ban_reason

    def progress(self) -> Progress:
        """Returns the operation that this member is at."""
        return self.bound.lane.progress

    def waits_in_part(self) -> str:
        """Returns the operation of a part that this member has waited in for longest, for people; "" for none."""
        inside = [(each.bound.lane.progress, each) for each in self._all_parts() if each.bound.lane.progress.inside]
        if not inside:
            return ""
        progress, part = min(inside, key=lambda found: found[0].since)
        return f"{part.doing(progress.operation)} {progress.operation} of group {group_name(part.bound.name)!r}"

    def doing(self, operation: int) -> str:
        """Returns the kind of an operation, "all_reduce"; "operation" if it is not recorded any more."""
        signature = self.recorder.find(self.bound.mesh.generation, self.bound.name, operation)
        return signature.partition(b" ")[0].decode("ascii", "replace")[:64] if signature else "operation"

    def _all_parts(self) -> Iterator[GroupCore]:
        for part in list(self._parts):
            yield part
            yield from part._all_parts()

    @contextmanager
    def surrounded(self, around: Around) -> Iterator[None]:
        """Runs operations that this thread issues inside the block through a function, which may copy memory too.

        An error of the function fails the operation.
        """
        self._in_thread.around = around
        try:
            yield
        finally:
            del self._in_thread.around

    def subgroup(self, bound: Binding, members: Iterable[int], name: str) -> Self:
        """Makes a part of this group for the generation of a binding; see `Group.subgroup`."""
        chosen = sorted(members)
        digest = _digest(bound.mesh.peers, chosen)
        with self._lock:
            key = f"{digest}-{name}"
            bound.parts[key] += 1
            full = f"{key}-{bound.parts[key]}"
        return self._part(bound, chosen, full, full)

    def split(self, rule: Rule) -> Self:
        """Makes a part that lasts: each new view is split by the same rule."""
        bound = self.enter(calls=False)
        with self._lock:
            self._splits += 1
            name = f"split{self._splits}"
        members = rule(bound.mesh.peers, bound.mesh.rank)
        part = self._part(bound, members, name, f"{name}-{_digest(bound.mesh.peers, members)}")
        part._rule = rule
        return part

    def _part(self, bound: Binding, members: Sequence[int], name: str, label: str) -> Self:
        mesh = SubMesh(bound.mesh, members, name)
        part = type(self)(mesh, self._config, choose=self.choose, parent=self, name=name, label=label)
        with self._lock:
            self._parts.add(part)
        return part

    def close(self, timeout: float, drain: float | None) -> None:
        """Ends queued operations, then closes the links; see `Group.close`."""
        now = monotonic()
        self._end_lanes(now + timeout)
        self._close_links(now + (timeout if drain is None else drain))

    def _end_lanes(self, deadline: float) -> None:
        for part in list(self._parts):
            part._end_lanes(deadline)
        self.bound.end_lane(deadline)

    def _close_links(self, deadline: float) -> None:
        for part in list(self._parts):
            part._close_links(deadline)
        self.bound.mesh.close(deadline)
        self._forget()

    def _forget(self) -> None:
        if self.parent is not None:
            with self.parent._lock:
                self.parent._parts.discard(self)

    def flush(self) -> None:
        """Waits until no collective is running or queued, on this group and its parts."""
        for part in list(self._parts):
            part.flush()
        self.bound.lane.flush()

    def move(self, mesh: Mesh) -> None:
        """Moves the group to the next generation. Its owner calls this while no collective is under way.

        Lasting parts move too; all other parts become stale.
        """
        plan = self._plan(mesh)  # first, because a rule may raise, and then nothing must have moved
        self.counters.generation_ended(self.mesh.sent_bytes)
        for group in [self, *(group for group, *_ in plan)]:
            for part in list(group._parts):
                if part._rule is None:
                    part._expire()
        for group, its_mesh, label in [(self, mesh, self._label), *plan]:
            group.bound.abandon()
            group._label = label
            group.bound = Binding(its_mesh, group.bound.name, label, self.recorder, self.counters)

    def _plan(self, mesh: Mesh) -> list[tuple[GroupCore, Mesh, str]]:
        """Returns the lasting parts, with their links and labels in the generation of a mesh."""
        plan: list[tuple[GroupCore, Mesh, str]] = []
        for part in list(self._parts):
            if part._rule is not None:
                members = part._rule(mesh.peers, mesh.rank)
                of_part = SubMesh(mesh, members, part._name)
                plan.append((part, of_part, f"{part._name}-{_digest(mesh.peers, members)}"))
                plan += part._plan(of_part)
        return plan

    def _expire(self) -> None:
        """Marks this part and its own parts as stale, because their generation is over."""
        for part in list(self._parts):
            part._expire()
        self.bound.abandon()
        self._forget()

    def enter(self, *, calls: bool = True) -> Binding:
        """Checks at the start of every public call that the generation is not over; returns the binding to use.

        The group may move on meanwhile. A call that sends nothing passes `calls=False`, and so is never banned.
        """
        bound = self.bound
        if bound.stale:
            text = f"this group was made for generation {bound.mesh.generation}, which is over; make a new one"
            raise StaleGeneration(text, generation=bound.mesh.generation)
        if self._owner.ban_reason and calls:
            raise StepOrderError(self._owner.ban_reason)
        order = self._owner.order
        if order.is_leaf and calls and (refusal := order.refusal("a collective", of_wrappers=True)):
            raise StepOrderError(refusal)
        try:
            bound.mesh.fault.check()
        except PacelineError as error:
            self.tell_abort(error)
            raise
        return bound

    def deadline(self, timeout: float | None, started: float) -> float:
        return started + (self._step_timeout if timeout is None else checked_timeout(timeout))

    def check_rank(self, what: str, rank: object) -> None:
        if not self.mesh.size:
            self.enter()  # if the group has no valid view, its error says more than an invalid rank
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 0 <= rank < self.mesh.size:
            raise InvalidRank(f"{what} {rank!r} lies outside the world of {self.mesh.size}, at rank {self.mesh.rank}")

    @overload
    def issue(self, make: Callable[[Binding], Task[T]], timeout: float | None, async_op: Literal[False]) -> T: ...
    @overload
    def issue(self, make: Callable[[Binding], Task[T]], timeout: float | None, async_op: bool) -> T | Work[T]: ...
    def issue(self, make: Callable[[Binding], Task[T]], timeout: float | None, async_op: bool) -> T | Work[T]:
        """Makes a task, and runs it when its turn comes."""
        bound = self.enter()
        task = make(bound)
        started = monotonic()
        deadline = self.deadline(timeout, started)
        body, around = task.body, getattr(self._in_thread, "around", None)
        if around is not None:
            body = partial(_run_inside, around, task.body)

        def begin(operation: int) -> Callable[[], T]:
            entry = self.recorder.issue(bound.name, operation, task.signature, bound.mesh.generation, bound.first_rank)

            def run() -> T:
                entry.begin()
                try:
                    result = bound.engine.attempt(CollectiveCall(operation, task.signature, started, deadline), body)
                except BaseException as error:
                    entry.end(error)
                    self.tell_abort(error)
                    raise
                entry.end()
                return result

            return run

        try:
            return bound.lane.submit(begin) if async_op else bound.lane.run(begin, deadline)
        except ConcurrentUse as error:
            bound.engine.abort(error.operation, error)
            raise

    def tell_abort(self, error: BaseException) -> None:
        """Calls `on_abort` if the generation has failed, after the other members were told."""
        if self.on_abort is not None and self.bound.mesh.fault.failed:
            self.on_abort(error)


def _digest(peers: Sequence[Peer], members: Sequence[int]) -> str:
    """Returns a digest of a list of members, 16 hexadecimal digits."""
    ids = " ".join(str(peers[member].rank) for member in members)
    return hashlib.sha256(ids.encode()).hexdigest()[:16]


def _run_inside(around: Around, body: Callable[[CollectiveCall], T], call: CollectiveCall) -> T:
    found: T = around(partial(body, call), call.deadline)
    return found


def labelled(label: str) -> str:
    """Returns a caller's label in the form that signatures contain.

    Raises UnsupportedOp unless it is 1 to 40 letters, digits, underscores and dashes.
    """
    if label and not _LABEL.fullmatch(label):
        raise UnsupportedOp(f"a label is 1 to 40 letters, digits, underscores and dashes, not {label!r:.60}")
    return f" label={label}" if label else ""
