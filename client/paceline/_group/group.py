"""The group that users hold: collectives, messages between two ranks, and parts, which are groups too."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline._base.activity import FlightRecorder, MemberCounters
from paceline._base.arrays import Array, Signature, as_array, check_writable, native
from paceline._base.work import Work
from paceline._collectives.carried_tasks import carried_task
from paceline._collectives.choose import choose as choose_by_rules
from paceline._collectives.tasks import Chooser
from paceline._group.collective_calls import Collectives
from paceline._group.group_core import Binding, labelled
from paceline._links.base import MAX_GROUP_NAME, Mesh, Peer
from paceline._links.submesh import SubMesh
from paceline.config import Config
from paceline.engines import MAX_CONTACT_BYTES, DataEngine, EngineFailed, EngineTimeout, OnDevice, Ticket
from paceline.engines._catalogue import make_engine
from paceline.errors import (
    InvalidRank,
    InvalidWorldSize,
    LimitExceeded,
    LinkUnavailable,
    SettingsMismatch,
    UnsupportedOp,
)

Rule: TypeAlias = Callable[[Sequence[Peer], int], list[int]]
"""Maps all members and the own rank to the ranks of the members of a part, in order."""

_NAME = re.compile(r"[A-Za-z0-9_]{1,40}")


class Group(Collectives):
    """The members of one generation, or a part of them.

    All members must call the same collectives in the same order. A collective returns its result in a new array, or
    in `out`, and never changes its argument; `out` may be the argument itself. With `async_op=True` it returns a
    `Work` at once, copies nothing, and neither the argument nor `out` may be changed before `Work.wait` has returned.
    A timeout is in seconds and counts from the call; the default is `Config.step_timeout`. A collective that fails
    anywhere ends the generation. All members get the same error: one that had already finished gets it in its next
    call, and every later call raises it again.

    The first thread that calls a collective of a group owns them. While that thread lives and has not called
    `hand_over`, calls from another thread raise `ConcurrentUse`, because their order could differ between ranks. Groups
    never wait for each other: give each thread a part of its own, `group.subgroup(range(group.size), name="prefetch")`.
    Any thread may send and receive messages.

    Args:
        mesh: this member's links.
        config: timeouts.
        choose: picks schedules; must be the same function on all ranks.
        name: name of a part of a view; "" for the view.
        label: text on which the members of a part must agree, for signatures.
        recorder: remembers operations; if None, the group makes its own.
        counters: counts what this member does; if None, the group makes its own.

    Attributes:
        choose: picks schedules; may be set, to the same on all ranks, while no collective is under way.
        recorder: the last 1,000 operations of this member, in this group and its parts.
        counters: what this member has counted, in this group and its parts.
        on_abort: called with the error when the generation has failed, in the thread that raises it.
        parent: the group that this one is a part of; None for the view.
    """

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
        super().__init__(mesh, config, choose=choose, name=name, label=label, recorder=recorder, counters=counters)
        self.parent: Group | None = None
        self._rule: Rule | None = None
        self._name = name  # unique within the parent
        self._parts: set[Group] = set()  # those that are not closed
        self._splits = 0

    def open_engine(self) -> DataEngine | None:
        """Begins to open the engine of this generation, if it is not open; a collective then, else nothing is sent.

        Returns:
            The engine; None if links carry gradients, or there is no other member.

        Raises:
            LinkUnavailable: the engine's package is missing, or it cannot be opened; the text says why.
            UnsupportedOp: the engine does not give all ranks the same bits.
            LimitExceeded: a member's contact is too long.
            SettingsMismatch: members name different engines.
            PacelineError: the generation has failed.
        """
        bound = self._enter()
        if bound.carrier is not None or self.engine_name == "links" or self.size == 1:
            return bound.carrier
        if bound.mesh.encrypted:
            text = f"the engine {self.engine_name!r} does not encrypt, and the job uses TLS: name no engine"
            raise LinkUnavailable(text)
        engine = make_engine(self.engine_name)
        if not engine.traits.same_bits:
            raise UnsupportedOp(f"the engine {engine.name!r}: training needs the same bits at all ranks (I5)")
        engine.open(self.rank, self.members, self._config.failure_timeout)
        bound.mesh.fault.on_failure(engine.abort)
        bound.carrier = engine
        try:
            mine = engine.contact(monotonic() + self._config.call_timeout)
        except (EngineFailed, EngineTimeout) as error:
            bound.mesh.fault.check()
            raise LinkUnavailable(f"the engine {engine.name!r} did not open: {error}") from error
        told = self.all_gather_object([engine.name, mine])
        names, contacts = zip(*told, strict=True)
        if odd := tuple(rank for rank, name in enumerate(names) if name != names[0]):
            text = f"{self.members[odd[0]]} names the engine {names[odd[0]]!r}, and {self.members[0]} {names[0]!r}"
            raise SettingsMismatch(text, ranks=tuple(self.members[rank].rank for rank in odd))
        for member, contact in zip(self.members, contacts, strict=True):
            if not isinstance(contact, bytes) or len(contact) > MAX_CONTACT_BYTES:
                text = f"{member} tells no contact of the engine {engine.name!r}: bytes, at most {MAX_CONTACT_BYTES}"
                raise LimitExceeded(text, ranks=(member.rank,))
        engine.connect(contacts)
        return engine

    def check_renewable(self) -> None:
        """Checks that there may be another generation.

        Raises:
            PacelineError: this generation has failed, and its engine cannot be opened again (`DataEngine.reopens`).
        """
        bound = self._bound
        if bound.mesh.fault.failed and bound.carrier is not None and not bound.carrier.reopens():
            raise bound.mesh.fault.error()

    def all_reduce_carried(
        self,
        x: Any,
        tail: Array,
        *,
        divisor: Callable[[], float] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Sums two arrays over all ranks in place: a large one by the engine, after a small one over links.

        Args:
            x: the large one, shape [N], contiguous, of a dtype that the engine can sum: an array, or an `OnDevice`.
            tail: the small one, shape [M], contiguous.
            divisor: as for `all_reduce`, for `x`; only if `x` lies on the CPU.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            `x`.

        Raises:
            PacelineError: as `open_engine` and `all_reduce`.
        """
        return self._carry(
            lambda engine: engine.all_reduce(x), x, tail, divisor=divisor, timeout=timeout, async_op=async_op
        )

    def all_gather_carried(self, x: OnDevice, *, label: str = "") -> Work[Any]:
        """Has the engine gather the parts of all ranks in place, shape [W S]; see `DataEngine.all_gather`.

        Raises:
            PacelineError: as `open_engine` and `all_gather`, whose `label` this is.
        """
        detail = " all_gather" + labelled(label)
        work: Work[Any] = self._carry(lambda engine: engine.all_gather(x), x, np.zeros(1), detail, async_op=True)
        return work

    def reduce_scatter_carried(self, x: OnDevice, *, label: str = "") -> Work[Any]:
        """Has the engine sum over all ranks, shape [W S]; see `DataEngine.reduce_scatter`.

        Raises:
            PacelineError: as `open_engine` and `reduce_scatter`, whose `label` this is.
        """
        detail = " reduce_scatter" + labelled(label)
        work: Work[Any] = self._carry(lambda engine: engine.reduce_scatter(x), x, np.zeros(1), detail, async_op=True)
        return work

    def _carry(
        self,
        start: Callable[[DataEngine], Ticket],
        x: Any,
        tail: Array,
        detail: str = "",
        *,
        divisor: Callable[[], float] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Issues an operation that the engine carries; see `carried_task`."""
        engine, patience = self.open_engine(), self._config.failure_timeout
        assert engine is not None, "this group has no engine"
        return self._issue(
            lambda bound: carried_task(bound.engine, engine, start, x, tail, self.choose, patience, detail, divisor),
            timeout,
            async_op,
        )

    def send(self, x: npt.ArrayLike, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Sends an array to a rank, also to itself; returns when `x` may be changed, perhaps before it is received.

        Messages with one tag from one rank are received in the order of sending.

        Args:
            x: the array.
            dst: rank of the receiver.
            tag: 0 or more; the receiver asks for it.
            timeout: seconds; a timeout does not end the generation.

        Raises:
            InvalidRank: `dst` lies outside the world.
            UnsupportedOp: the dtype cannot be sent.
            OperationTimeout: the receiver accepts no more messages.
            PacelineError: the generation has failed.
        """
        bound = self._enter()
        self._check_rank("dst", dst)
        array, tag = as_array(x), _check_tag(tag)
        detail = f"to={dst} tag={tag}"
        with self._recorded(bound, Signature("send", detail, native(array.dtype), array.shape)):
            bound.mailbox.send(array, dst, tag, self._deadline(timeout, monotonic()))

    def recv(
        self, src: int | None = None, *, tag: int = 0, out: Array | None = None, timeout: float | None = None
    ) -> tuple[Array, int]:
        """Receives the next array with a tag.

        Args:
            src: rank of the sender; None for any.
            tag: 0 or more.
            out: receives the array. A message that does not fit is kept and can be received again.
            timeout: seconds; a timeout loses no message and does not end the generation.

        Returns:
            The array, and the rank that sent it.

        Raises:
            InvalidRank: `src` lies outside the world.
            SizeMismatch: the message has another shape than `out`.
            UnsupportedOp: the message has another dtype than `out`.
            OperationTimeout: no such message came in time.
            PacelineError: the generation has failed, or all possible senders have left.
        """
        bound = self._enter()
        if src is not None:
            self._check_rank("src", src)
        if out is not None:
            check_writable(out)
        tag = _check_tag(tag)
        detail = f"from={'any' if src is None else src} tag={tag}"
        with self._recorded(bound, Signature("recv", detail)):
            return bound.mailbox.recv(src, tag, out, self._deadline(timeout, monotonic()))

    @contextmanager
    def _recorded(self, bound: Binding, signature: Signature) -> Iterator[None]:
        """Records a message; unlike a collective, a message has no number that all ranks share."""
        entry = self.recorder.issue(bound.name, 0, signature.encode(), bound.mesh.generation, bound.first_rank)
        entry.begin()
        try:
            yield
        except BaseException as error:
            entry.end(error)
            self._tell_abort(error)
            raise
        entry.end()

    def subgroup(self, members: Sequence[int], *, name: str = "") -> Group:
        """Makes a part of this group for this generation; in later ones its calls raise `StaleGeneration`.

        Nothing is sent, and only the part's members call this. Members that make several parts of the same members must
        make them in the same order, or name them.

        Args:
            members: ranks in this group, in any order; duplicates count once.
            name: tells parts of the same members apart: letters, digits and underscores.

        Raises:
            InvalidWorldSize: there are no members.
            InvalidRank: a member lies outside the group, or this member is not among them.
        """
        bound = self._enter(calls=False)
        members = list(members)
        if not members:
            raise InvalidWorldSize("a group needs at least 1 member, not 0")
        for member in members:
            self._check_rank("member", member)
        chosen = sorted({int(member) for member in members})
        if self.rank not in chosen:
            raise InvalidRank(f"rank {self.rank} is not among the members {chosen} of the group that it asks for")
        if name and not _NAME.fullmatch(name):
            raise UnsupportedOp(f"a group's name is made of 1 to 40 letters, digits and underscores, not {name!r}")
        digest = _digest(bound.mesh.peers, chosen)
        with self._lock:
            key = f"{digest}-{name}"
            bound.parts[key] += 1
            full = f"{key}-{bound.parts[key]}"
        return self._part(bound, chosen, full, full)

    def split(self, color: Callable[[Peer], Any], key: Callable[[Peer], Any] | None = None) -> Group:
        """Makes the part of all members with this member's color. It lasts: each new view is split by the same rule.

        All members must make these calls in the same order, with rules that give the same answers everywhere, because
        nothing is sent.

        Args:
            color: maps a member (`rank` in the view, `host`, ...) to a value that can be compared for equality.
            key: maps a member to a sort key for the part; members with equal keys, or without `key`, sort by rank.

        Example:
            pairs = group.split(color=lambda member: member.rank // 2)
        """

        def rule(members: Sequence[Peer], me: int) -> list[int]:
            mine = color(members[me])
            same = [rank for rank, member in enumerate(members) if color(member) == mine]
            return same if key is None else sorted(same, key=lambda rank: key(members[rank]))

        bound = self._enter(calls=False)
        with self._lock:
            self._splits += 1
            name = f"split{self._splits}"
        part = self._part(bound, rule(bound.mesh.peers, self.rank), name, "")
        part._rule = rule
        return part

    def split_by_host(self) -> Group:
        """Makes a lasting part of the members on this member's host."""
        return self.split(color=lambda member: member.host)

    def close(self, timeout: float = 5.0, *, drain: float | None = None) -> None:
        """Ends queued operations, then closes the links, so that the others see this member leave. Idempotent.

        Closing a part closes only that part's links. A part that is not closed lives as long as the whole group.

        Args:
            timeout: seconds for queued operations to end.
            drain: seconds for the others to receive what was sent to them; None for `timeout`.
        """
        now = monotonic()
        self._end_lanes(now + timeout)
        self._close_links(now + (timeout if drain is None else drain))

    def _end_lanes(self, deadline: float) -> None:
        for part in list(self._parts):
            part._end_lanes(deadline)
        self._bound.end_lane(deadline)

    def _close_links(self, deadline: float) -> None:
        for part in list(self._parts):
            part._close_links(deadline)
        self._bound.mesh.close(deadline)
        self._forget()

    def _forget(self) -> None:
        if self.parent is not None:
            with self.parent._lock:
                self.parent._parts.discard(self)

    def flush(self) -> None:
        """Waits until no collective is running or queued, on this group and its parts."""
        for part in list(self._parts):
            part.flush()
        self._bound.lane.flush()

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
            group._bound.abandon()
            group._label = label
            group._bound = Binding(its_mesh, group._bound.name, label, self.recorder, self.counters)

    def _plan(self, mesh: Mesh) -> list[tuple[Group, Mesh, str]]:
        """Returns the lasting parts, with their links and labels in the generation of a mesh."""
        plan: list[tuple[Group, Mesh, str]] = []
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
        self._bound.abandon()
        self._forget()

    def _part(self, bound: Binding, members: list[int], name: str, label: str) -> Group:
        mesh = SubMesh(bound.mesh, members, name)
        label = label or f"{name}-{_digest(bound.mesh.peers, members)}"
        full = f"{bound.name}/{name}" if bound.name else name
        if len(full) > MAX_GROUP_NAME:
            raise LimitExceeded(f"too many nested groups: their names together may have {MAX_GROUP_NAME} bytes")
        part = Group(
            mesh,
            self._config,
            choose=self.choose,
            name=full,
            label=label,
            recorder=self.recorder,
            counters=self.counters,
        )
        part.parent = self
        part._name = name
        part.on_abort = self.on_abort
        part._owner = self._owner
        with self._lock:
            self._parts.add(part)
        return part


def _digest(peers: Sequence[Peer], members: Sequence[int]) -> str:
    """Returns a digest of a list of members, 16 hexadecimal digits."""
    ids = " ".join(str(peers[member].rank) for member in members)
    return hashlib.sha256(ids.encode()).hexdigest()[:16]


def _check_tag(tag: object) -> int:
    if isinstance(tag, bool) or not isinstance(tag, int | np.integer) or not 0 <= tag < 1 << 63:
        raise UnsupportedOp(f"a tag is a whole number from 0 to 2**63 - 1, not {tag!r}")
    return int(tag)
