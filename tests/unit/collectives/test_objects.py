"""Objects as bytes: what arrives is what was sent, what cannot be sent is named, and no bytes do harm."""

import collections
import contextlib
import enum
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._collectives.objects import MAX_DEPTH, decode_object, encode_object
from paceline.errors import LimitExceeded, UnsupportedOp

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    *(np.dtype(name) for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")),
    BF16,
]


class Color(enum.IntEnum):
    RED = 1


class Named(collections.namedtuple("Named", "x")):
    __slots__ = ()


class MyFloat64(np.float64):
    pass


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, and of the same types at any depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float | np.ndarray | np.generic):
        a, b = np.asarray(a), np.asarray(b)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


def raw(tag: bytes, number: int, *rest: bytes) -> bytes:
    return tag + number.to_bytes(8, "big") + b"".join(rest)


def raw_array(signature: bytes, elements: bytes = b"") -> bytes:
    return raw(b"a", len(signature), signature, elements)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    return (data & 1 if dtype == np.bool_ else data).view(dtype).reshape(shape)


SCALARS = arrays().filter(lambda x: x.size > 0).map(lambda x: x.reshape(-1)[0])
KEYS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.text(st.characters())
    | st.text(st.characters(categories=["Cs"]), max_size=2)
    | st.binary(),
    lambda keys: st.lists(keys, max_size=3).map(tuple),
    max_leaves=4,
)
OBJECTS = st.recursive(
    KEYS | arrays() | SCALARS,
    lambda o: st.lists(o, max_size=4) | st.lists(o, max_size=4).map(tuple) | st.dictionaries(KEYS, o, max_size=4),
    max_leaves=10,
)


@given(OBJECTS)
def test_encoding_and_decoding_preserve_any_object(o: Any) -> None:
    data = encode_object(o)
    assert same(decode_object(data), o)
    assert same(decode_object(memoryview(data)), o)


@pytest.mark.parametrize(
    "o",
    [
        *(sign * (2**bits + off) for sign in (1, -1) for bits in (0, 7, 8, 63, 64, 4096) for off in (-1, 0, 1)),
        10**10_000,
        *(float("nan"), float("inf"), -0.0),
        struct.unpack(">d", bytes.fromhex("fff8000000001234"))[0],
        "",
        "ü€𝄞\x00",
        *("\ud834", "\ud834\udd1e"),
        *(b"", [], (), {}),
        [(1, [2]), ([1], (2,))],
        {"z": 1, "a": 2, None: 3, (1, ("x", b"y")): 4, 0: 5, "": 6, np.int16(7): 8},
    ],
    ids=lambda o: repr(o)[:20] if not isinstance(o, int) else f"int of {o.bit_length()} bits",
)
def test_corner_case_values_survive_encoding(o: Any) -> None:
    assert same(decode_object(encode_object(o)), o)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_travels_in_arrays_and_scalars(dtype: Any) -> None:
    x = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    for array in (x, x.T, x[:, ::-2], x[0, 1:2].reshape(()), x[:0], np.broadcast_to(x[0], (4, 3))):
        arrived = decode_object(encode_object({"x": (array,)}))["x"][0]
        assert same(arrived, array)
        assert arrived.flags.writeable
        assert arrived.flags.owndata
        assert arrived.flags.c_contiguous
    assert same(decode_object(encode_object([x[0, 1]])), [x[0, 1]])


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize > 1 and dtype != BF16], ids=str)
def test_arrays_of_foreign_byte_order_arrive_in_native_order(dtype: Any) -> None:
    x = np.array([[1, 2], [3, 4]]).astype(dtype)
    arrived = decode_object(encode_object(x.astype(dtype.newbyteorder("S"))))
    assert same(arrived, x)
    assert arrived.dtype.isnative


