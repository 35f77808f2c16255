"""Every collective by every schedule against NumPy: dtypes, ops, worlds, lengths, layouts, places for the result."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._collectives.arithmetic import reduction
from paceline._group import Group
from paceline._links.base import LEND_BYTES
from paceline.errors import UnsupportedOp
from paceline.testing import run_groups, run_ranks
from support.collective_calls import (
    COMPLEX,
    DTYPES,
    INTEGERS,
    REALS,
    UFUNCS,
    WAYS,
    Call,
    bits,
    draw_call,
    groups_by,
    ops_of,
    quick,
)


@pytest.mark.parametrize(("collective", "schedule", "variant"), WAYS)
@quick(max_examples=15)
@given(data=st.data(), segment=st.sampled_from([16, 64, 1 << 20]))
def test_every_collective_and_schedule_agrees_with_numpy(
    collective: str, schedule: str, variant: str, data: Any, segment: int
) -> None:
    call, places = draw_call(data, collective, variant)

    def rank(group: Group) -> None:
        place = places[group.rank]
        place.check(call.at(group, place.x, place.out))

    run_groups(groups_by(len(places), collective, schedule, segment), rank, timeout=20)


@pytest.mark.parametrize("n", [13, 4096])
def test_all_to_all_works_in_place_through_another_view_of_the_memory(n: int) -> None:
    """A view, or a subclass such as `np.memmap`, is another object, but the same memory; 4096 rows are lent."""
    world = 4

    def rank(group: Group) -> None:
        x = np.arange(world * n, dtype="f8") + 1e6 * group.rank
        hoped = [1e6 * source + n * group.rank + i for source in range(world) for i in range(n)]
        group.barrier()
        group.all_to_all(x, out=x[:])
        assert x.tolist() == hoped

    for _ in range(20):
        run_ranks(world, rank, timeout=20)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_an_op_that_the_dtype_lacks_raises_unsupported_op(collective: str) -> None:
    mistakes = [
        *(("mean", dtype, "whole numbers") for dtype in [np.dtype(bool), *INTEGERS]),
        *((op, dtype, "no order") for op in ("min", "max") for dtype in COMPLEX),
        *((op, dtype, "bits") for op in ("band", "bor", "bxor") for dtype in REALS),
    ]

    def rank(group: Group) -> Any:
        for op, dtype, why in mistakes:
            with pytest.raises(UnsupportedOp, match=why):
                getattr(group, collective)(np.ones(4, dtype), op=op)
        return group.all_reduce(np.ones(1)).tolist()

    assert run_ranks(2, rank) == [[2.0]] * 2


@pytest.mark.parametrize(("collective", "schedule", "variant"), WAYS)
def test_the_caller_may_change_its_arrays_after_a_call_returns(collective: str, schedule: str, variant: str) -> None:
    """Links of one process lend: who returned while another still read its array would spoil that one's result."""
    world, n, rounds = 4, 100_000, 3
    xs = [np.arange(n, dtype="f8") + n * rank for rank in range(world)]  # sums of whole numbers are exact
    sent = [[n // 2 - 7, 7, n // 4 - rank, n // 4 + rank] for rank in range(world)]
    call = Call(collective, variant, xs, root=1, sent=sent if variant.startswith("sent") else None)
    expected = call.expected()

    def rank(group: Group) -> None:
        kept = []
        for _ in range(rounds):
            x = xs[group.rank].copy()
            result = call.at(group, x.reshape(world, -1) if collective == "scatter" else x)
            x[...] = -1
            if result is not None:
                kept.append(result.copy())
                result[...] = -2
        assert len(kept) == (rounds if expected[group.rank] is not None else 0)
        for result in kept:
            assert bits(result) == bits(expected[group.rank])

    run_groups(groups_by(world, collective, schedule, 2 * LEND_BYTES), rank, timeout=30)


def test_supported_ops_of_each_dtype_match_the_tested_ones() -> None:
    """A new op or a new dtype must come here too."""
    for dtype in DTYPES:
        for op in UFUNCS:
            if op in ops_of(dtype):
                assert reduction(op, dtype).name == op
            else:
                with pytest.raises(UnsupportedOp):
                    reduction(op, dtype)
