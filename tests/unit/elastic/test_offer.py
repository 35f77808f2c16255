"""A state as chunks: what is given is what arrives, whatever the arrays; and what a liar describes does no harm."""

from __future__ import annotations

import json
import threading
import tracemalloc
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._elastic.offer import HASH_BYTES, Content, Description, OfferedState
from paceline.errors import PacelineError, SizeMismatch
from paceline_protocol import Tag

CHUNK = 64
TAG = Tag(3, 7)

dtypes = st.sampled_from([np.float64, np.float32, np.int8, np.bool_, np.complex128, ml_dtypes.bfloat16])
shapes = st.sampled_from([(), (0,), (3, 0, 2), (1,), (5,), (3, 4), (2, 3, 4), (64,), (65,), (0, 1)])
layouts = st.sampled_from(["C", "F", "sliced"])


content_of = partial(Content.of, chunk_bytes=CHUNK)


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Any]:
    found = {}
    for n in range(draw(st.integers(0, 5))):
        dtype, shape, layout = draw(dtypes), draw(shapes), draw(layouts)
        seed = draw(st.integers(0, 99))
        array = np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)
        if layout == "F":
            array = np.asfortranarray(array)
        elif layout == "sliced" and shape:
            array = np.repeat(array, 2, axis=-1)[..., ::2]
        found[f"a{n}"] = array
    return found


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes() for k in a
    )


def kind_of(array: Any) -> tuple[Any, Any]:
    return array.dtype, array.shape


def described(content: Content) -> Description:
    """As it arrives."""
    sent = Description.of(content)
    return Description.from_json(sent.to_json(), sent.hashes, 1 << 20, chunk_bytes=CHUNK)


@given(given_arrays=arrays(), own=arrays())
@settings(deadline=None, max_examples=40)
def test_a_state_arrives_intact_and_only_differing_chunks_are_missing(given_arrays: Any, own: Any) -> None:
    content = content_of({"x": given_arrays, "n": 1})
    assert content.size == sum(array.nbytes for array in given_arrays.values())
    assert content.chunks == -(-content.size // CHUNK)
    assert b"".join(content.read(n) for n in range(content.chunks)) == b"".join(
        array.tobytes() for array in given_arrays.values()
    )
    description = described(content)
    mine = content_of({"x": own}).arrays
    taken, lacking = description.allocate(mine)
    held = content_of({
        name: mine[name] if name in mine and kind_of(mine[name]) == kind_of(x) else np.zeros_like(x)
        for name, x in taken.arrays.items()
    })  # fmt: skip
    assert lacking == [n for n in range(content.chunks) if held.read(n) != content.read(n)]
    for chunk in lacking:
        taken.write(chunk, content.read(chunk))
    assert same(taken.tree()["x"], given_arrays)
    assert taken.tree()["n"] == 1
    again, lacking = description.allocate(content.arrays)
    assert not lacking, "what is alike does not travel"
    assert same(again.tree()["x"], given_arrays)


def test_writing_received_chunks_leaves_own_arrays_unchanged() -> None:
    mine = {"a": np.ones(3), "b": np.ones(2, int)}
    taken, _ = described(content_of({"a": np.zeros(3), "b": np.zeros(2)})).allocate(mine)
    for chunk in range(taken.chunks):
        taken.write(chunk, bytes(len(taken.read(chunk))))
    assert mine["a"].tolist() == [1] * 3
    assert not taken.arrays["a"].any()


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK + 1, 200])
def test_a_chunk_of_the_wrong_length_is_refused(length: int) -> None:
    content = content_of({"a": np.zeros(CHUNK + 8, np.uint8)})
    with pytest.raises(SizeMismatch, match="chunk 0 of a state has"):
        content.write(0, b"1" * length)


def test_content_reads_the_current_values_of_live_arrays() -> None:
    array, scalar = np.zeros(4), np.zeros(())
    content = content_of({"a": array, "s": scalar})
    array[0], scalar[()] = 1, 2
    assert content.read(0) == array.tobytes() + scalar.tobytes()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("float32"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.just("$array"), inner),
    max_leaves=12,
)


@given(arrays=json_values, skeleton=json_values, spread=json_values, hashes=st.binary(max_size=40))
@settings(deadline=None, max_examples=80)
def test_arbitrary_json_is_parsed_or_raises_value_error(arrays: Any, skeleton: Any, spread: Any, hashes: bytes) -> None:
    sides = ({"arrays": arrays, "skeleton": skeleton, "spread": []}, {"arrays": [], "skeleton": 1, "spread": spread})
    for value in (*sides, arrays):
        try:
            found = Description.from_json(json.dumps(value).encode(), hashes, 1 << 16, chunk_bytes=CHUNK)
        except ValueError:
            continue
        found.allocate({})[0].tree()


