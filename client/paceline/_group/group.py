"""The group that users hold: collectives, messages between two ranks, and its parts, which are groups too."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline._arrays import Array, as_array, check_writable, native
from paceline._collectives.choose import choose as choose_by_rules
from paceline._collectives.tasks import Chooser
from paceline._group.collective_calls import Collectives
from paceline._group.group_core import Binding
from paceline._links.base import MAX_GROUP_NAME, Mesh, Peer
from paceline._links.submesh import SubMesh
from paceline._recorder import FlightRecorder
from paceline._signature import Signature
from paceline.config import Config
from paceline.errors import InvalidRank, InvalidWorldSize, LimitExceeded, UnsupportedOp

__all__ = ["Group"]

Rule: TypeAlias = Callable[[Sequence[Peer], int], list[int]]
"""From all members and the own rank to the ranks of the members of a part, in order."""

_NAME = re.compile(r"[A-Za-z0-9_]{1,40}")


class Group(Collectives):
    """The members of one generation, or a part of them.

    All members must call the same collectives in the same order. A collective returns its result in a new array, or
    in `out`, and never changes its argument; `out` may be the argument itself. With `async_op=True` it returns a
    `Work` at once, copies nothing, and neither the argument nor `out` may be changed before `Work.wait` has returned.
    A timeout is in seconds and counts from the call; the default is `Config.step_timeout`. A collective that fails
    anywhere ends the generation: all its members get the same error, those that had done their part in the next call,
    and every later call raises it again.

    Collectives of one group are one thread's: the first to call any. Those of another thread, while the first lives and
    has not called `hand_over`, are `ConcurrentUse`, for their order need not be the same on all ranks. Groups never
    wait for each other: give each thread a part of its own, `group.subgroup(range(group.size), name="prefetch")`.
    Messages are for any thread.

    Args:
        mesh: this member's links.
        config: timeouts.
        choose: picks schedules; must be the same function on all ranks.
        name: of a part of a view; "" for the view.
        label: what the members of a part must agree on, for signatures.
        recorder: remembers operations; one of its own if None.

    Attributes:
        choose: picks schedules; may be set, to the same on all ranks, while no collective is under way.
        recorder: the last 1,000 operations of this member, in this group and its parts.
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
    ) -> None:
        super().__init__(mesh, config, choose=choose, name=name, label=label, recorder=recorder)
        self.parent: Group | None = None
        self._rule: Rule | None = None
        self._name = name  # within the parent
        self._parts: set[Group] = set()  # until they are closed
        self._splits = 0

    def send(self, x: npt.ArrayLike, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Sends an array to a rank, oneself included; returns when `x` may be changed, perhaps before it is received.

        Messages of one tag from one rank are received in the order of sending.

        Args:
            x: the array.
            dst: rank of the receiver.
            tag: 0 or more; the receiver asks for it.
            timeout: seconds; running out of them voids nothing.

        Raises:
            InvalidRank: `dst` lies outside the world.
            UnsupportedOp: the dtype cannot travel.
            OperationTimeout: the receiver takes in no more.
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
            out: where to put it. A message that does not fit stays, to be received again.
            timeout: seconds; running out of them loses no message and voids nothing.

        Returns:
            The array, and the rank that sent it.

        Raises:
            InvalidRank: `src` lies outside the world.
            SizeMismatch: the message has another shape than `out`.
            UnsupportedOp: the message has another dtype than `out`.
            OperationTimeout: no such message came in time.
            PacelineError: the generation has failed, or whoever could send has left.
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
        """Remembers a message; unlike a collective it has no number that all ranks share."""
        entry = self.recorder.issue(bound.name, 0, signature.encode(), bound.mesh.generation)
        entry.begin()
        try:
            yield
        except BaseException as error:
            entry.end(error)
            self._tell_abort(error)
            raise
        entry.end()

    def subgroup(self, members: Sequence[int], *, name: str = "") -> Group:
        """A part of this group, for this generation; in the next, its calls are `StaleGeneration`.

        Nothing is communicated; only the members call this. Those that make several parts of the same members make them
        in the same order, or name them.

        Args:
            members: ranks in this group, in any order; doubles count once.
            name: tells parts of the same members apart: letters, digits and underscores.

        Raises:
            InvalidWorldSize: no members.
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
        """The part of those members that have the same color as this one. It lasts: the rule is applied to each view.

        All members call this, in the same order of calls, with rules that give the same answers everywhere: nothing is
        communicated.

        Args:
            color: from a member (`rank` in the view, `host`, ...) to anything that can be compared for equality.
            key: from a member to what the part is sorted by; by rank if left out, and where keys are equal.

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
        """The members on this member's host, as a lasting part."""
        return self.split(color=lambda member: member.host)

    def close(self, timeout: float = 5.0, *, drain: float | None = None) -> None:
        """Ends what is in line, then closes the links: the others see that this member left. Idempotent.

        Closing a part closes that part's links alone. A part that is not closed lives as long as the whole group.

        Args:
            timeout: seconds for what is in line to end.
            drain: seconds for the others to take in what was sent to them; as `timeout` if left out.
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
        """Waits until no collective is under way or in line, on parts neither."""
        for part in list(self._parts):
            part.flush()
        self._bound.lane.flush()

    def move(self, mesh: Mesh) -> None:
        """Goes on in the next generation: for whoever owns the group, at a moment when no collective is under way.

        Lasting parts follow, the others are stale from now on.
        """
        plan = self._plan(mesh)  # a rule may raise: nothing has moved then
        for group in [self, *(group for group, *_ in plan)]:
            for part in list(group._parts):
                if part._rule is None:
                    part._expire()
        for group, its_mesh, label in [(self, mesh, self._label), *plan]:
            group._bound.abandon()
            group._label = label
            group._bound = Binding(its_mesh, group._bound.name, label, self.recorder)

    def _plan(self, mesh: Mesh) -> list[tuple[Group, Mesh, str]]:
        """Lasting parts, with their links and labels in the generation of a mesh."""
        plan: list[tuple[Group, Mesh, str]] = []
        for part in list(self._parts):
            if part._rule is not None:
                members = part._rule(mesh.peers, mesh.rank)
                of_part = SubMesh(mesh, members, part._name)
                plan.append((part, of_part, f"{part._name}-{_digest(mesh.peers, members)}"))
                plan += part._plan(of_part)
        return plan

    def _expire(self) -> None:
        """This part and its own were for a generation that is over."""
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
        part = Group(mesh, self._config, choose=self.choose, name=full, label=label, recorder=self.recorder)
        part.parent = self
        part._name = name
        part.on_abort = self.on_abort
        part._owner = self._owner
        with self._lock:
            self._parts.add(part)
        return part


def _digest(peers: Sequence[Peer], members: Sequence[int]) -> str:
    """16 hexadecimal digits for a list of members."""
    ids = " ".join(str(peers[member].rank) for member in members)
    return hashlib.sha256(ids.encode()).hexdigest()[:16]


def _check_tag(tag: object) -> int:
    if isinstance(tag, bool) or not isinstance(tag, int | np.integer) or not 0 <= tag < 1 << 63:
        raise UnsupportedOp(f"a tag is a whole number from 0 to 2**63 - 1, not {tag!r}")
    return int(tag)
