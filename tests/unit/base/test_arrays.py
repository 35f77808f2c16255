"""Layouts, bytes, signatures: what travels, and what is refused."""

import contextlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._base.arrays import (
    MAX_SIGNATURE_BYTES,
    Signature,
    as_array,
    as_bytes,
    as_flat,
    check_out,
    deliver,
    from_bytes,
    landing,
)
from paceline.errors import LimitExceeded, SizeMismatch, UnsupportedOp

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    np.dtype(name) for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
]


@pytest.mark.parametrize(
    "x",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6.0).reshape(2, 3).T,
        np.arange(12.0)[::-2],
        np.array(3.0),
        np.empty((0, 4)),
        np.arange(4, dtype=">f8"),
        np.broadcast_to(np.float64(2), (3, 2)),
    ],
    ids=["contiguous", "transposed", "reversed", "0-d", "empty", "big-endian", "broadcast"],
)
def test_as_flat_has_the_elements_in_c_order(x: Any) -> None:
    flat = as_flat(x)
    assert flat.dtype == np.float64
    assert flat.dtype.isnative
    assert flat.tolist() == x.ravel().tolist()
    assert as_bytes(flat).nbytes == x.size * 8


def test_as_flat_does_not_copy_a_contiguous_array() -> None:
    x = np.arange(6.0).reshape(2, 3)
    assert np.shares_memory(as_flat(x), x)


@pytest.mark.parametrize("dtype", [*DTYPES, BF16])
def test_as_bytes_and_from_bytes_round_trip(dtype: Any) -> None:
    x = np.array([0, 1, 1, 0]).astype(dtype)
    assert (from_bytes(bytes(as_bytes(x)), dtype) == x).all()
    assert from_bytes(b"", dtype).shape == (0,)


@pytest.mark.parametrize(
    "x", [np.array([None]), np.array(["a"]), np.zeros(2, "M8[s]"), np.zeros(2, "g"), np.zeros(1, "i4,i4"), [None]]
)
def test_unsupported_types_are_refused(x: Any) -> None:
    with pytest.raises(UnsupportedOp, match="cannot be sent"):
        as_array(x)


def test_out_of_the_wrong_shape_type_or_mode_is_refused() -> None:
    f4 = np.dtype("f4")
    with pytest.raises(SizeMismatch, match=r"\(2,\).*\(3,\)"):
        check_out(np.empty(2, "f4"), f4, (3,))
    with pytest.raises(UnsupportedOp, match=r"float64.*float32"):
        check_out(np.empty(3), f4, (3,))
    with pytest.raises(UnsupportedOp, match="list"):
        check_out([1, 2, 3], f4, (3,))
    frozen = np.empty(3, "f4")
    frozen.flags.writeable = False
    with pytest.raises(UnsupportedOp, match="read-only"):
        check_out(frozen, f4, (3,))


def test_landing_uses_out_as_buffer_only_where_that_is_safe() -> None:
    buffer = np.arange(10.0)
    x = buffer[:8]
    f8 = x.dtype
    assert landing(x, x, f8, (8,), in_place=True) is x
    same = buffer[:8]
    assert landing(same, x, f8, (8,), in_place=True) is same
    assert not np.shares_memory(landing(x, x, f8, (8,)), buffer), "elements may be written before they are read"
    assert landing(np.empty(8), x, f8, (8,)).size == 8
    assert landing(part := buffer[:4], x, f8, (4,), in_place=True) is not part, "the same start is not the same array"
    subclass = np.arange(8.0).view(type("Sub", (np.ndarray,), {}))
    plain = landing(subclass, x, f8, (8,))
    assert type(plain) is np.ndarray
    assert np.shares_memory(plain, subclass)
    assert deliver(plain, subclass) is subclass
    shifted = buffer[2:]
    assert not np.shares_memory(landing(shifted, x, f8, (8,)), buffer)
    strided = np.empty(16)[::2]
    result = landing(strided, x, f8, (8,))
    assert result.flags.c_contiguous
    result[:] = 5
    assert deliver(result, strided) is strided
    assert (strided == 5).all()


@given(
    st.sampled_from([*DTYPES, BF16]),
    st.lists(st.integers(0, 50), max_size=6),
    st.sampled_from(["all_reduce", "send"]),
    st.sampled_from(["", "op=sum", "root=3", "op=mean tree=00ff00ff"]),
)
def test_signature_survives_encode_and_decode(dtype: Any, shape: Any, kind: str, detail: str) -> None:
    signature = Signature(kind, detail, dtype, tuple(shape))
    assert Signature.decode(signature.encode()) == signature


def test_encoded_signature_is_readable_text() -> None:
    assert Signature("all_reduce", "op=sum", np.dtype("f4"), (1024, 3)).encode() == b"all_reduce op=sum float32[1024,3]"
    assert Signature("barrier").encode() == b"barrier"
    assert Signature("send", "tag=1", BF16, ()).encode() == b"send tag=1 bfloat16[]"


def test_signatures_beyond_the_limits_are_refused() -> None:
    with pytest.raises(LimitExceeded, match="33 dimensions"):
        Signature("send", "tag=1", np.dtype("f4"), (1,) * 33).encode()
    with pytest.raises(LimitExceeded, match="bytes"):
        Signature("send", "tag=1", np.dtype("f4"), (1 << 30, 1 << 30)).encode()
    widest = Signature("send", f"tag={2**63 - 1}", np.dtype("complex128"), (1,) * 31 + (1 << 39,)).encode()
    assert len(widest) <= MAX_SIGNATURE_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"send tag=1 float33[2]",
        b"send tag=1 object[2]",
        b"send tag=1 float32[-2]",
        b"send tag=1 float32[2,]",
        b"send tag=1 float32[99999999999999999999]",
        b"send tag=1 float32[999999999999,999999999999]",
        b"send tag=1 float32[" + b",".join([b"1"] * 33) + b"]",
        b"__import__('os')",
        b"send " + b"a=b " * 400,
        b"\xff\xfe",
        b"barrier\n",
    ],
)
def test_decoding_an_invalid_signature_raises_value_error(data: Any) -> None:
    with pytest.raises(ValueError):
        Signature.decode(data)


@given(st.binary(max_size=64))
def test_random_bytes_decode_or_raise_value_error(data: Any) -> None:
    with contextlib.suppress(ValueError):
        Signature.decode(data)