def test_a_decoded_array_does_not_share_memory_with_the_bytes() -> None:
    data = bytearray(encode_object(np.arange(3.0)))
    arrived = decode_object(memoryview(data))
    data[:] = bytes(len(data))
    arrived += 1
    assert arrived.tolist() == [1, 2, 3]


def test_dict_order_is_kept() -> None:
    keys = list(range(100))
    random.Random(3).shuffle(keys)
    assert list(decode_object(encode_object(dict.fromkeys(keys)))) == keys


@pytest.mark.parametrize(
    ("o", "name"),
    [
        ({1}, "set"),
        (frozenset({1}), "frozenset"),
        (1j, "complex"),
        (bytearray(b"x"), "bytearray"),
        (range(3), "range"),
        (object(), "object"),
        (int, "type"),
        (Fraction(1, 2), "fractions.Fraction"),
        (Color.RED, f"{__name__}.Color"),
        (Named(1), f"{__name__}.Named"),
        (MyFloat64(1), f"{__name__}.MyFloat64"),
        (collections.OrderedDict(a=1), "collections.OrderedDict"),
        (np.ma.masked_array([1, 2]), "numpy.ma.MaskedArray"),
        (np.array([None]), "numpy.ndarray"),
        (np.array(["a"]), "numpy.ndarray"),
        (np.zeros(1, "i4,i4"), "numpy.ndarray"),
        (np.zeros(1, "g"), "numpy.ndarray"),
        (np.zeros(1, "i4,i4")[0], "numpy.void"),
        (np.datetime64("2020-01-01"), "numpy.datetime64"),
        (np.str_("a"), "numpy.str_"),
        (ml_dtypes.float8_e5m2(1), "ml_dtypes.float8_e5m2"),
    ],
    ids=lambda o: o if isinstance(o, str) else "",
)
def test_an_unsupported_type_is_named_with_its_path(o: Any, name: str) -> None:
    with pytest.raises(UnsupportedOp) as caught:
        encode_object(o)
    # Since NumPy 2.0 MaskedArray says that it lives in numpy.ma; before, in numpy.ma.core.
    assert str(caught.value).replace("ma.core", "ma").startswith(f"cannot send a {name}: ")
    with pytest.raises(UnsupportedOp) as caught:
        encode_object({"config": [1, (), {2: o}]})
    assert f" {name} (at ['config'][2][2]): " in str(caught.value).replace("ma.core", "ma")


def test_error_text_for_an_unsupported_object_is_short_and_has_the_path() -> None:
    with pytest.raises(
        UnsupportedOp, match=r"^cannot send a set \(at \['a'\]\[1\]\): the supported types are None, bool, int, .*"
    ):
        encode_object({"a": [0, set()]})
    with pytest.raises(UnsupportedOp, match=r"numpy\.ndarray \(at \[0\]\): arrays of dtype object cannot be sent"):
        encode_object([np.array([None])])
    with pytest.raises(UnsupportedOp, match=r"Color \(at \['a'\]<key>\[1\]\): "):
        encode_object({"a": {("x", Color.RED): 1}})
    with pytest.raises(UnsupportedOp, match=r"set \(at \[<int>\]\): "):
        encode_object({10**5000: set()})
    with pytest.raises(UnsupportedOp) as caught:
        encode_object({"k" * 10_000: {"end": set()}})
    assert "['kkk" in str(caught.value)
    assert "['end']" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_an_array_too_large_to_travel_is_refused_before_it_is_copied() -> None:
    with pytest.raises(LimitExceeded, match=r"numpy\.ndarray \(at \[0\]\): .*the limit is"):
        encode_object([np.broadcast_to(np.float32(0), (1 << 30, 1 << 30))])


WRAPS: list[Callable[[Any], Any]] = [lambda o: [o], lambda o: (o,), lambda o: {"k": o}]
RAW_WRAPS: list[Callable[[bytes], bytes]] = [
    lambda data: raw(b"l", 1, data),
    lambda data: raw(b"t", 1, data),
    lambda data: raw(b"d", 1, encode_object("k"), data),
    lambda data: raw(b"d", 1, data, encode_object("v")),
]


