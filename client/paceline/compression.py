"""Compression of gradients and other values in a reduction: codecs, and the rounding errors kept between calls.

Pure: no links, no ranks. Letters: n elements of a piece, b elements of a block, m the largest |x| of a block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SizeMismatch, UnsupportedOp

__all__ = ["Bf16", "Codec", "Int8", "Memory", "PIECE", "PowerSGD", "codec_of", "words_of"]

PIECE = 1 << 16
"""Most elements that are encoded at once: their intermediate results fit the processor's cache. Source: measured,
64 Ki elements take 0.41 ns each as bfloat16 and 0.85 ns as int8; 8 Ki take 1.04 and 2.0 ns."""

_WORDS = re.compile(r"[\w-]{1,40}(?: [a-z_]{1,20}=[\w-]{1,20}){0,4}", re.ASCII)

_SMALLEST = np.float32(2.0**-119)
"""Int8 turns blocks with a smaller m into zeros: at this m, m / 127 and 127 / m are still normal float32 numbers."""


@runtime_checkable
class Codec(Protocol):
    """Encodes float32 values in fewer bytes, and decodes the bytes to nearly the same values.

    Two codecs with equal `str` are the same: ranks compare it ("int8 block=1024") before they accept each other's
    bytes. Threads share a codec, so it keeps nothing between calls.
    """

    @property
    def feedback(self) -> bool:
        """Whether rounding errors are added to the next call's values (error feedback), unless the user decides."""

    @property
    def block(self) -> int:
        """b, the number of elements that are encoded together; at most `PIECE`."""

    def nbytes(self, n: int) -> int:
        """Returns the bytes of n elements. They depend on n alone, because the receiver knows nothing else (I9)."""

    def encode(self, x: NDArray[np.float32], into: NDArray[np.uint8], scratch: NDArray[np.float32]) -> None:
        """Encodes x, shape [n], into shape [nbytes(n)]; `scratch` has shape [n] and is not x."""

    def decode(self, data: NDArray[np.uint8], into: NDArray[np.float32]) -> None:
        """Decodes shape [nbytes(n)] into shape [n]. It never raises, whatever the bytes are."""


def words_of(codec: Codec) -> str:
    """Returns the text of a codec in signatures: "int8 block=1024".

    Raises:
        UnsupportedOp: the text has another form, or the codec's blocks are too large.
    """
    words = str(codec)
    if not _WORDS.fullmatch(words):
        raise UnsupportedOp(
            f"str() of a codec must be a name and up to 4 settings, 'name key=value', not {words!r:.80}"
        )
    if not 1 <= codec.block <= PIECE:
        raise UnsupportedOp(f"a codec's block must have 1 to {PIECE} elements, not {codec.block}")
    return words


def codec_of(compression: str | Codec) -> Codec:
    """Returns the codec that a user asks for.

    Args:
        compression: "bf16", "int8", or a codec.

    Raises:
        UnsupportedOp: there is no such codec.
    """
    given: object = compression
    if isinstance(given, str):
        if given == "bf16":
            return Bf16()
        if given == "int8":
            return Int8()
    elif isinstance(given, Codec) and not isinstance(given, type):
        words_of(given)
        return given
    raise UnsupportedOp(f"compression must be 'bf16', 'int8' or a paceline.compression.Codec, not {given!r:.80}")


