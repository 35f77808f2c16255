"""Collectives that combine the arrays of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar, overload

import numpy.typing as npt

from paceline.arrays import Array, as_array
from paceline.collectives.tasks import reduce_task, reducing_task
from paceline.collectives.trees import Fusion
from paceline.group.core import GroupCore, labelled
from paceline.work import Work

__all__ = ["Reducing"]

T = TypeVar("T")


class Reducing(GroupCore):
    """all_reduce, reduce, reduce_scatter, average: see `Group`.

    `op` is sum, mean, prod, min, max, band, bor or bxor. Integers keep their type. A mean is the sum divided once by
    W; it overflows only where the mean itself does, and rounds what comes near the smallest normal number of the
    dtype. Every rank that gets an element gets the same bits.

    `order="rank"` sums in rank order, ((x_0 + x_1) + x_2) + ..., whatever the size: the bits depend on the ranks'
    values alone. float16 and bfloat16 are then added up in float32 and rounded once. "fastest" leaves the order to the
    schedule: the same for the same size and world.
    """

    @overload
    def all_reduce(
        self,
        x: npt.ArrayLike,
        *,
        op: str = ...,
        order: str = ...,
        out: Array | None = ...,
        label: str = ...,
        divisor: Callable[[], float] | None = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Array: ...
    @overload
    def all_reduce(
        self,
        x: npt.ArrayLike,
        *,
        op: str = ...,
        order: str = ...,
        out: Array | None = ...,
        label: str = ...,
        divisor: Callable[[], float] | None = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Array]: ...
    def all_reduce(
        self,
        x: npt.ArrayLike,
        *,
        op: str = "sum",
        order: str = "fastest",
        out: Array | None = None,
        label: str = "",
        divisor: Callable[[], float] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array]:
        """Combines the arrays of all ranks element by element; every rank gets the result.

        Args:
            x: this rank's array, any shape; dtype and shape must agree.
            op: sum, mean, prod, min, max, band, bor or bxor.
            order: "fastest" or "rank".
            out: where to put the result; may be `x`.
            label: a word that all ranks must agree on: tells operations of one size apart, in errors and records too.
            divisor: gives what a sum is divided by, once and in the same pass over memory; the same on all ranks, or
                they end with other bits. It is asked when the operation's turn has come, so it may be the result of
                one before. For floats and complex numbers.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            An array of the shape and dtype of `x`, in native byte order.

        Raises:
            UnsupportedOp: the dtype does not have the op, or cannot travel.
            SizeMismatch: `out` has another shape.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        array = as_array(x)
        return self._issue(
            lambda bound: reducing_task(
                bound.engine, "all_reduce", array, op, out, self.choose, order, labelled(label), divisor
            ),
            timeout,
            async_op,
        )

    @overload
    def reduce(
        self,
        x: npt.ArrayLike,
        *,
        op: str = ...,
        root: int = ...,
        order: str = ...,
        out: Array | None = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Array | None: ...
    @overload
    def reduce(
        self,
        x: npt.ArrayLike,
        *,
        op: str = ...,
        root: int = ...,
        order: str = ...,
        out: Array | None = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Array | None]: ...
    def reduce(
        self,
        x: npt.ArrayLike,
        *,
        op: str = "sum",
        root: int = 0,
        order: str = "fastest",
        out: Array | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array | None] | None:
        """Combines the arrays of all ranks element by element; the root gets the result.

        Args:
            x: this rank's array, any shape; dtype and shape must agree.
            op: as for `all_reduce`.
            root: rank of the root; must agree.
            order: "fastest" or "rank".
            out: at the root: where to put the result; may be `x`.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            At the root an array of the shape and dtype of `x`, elsewhere None.

        Raises:
            InvalidRank: `root` lies outside the world.
            UnsupportedOp, SizeMismatch, PacelineError: as `all_reduce`.
        """
        self._check_rank("root", root)
        array = as_array(x)
        return self._issue(
            lambda bound: reduce_task(bound.engine, array, op, root, out, self.choose, order), timeout, async_op
        )

    @overload
    def reduce_scatter(
        self,
        x: npt.ArrayLike,
        *,
        op: str = ...,
        order: str = ...,
        out: Array | None = ...,
        label: str = ...,
        divisor: Callable[[], float] | None = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Array: ...
    @overload
    def reduce_scatter(
        self,
        x: npt.ArrayLike,
        *,
        op: str = ...,
        order: str = ...,
        out: Array | None = ...,
        label: str = ...,
        divisor: Callable[[], float] | None = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Array]: ...
    def reduce_scatter(
        self,
        x: npt.ArrayLike,
        *,
        op: str = "sum",
        order: str = "fastest",
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
            order: "fastest" or "rank".
            out: where to put the result, shape [m, ...].
            label: as for `all_reduce`.
            divisor: as for `all_reduce`.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            An array of shape [m, ...].

        Raises:
            SizeMismatch: axis 0 has no W equal parts, or `out` has another shape.
            UnsupportedOp, PacelineError: as `all_reduce`.
        """
        array = as_array(x)
        return self._issue(
            lambda bound: reducing_task(
                bound.engine, "reduce_scatter", array, op, out, self.choose, order, labelled(label), divisor
            ),
            timeout,
            async_op,
        )

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
        detail = f" tree={fusion.digest}"
        for vector in fusion.vectors:
            self._issue(
                lambda bound, vector=vector: reducing_task(
                    bound.engine, "all_reduce", vector, "mean", vector, self.choose, detail=detail
                ),
                timeout,
                async_op=False,
            )
        filled: T = fusion.rebuild(fusion.vectors)
        return filled
