"""The transport of gradients: the interface that stores and moves them, and its implementations on the host.

Gradients on a device need a transport with buckets of its own, and code that reads parameters outside of a step must
support the device too: `TorchParameter`, the comparison of members (`_agreement`), clipping. torch tensors on the CPU
are seen as NumPy arrays over the same memory, so `HostTransport` serves both frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from paceline._base.sum_order import Node, SumOrder
from paceline._base.work import Work
from paceline._group import Group
from paceline._group.group_core import Piggyback
from paceline._parallel._buckets import Bucket
from paceline._parallel._low_rank import LowRankBucket, shrinks
from paceline._parallel._parameter import Parameter
from paceline.compression import Bf16, Codec

NO_FIXED_ORDER = (
    "gradients of microbatches are summed in one fixed order, which neither compression nor an engine keeps: leave out "
    "compression= and --engine, or the microbatches of the sampler"
)
"""The text of the error that refuses microbatches with compression or an engine."""


class GradientBucket(Protocol):
    """The home of some parameters' gradients: memory that is sent as one message.

    From `reclaim` on, `Parameter._home` of each of its parameters is a view of this memory.
    """

    @property
    def nbytes(self) -> int:
        """Size of the message, in bytes."""

    @property
    def divisible(self) -> bool:
        """True if the sums may be divided by the total weight while they are reduced."""

    @property
    def piggyback(self) -> NDArray[Any]:
        """The elements that carry the step word of `session.steps`; only the first bucket has some."""

    @property
    def total(self) -> NDArray[Any]:
        """The weight, shape [1]: before the reduction this rank's, after it the sum over all ranks."""

    def add_leaf(self, order: SumOrder) -> None:
        """Adds the packed gradients to others, as a leaf of a tree; see `NodeSums.add_leaf`."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the tree whose sums it holds."""

    def keep_nodes(self, nodes: Sequence[Node], *, spare: int) -> None:
        """Forgets the sums of all nodes but these; keeps memory for `spare` others."""

    def pack(self, weight: float, *, alone: bool) -> None:
        """Completes the message with this rank's weight; until `unpack` its gradients must not be written.

        The gradients are already multiplied by the weight. A rank that is `alone` sends nothing.
        """

    def unpack(self, total: float, *, divided: bool) -> None:
        """Divides the reduced sums, and gives the means to the parameters; see `Bucket.unpack`."""

    def vacate(self) -> None:
        """Stops using this memory after a failed step, until `reclaim` or `renew`: a collective may still read it."""

    def reclaim(self) -> None:
        """Uses this memory again, and removes what the failed step left in it."""

    def renew(self) -> None:
        """Replaces this memory, because the failed step's collective still uses it."""

    def commit(self) -> None:
        """Makes the errors kept for feedback final."""

    def new_generation(self) -> None:
        """Resets whatever must be the same on all ranks, because a new generation has other ranks."""


class GradientTransport(Protocol):
    """Makes buckets and sums them over the ranks."""

    @property
    def size(self) -> int:
        """W, the number of ranks."""

    @property
    def ban_reason(self) -> str:
        """The reason why no collective may be called now; empty if collectives may be called."""

    @property
    def tree_refusal(self) -> str:
        """The reason why it cannot sum in a tree; empty if it can."""

    def new_bucket(self, parameters: Mapping[str, Parameter], *, room: int) -> Any:
        """Makes a `GradientBucket` for these parameters, all of one dtype, in their order.

        `room` is the number of elements for a piggyback.
        """

    def take_piggyback(self) -> Piggyback | None:
        """Returns, once, the numbers that wait to travel in a bucket; either all ranks have some or none has."""

    def start(self, bucket: Any, *, divisor: Callable[[], float] | None, in_background: bool) -> Work[Any] | None:
        """Starts to sum a packed bucket over the ranks, in place. All ranks start their buckets in the same order.

        `divisor` returns the number to divide the sums by; called once all buckets before are complete. Unless
        `in_background`, the sums are complete on return.
        """

    def complete(self, bucket: Any) -> None:
        """Finishes a bucket after the work of `start`, in the caller's thread; a collective."""


