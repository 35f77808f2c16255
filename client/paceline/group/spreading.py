"""Collectives that spread what the root holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import numpy.typing as npt

from paceline.arrays import Array, as_array
from paceline.collectives.tasks import broadcast_task, scatter_task
from paceline.group.core import GroupCore
from paceline.work import Work

__all__ = ["Spreading"]


class Spreading(GroupCore):
    """broadcast, scatter: see `Group`."""

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
        self._check_rank("root", root)
        array = None if x is None else as_array(x)
        return self._issue(lambda bound: broadcast_task(bound.engine, array, root, out, self.choose), timeout, async_op)

    @overload
    def scatter(
        self,
        xs: Sequence[npt.ArrayLike] | Array | None,
        *,
        root: int = ...,
        out: Array | None = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Array: ...
    @overload
    def scatter(
        self,
        xs: Sequence[npt.ArrayLike] | Array | None,
        *,
        root: int = ...,
        out: Array | None = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
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
            xs: at the root: W arrays of one dtype and shape, or one array of shape [W, ...]. Elsewhere it does not
                count, and may be None: dtype and shape come from the root.
            root: rank of the root; must agree.
            out: where to put the result.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            This rank's array, a copy at the root too, in native byte order.

        Raises:
            InvalidRank: `root` lies outside the world.
            UnsupportedOp: the dtype cannot travel, or the root gave no arrays.
            SizeMismatch: the root's arrays are not W, or not alike, or `out` has another shape.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        self._check_rank("root", root)
        return self._issue(lambda bound: scatter_task(bound.engine, xs, root, out), timeout, async_op)
