"""Each codec by itself: how near it comes, and what becomes of values that are no ordinary numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from paceline.compression import PIECE, Bf16, Codec, Int8, codec_of, words_of
from paceline.errors import UnsupportedOp

Floats = NDArray[np.float32]

ANY = hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**127), 2.0**127, width=32))
INT8 = st.builds(Int8, st.integers(1, 80))


def through(codec: Codec, x: Floats) -> Floats:
    """Encoded and decoded."""
    data, found = np.full(codec.nbytes(x.size), 0xA5, np.uint8), np.empty_like(x)
    codec.encode(x, data, np.empty_like(x))
    codec.decode(data, found)
    return found


def block_max(x: NDArray[Any], block: int) -> NDArray[Any]:
    """The largest |x| of each element's block."""
    starts = np.arange(0, x.size, block)
    widths = np.diff([*starts, x.size])
    return np.repeat(np.maximum.reduceat(np.abs(x), starts), widths)


@given(ANY)
@settings(deadline=None)
def test_bf16_error_is_within_its_bound(x: Floats) -> None:
    error = np.abs(through(Bf16(), x).astype(np.float64) - x)
    assert (error <= np.maximum(2.0**-8 * np.abs(x.astype(np.float64)), 2.0**-134)).all()


@given(INT8, ANY)
@settings(deadline=None)
def test_int8_error_is_within_its_bound(codec: Int8, x: Floats) -> None:
    largest = block_max(x, codec.block).astype(np.float64)
    error = np.abs(through(codec, x).astype(np.float64) - x)
    bound = np.where(largest < 2.0**-119, largest, largest / 254 * (1 + 2.0**-12))
    assert (error <= bound).all()


@pytest.mark.parametrize("codec", [Bf16(), Int8(), Int8(7)], ids=str)
def test_zeros_and_integers_in_the_int8_range_are_kept_exactly(codec: Codec) -> None:
    whole = np.arange(-127, 128, dtype=np.float32)
    zeros = np.zeros(20, np.float32)
    np.testing.assert_array_equal(through(codec, zeros), zeros)
    np.testing.assert_array_equal(through(Int8(255), whole), whole)
    assert through(codec, np.zeros(0, np.float32)).size == 0


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_turns_only_its_int8_block_into_nan(odd: float) -> None:
    x = np.ones(12, np.float32)
    x[5] = odd
    found = through(Int8(4), x)
    assert np.isnan(found[4:8]).all()
    np.testing.assert_array_equal(found[[0, 1, 2, 3, 8, 9, 10, 11]], 1)


def test_bf16_keeps_nan_infinities_and_signed_zero() -> None:
    found = through(Bf16(), np.array([np.nan, np.inf, -np.inf, 3.4e38, -0.0, 1.0], np.float32))
    np.testing.assert_array_equal(found, [np.nan, np.inf, -np.inf, np.inf, 0, 1])
    assert np.signbit(found[4])


@given(st.binary(min_size=0, max_size=200), st.integers(1, 40))
@settings(deadline=None)
def test_decoding_accepts_any_bytes(data: bytes, block: int) -> None:
    """What a peer sends has the right length, for the engine checks it, and nothing else is sure (I9)."""
    codec = Int8(block)
    n = max(n for n in range(len(data) + 1) if codec.nbytes(n) <= len(data))
    codec.decode(np.frombuffer(data[: codec.nbytes(n)], np.uint8), np.empty(n, np.float32))
    n = len(data) // 2
    Bf16().decode(np.frombuffer(data[: 2 * n], np.uint8), np.empty(n, np.float32))


def test_nbytes_of_each_codec() -> None:
    assert [Bf16().nbytes(n) for n in (0, 1, 7)] == [0, 2, 14]
    assert [Int8(4).nbytes(n) for n in (0, 1, 4, 5)] == [0, 5, 8, 13]


def test_codec_of_finds_codecs_by_name_and_refuses_others() -> None:
    assert codec_of("bf16") == Bf16()
    assert codec_of("int8") == Int8(1024)
    assert codec_of(Int8(64)) == Int8(64)
    assert (str(codec_of("int8")), str(codec_of("bf16"))) == ("int8 block=1024", "bf16")
    assert (Int8().feedback, Bf16().feedback) == (True, False)
    for odd in ("int4", 8, None, Int8):
        with pytest.raises(UnsupportedOp, match="compression must be 'bf16', 'int8'"):
            codec_of(odd)  # type: ignore[arg-type]
    for block in (0, PIECE + 1):
        with pytest.raises(ValueError, match="a block must have"):
            Int8(block)


class Named(Bf16):
    """A codec of the user's own."""

    def __init__(self, words: str, block: int = 1) -> None:
        super().__init__(block=block)
        object.__setattr__(self, "words", words)

    def __str__(self) -> str:
        return str(getattr(self, "words"))  # noqa: B009


def test_a_custom_codec_must_fit_a_signature() -> None:
    assert words_of(Named("top_k k=3")) == "top_k k=3"
    for odd in ("", "top k", "k=[3]", "a\nb", "x" * 41):
        with pytest.raises(UnsupportedOp, match="of a codec must be"):
            codec_of(Named(odd))
    with pytest.raises(UnsupportedOp, match="block must have 1 to"):
        codec_of(Named("big", PIECE + 1))
