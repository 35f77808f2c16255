"""Reductions whose values travel in fewer bits."""

from __future__ import annotations

from typing import Literal, overload

import numpy.typing as npt

from paceline.arrays import Array, as_array
from paceline.collectives.tasks.compressed import all_reduce_compressed_task
from paceline.compression import Codec, Memory, codec_of
from paceline.group.core import GroupCore, labelled
from paceline.work import Work

__all__ = ["Compressing"]


class Compressing(GroupCore):
    """all_reduce_compressed: see `Group`."""

    @overload
    def all_reduce_compressed(
        self,
        x: npt.ArrayLike,
        codec: str | Codec,
        *,
        op: str = ...,
        exact: int = ...,
        memory: Memory | None = ...,
        out: Array | None = ...,
        label: str = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Array: ...
    @overload
    def all_reduce_compressed(
        self,
        x: npt.ArrayLike,
        codec: str | Codec,
        *,
        op: str = ...,
        exact: int = ...,
        memory: Memory | None = ...,
        out: Array | None = ...,
        label: str = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Array]: ...
    def all_reduce_compressed(
        self,
        x: npt.ArrayLike,
        codec: str | Codec,
        *,
        op: str = "sum",
        exact: int = 0,
        memory: Memory | None = None,
        out: Array | None = None,
        label: str = "",
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array]:
        """As `all_reduce`, with fewer bits on the wire: every rank gets the same bits, near the exact result.

        Each value is rounded by the codec when it leaves its rank, is added up in the dtype of `x` in rank order, and
        the result is rounded once more. How near that is, the codec says (`paceline.compression.Int8`). In a world of
        one nothing travels, and nothing is rounded. Links to all other ranks are opened.

        Args:
            x: this rank's array, float32 or float64, any shape; dtype and shape must agree. Values beyond float32's
                range are infinite.
            codec: "bf16", "int8" or a codec; must agree.
            op: sum or mean.
            exact: so many elements at the end of `x`, in C order, are not compressed; must agree. For a few: every rank
                sends them to every other.
            memory: what to keep for the next call with this array: memory for bytes and, if it has `feedback`, what was
                rounded away, which the next call adds to its values.
            out: where to put the result; may be `x`.
            label: as for `all_reduce`.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            An array of the shape and dtype of `x`, in native byte order.

        Raises:
            UnsupportedOp: another dtype or op, or no such codec.
            SizeMismatch: `out` has another shape, `memory` is another array's, or `x` has fewer elements than `exact`.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        array, how = as_array(x), codec_of(codec)
        kept = Memory(feedback=False) if memory is None else memory
        return self._issue(
            lambda bound: all_reduce_compressed_task(
                bound.engine, array, how, op, exact, out, self.choose, kept, self.empty, labelled(label)
            ),
            timeout,
            async_op,
        )
