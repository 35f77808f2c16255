"""`Group.all_reduce_compressed`: the same bits everywhere, near the exact result, and nothing lost with feedback."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from unit.test_compression_codecs import block_max

from paceline._group import Group
from paceline.compression import PIECE, Bf16, Codec, Int8, Memory
from paceline.errors import CollectiveMismatch, SizeMismatch, UnsupportedOp
from paceline.testing import local_groups, run_groups, run_ranks

Array = NDArray[Any]
CODECS: list[Codec] = [Bf16(), Int8(), Int8(32)]


def values(world: int, n: int, dtype: Any = np.float32, seed: int = 0) -> list[Array]:
    """One array for each rank, of many magnitudes."""
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(n) * np.exp(4 * rng.standard_normal(n))).astype(dtype) for _ in range(world)]


def bound(codec: Codec, xs: list[Array]) -> Array:
    """How far from the exact sum a result may be: as the codecs' docstrings say."""
    wide = [x.astype(np.float64) for x in xs]
    world, sizes = len(xs), sum(np.abs(x) for x in wide)
    if isinstance(codec, Int8):
        # Blocks begin anew in each chunk and piece, so an element's block is some part of this range.
        return sum(_near_max(x, codec.block) for x in wide) / 126 + world * 2.0**-118 + world * 2.0**-23 * sizes
    return (1 / 127 + world * 2.0**-20) * sizes + world * 2.0**-133


def _near_max(x: Array, block: int) -> Array:
    """The largest |x| that can be in one block with each element."""
    found = block_max(x, block)
    return np.maximum(found, np.maximum(np.roll(found, block), np.roll(found, -block)))


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize(
    ("world", "dtype", "op"),
    [
        (1, np.float32, "sum"),
        (2, np.float64, "mean"),
        (3, np.float32, "mean"),
        (3, np.float64, "sum"),
        (5, np.float32, "sum"),
        (5, np.float64, "mean"),
    ],
)
def test_all_ranks_get_the_same_bits_near_the_exact_result(codec: Codec, world: int, dtype: Any, op: str) -> None:
    for n in (0, 1, 2, world, 1000, 2 * world * PIECE + 77):
        xs = values(world, n, dtype)
        found = run_ranks(world, lambda g, xs=xs: g.all_reduce_compressed(xs[g.rank], codec, op=op))  # type: ignore[misc]
        assert len({x.tobytes() for x in found}) == 1
        assert found[0].dtype == dtype
        exact = sum(x.astype(np.float64) for x in xs)
        divisor = world if op == "mean" else 1
        if world == 1:
            np.testing.assert_array_equal(found[0], xs[0])
        assert (np.abs(found[0] - exact / divisor) <= bound(codec, xs) / divisor).all()


