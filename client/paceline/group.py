"""The group: the members of a generation, as the object that users call collectives on.

It owns what is checked at the call, before anything is sent, and what a collective means in terms of arrays. Programs
are made in `collectives`, bytes are moved by its engine, order is kept by the lane in `work.py`.

Letters: N elements, W world size.
"""

from __future__ import annotations

from time import monotonic
from typing import Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt

from paceline.arrays import Array, as_array
from paceline.collectives.choose import Chooser, choose_all_reduce
from paceline.collectives.engine import Call, Engine
from paceline.collectives.mailbox import Mailbox
from paceline.collectives.tasks import Task, all_reduce_task, barrier_task, broadcast_task
from paceline.collectives.trees import Fusion
from paceline.config import Config, checked_timeout
from paceline.errors import InvalidRank, UnsupportedOp
from paceline.links.base import Mesh
from paceline.work import Lane, Progress, Work

__all__ = ["Group"]

T = TypeVar("T")


class Group:
    """The members of one generation. Thread-safe; all ranks must call the same collectives in the same order.

    A collective returns its result in a new array, or in `out`, and never changes its argument; `out` may be the
    argument itself. With `async_op=True` it returns a `Work` at once, copies nothing, and neither the argument nor
    `out` may be changed before `Work.wait` has returned. A timeout is in seconds and counts from the call; the default
    is `Config.step_timeout`. A collective that fails anywhere fails everywhere, with the same error, and ends the
    generation: every later call raises it again.

    Args:
        mesh: this member's links.
        config: timeouts.
        choose: picks the schedule of an all_reduce; must be the same function on all ranks.
    """

    def __init__(self, mesh: Mesh, config: Config, *, choose: Chooser = choose_all_reduce) -> None:
        self._mesh = mesh
        self._config = config
        self._choose = choose
        self._engine = Engine(mesh)
        self._mailbox = Mailbox(mesh)
        self._lane = Lane(self._engine.abort)

    @property
    def rank(self) -> int:
        """This member's rank."""
        return self._mesh.rank

    @property
    def size(self) -> int:
        """World size W."""
        return self._mesh.size

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self._mesh.size)

    @property
    def generation(self) -> int:
        """The generation whose members these are."""
        return self._mesh.generation

    @property
    def bytes_sent(self) -> int:
        """Bytes that this member has sent to the others in this generation."""
        return self._mesh.bytes_sent

    def progress(self) -> Progress:
        """Where this member is."""
        return self._lane.progress

    @overload
    def all_reduce(
        self,
        x: npt.ArrayLike,
        *,
        op: str = ...,
        out: Array | None = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Array: ...
    @overload
    def all_reduce(
        self,
        x: npt.ArrayLike,
        *,
        op: str = ...,
        out: Array | None = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Array]: ...
    def all_reduce(
        self,
        x: npt.ArrayLike,
        *,
        op: str = "sum",
        out: Array | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array]:
        """Combines the arrays of all ranks element by element; every rank gets the same bits.

        Args:
            x: this rank's array, any shape; dtype and shape must agree.
            op: sum, mean, prod, min, max, band, bor or bxor. A mean is the sum divided once by W.
            out: where to put the result; may be `x`.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            An array of the shape and dtype of `x`, in native byte order.

        Raises:
            UnsupportedOp: the dtype does not have the op, or cannot travel.
            SizeMismatch: `out` has another shape.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        self._enter()
        return self._issue(all_reduce_task(self._engine, as_array(x), op, out, self._choose), timeout, async_op)

    @overload
    def broadcast(
        self,
        x: npt.ArrayLike | None,
        *,
        root: int = ...,
        out: Array | None = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Array: ...
    @overload
    def broadcast(
        self,
        x: npt.ArrayLike | None,
        *,
        root: int = ...,
        out: Array | None = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Array]: ...
    def broadcast(
        self,
        x: npt.ArrayLike | None,
        *,
        root: int = 0,
        out: Array | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array]:
        """Gives the root's array to all ranks.

        Args:
            x: the root's array. Elsewhere only its dtype and shape count, which must agree; None to take them from
                the root.
            root: rank of the root; must agree.
            out: where to put the result; may be `x`.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            An array like the root's, in native byte order; a copy at the root too, unless `out` is `x`.

        Raises:
            InvalidRank: `root` lies outside the world.
            UnsupportedOp: the dtype cannot travel, or the root gave no array.
            SizeMismatch: `out` has another shape.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        self._enter()
        self._check_rank("root", root)
        array = None if x is None else as_array(x)
        return self._issue(broadcast_task(self._engine, array, root, out), timeout, async_op)

    def barrier(self, timeout: float | None = None) -> None:
        """Returns when all ranks have called it.

        Raises:
            PacelineError: the generation has failed.
        """
        self._enter()
        self._issue(barrier_task(self._engine), timeout, async_op=False)

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
        self._enter()
        self._check_rank("dst", dst)
        self._mailbox.send(as_array(x), dst, _check_tag(tag), self._deadline(timeout))

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
        self._enter()
        if src is not None:
            self._check_rank("src", src)
        return self._mailbox.recv(src, _check_tag(tag), out, self._deadline(timeout))

    def average(self, tree: T, *, timeout: float | None = None) -> T:
        """The mean over all ranks of every array in nested dicts, lists and tuples; one all_reduce for each dtype.

        Args:
            tree: arrays of floats or complex numbers; paths, shapes and dtypes must agree.
            timeout: seconds for each all_reduce.

        Returns:
            A tree of the same form with new arrays.

        Raises:
            UnsupportedOp: a dtype has no mean.
            PacelineError: the generation has failed.
        """
        self._enter()
        fusion = Fusion(tree)
        for vector in fusion.vectors:
            task = all_reduce_task(self._engine, vector, "mean", vector, self._choose, f" tree={fusion.digest}")
            self._issue(task, timeout, async_op=False)
        filled: T = fusion.rebuild(fusion.vectors)
        return filled

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
        """A new array that links can use without a copy; its contents are undefined."""
        return np.empty(shape, dtype)

    def close(self, timeout: float = 5.0, *, drain: float | None = None) -> None:
        """Ends what is in line, then closes the links: the others see that this member left. Idempotent.

        Args:
            timeout: seconds for what is in line to end.
            drain: seconds for the others to take in what was sent to them; as `timeout` if left out.
        """
        self._lane.close(monotonic() + timeout)
        self._mesh.close(monotonic() + (timeout if drain is None else drain))

    def _enter(self) -> None:
        """Every public call passes here first: refuses a generation that has failed."""
        self._mesh.fault.check()

    def _deadline(self, timeout: float | None) -> float:
        return monotonic() + checked_timeout(self._config.step_timeout if timeout is None else timeout)

    def _check_rank(self, what: str, rank: object) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise InvalidRank(f"{what} {rank!r} lies outside the world of {self.size}, at rank {self.rank}")

    @overload
    def _issue(self, task: Task[T], timeout: float | None, async_op: Literal[False]) -> T: ...
    @overload
    def _issue(self, task: Task[T], timeout: float | None, async_op: bool) -> T | Work[T]: ...
    def _issue(self, task: Task[T], timeout: float | None, async_op: bool) -> T | Work[T]:
        started, deadline = monotonic(), self._deadline(timeout)

        def run(operation: int) -> T:
            return self._engine.attempt(Call(operation, task.signature, started, deadline), task.body)

        return self._lane.submit(run) if async_op else self._lane.run(run, deadline)


def _check_tag(tag: object) -> int:
    if not isinstance(tag, int) or not 0 <= tag < 1 << 63:
        raise UnsupportedOp(f"a tag is a whole number from 0 to 2**63 - 1, not {tag!r}")
    return tag
