"""The plan of buckets, and the pure decision when they may go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._parallel import Parameter
from paceline._parallel._bucket_reducer import Readiness
from paceline._parallel._buckets import Bucket, plan_buckets
from paceline.errors import UnsupportedOp


def model(*sizes: int, dtypes: str = "") -> dict[str, Parameter]:
    """Parameters p0, p1, ... of so many elements; dtypes: one letter each, f or d."""
    dtypes = dtypes or "d" * len(sizes)
    return {f"p{i}": Parameter(np.zeros(n, dtype)) for i, (n, dtype) in enumerate(zip(sizes, dtypes, strict=True))}


@pytest.mark.parametrize(
    ("sizes", "dtypes", "cap_bytes", "expected"),
    [
        ((1, 1, 1), "", 24, ["p2 p1 p0"]),
        ((1, 1, 1), "", 16, ["p2 p1", "p0"]),
        ((1, 9, 1), "", 16, ["p2", "p1", "p0"]),  # larger than the cap: its own
        ((9, 1, 1), "", 16, ["p2 p1", "p0"]),
        ((0, 2, 0), "", 16, ["p2 p1 p0"]),
        ((1, 1, 1, 1), "fdfd", 99, ["p3 p1", "p2 p0"]),  # p1 completes the first, p0 the second
        ((1, 1, 1, 1), "dfff", 99, ["p3 p2 p1", "p0"]),
        ((), "", 16, []),
    ],
)
def test_plan_buckets_fills_each_bucket_up_to_the_cap(
    sizes: tuple[int, ...], dtypes: str, cap_bytes: int, expected: list[str]
) -> None:
    assert [" ".join(paths) for paths in plan_buckets(model(*sizes, dtypes=dtypes), cap_bytes)] == expected


@pytest.mark.parametrize(
    ("sizes", "dtypes", "expected"),
    [
        ((9, 9, 9, 9, 9, 9), "", ["p5", "p4 p3 p2", "p1 p0"]),
        ((9, 9, 9, 9, 1, 1), "", ["p5 p4 p3", "p2 p1 p0"]),  # 2 elements are no bucket yet; with p3 it is full
        ((9, 9, 9, 33), "", ["p3", "p2 p1 p0"]),
        ((9, 9, 33, 1), "", ["p3", "p2", "p1 p0"]),  # never above the cap
        ((9, 9, 9, 18, 18, 18), "dddfff", ["p5", "p4 p3", "p2", "p1 p0"]),  # of each dtype
        ((1, 1, 1), "", ["p2 p1 p0"]),
    ],
)
def test_the_first_bucket_has_a_smaller_cap(sizes: tuple[int, ...], dtypes: str, expected: list[str]) -> None:
    plan = plan_buckets(model(*sizes, dtypes=dtypes), cap_bytes=27 * 8, first_bytes=8 * 8)
    assert [" ".join(paths) for paths in plan] == expected


def test_float16_parameters_are_refused_unless_narrow_is_set() -> None:
    parameters = {"p": Parameter(np.zeros(3, np.float16)), "q": Parameter(np.zeros(3))}
    assert plan_buckets(parameters, 99, narrow=True) == [["q"], ["p"]]
    with pytest.raises(UnsupportedOp, match="'p' is float16; only float32 and float64"):
        plan_buckets(parameters, 99)


def test_float16_gradients_are_sent_as_float32() -> None:
    parameter = Parameter(np.zeros(3, np.float16))
    bucket = Bucket({"p": parameter})
    parameter.accumulate([1, 2, 3])
    bucket.pack(0.1)
    assert bucket.flat.dtype == np.float32
    bucket.flat *= 3  # as three ranks would
    bucket.unpack(bucket.total.item())
    assert parameter.grad is not None
    assert parameter.grad.dtype == np.float16
    np.testing.assert_allclose(parameter.grad, [10, 20, 30], rtol=1e-3)


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("fd"), st.booleans())), st.integers(1, 200))
@settings(deadline=None, max_examples=100)
def test_plan_holds_every_trained_parameter_once_in_buckets_of_one_dtype(
    rows: list[tuple[int, str, bool]], cap_bytes: int
) -> None:
    parameters = {f"p{i}": Parameter(np.zeros(n, dtype), trained) for i, (n, dtype, trained) in enumerate(rows)}
    plan = plan_buckets(parameters, cap_bytes)
    trained = [path for path, p in parameters.items() if p.requires_grad]
    assert sorted(path for paths in plan for path in paths) == sorted(trained)
    for paths in plan:
        assert len({parameters[path].data.dtype for path in paths}) == 1
        assert len(paths) == 1 or sum(parameters[path].data.nbytes for path in paths) <= cap_bytes
        assert [int(path[1:]) for path in paths] == sorted((int(path[1:]) for path in paths), reverse=True)


def test_no_bucket_is_sent_early_before_a_complete_pass() -> None:
    ready = Readiness([0, 1])
    ready.start(early=True)
    assert [list(ready.signal(i)) for i in (0, 1)] == [[], []]
    assert list(ready.rest()) == [0, 1]
    ready.start(early=True)  # without `end`: the pass failed
    assert list(ready.signal(0)) == []


def test_buckets_are_sent_when_complete_and_in_order() -> None:
    ready = Readiness([0, 0, 1, 2])
    ready.start(early=True)
    ready.signal(2)
    ready.signal(2)  # twice in a pass
    ready.end()
    ready.start(early=True)
    assert list(ready.signal(2)) == []
    assert list(ready.signal(2)) == []  # complete, but bucket 0 is before it
    assert list(ready.signal(0)) == []
    assert list(ready.signal(1)) == [0, 1]
    assert [ready.may_write(i) for i in range(4)] == [False, False, False, True]
    assert list(ready.rest()) == [2]


def test_a_refused_write_is_expected_next_time() -> None:
    ready = Readiness([0])
    ready.start(early=True)
    ready.end()
    ready.start(early=True)
    assert list(ready.signal(0)) == [0]
    assert not ready.may_write(0)
    ready.start(early=True)
    assert list(ready.signal(0)) == []
    assert ready.may_write(0)
    assert list(ready.signal(0)) == [0]


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_every_bucket_is_sent_once_and_in_order(data: st.DataObject) -> None:
    bucket_of = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=8).map(lambda b: _dense(b)))
    signals = data.draw(st.lists(st.integers(0, len(bucket_of) - 1), max_size=20))
    ready = Readiness(bucket_of)
    for early in (True, True, False):
        ready.start(early=early)
        sent: list[int] = []
        for place, parameter in enumerate(data.draw(st.permutations(signals))):
            assert ready.may_write(parameter)
            new = list(ready.signal(parameter))
            assert early or not new
            sent += new
            del place
        ready.end()
        sent += ready.rest()
        assert sent == list(range(max(bucket_of) + 1))


def _dense(buckets: list[int]) -> list[int]:
    """The same partition with numbers from 0 without gaps."""
    numbers = {bucket: i for i, bucket in enumerate(sorted(set(buckets)))}
    return [numbers[bucket] for bucket in buckets]