@given(
    st.sampled_from(CODECS),
    st.integers(2, 4),
    st.data(),
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_results_for_any_values_are_within_the_error_bound_of_the_codec(
    codec: Codec, world: int, data: st.DataObject
) -> None:
    numbers = st.floats(-(2.0**120), 2.0**120, width=32)
    n = data.draw(st.integers(1, 70))
    xs = [np.array(data.draw(st.lists(numbers, min_size=n, max_size=n)), np.float32) for _ in range(world)]
    found = run_ranks(world, lambda g: g.all_reduce_compressed(xs[g.rank], codec))
    assert len({x.tobytes() for x in found}) == 1
    near = bound(codec, xs)
    if isinstance(codec, Int8) and n > codec.block:  # blocks of this size may lie anywhere
        near = np.full(n, near.max())
    assert (np.abs(found[0].astype(np.float64) - sum(x.astype(np.float64) for x in xs)) <= near).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_elements_marked_exact_are_summed_exactly(codec: Codec, op: str) -> None:
    xs = [np.append(x, [1e6 + r, 1.0, 2.0**-40]).astype(np.float32) for r, x in enumerate(values(3, 500))]
    for x in run_ranks(3, lambda g: g.all_reduce_compressed(xs[g.rank], codec, op=op, exact=3)):
        divisor = np.float32(3 if op == "mean" else 1)
        np.testing.assert_array_equal(x[-3:], (xs[0][-3:] + xs[1][-3:] + xs[2][-3:]) / divisor)
    whole = run_ranks(2, lambda g: g.all_reduce_compressed(xs[g.rank], codec, exact=503))
    np.testing.assert_array_equal(whole[1], xs[0] + xs[1])


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_async_in_place_and_other_layouts_give_the_same_result(codec: Codec) -> None:
    xs = values(2, 3000)
    expected = run_ranks(2, lambda g: g.all_reduce_compressed(xs[g.rank], codec))[0]

    def rank(g: Group) -> None:
        x = xs[g.rank].copy()
        work = g.all_reduce_compressed(x, codec, out=x, async_op=True)
        assert work.wait() is x
        np.testing.assert_array_equal(x, expected)
        swapped = xs[g.rank].astype(">f4").reshape(30, 100)
        out = np.empty((100, 30), np.float32).T
        assert g.all_reduce_compressed(swapped, codec, out=out) is out
        np.testing.assert_array_equal(out, expected.reshape(30, 100))
        np.testing.assert_array_equal(swapped.reshape(-1), xs[g.rank])

    run_ranks(2, rank)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_and_left_over_of_feedback_add_up_to_the_exact_sum(codec: Codec, op: str, dtype: Any) -> None:
    """After any number of calls, all results and what is left over make up the exact sum."""
    world, n, calls = 3, 5000, 12
    xs = [values(world, n, dtype, seed) for seed in range(calls)]

    def rank(g: Group) -> tuple[Array, Array]:
        memory = Memory(feedback=True)
        total = np.zeros(n)
        for step in xs:
            total += g.all_reduce_compressed(step[g.rank], codec, op=op, memory=memory)
            memory.commit()
        assert memory.left_over is not None
        return total, memory.left_over.astype(np.float64)

    found = run_ranks(world, rank)
    divisor = world if op == "mean" else 1
    exact = sum(x.astype(np.float64) for step in xs for x in step)
    scale = sum(np.abs(x) for step in xs for x in step)
    rest = sum(left for _, left in found)
    assert (np.abs(found[0][0] * divisor + rest - exact) <= 1e-5 * scale + 1e-5 * np.abs(rest).max()).all()


def test_small_values_beside_a_large_one_survive_only_with_feedback() -> None:
    x = np.full(64, 1e-4, np.float32)
    x[0] = 1.0

    def rank(g: Group) -> list[float]:
        sums = []
        for memory in (None, Memory(feedback=True)):
            total = np.zeros(64)
            for _ in range(400):
                total += g.all_reduce_compressed(x, Int8(), memory=memory)
                if memory is not None:
                    memory.commit()
            sums.append(float(total[1]))
        return sums

    without, with_feedback = run_ranks(2, rank)[0]
    assert without == 0
    assert with_feedback == pytest.approx(400 * 2e-4, rel=0.2)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_an_undone_call_does_not_change_later_results(codec: Codec) -> None:
    xs = [values(2, 2000, seed=seed) for seed in range(4)]

    def rank(g: Group, undone: bool) -> list[bytes]:
        memory, found = Memory(feedback=True), []
        for step in xs:
            if undone:
                for other in values(3, 2000, seed=99)[:2]:  # two calls in the step that is undone
                    g.all_reduce_compressed(other, codec, memory=memory)
                memory.undo()
            found += [g.all_reduce_compressed(step[g.rank], codec, memory=memory).tobytes() for _ in range(2)]
            memory.commit()
        return found

    assert run_ranks(2, lambda g: rank(g, undone=True)) == run_ranks(2, lambda g: rank(g, undone=False))


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_non_finite_values_affect_only_one_call(codec: Codec, odd: float) -> None:
    def rank(g: Group) -> Array:
        memory = Memory(feedback=True)
        x = np.ones(3000, np.float32)
        x[[10, 2000]] = odd
        found = g.all_reduce_compressed(x, codec, memory=memory)
        assert not np.isfinite(found[[10, 2000]]).any()
        memory.commit()
        assert memory.left_over is not None
        assert np.isfinite(memory.left_over).all()
        return g.all_reduce_compressed(np.ones(3000, np.float32), codec, memory=memory)

    for x in run_ranks(2, rank):
        np.testing.assert_allclose(x, 2, rtol=0.02)


def test_different_compressions_on_ranks_are_a_mismatch() -> None:
    ways: list[Any] = [
        ("int8", Int8(64), "compression=int8 block=64"),
        ("int8", "bf16", "compression=bf16"),
        ("bf16", None, "all_reduce op=sum float32"),
    ]
    for one, other, text in ways:

        def rank(g: Group, one: Any = one, other: Any = other, text: str = text) -> None:
            x = np.ones(5, np.float32)
            how = other if g.rank else one
            with pytest.raises(CollectiveMismatch, match=text) as caught:
                g.all_reduce(x) if how is None else g.all_reduce_compressed(x, how)
            assert f"compression={one}" in str(caught.value)

        run_ranks(2, rank)


def test_the_flight_record_shows_the_compression() -> None:
    def rank(g: Group) -> None:
        g.all_reduce_compressed(np.ones(5, np.float32), "int8", exact=2, label="grads")
        signature = "all_reduce op=sum compression=int8 block=1024 exact=2 label=grads float32[5]"
        assert g._core.recorder.find(g.generation, "", 1) == signature.encode()

    run_ranks(2, rank)


def test_invalid_arguments_raise_without_ending_the_generation() -> None:
    def rank(g: Group) -> float:
        x, memory = np.ones(8, np.float32), Memory(feedback=True)
        g.all_reduce_compressed(x, "bf16", memory=memory)
        with pytest.raises(SizeMismatch, match=r"memory belongs to an array float32\[8\]"):
            g.all_reduce_compressed(x[:4], "bf16", memory=memory)
        with pytest.raises(UnsupportedOp, match="float32 and float64"):
            g.all_reduce_compressed(np.ones(4, np.int32), "int8")
        with pytest.raises(UnsupportedOp, match="'max' cannot be compressed"):
            g.all_reduce_compressed(x, "int8", op="max")
        with pytest.raises(UnsupportedOp, match="compression must be"):
            g.all_reduce_compressed(x, "int4")
        with pytest.raises(SizeMismatch, match="exact=9 of an array of 8"):
            g.all_reduce_compressed(x, "int8", exact=9)
        with pytest.raises(SizeMismatch, match="out has shape"):
            g.all_reduce_compressed(x, "int8", out=np.empty(9, np.float32))
        return float(g.all_reduce_compressed(x, "int8")[0])

    assert run_ranks(2, rank) == [2.0, 2.0]


def test_a_repeated_call_with_memory_allocates_less_than_the_array() -> None:
    """In the steady state a call allocates pieces, and nothing of the array's size."""
    world, n = 2, 2 << 20
    groups = local_groups(world)
    xs = values(world, n)
    peaks = []

    def rank(g: Group) -> None:
        memory, x = Memory(feedback=True), xs[g.rank]
        for turn in range(3):
            g.all_reduce_compressed(x, "int8", memory=memory, out=x)
            memory.commit()
            g.barrier()
            if g.rank == 0:
                before, peak = tracemalloc.get_traced_memory()
                peaks.append(peak - before)
                tracemalloc.reset_peak()
            g.barrier()
            del turn

    tracemalloc.start()
    try:
        run_groups(groups, rank)
    finally:
        tracemalloc.stop()
    assert peaks[-1] < world * 8 * PIECE * 4 < n * 4