@pytest.mark.parametrize("wrap", WRAPS, ids=["list", "tuple", "dict"])
def test_encoding_limits_nesting_depth(wrap: Callable[[Any], Any]) -> None:
    o: Any = 1
    for _ in range(MAX_DEPTH):
        o = wrap(o)
    assert same(decode_object(encode_object(o)), o)
    for _ in range(sys.getrecursionlimit()):
        o = wrap(o)
        with pytest.raises(LimitExceeded, match=f"more than {MAX_DEPTH} nested containers"):
            encode_object(o)


def test_encoding_limits_nesting_depth_of_dict_keys() -> None:
    key: Any = ()
    for _ in range(MAX_DEPTH):
        key = (key,)
    with pytest.raises(LimitExceeded, match=r"\(at <key>\[0\]"):
        encode_object({key: 1})


def test_encoding_refuses_a_cycle() -> None:
    loop: dict[str, Any] = {"a": 1}
    loop["b"] = [loop]
    with pytest.raises(LimitExceeded, match=r"\['b'\]\[0\]\['b'\].*contain itself"):
        encode_object(loop)


@pytest.mark.parametrize("wrap", RAW_WRAPS, ids=["list", "tuple", "dict value", "dict key"])
def test_decoding_limits_nesting_depth(wrap: Callable[[bytes], bytes]) -> None:
    data = encode_object(1)
    for _ in range(2000):
        data = wrap(data)
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} nested containers"):
        decode_object(data)


HUGE = 2**64 - 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"N" + bytes(7),
        raw(b"N", 1),
        raw(b"T", 1, b"x"),
        raw(b"?", 0),
        raw(b"f", 7, bytes(7)),
        raw(b"i", HUGE, b"1"),
        raw(b"s", HUGE, b"1"),
        raw(b"s", 2, b"\xff\xfe"),
        raw(b"b", HUGE, b"1"),
        raw(b"l", HUGE),
        raw(b"d", HUGE),
        raw(b"l", 2, encode_object(1)),
        raw(b"d", 1, encode_object(1)),
        raw(b"l", 1, encode_object(1), encode_object(1)),
        encode_object(None) + b"\x00",
        raw_array(b"", b""),
        raw_array(b"array", b""),
        raw_array(b"array op=sum uint8[1]", b"1"),
        raw_array(b"send uint8[1]", b"1"),
        raw_array(b"scalar uint8[1]", b"1"),
        raw_array(b"array object[1]", b"12345678"),
        raw_array(b"array float32[2]", bytes(7)),
        raw_array(b"array float32[2]", bytes(9)),
        raw_array(b"array float32[999999999999]", bytes(8)),
        raw_array(b"array float32[999999999999,999999999999]", bytes(8)),
        raw_array(b"array uint8[0,999999999999999,999999999999999]"),
        raw_array(b"array bool[2]", b"\x00\x02"),
        raw_array(b"scalar bool[]", b"\x02"),
        raw_array(b"scalar float\xff[]", bytes(4)),
        raw_array(b"x" * 100_000),
    ],
)
def test_decoding_garbage_raises_value_error(data: Any) -> None:
    with pytest.raises(ValueError):
        decode_object(data)


M61 = 2**61 - 1  # the modulus of Python's hash of numbers: these keys fall into one slot, and are compared