HUGE = 1 << 45
HOSTILE = [
    b"",
    b"\xff\xfe",
    b"[" * 200_000,
    b'{"arrays": ' + b"[" * 200_000,
    b"9" * 5000,
    b"null",
    b"[]",
    b'{"arrays": []}',
    b'{"skeleton": 1}',
    b'{"skeleton": 1, "arrays": []}',
    *(
        json.dumps({"skeleton": None, "arrays": [["a", "float32", [0]]], "spread": spread}).encode()
        for spread in (["a"], ["b", "b"], [3], [["b"]], "bcd", {"b": 1}, None, 5)
    ),
    *(
        json.dumps({"skeleton": None, "arrays": listed, "spread": []}).encode()
        for listed in (
            [["a", "float32", [HUGE]]],
            [["a", "float32", [1 << 30, 1 << 30]]],
            [["a", "float32", [0, 1 << 44, 1 << 44]]],
            [["a", "float32", [1] * 33]],
            [["a", "float32", [-1]]],
            [["a", "float32", [True]]],
            [["a", "float32", [1.0]]],
            [["a", "float32", "33"]],
            [["a", "object", [1]]],
            [["a", "O", [1]]],
            [["a", ["float32"], [1]]],
            [["a", "float32", [0]], ["a", "float32", [0]]],
            [[3, "float32", [0]]],
            [["a", "float32"]],
            {"a": 1},
            "abc",
            5,
        )
    ),
    *(
        json.dumps({"skeleton": skeleton, "arrays": [], "spread": []}).encode()
        for skeleton in (
            {"$array": "a"}, {"$array": []}, {"$float": "x"}, {"$odd": 1}, {"$dict": [[[], 1]]}, {"$a": 1, "b": 2}
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: data[:40].decode("latin-1"))
def test_hostile_descriptions_are_refused_and_take_little_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            Description.from_json(data, b"", 1 << 62, chunk_bytes=CHUNK)
        assert tracemalloc.get_traced_memory()[1] < 32 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()


def test_a_description_with_implausible_size_or_hashes_is_refused() -> None:
    sent = Description.of(content_of({"a": np.zeros(100)}))
    assert len(sent.hashes) == 13 * HASH_BYTES
    with pytest.raises(ValueError, match="implausible for this model"):
        Description.from_json(sent.to_json(), sent.hashes, 799, chunk_bytes=CHUNK)
    with pytest.raises(ValueError, match="bytes of hashes"):
        Description.from_json(sent.to_json(), sent.hashes[1:], 800, chunk_bytes=CHUNK)


def test_offered_state_serves_only_the_tag_that_is_offered() -> None:
    offered, content = OfferedState(), content_of({"a": np.arange(20.0)})
    with pytest.raises(PacelineError, match="does not hold the state g00000003-s0000000007 now"):
        offered.describe(TAG)
    offered.offer(TAG, content)
    description = offered.describe(TAG)
    assert offered.describe(TAG) is description, "hashes are computed once"
    assert offered.read(TAG, 2) == content.read(2)
    for chunk in (-1, 3):
        with pytest.raises(PacelineError, match="there is no chunk"):
            offered.read(TAG, chunk)
    with pytest.raises(PacelineError, match="does not hold"):
        offered.read(Tag(3, 8), 0)
    offered.offer(Tag(4, 8), content_of({"a": np.zeros(1)}))
    with pytest.raises(PacelineError, match="does not hold"):
        offered.describe(TAG)
    assert offered.describe(Tag(4, 8)) is not description


def test_a_read_succeeds_if_the_same_tag_is_offered_again_meanwhile() -> None:
    """A member says what it holds each time that it meets: equal tags are equal bits."""

    class Again(Content):
        def read(self, chunk: int) -> bytes:
            offered.offer(TAG, content_of({"a": np.zeros(4)}))
            return super().read(chunk)

    offered = OfferedState()
    offered.offer(TAG, Again.of({"a": np.zeros(4)}, chunk_bytes=CHUNK))
    assert offered.read(TAG, 0) == bytes(32)


@pytest.mark.parametrize("what", ["read", "describe"])
@pytest.mark.parametrize("then", ["withdraw", "offer"])
def test_a_read_fails_if_the_state_is_withdrawn_or_replaced_meanwhile(what: str, then: str) -> None:
    reading, go_on = threading.Event(), threading.Event()

    class Slow(Content):
        def read(self, chunk: int) -> bytes:
            reading.set()
            assert go_on.wait(10)
            return super().read(chunk)

        def hash(self, chunk: int) -> bytes:
            reading.set()
            assert go_on.wait(10)
            return super().hash(chunk)

    offered, outcome = OfferedState(), []
    offered.offer(TAG, Slow.of({"a": np.zeros(4)}, chunk_bytes=CHUNK))

    def read() -> None:
        try:
            outcome.append(offered.read(TAG, 0) if what == "read" else offered.describe(TAG))
        except PacelineError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(10)
    if then == "withdraw":
        offered.withdraw()
    else:
        offered.offer(Tag(TAG.generation, TAG.step + 1), content_of({"a": np.ones(4)}))
    go_on.set()
    thread.join(10)
    assert outcome == [f"the state {TAG} is no longer offered"]
