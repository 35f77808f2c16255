"""A state comes back from its skeleton and arrays exactly as it was, types and bits; what cannot is refused by path."""

from __future__ import annotations

import math
import tempfile
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paceline import checkpoint
from paceline.checkpoint import Shard
from paceline.checkpoint.tree import join, split, split_shards
from paceline.errors import UnsupportedOp

DTYPES = [
    *("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"),
    *(">i4", ">f8", ">c16"),
]
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
arrays = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(np.dtype(dtype), shapes))
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | arrays
    | st.floats(width=32).map(np.float32)
    | st.integers(-5, 5).map(np.int16)
)
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def round_trip(state: Any) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint.save(directory, state, (1, 1))
        found = checkpoint.load(directory)
    assert found is not None
    return found.state


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, np.ndarray | np.generic):
        assert isinstance(b, np.ndarray) == isinstance(a, np.ndarray)
        assert b.dtype == a.dtype.newbyteorder("=")  # in this machine's order
        assert b.shape == a.shape
        assert np.asarray(b).tobytes() == np.asarray(a, b.dtype).tobytes()
        return
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, float):
        assert a == b or (math.isnan(a) and math.isnan(b))
        assert math.copysign(1, a) == math.copysign(1, b) or math.isnan(a)
    else:
        assert a == b


@given(states)
def test_state_round_trip(state: Any) -> None:
    assert_same(state, round_trip(state))


def test_layouts_bfloat16_and_special_names_round_trip() -> None:
    x = np.arange(12.0).reshape(3, 4)
    state = {
        "transposed": x.T,
        "stepped": x[:, ::2],
        "backwards": x[::-1],
        "bf16": np.array([1.5, -2], ml_dtypes.bfloat16),
        "a.b": x,
        "a": {"b": -x},
        "$array": "not one",
        "": {"": x + 1},
        "complex128": np.array([1j]),
    }
    assert_same(state, round_trip(state))


def test_loaded_arrays_are_writable() -> None:
    back = round_trip({"x": np.zeros(3)})
    back["x"][0] = 1
    assert back["x"].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": [1, {"b": object()}]}, "a.1.b"),
        ({"a": np.array([object()])}, "a"),
        ({"a": np.array(["text"])}, "a"),
        ({"a": {1, 2}}, "a"),
        ({"a": np.zeros(2, np.longdouble)}, "a"),
        ({"a": lambda: None}, "a"),
        ({"a": True + 1j}, "a"),
    ],
)
def test_an_unsupported_value_is_named_by_its_path(state: Any, path: str) -> None:
    with pytest.raises(UnsupportedOp, match=rf"^{path}\b"):
        split(state)


def test_a_state_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedOp, match="nested more than"):
        split(loop)


@given(st.recursive(st.none() | st.text() | st.integers(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)))
def test_joining_an_arbitrary_skeleton_raises_at_most_value_error(skeleton: Any) -> None:
    with suppress(ValueError):
        join(skeleton, {})


@pytest.mark.parametrize(
    "damaged", [{"$float": 10**400}, {"$array": "w"}, {"$array": []}, {"$dict": [[{}, 1]]}, {"$x": 1}]
)
def test_an_invalid_skeleton_raises_value_error(damaged: Any) -> None:
    with pytest.raises(ValueError, match="skeleton"):
        join(damaged, {})


def test_split_shards_accepts_shards_and_split_refuses_them() -> None:
    shard = Shard(np.ones(2), 1, (2, 2))
    skeleton, leaves = split_shards({"a": [shard, np.zeros(3)]})
    assert skeleton == {"a": [{"$array": "a.0"}, {"$array": "a.1"}]}
    assert leaves["a.0"] is shard
    with pytest.raises(UnsupportedOp, match=r"^a\.0 is sharded"):
        split({"a": [shard]})
    for state in ({"a.0": np.ones(1), "a": [shard]}, {"a": [shard], "a.0": np.ones(1)}):
        with pytest.raises(UnsupportedOp, match="path of two arrays"):
            split_shards(state)
    with pytest.raises(UnsupportedOp, match=r"^a\b"):
        split_shards({"a": Shard(np.array(["text"]), 0, (1,))})
