"""Collectives that put together what the ranks hold, and that exchange it between all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import numpy.typing as npt

from paceline.arrays import Array, as_array
from paceline.collectives.gather_tasks import all_gather_task, all_to_all_task, gather_task
from paceline.group.core import GroupCore, labelled
from paceline.work import Work

__all__ = ["Gathering"]


class Gathering(GroupCore):
    """all_gather, gather, all_to_all: see `Group`."""

    @overload
    def all_gather(
        self,
        x: npt.ArrayLike,
        *,
        uneven: bool = ...,
        out: Array | None = ...,
        label: str = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Array: ...
    @overload
    def all_gather(
        self,
        x: npt.ArrayLike,
        *,
        uneven: bool = ...,
        out: Array | None = ...,
        label: str = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
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
            out: where to put the result.
            label: as for `all_reduce`.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            An array of shape [W * m, ...], uneven [sum of all m, ...], in native byte order.

        Raises:
            UnsupportedOp: the dtype cannot travel.
            SizeMismatch: `out` has another shape.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        array = as_array(x)
        return self._issue(
            lambda bound: all_gather_task(bound.engine, array, out, self.choose, uneven=uneven, detail=labelled(label)),
            timeout,
            async_op,
        )

    @overload
    def gather(
        self,
        x: npt.ArrayLike,
        *,
        root: int = ...,
        uneven: bool = ...,
        out: Array | None = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Array | None: ...
    @overload
    def gather(
        self,
        x: npt.ArrayLike,
        *,
        root: int = ...,
        uneven: bool = ...,
        out: Array | None = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
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
            out: at the root: where to put the result.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            At the root an array as of `all_gather`, elsewhere None.

        Raises:
            InvalidRank: `root` lies outside the world.
            UnsupportedOp, SizeMismatch, PacelineError: as `all_gather`.
        """
        self._check_rank("root", root)
        array = as_array(x)
        return self._issue(
            lambda bound: gather_task(bound.engine, array, root, out, self.choose, uneven=uneven), timeout, async_op
        )

    @overload
    def all_to_all(
        self,
        x: npt.ArrayLike,
        *,
        send_counts: Sequence[int] | None = ...,
        recv_counts: Sequence[int] | None = ...,
        out: Array | None = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Array: ...
    @overload
    def all_to_all(
        self,
        x: npt.ArrayLike,
        *,
        send_counts: Sequence[int] | None = ...,
        recv_counts: Sequence[int] | None = ...,
        out: Array | None = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
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
        """Sends the r-th part of axis 0 to rank r, and joins what comes from all ranks, in rank order.

        Args:
            x: this rank's array, shape [m, ...]: W equal parts, or parts of `send_counts` rows. Dtype and the other
                axes must agree.
            send_counts: rows for each rank, W numbers that make m. All ranks give counts, or none does.
            recv_counts: rows from each rank, if this rank knows them: then they are checked.
            out: where to put the result; may be `x` if the shape is the same.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            An array of shape [m, ...], with counts [sum of received rows, ...], in native byte order.

        Raises:
            SizeMismatch: axis 0 has no such parts, the counts are not W numbers, or `out` has another shape.
            CollectiveMismatch: a rank sends another number of rows than `recv_counts` says.
            UnsupportedOp: the dtype cannot travel.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        array = as_array(x)
        return self._issue(
            lambda bound: all_to_all_task(bound.engine, array, send_counts, recv_counts, out), timeout, async_op
        )
