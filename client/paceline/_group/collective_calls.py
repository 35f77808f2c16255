"""The collectives that users call on a group: their arguments, and the task that each call makes.

The tasks themselves are in `_collectives/tasks.py` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypeVar, Unpack, overload

import numpy.typing as npt

from paceline._base.arrays import Array, as_array
from paceline._base.sum_order import Node
from paceline._base.work import Work
from paceline._collectives.compressed_tasks import all_reduce_compressed_task
from paceline._collectives.gather_tasks import all_gather_task, all_to_all_task, gather_task
from paceline._collectives.tasks import (
    broadcast_task,
    reduce_task,
    reducing_task,
    scatter_task,
    shift_task,
)
from paceline._collectives.trees import Fusion
from paceline._group.call_options import (
    AllGatherOptions,
    AllReduceOptions,
    AllToAllOptions,
    CompressedOptions,
    GatherOptions,
    Op,
    Order,
    ReduceOptions,
    RootedOptions,
    ShiftOptions,
)
from paceline._group.group_core import labelled
from paceline._group.object_calls import ObjectCollectives
from paceline.compression import Codec, Memory, codec_of
from paceline.errors import InvalidRank

T = TypeVar("T")

_Nodes: TypeAlias = tuple[tuple[Node, ...], ...] | None


class Collectives(ObjectCollectives):
    """The collectives of a `Group`.

    `op` is sum, mean, prod, min, max, band, bor or bxor; torch's name avg is another name of mean. Integers keep their
    type, and have no mean. A mean is the sum divided once by W; it overflows only where the mean itself does, and
    rounds values near the smallest normal number of the dtype. Every rank that gets an element gets the same bits.

    `order="rank"` sums in rank order, ((x_0 + x_1) + x_2) + ..., whatever the size: the bits depend only on the ranks'
    values. float16 and bfloat16 are then added up in float32 and rounded once. `order="tree"` does the same, but in
    a binary tree over the ranks, as `all_reduce_tree` does over microbatches. With "fastest" the schedule decides the
    order, which is the same for the same size and world.
    """

    @overload
    def all_reduce(
        self, x: npt.ArrayLike, *, async_op: Literal[False] = ..., **options: Unpack[AllReduceOptions]
    ) -> Array: ...
    @overload
    def all_reduce(
        self, x: npt.ArrayLike, *, async_op: Literal[True], **options: Unpack[AllReduceOptions]
    ) -> Work[Array]: ...
    def all_reduce(
        self,
        x: npt.ArrayLike,
        *,
        op: Op = "sum",
        order: Order = "fastest",
        out: Array | None = None,
        label: str = "",
        divisor: Callable[[], float] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array]:
        """Combines the arrays of all ranks element by element; every rank gets the result.

        Args:
            x: this rank's array of any shape, or a tensor on the CPU; dtype and shape must agree.
            op: sum, mean (or avg), prod, min, max, band, bor or bxor.
            order: "fastest", "rank" or "tree".
            out: receives the result; may be `x`.
            label: a word on which all ranks must agree. It tells operations of one size apart, also in errors and
                records.
            divisor: returns the number by which a sum is divided, once and in the same pass over memory. It must be the
                same on all ranks, or their results differ in bits. It is called when the operation's turn comes, so it
                may use the result of an earlier one. Floats and complex numbers only.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            A NumPy array of the shape and dtype of `x`, in native byte order; also for a tensor.

        Raises:
            UnsupportedOp: the op is not defined for the dtype, or the dtype cannot be sent.
            SizeMismatch: `out` has another shape.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        array = as_array(x)
        return self._core.issue(
            lambda bound: reducing_task(
                bound.engine, "all_reduce", array, op, out, self._core.choose, order, labelled(label), divisor
            ),
            timeout,
            async_op,
        )

    @overload
    def reduce(
        self, x: npt.ArrayLike, *, async_op: Literal[False] = ..., **options: Unpack[ReduceOptions]
    ) -> Array | None: ...
    @overload
    def reduce(
        self, x: npt.ArrayLike, *, async_op: Literal[True], **options: Unpack[ReduceOptions]
    ) -> Work[Array | None]: ...
    def reduce(
        self,
        x: npt.ArrayLike,
        *,
        op: Op = "sum",
        root: int = 0,
        order: Order = "fastest",
        out: Array | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array | None] | None:
        """Combines the arrays of all ranks element by element; the root gets the result.

        Args:
            x: this rank's array, any shape; dtype and shape must agree.
            op: as for `all_reduce`.
            root: rank of the root; must agree.
            order: "fastest", "rank" or "tree".
            out: receives the result at the root; may be `x`.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            At the root an array of the shape and dtype of `x`, elsewhere None.

        Raises:
            InvalidRank: `root` lies outside the world.
            UnsupportedOp, SizeMismatch, PacelineError: as for `all_reduce`.
        """
        self._core.check_rank("root", root)
        array = as_array(x)
        return self._core.issue(
            lambda bound: reduce_task(bound.engine, array, op, root, out, self._core.choose, order), timeout, async_op
        )

    @overload
    def reduce_scatter(
        self, x: npt.ArrayLike, *, async_op: Literal[False] = ..., **options: Unpack[AllReduceOptions]
    ) -> Array: ...
    @overload
    def reduce_scatter(
        self, x: npt.ArrayLike, *, async_op: Literal[True], **options: Unpack[AllReduceOptions]
    ) -> Work[Array]: ...
    def reduce_scatter(
        self,
        x: npt.ArrayLike,
        *,
        op: Op = "sum",
        order: Order = "fastest",
        out: Array | None = None,
        label: str = "",
        divisor: Callable[[], float] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array]:
        """Combines the arrays of all ranks element by element; rank r gets the r-th of W equal parts of axis 0.

        Args:
            x: this rank's array, shape [W * m, ...]; dtype and shape must agree.
            op: as for `all_reduce`.
            order: "fastest", "rank" or "tree".
            out: receives the result, shape [m, ...].
            label: as for `all_reduce`.
            divisor: as for `all_reduce`.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            An array of shape [m, ...].

        Raises:
            SizeMismatch: axis 0 has no W equal parts, or `out` has another shape.
            UnsupportedOp, PacelineError: as for `all_reduce`.
        """
        array = as_array(x)
        return self._core.issue(
            lambda bound: reducing_task(
                bound.engine, "reduce_scatter", array, op, out, self._core.choose, order, labelled(label), divisor
            ),
            timeout,
            async_op,
        )

    def average(self, tree: T, *, timeout: float | None = None) -> T:
        """Averages over all ranks every array in nested dicts, lists and tuples, with one all_reduce for each dtype.

        Args:
            tree: arrays of floats or complex numbers; paths, shapes and dtypes must agree.
            timeout: seconds for each all_reduce.

        Returns:
            A tree of the same form with new arrays.

        Raises:
            UnsupportedOp: the mean is not defined for a dtype.
            PacelineError: the generation has failed.
        """
        self._core.enter()
        fusion = Fusion(tree)
        detail = f" tree={fusion.digest}"
        for vector in fusion.vectors:
            self._core.issue(
                lambda bound, vector=vector: reducing_task(
                    bound.engine, "all_reduce", vector, "mean", vector, self._core.choose, detail=detail
                ),
                timeout,
                async_op=False,
            )
        filled: T = fusion.rebuild(fusion.vectors)
        return filled

    @overload
    def all_reduce_compressed(
        self,
        x: npt.ArrayLike,
        codec: str | Codec,
        *,
        async_op: Literal[False] = ...,
        **options: Unpack[CompressedOptions],
    ) -> Array: ...
    @overload
    def all_reduce_compressed(
        self, x: npt.ArrayLike, codec: str | Codec, *, async_op: Literal[True], **options: Unpack[CompressedOptions]
    ) -> Work[Array]: ...
    def all_reduce_compressed(
        self,
        x: npt.ArrayLike,
        codec: str | Codec,
        *,
        op: Op = "sum",
        exact: int = 0,
        memory: Memory | None = None,
        out: Array | None = None,
        label: str = "",
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array]:
        """Combines arrays as `all_reduce` does, but sends fewer bytes: all ranks get the same bits, near the exact sum.

        The codec rounds each value when it leaves its rank; the owner adds up the values in the dtype of `x` in rank
        order, and the codec rounds the result once more. Each codec states its error (`paceline.compression.Int8`). In
        a world of one nothing is sent or rounded. The call opens links to all other ranks.

        Args:
            x: this rank's array, float32 or float64, any shape; dtype and shape must agree. Values beyond float32's
                range become infinite.
            codec: "bf16", "int8" or a codec; must agree.
            op: sum or mean (or avg).
            exact: number of elements at the end of `x`, in C order, that are not compressed; must agree. Every rank
                sends them to every other, so there should be few.
            memory: kept for the next call with this array: memory for bytes and, with `feedback`, rounding errors,
                which the next call adds to its values.
            out: receives the result; may be `x`.
            label: as for `all_reduce`.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            An array of the shape and dtype of `x`, in native byte order.

        Raises:
            UnsupportedOp: the dtype, op or codec is not supported.
            SizeMismatch: `out` has another shape, `memory` is another array's, or `x` has fewer elements than `exact`.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        array, how = as_array(x), codec_of(codec)
        kept = Memory(feedback=False) if memory is None else memory
        return self._core.issue(
            lambda bound: all_reduce_compressed_task(
                bound.engine, array, how, op, exact, out, self._core.choose, kept, self.empty, labelled(label)
            ),
            timeout,
            async_op,
        )

    @overload
    def broadcast(
        self, x: npt.ArrayLike | None, *, async_op: Literal[False] = ..., **options: Unpack[RootedOptions]
    ) -> Array: ...
    @overload
    def broadcast(
        self, x: npt.ArrayLike | None, *, async_op: Literal[True], **options: Unpack[RootedOptions]
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
            x: the root's array. On other ranks only dtype and shape count, which must agree; None to take them from
                the root.
            root: rank of the root; must agree.
            out: receives the result; may be `x`.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            An array like the root's, in native byte order; a copy at the root too, unless `out` is `x`.

        Raises:
            InvalidRank: `root` lies outside the world.
            UnsupportedOp: the dtype cannot be sent, or the root gave no array.
            SizeMismatch: `out` has another shape.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        self._core.check_rank("root", root)
        array = None if x is None else as_array(x)
        return self._core.issue(
            lambda bound: broadcast_task(bound.engine, array, root, out, self._core.choose), timeout, async_op
        )

    @overload
    def scatter(
        self,
        xs: Sequence[npt.ArrayLike] | Array | None,
        *,
        async_op: Literal[False] = ...,
        **options: Unpack[RootedOptions],
    ) -> Array: ...
    @overload
    def scatter(
        self, xs: Sequence[npt.ArrayLike] | Array | None, *, async_op: Literal[True], **options: Unpack[RootedOptions]
    ) -> Work[Array]: ...
    def scatter(
        self,
        xs: Sequence[npt.ArrayLike] | Array | None,
        *,
        root: int = 0,
        out: Array | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array]:
        """Gives the r-th of the root's arrays to rank r.

        Args:
            xs: at the root W arrays of one dtype and shape, or one array of shape [W, ...]. Elsewhere ignored, and may
                be None: dtype and shape come from the root.
            root: rank of the root; must agree.
            out: receives the result.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            This rank's array, a copy at the root too, in native byte order.

        Raises:
            InvalidRank: `root` lies outside the world.
            UnsupportedOp: the dtype cannot be sent, or the root gave no arrays.
            SizeMismatch: the root's arrays are not W in number or differ in dtype or shape, or `out` has another shape.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        self._core.check_rank("root", root)
        return self._core.issue(lambda bound: scatter_task(bound.engine, xs, root, out), timeout, async_op)

    @overload
    def all_gather(
        self, x: npt.ArrayLike, *, async_op: Literal[False] = ..., **options: Unpack[AllGatherOptions]
    ) -> Array: ...
    @overload
    def all_gather(
        self, x: npt.ArrayLike, *, async_op: Literal[True], **options: Unpack[AllGatherOptions]
    ) -> Work[Array]: ...
    def all_gather(
        self,
        x: npt.ArrayLike,
        *,
        uneven: bool = False,
        out: Array | None = None,
        label: str = "",
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array]:
        """Joins the arrays of all ranks on axis 0, in rank order; every rank gets the result.

        Args:
            x: this rank's array, shape [m, ...]; 0-d counts as one row. Dtype and shape must agree.
            uneven: m may differ between ranks, which costs one more exchange.
            out: receives the result.
            label: as for `all_reduce`.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            An array of shape [W * m, ...], or with `uneven` [sum of all m, ...], in native byte order.

        Raises:
            UnsupportedOp: the dtype cannot be sent.
            SizeMismatch: `out` has another shape.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        array = as_array(x)
        return self._core.issue(
            lambda bound: all_gather_task(
                bound.engine, array, out, self._core.choose, uneven=uneven, detail=labelled(label)
            ),
            timeout,
            async_op,
        )

    @overload
    def gather(
        self, x: npt.ArrayLike, *, async_op: Literal[False] = ..., **options: Unpack[GatherOptions]
    ) -> Array | None: ...
    @overload
    def gather(
        self, x: npt.ArrayLike, *, async_op: Literal[True], **options: Unpack[GatherOptions]
    ) -> Work[Array | None]: ...
    def gather(
        self,
        x: npt.ArrayLike,
        *,
        root: int = 0,
        uneven: bool = False,
        out: Array | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array | None] | None:
        """Joins the arrays of all ranks on axis 0, in rank order; the root gets the result.

        Args:
            x: this rank's array, as for `all_gather`.
            root: rank of the root; must agree.
            uneven: as for `all_gather`.
            out: receives the result at the root.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            At the root an array as `all_gather` returns, elsewhere None.

        Raises:
            InvalidRank: `root` lies outside the world.
            UnsupportedOp, SizeMismatch, PacelineError: as for `all_gather`.
        """
        self._core.check_rank("root", root)
        array = as_array(x)
        return self._core.issue(
            lambda bound: gather_task(bound.engine, array, root, out, self._core.choose, uneven=uneven),
            timeout,
            async_op,
        )

    @overload
    def all_to_all(
        self, x: npt.ArrayLike, *, async_op: Literal[False] = ..., **options: Unpack[AllToAllOptions]
    ) -> Array: ...
    @overload
    def all_to_all(
        self, x: npt.ArrayLike, *, async_op: Literal[True], **options: Unpack[AllToAllOptions]
    ) -> Work[Array]: ...
    def all_to_all(
        self,
        x: npt.ArrayLike,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        out: Array | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array]:
        """Sends the r-th part of axis 0 to rank r, and joins the parts from all ranks, in rank order.

        Args:
            x: this rank's array, shape [m, ...]: W equal parts, or parts of `send_counts` rows. Dtype and the other
                axes must agree.
            send_counts: rows for each rank, W numbers whose sum is m. All ranks give counts, or none does.
            recv_counts: rows from each rank, to be checked; None if this rank does not know them.
            out: receives the result; may be `x` if the shape is the same.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            An array of shape [m, ...], or with counts [sum of received rows, ...], in native byte order.

        Raises:
            SizeMismatch: axis 0 has no such parts, the counts are not W numbers, or `out` has another shape.
            CollectiveMismatch: a rank sends another number of rows than `recv_counts` says.
            UnsupportedOp: the dtype cannot be sent.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        array = as_array(x)
        return self._core.issue(
            lambda bound: all_to_all_task(bound.engine, array, send_counts, recv_counts, out), timeout, async_op
        )

    @overload
    def shift(
        self, x: npt.ArrayLike, to: int, source: int, *, async_op: Literal[False] = ..., **options: Unpack[ShiftOptions]
    ) -> Array: ...
    @overload
    def shift(
        self, x: npt.ArrayLike, to: int, source: int, *, async_op: Literal[True], **options: Unpack[ShiftOptions]
    ) -> Work[Array]: ...
    def shift(
        self,
        x: npt.ArrayLike,
        to: int,
        source: int,
        *,
        out: Array | None = None,
        label: str = "",
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array]:
        """Sends an array to one rank, and receives the array of another; each rank sends and receives once.

        Args:
            x: this rank's array; dtype and shape must agree.
            to: the rank that receives it; another one on each rank.
            source: the rank whose `to` is this rank, which is not checked: a rank waits for one that sends elsewhere. A
                rank that names itself gets a copy of its own array.
            out: receives the result; may be `x`.
            label: as for `all_reduce`.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            The array of rank `source`, in native byte order.

        Raises:
            InvalidRank: `to` or `source` lies outside the world, or only one of them is this rank.
            SizeMismatch: `out` has another shape.
            UnsupportedOp: the dtype cannot be sent.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        self._core.check_rank("to", to)
        self._core.check_rank("source", source)
        if (to == self.rank) != (source == self.rank):
            raise InvalidRank(
                f"a shift to rank {to} from rank {source}, at rank {self.rank}: name this rank in both or in neither"
            )
        array = as_array(x)
        return self._core.issue(
            lambda bound: shift_task(bound.engine, array, to, source, out, labelled(label)), timeout, async_op
        )