@dataclass(frozen=True)
class Bf16:
    """Rounds to the nearest bfloat16, ties to even: half the bytes of float32, and its range.

    **Error** of one rounding of x: at most 2^-8 |x|, and at most 2^-134 where |x| is below the smallest normal number
    (2^-126). Infinities and NaN stay as they are; values beyond bfloat16's largest number, 2^128 (1 - 2^-9),
    become infinite.

    The error of each element of an all_reduce is at most (1/127 + W 2^-20) times the sum of the ranks' |x|, plus
    W 2^-133; for a mean, a W-th of that. Derived in docs/decisions/11.
    """

    feedback: bool = False
    block: int = 1

    def __str__(self) -> str:
        return "bf16"

    def nbytes(self, n: int) -> int:
        """Returns the bytes of n elements: 2 for each."""
        return 2 * n

    def encode(self, x: NDArray[np.float32], into: NDArray[np.uint8], scratch: NDArray[np.float32]) -> None:
        """See `Codec`."""
        import ml_dtypes  # imported here, because few jobs need it and it slows down start-up

        into.view(ml_dtypes.bfloat16)[...] = x

    def decode(self, data: NDArray[np.uint8], into: NDArray[np.float32]) -> None:
        """See `Codec`."""
        import ml_dtypes

        into[...] = data.view(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Int8:
    """Rounds x to the nearest of 255 multiples of m / 127: about a quarter of the bytes of float32.

    A piece of n elements is encoded as ceil(n / b) float32 scales, then n int8 numbers.

    **Error** of one rounding of x: at most m / 254 (1 + 2^-12), where the second factor covers the arithmetic itself;
    or m, if m is below 2^-119: such a block becomes zeros. A block with an infinity or a NaN becomes all NaN, so that
    it is not taken for small numbers. The bound holds for |x| up to 2^127; above, 127 times the scale may overflow.

    The error of each element of an all_reduce is at most 1/126 of the sum of the ranks' m of its block, plus W 2^-118
    and the rounding of a sum of W float32 numbers; for a mean, a W-th of that. Derived in docs/decisions/11. Small
    values beside a large one are lost in a single call; with error feedback they arrive later.

    Args:
        block: b, 1 to 65,536.
        feedback: whether DDP adds rounding errors to the next step's gradients.
    """

    block: int = 1024
    feedback: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.block <= PIECE:
            raise ValueError(f"a block must have 1 to {PIECE} elements, not {self.block!r}")

    def __str__(self) -> str:
        return f"int8 block={self.block}"

    def nbytes(self, n: int) -> int:
        """Returns the bytes of n elements: 1 for each, and 4 for each block."""
        return n + 4 * -(-n // self.block)

    def encode(self, x: NDArray[np.float32], into: NDArray[np.uint8], scratch: NDArray[np.float32]) -> None:
        """See `Codec`."""
        scales, codes = self._parts(into, x.size)
        np.abs(x, out=scratch)
        for elements, blocks, width in self._stripes(x.size):
            rows = scratch[elements].reshape(-1, width)
            largest = rows.max(axis=1)  # NaN if the block has one
            finite, small = np.isfinite(largest), largest < _SMALLEST
            with np.errstate(all="ignore"):
                scales[blocks] = np.where(finite, np.where(small, 0, largest / np.float32(127)), np.nan)
                factors = np.where(finite & ~small, np.float32(127) / largest, 0).astype(np.float32)
                np.multiply(x[elements].reshape(-1, width), factors[:, np.newaxis], out=rows)
                np.rint(rows, out=rows)
                codes[elements] = scratch[elements]  # a NaN may become any number, because its scale is NaN

    def decode(self, data: NDArray[np.uint8], into: NDArray[np.float32]) -> None:
        """See `Codec`."""
        scales, codes = self._parts(data, into.size)
        into[...] = codes
        for elements, blocks, width in self._stripes(into.size):
            rows = into[elements].reshape(-1, width)
            with np.errstate(all="ignore"):  # the scales come from the network, and may have any value
                np.multiply(rows, scales[blocks][:, np.newaxis], out=rows)

    def _parts(self, data: NDArray[np.uint8], n: int) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
        end = len(data) - n
        return data[:end].view(np.float32), data[end:].view(np.int8)

    def _stripes(self, n: int) -> Iterator[tuple[slice, slice, int]]:
        """Yields whole blocks, then the last one if it is shorter: (elements, blocks, elements of each block)."""
        whole = n // self.block
        if whole:
            yield slice(0, whole * self.block), slice(0, whole), self.block
        if n % self.block:
            yield slice(whole * self.block, n), slice(whole, whole + 1), n % self.block


@dataclass(frozen=True)
class PowerSGD:
    """The setting for PowerSGD: ranks send only the largest components of each gradient that is a matrix.

    A gradient of shape [n, m] (all axes after the first count as one) becomes rank * (n + m) numbers.

    PowerSGD projects the sum over the ranks on `rank` directions: the directions of the step before, turned by one
    power iteration. The remainder is added in the next step (`error_feedback`). Vectors, and matrices that would not
    become smaller, are sent uncompressed. Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1
    and 2.

    Attributes:
        rank: number of directions; 1 to 64.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 64:
            raise ValueError(f"want a rank of 1 to 64, not {self.rank!r}")

    def __str__(self) -> str:
        return f"powersgd rank={self.rank}"


class Memory:
    """State that compressed reductions of one array keep between calls: memory for bytes, and rounding errors.

    Error feedback adds the rounding errors of one call to the values of the next, so they are delayed, not lost: the
    sum of all results so far differs from the exact one only by the present rounding errors, after any number of calls.
    Source: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; the owner's part (its own rounding of
    the total) as in Tang et al., "DoubleSqueeze", ICML 2019.

    A memory belongs to one rank: other ranks have other errors, a newcomer has none, and it is not part of the
    replicated state (I5). A step that is undone must not change it, so there are two arrays: calls read one and write
    the other, and `commit` swaps them. Only one call of `Group.all_reduce_compressed` may use it at a time.

    Args:
        feedback: keep rounding errors; otherwise only memory for bytes is kept.
    """

    def __init__(self, *, feedback: bool) -> None:
        self.feedback = feedback
        self._kept: Any = None  # an array; a tensor in a bucket of PowerSGD on a device
        self._next: Any = None
        self._written = False
        self._areas: dict[str, NDArray[np.uint8]] = {}

    def commit(self) -> None:
        """Keeps the writes since the last `commit`."""
        if self._written:
            self._kept, self._next = self._next, self._kept
            self._written = False

    def undo(self) -> None:
        """Discards the writes since the last `commit`."""
        self._written = False

    def successor(self) -> Memory:
        """Returns a copy of the state after `undo`, for calls made while an abandoned one still uses this memory."""
        copy = Memory(feedback=self.feedback)
        copy._kept = self._kept  # shared, because it is only read
        return copy

    @property
    def left_over(self) -> NDArray[Any] | None:
        """The rounding errors that the next call adds, shape [n]; None for none. It is a view: do not change it."""
        found: NDArray[Any] | None = self._next if self._written else self._kept
        return found

    # The task of a call uses the methods below.

    def check(self, n: int, dtype: np.dtype[Any]) -> None:
        """Checks that this can be the memory of such an array.

        Raises:
            SizeMismatch: it is the memory of another array.
        """
        for array in (self._kept, self._next):
            if array is not None and (array.shape != (n,) or array.dtype != dtype):
                raise SizeMismatch(f"this memory belongs to an array {array.dtype}[{array.size}], not to {dtype}[{n}]")

    def residuals(self, n: int, dtype: Any, zeros: Callable[..., Any] = np.zeros) -> tuple[Any, Any]:
        """Returns the errors to add and the array for the new errors, shape [n] both; they may be one array.

        `zeros` makes them: other code than that of `Group` may keep tensors here.
        """
        if self._kept is None:
            self._kept = zeros(n, dtype=dtype)
        if self._next is None:
            self._next = zeros(n, dtype=dtype)
        return (self._next if self._written else self._kept), self._next

    def wrote(self) -> None:
        """Notes that the call is complete and its errors are written."""
        self._written = self.feedback

    def area(self, name: str, nbytes: int, empty: Callable[[int, Any], NDArray[Any]]) -> NDArray[np.uint8]:
        """Returns memory for bytes, shape [nbytes]; the same as last time if that is large enough."""
        area = self._areas.get(name)
        if area is None or area.size < nbytes:
            area = self._areas[name] = empty(nbytes, np.uint8)
        return area[:nbytes]
