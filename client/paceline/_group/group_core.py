"""The common part of all calls of a group: its members, its binding to one generation, and how calls are issued."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from paceline._base.activity import FlightRecorder, MemberCounters
from paceline._base.arrays import Array
from paceline._base.sum_order import EVEN, SumOrder
from paceline._base.work import Lane, Progress, Work
from paceline._collectives.choose import choose as choose_by_rules
from paceline._collectives.engine import CollectiveCall, Engine
from paceline._collectives.mailbox import Mailbox
from paceline._collectives.tasks import Chooser, Task, barrier_task
from paceline._links.base import Mesh, Peer
from paceline.config import Config, checked_timeout
from paceline.engines import DataEngine
from paceline.errors import ConcurrentUse, InvalidRank, PacelineError, StaleGeneration, StepOrderError, UnsupportedOp

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
    """Members of a group, and the path of every operation: see `Group`."""

    def __init__(
        self,
        mesh: Mesh,
        config: Config,
        *,
        choose: Chooser = choose_by_rules,
        name: str = "",
        label: str = "",
        recorder: FlightRecorder | None = None,
        counters: MemberCounters | None = None,
    ) -> None:
        self._config = config
        self._step_timeout = checked_timeout(config.step_timeout)
        self.choose = choose
        self._label = label
        self._lock = threading.Lock()
        self.recorder = recorder if recorder is not None else FlightRecorder()
        self.on_abort: Callable[[BaseException], None] | None = None
        self._owner = _OwnerState()
        self._in_thread = threading.local()
        self.counters = counters if counters is not None else MemberCounters()
        self._bound = Binding(mesh, name, label, self.recorder, self.counters)

    def __repr__(self) -> str:
        bound = getattr(self, "_bound", None)  # None while the group is being made
        if bound is None or not bound.mesh.size:
            return "<Group in no view>"
        mesh, part = bound.mesh, ""
        if bound.name:
            first = ", ".join(str(peer.rank) for peer in mesh.peers[:8])
            part = f" (ranks {first}{', ...' if mesh.size > 8 else ''} of the view)"
        stale = ", stale" if bound.stale else ""
        return f"<Group rank {mesh.rank} of {mesh.size}{part}, generation {mesh.generation}{stale}>"

    @property
    def rank(self) -> int:
        """This member's rank in the group."""
        return self._bound.mesh.rank

    @property
    def size(self) -> int:
        """World size W: number of the group's members."""
        return self._bound.mesh.size

    @property
    def ranks(self) -> Sequence[int]:
        """Each member's rank in the view."""
        return tuple(peer.rank for peer in self._bound.mesh.peers)

    @property
    def members(self) -> Sequence[Peer]:
        """The members in the order of their ranks in the group."""
        return self._bound.mesh.peers

    @property
    def mesh(self) -> Mesh:
        """This member's links in the current generation; for tests, tools and the group's owner."""
        return self._bound.mesh

    @property
    def generation(self) -> int:
        """The generation of the group's members."""
        return self._bound.mesh.generation

    @property
    def bytes_sent(self) -> int:
        """Bytes that this member has sent to the others in this generation, in all groups."""
        return self._bound.mesh.bytes_sent

    @property
    def has_same_state(self) -> bool:
        """True if all members are known to hold the same state, because `session.steps` has checked it."""
        return self._owner.same_state_in == self.generation

    def confirm_same_state(self) -> None:
        """Notes that all members of this generation hold the same state. For the group's owner."""
        self._owner.same_state_in = self.generation

    @property
    def is_elastic(self) -> bool:
        """True if the job lets members come and go: another generation may have more or fewer."""
        return self._owner.most is not None

    @property
    def most_members(self) -> int:
        """The largest number of members that any generation can have."""
        return self.size if self._owner.most is None else self._owner.most

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
        return self._owner.piggyback_taken_in == self.generation

    def take_piggyback(self) -> Piggyback | None:
        """Returns the waiting numbers once, then None."""
        self._owner.piggyback_taken_in = self.generation
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

    def global_rank(self, rank: int) -> int:
        """Returns the rank in the view of the member with this rank in the group.

        Raises:
            InvalidRank: there is no such member.
        """
        self._check_rank("rank", rank)
        return self._bound.mesh.peers[rank].rank

    def group_rank(self, rank: int) -> int | None:
        """Returns the rank in the group of the member with this rank in the view; None if it is not in the group."""
        return next((place for place, peer in enumerate(self._bound.mesh.peers) if peer.rank == rank), None)

    def progress(self) -> Progress:
        """Returns the operation that this member is at."""
        return self._bound.lane.progress

    @overload
    def barrier(self, timeout: float | None = ..., *, async_op: Literal[False] = ...) -> None: ...
    @overload
    def barrier(self, timeout: float | None = ..., *, async_op: Literal[True]) -> Work[None]: ...
    def barrier(self, timeout: float | None = None, *, async_op: bool = False) -> Work[None] | None:
        """Waits until all ranks have called it.

        Args:
            timeout: seconds.
            async_op: return a `Work`, which ends when all ranks have called.

        Raises:
            PacelineError: the generation has failed.
        """
        return self._issue(lambda bound: barrier_task(bound.engine, self.choose), timeout, async_op)

    def hand_over(self, *, to_all: bool = False) -> None:
        """Lets another thread continue with collectives of this group: the next thread that calls one owns them.

        Args:
            to_all: any thread may call collectives at any time in this generation. The caller must ensure that all
                ranks call them in one order.
        """
        self._bound.lane.hand_over(to_all=to_all)

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

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
        """Returns a new array that links can use without a copy; its contents are undefined.

        The array outlives the generation. Without shared memory, or if none is left, it is an ordinary array. A forked
        child shares its memory, instead of having a copy.
        """
        return self._bound.mesh.empty(shape, np.dtype(dtype))

    def _enter(self, *, calls: bool = True) -> Binding:
        """Checks at the start of every public call that the generation is not over; returns the binding to use.

        The group may move on meanwhile. A call that sends nothing passes `calls=False`, and so is never banned.
        """
        bound = self._bound
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
            self._tell_abort(error)
            raise
        return bound

    def _deadline(self, timeout: float | None, started: float) -> float:
        return started + (self._step_timeout if timeout is None else checked_timeout(timeout))

    def _check_rank(self, what: str, rank: object) -> None:
        if not self.size:
            self._enter()  # if the group has no valid view, its error says more than an invalid rank
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 0 <= rank < self.size:
            raise InvalidRank(f"{what} {rank!r} lies outside the world of {self.size}, at rank {self.rank}")

    @overload
    def _issue(self, make: Callable[[Binding], Task[T]], timeout: float | None, async_op: Literal[False]) -> T: ...
    @overload
    def _issue(self, make: Callable[[Binding], Task[T]], timeout: float | None, async_op: bool) -> T | Work[T]: ...
    def _issue(self, make: Callable[[Binding], Task[T]], timeout: float | None, async_op: bool) -> T | Work[T]:
        """Makes a task, and runs it when its turn comes."""
        bound = self._enter()
        task = make(bound)
        started = monotonic()
        deadline = self._deadline(timeout, started)
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
                    self._tell_abort(error)
                    raise
                entry.end()
                return result

            return run

        try:
            return bound.lane.submit(begin) if async_op else bound.lane.run(begin, deadline)
        except ConcurrentUse as error:
            bound.engine.abort(error.operation, error)
            raise

    def _tell_abort(self, error: BaseException) -> None:
        """Calls `on_abort` if the generation has failed, after the other members were told."""
        if self.on_abort is not None and self._bound.mesh.fault.failed:
            self.on_abort(error)


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