class GroupTransport:
    """The base class of a group's transports."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @property
    def size(self) -> int:
        """See `GradientTransport`."""
        return self._group.size

    @property
    def ban_reason(self) -> str:
        """See `GradientTransport`."""
        return self._group._core.ban_reason

    def take_piggyback(self) -> Piggyback | None:
        """See `GradientTransport`."""
        return self._group._core.take_piggyback()


class HostTransport(GroupTransport):
    """Keeps gradients in NumPy arrays, which a group moves.

    Args:
        codec: compresses gradients on the wire, but not weights and flags; None for no compression: even bfloat16 is
            then sent with all bits.
        low_rank: number of directions of each matrix that travel (`PowerSGD`); 0 for whole matrices.
        feedback: with compression, adds the rounding errors of a pass to the gradients of the next.
    """

    def __init__(self, group: Group, codec: Codec | None = None, low_rank: int = 0, *, feedback: bool = False) -> None:
        super().__init__(group)
        self._codec = codec
        self._low_rank = low_rank
        self._feedback = feedback

    @property
    def tree_refusal(self) -> str:
        """See `GradientTransport`: compression rounds the sums of each rank."""
        return NO_FIXED_ORDER if self._codec is not None or self._low_rank else ""

    def new_bucket(self, parameters: Mapping[str, Parameter], *, room: int) -> Bucket:
        """See `GradientTransport`."""
        rank, empty = self._low_rank, self._group.empty
        if rank and any(shrinks(parameter, rank) for parameter in parameters.values()):
            return LowRankBucket(parameters, rank, room, empty, self._feedback)
        bucket = Bucket(parameters, room, empty, self._feedback and not rank)
        bucket.codec = Bf16() if self._codec is None and bucket.dtype.name == "bfloat16" else self._codec
        return bucket

    def start(self, bucket: Bucket, *, divisor: Callable[[], float] | None, in_background: bool) -> Work[Any] | None:
        """See `GradientTransport`."""
        terms = [term.flat for term in bucket.terms]
        work = self._sum(bucket, terms, bucket.flat, divisor, in_background=in_background)
        return work if in_background else None

    def _sum(
        self,
        bucket: Any,
        terms: Sequence[NDArray[Any]],
        out: NDArray[Any],
        divisor: Callable[[], float] | None,
        *,
        in_background: bool,
    ) -> Any:
        """Sums `out` over the ranks in place; in a tree, `terms` into `out`."""
        order, async_op = bucket.order, in_background
        if order.leaves:
            return self._group._core.all_reduce_tree(
                terms, leaves=order.leaves, out=out, nodes=order.nodes, divisor=divisor, async_op=async_op
            )
        how: Any = {"out": out, "async_op": async_op}  # mypy takes either overload then
        if bucket.codec is None:
            return self._group.all_reduce(out, op="sum", divisor=divisor, **how)
        return self._group.all_reduce_compressed(out, bucket.codec, exact=bucket.exact, memory=bucket.memory, **how)

    def complete(self, bucket: Bucket) -> None:
        """Runs the second reduction of a `LowRankBucket`; does nothing for other buckets."""
        if isinstance(bucket, LowRankBucket) and bucket.compresses:
            second = bucket.second()
            self._group.all_reduce(second, out=second)


class EngineTransport(HostTransport):
    """Keeps gradients in NumPy arrays, whose sums the group's engine carries.

    The end of each bucket, which is not gradients (the weight, the flags, the step word), still travels over links, and
    before them. Nothing is compressed.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._carrying = group

    @property
    def tree_refusal(self) -> str:
        """See `GradientTransport`: an engine sums in an order of its own."""
        return NO_FIXED_ORDER

    def new_bucket(self, parameters: Mapping[str, Parameter], *, room: int) -> Bucket:
        """See `GradientTransport`."""
        return Bucket(parameters, room, self._group.empty)

    def start(self, bucket: Bucket, *, divisor: Callable[[], float] | None, in_background: bool) -> Work[Any] | None:
        """See `GradientTransport`."""
        gradients, tail = bucket.flat[: -bucket.exact], bucket.flat[-bucket.exact :]
        work = self._carrying._core.all_reduce_carried(gradients, tail, divisor=divisor, async_op=in_background)
        return work if in_background else None
