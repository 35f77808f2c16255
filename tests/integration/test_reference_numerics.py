"""Defects that other systems have, numbers 8 to 10: errors and numerics (see test_reference_defects.py)."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import paceline
from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from paceline.errors import (
    CollectiveMismatch,
    OperationTimeout,
    PacelineError,
)
from support.reference import X, every
from support.worlds import errors_over, run_over, scheduled

# Over gRPC these have pytest.mark.slow (support.worlds.EACH_LINK).

# 8. Panics for user errors, and 9. all errors flattened to one type with a text, on which the callers then matched.


MISTAKES: dict[str, Callable[[Group], object]] = {
    "no such rank": lambda g: g.global_rank(7),
    "half a member": lambda g: g.subgroup([g.rank, 0.5]),  # type: ignore[list-item]
    "a member in words": lambda g: g.subgroup([g.rank, "1"]),  # type: ignore[list-item]
    "no member": lambda g: g.subgroup([g.rank, None]),  # type: ignore[list-item]
    "half a tag": lambda g: g.send(X, 1 - g.rank, tag=1.5),  # type: ignore[arg-type]
    "a truth for a tag": lambda g: g.send(X, 1 - g.rank, tag=True),
    "a tag too large": lambda g: g.send(X, 1 - g.rank, tag=1 << 63),
    "a truth for a rank": lambda g: g.send(X, True),
    "uneven rows": lambda g: g.reduce_scatter(np.ones((3, 2))),
    "counts that do not add up": lambda g: g.all_to_all(X, send_counts=[2, 1]),
    "counts that are no whole numbers": lambda g: g.all_to_all(X, send_counts=[1.5, 2.5]),  # type: ignore[list-item]
    "a short out": lambda g: g.all_reduce(X, out=X[:2].copy()),
    "text": lambda g: g.all_reduce(np.array(["x"])),
    "objects": lambda g: g.all_reduce(np.array([None])),
    "an object that cannot travel": lambda g: g.all_gather_object(g),
    "a root without an array": lambda g: g.broadcast(None, root=g.rank),
    "too few parts": lambda g: g.scatter([X], root=g.rank),
    "parts that are none": lambda g: g.scatter(5, root=g.rank),
    "an op that is no name": lambda g: g.all_reduce(X, op=[1]),
    "one count for all": lambda g: g.all_to_all(X, send_counts=1),
    "counts that are none": lambda g: g.all_to_all(X, send_counts=[float("nan"), None]),
    "a list to receive into": lambda g: g.recv(0, out=[1.0]),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_8_a_mistake_is_a_typed_error_at_the_call_and_costs_nothing(name: str, link: str) -> None:
    def rank(group: Group) -> int:
        with pytest.raises(PacelineError) as caught:
            MISTAKES[name](group)
        assert isinstance(caught.value, ValueError | TypeError), "and not the generation's end"
        return int(group.all_reduce(np.int64(1)))

    assert run_over(link, 2, rank) == [2, 2]


def test_9_errors_have_types_and_attributes(link: str) -> None:
    def times_out(group: Group) -> None:
        group.barrier()
        if group.rank == 0:
            group.all_reduce(X, timeout=0.05)
        else:
            group.recv(0, timeout=20.0)

    def disagrees(group: Group) -> None:
        group.barrier()
        group.barrier()
        group.all_reduce(X, op="max" if group.rank else "min")

    for call, kind, operation in ((times_out, OperationTimeout, 2), (disagrees, CollectiveMismatch, 3)):
        for error in errors_over(link, 2, call):
            assert type(error) is kind
            assert isinstance(error, TimeoutError) == (kind is OperationTimeout)
            assert (error.operation, error.generation) == (operation, 1)
            assert set(error.ranks) <= {0, 1}
            assert error.ranks


def test_9_nothing_matches_on_the_text_of_an_error() -> None:
    """`x in str(error)`, `str(error).startswith(x)`, `error.args[0] == x`, in any `except X as error`."""
    found = []
    for path in sorted(Path(paceline.__file__).parent.rglob("*.py")):
        for handler in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler)):
            texts = {
                f"str({handler.name})",
                f"{handler.name}.args[0]",
                f"{handler.name}.details()",
                f"{handler.name}.args",
            }
            for node in ast.walk(handler):
                sides: list[ast.expr] = []
                if isinstance(node, ast.Compare):
                    sides = [node.left, *node.comparators]
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    sides = [node.func.value] if node.func.attr in ("startswith", "endswith", "find", "count") else []
                if texts & {ast.unparse(side) for side in sides}:
                    found.append(f"{path.name}:{handler.lineno}")
    assert found == []


# 10. Sum and mean alone, of float32 and float64 alone; a mean overflowed where the mean fits (3e38 and 3e38 gave inf).

BF16 = np.dtype(ml_dtypes.bfloat16)
NEAR_THE_END = [  # dtype, value, and how far off the mean of three may be: two rounded sums and a division
    ("f2", 60000, 2**-10),
    (BF16, 3e38, 3 * 2**-8),
    ("f4", 3e38, 3 * 2**-24),
    ("f8", 1.7e308, 3 * 2**-53),
    ("c8", complex(3e38, -3e38), 3 * 2**-24),
    ("c16", complex(1.7e308, -1.7e308), 3 * 2**-53),
]


def reals(x: Any) -> Any:
    """The numbers, complex ones as two, in float64."""
    return (x.view(x.real.dtype) if x.dtype.kind == "c" else x).astype(np.float64)


@pytest.mark.parametrize(
    ("collective", "schedule"),
    [(name, schedule) for name in ("all_reduce", "reduce", "reduce_scatter") for schedule in SCHEDULES[name]],
)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_10_a_mean_that_fits_does_not_overflow(collective: str, schedule: str, world: int) -> None:
    def rank(group: Group) -> None:
        for dtype, value, digits in NEAR_THE_END:
            x = np.full(world, value, dtype)
            result = getattr(group, collective)(x, op="mean")
            if result is None:
                continue  # not the root
            assert result.dtype == x.dtype
            if world != 3:
                assert (result == x[: result.size]).all(), (dtype, result)
            got, due = (reals(array[: result.size]) for array in (result, x))
            assert (abs(got / due - 1) <= digits).all(), (dtype, result)

    run_over("local", world, rank, choose=scheduled(collective)[schedule])


def test_10_a_mean_that_fits_does_not_overflow_on_any_link(link: str) -> None:
    def rank(group: Group) -> list[float]:
        result: list[float] = group.all_reduce(np.full(3, 3e38, np.float32), op="mean").tolist()
        return result

    assert run_over(link, 2, rank) == [[float(np.float32(3e38))] * 3] * 2


@every("all_reduce")
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", BF16, "f4", "f8"])
def test_10_all_ops_keep_the_type(dtype: Any, schedule: str) -> None:
    values = [np.array([3, 1, 2], dtype), np.array([1, 5, 2], dtype), np.array([2, 2, 7], dtype)]
    expected = {"sum": [6, 8, 11], "prod": [6, 10, 28], "min": [1, 1, 2], "max": [3, 5, 7]}
    if values[0].dtype.kind in "iu":
        expected |= {"band": [0, 0, 2], "bor": [3, 7, 7], "bxor": [0, 6, 7]}

    def rank(group: Group) -> None:
        for op, result in expected.items():
            got = group.all_reduce(values[group.rank], op=op)
            assert got.dtype == values[0].dtype
            assert got.astype(float).tolist() == result, op

    run_over("local", 3, rank, choose=scheduled("all_reduce")[schedule])


def test_10_large_integers_lose_no_digit(link: str) -> None:
    big = np.array([2**62, -(2**62), 2**53 + 1], np.int64)
    assert run_over(link, 2, lambda g: g.all_reduce(big // 2).tolist()) == [[2**62, -(2**62), 2**53]] * 2


@pytest.mark.parametrize(("dtype", "first", "world"), [("f2", 2048, 5), (BF16, 256, 5), ("f2", 2048, 3)])
@pytest.mark.parametrize(
    ("collective", "schedule"),
    [(name, schedule) for name in ("all_reduce", "reduce", "reduce_scatter") for schedule in SCHEDULES[name]],
)
def test_10_small_terms_count_in_rank_order(collective: str, schedule: str, dtype: Any, first: int, world: int) -> None:
    """2048 + 1 is 2048 in float16: one after the other, none of the ones would count."""

    def rank(group: Group) -> None:
        x = np.full(world, 1 if group.rank else first, dtype)
        result = getattr(group, collective)(x, op="sum", order="rank")
        if result is not None:
            assert result.dtype == x.dtype
            assert set(result.astype(float)) == {float(first + world - 1)}

    run_over("local", world, rank, choose=scheduled(collective)[schedule])


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["f2", BF16, "f4", "c8"])
def test_10_rank_order_gives_the_same_bits_at_every_size(dtype: Any, world: int) -> None:
    """Whatever schedule the rules take for the size: ((x_0 + x_1) + x_2) + ..., of half precision in float32."""
    rng = np.random.default_rng(world)
    terms = [(rng.standard_normal(60) * 10.0 ** rng.integers(-3, 4, 60)).astype(dtype) for _ in range(world)]
    wide = np.dtype(np.float32) if terms[0].dtype.itemsize == 2 else terms[0].dtype
    total = terms[0].astype(wide)
    for term in terms[1:]:
        total = total + term.astype(wide)
    bits = total.astype(dtype).tobytes()

    def rank(group: Group) -> None:
        for copies in (1, 100, 20_000):
            x = np.tile(terms[group.rank], copies)
            assert group.all_reduce(x, order="rank").tobytes() == bits * copies

    run_over("local", world, rank)
