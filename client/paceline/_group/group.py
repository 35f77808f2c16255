"""The group that users hold: collectives, messages between two ranks, and parts, which are groups too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline._base.arrays import Array, Signature, as_array, check_writable, native
from paceline._collectives.choose import choose as choose_by_rules
from paceline._collectives.tasks import Chooser
from paceline._group.collective_calls import Collectives
from paceline._group.group_core import Binding
from paceline._group.wrapper_calls import WrapperCore
from paceline._links.base import Mesh, Peer
from paceline.config import Config
from paceline.errors import (
    InvalidRank,
    InvalidWorldSize,
    UnsupportedOp,
)

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
    """

    _core: WrapperCore

    def __init__(self, mesh: Mesh, config: Config, *, choose: Chooser = choose_by_rules) -> None:
        super().__init__(WrapperCore(mesh, config, choose=choose))

    @classmethod
    def _of(cls, core: WrapperCore) -> Group:
        part = cls.__new__(cls)
        part._core = core
        return part

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
        bound = self._core.enter()
        self._core.check_rank("dst", dst)
        array, tag = as_array(x), _check_tag(tag)
        detail = f"to={dst} tag={tag}"
        with self._recorded(bound, Signature("send", detail, native(array.dtype), array.shape)):
            bound.mailbox.send(array, dst, tag, self._core.deadline(timeout, monotonic()))

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
        bound = self._core.enter()
        if src is not None:
            self._core.check_rank("src", src)
        if out is not None:
            check_writable(out)
        tag = _check_tag(tag)
        detail = f"from={'any' if src is None else src} tag={tag}"
        with self._recorded(bound, Signature("recv", detail)):
            return bound.mailbox.recv(src, tag, out, self._core.deadline(timeout, monotonic()))

    @contextmanager
    def _recorded(self, bound: Binding, signature: Signature) -> Iterator[None]:
        """Records a message; unlike a collective, a message has no number that all ranks share."""
        entry = self._core.recorder.issue(bound.name, 0, signature.encode(), bound.mesh.generation, bound.first_rank)
        entry.begin()
        try:
            yield
        except BaseException as error:
            entry.end(error)
            self._core.tell_abort(error)
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
        bound = self._core.enter(calls=False)
        members = list(members)
        if not members:
            raise InvalidWorldSize("a group needs at least 1 member, not 0")
        for member in members:
            self._core.check_rank("member", member)
        chosen = sorted({int(member) for member in members})
        if self.rank not in chosen:
            raise InvalidRank(f"rank {self.rank} is not among the members {chosen} of the group that it asks for")
        if name and not _NAME.fullmatch(name):
            raise UnsupportedOp(f"a group's name is made of 1 to 40 letters, digits and underscores, not {name!r}")
        return self._of(self._core.subgroup(bound, chosen, name))

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

        return self._of(self._core.split(rule))

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
        self._core.close(timeout, drain)


def _check_tag(tag: object) -> int:
    if isinstance(tag, bool) or not isinstance(tag, int | np.integer) or not 0 <= tag < 1 << 63:
        raise UnsupportedOp(f"a tag is a whole number from 0 to 2**63 - 1, not {tag!r}")
    return int(tag)