NUMPY_2 = pytest.mark.skipif(int(np.__version__.partition(".")[0]) < 2, reason="NumPy 1 can compare these keys")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ([[]], "unhashable type: 'list'"),
        ([{}], "unhashable type: 'dict'"),
        ([((), ([],))], "unhashable type: 'list'"),
        ([np.zeros(2)], "unhashable type: 'numpy.ndarray'"),
        (["a", "b", "a"], "same key twice"),
        ([1, True], "same key twice"),
        ([0.0, -0.0], "same key twice"),
        ([np.float32(2), 2], "same key twice"),
        pytest.param([np.float64(3), 3 + M61 * 10**400], "impossible key", marks=NUMPY_2),
        pytest.param([np.True_, 1 + M61 * 10**400], "impossible key", marks=NUMPY_2),
    ],
    ids=str,
)
def test_decoding_impossible_dict_keys_raises_value_error(keys: list[Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode_object(raw(b"d", len(keys), *(encode_object(o) for key in keys for o in (key, None))))


@pytest.mark.parametrize("scalar", [dtype.type(1) for dtype in DTYPES], ids=lambda x: x.dtype.name)
@pytest.mark.parametrize("other", [1 + M61, 1 + M61 * 2**4, 1 + M61 * 2**70, 1 + M61 * 10**400], ids=[0, 4, 70, 400])
def test_keys_that_numpy_cannot_compare_raise_at_most_value_error(scalar: Any, other: int) -> None:
    assert hash(scalar) == hash(other)
    for keys in ([scalar, other], [other, scalar], [(scalar,), (other,)]):
        with contextlib.suppress(ValueError):
            decode_object(raw(b"d", 2, *(encode_object(o) for key in keys for o in (key, None))))


def test_several_nans_may_be_dict_keys() -> None:
    o = {float("nan"): 1, float("nan"): 2}
    assert same(decode_object(encode_object(o)), o)


@given(st.binary(max_size=100))
def test_random_bytes_decode_or_raise_value_error(data: bytes) -> None:
    for form in (data, memoryview(data), np.frombuffer(data, np.uint8).data):
        with contextlib.suppress(ValueError):
            decode_object(form)


@given(OBJECTS, st.randoms(use_true_random=False))
def test_a_mutated_encoding_decodes_or_raises_value_error(o: Any, rng: random.Random) -> None:
    good = encode_object(o)
    for _ in range(10):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data) + 1)
            replacement = rng.choice([b"", rng.randbytes(1), rng.choice(b"NTFifsbltda").to_bytes(1, "big"), good[at:]])
            data[at : at + rng.randint(0, 2)] = replacement
        with contextlib.suppress(ValueError):
            encode_object(decode_object(data))


@given(OBJECTS)
def test_every_truncated_encoding_raises_value_error(o: Any) -> None:
    data = encode_object(o)
    for n in range(len(data)) if len(data) < 200 else range(0, len(data), 37):
        with pytest.raises(ValueError):
            decode_object(data[:n])


N = encode_object(None)


@pytest.mark.parametrize(
    "data",
    [
        raw_array(b"array uint8[17000000000000]"),
        raw_array(b"array uint8[0,999999999999999]"),
        raw(b"b", 2**40),
        raw(b"i", 2**40),
        raw(b"l", 2**40),
        b"".join(raw(b"l", 10_000) for _ in range(MAX_DEPTH)) + N * 10_000,
        b"".join(raw(b"t", HUGE) for _ in range(MAX_DEPTH)) + N * 10_000,
        raw(b"l", 5_000, raw(b"d", 1, N, N) * 5_000),
        raw(b"l", 5_000, raw(b"l", 1, raw(b"l", 1, raw(b"l", 0))) * 5_000),
        raw(b"l", 5_000, raw_array(b"array bool[0]") * 5_000),
        raw(b"l", 300, raw_array(b"array bool[" + b",".join([b"0"] * 32) + b"]") * 300),
        raw(b"s", 100_003, b"x" * 99_999, "𝄞".encode()),
    ],
    ids=["array", "empty", "bytes", "int", "list", "lists", "tuples", "dicts", "small lists", "arrays", "dims", "text"],
)
def test_decoding_memory_is_a_small_multiple_of_the_input(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode_object(data[:1000])  # whatever is imported or cached once
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            decode_object(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 16 * len(data) + 20_000
