"""The reference system's own unit tests of FSDP, as vectors, under their names, and the rows of its table around them.

Each holds over every kind of link. Lists are indexed by rank. Arrays are float32, equal bit for bit where the vector
has no tolerance. What must hold where the reference goes wrong: `test_reference_fsdp_defects`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline import FSDP, Parameter, ShardingStrategy
from paceline._group import Group
from paceline.errors import InvalidWorldSize, SizeMismatch, StepOrderError, UnsupportedOp
from support.worlds import run_over

FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
NO_SHARD, HYBRID = ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD

ONE = np.array([1.0], np.float32)
TWO = np.array([2.0], np.float32)


class Scaled:
    """y = x * sum(w), over all its parameters."""

    def __init__(self, *values: Any) -> None:
        self.parameters = [Parameter(np.array(w, np.float32)) for w in values]
        self.fails = False

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        for number, parameter in enumerate(self.parameters):
            yield "wuv"[number], parameter

    def forward(self, x: NDArray[Any]) -> NDArray[Any]:
        if self.fails:
            raise ZeroDivisionError("in the module")
        self.x = x
        return x * np.float32(sum(float(p.data.sum()) for p in self.parameters))

    def backward(self, dy: NDArray[Any]) -> None:
        for parameter in self.parameters:
            parameter.accumulate(np.full(parameter.shape, (dy * self.x).sum(), np.float32))


def wrap(group: Group, w: Any, strategy: ShardingStrategy = FULL, size: int | None = None) -> FSDP:
    return FSDP(Scaled(w), group, strategy, size)


def piece(fsdp: FSDP) -> Parameter:
    ((_, parameter),) = fsdp.named_parameters()
    return parameter


def whole(fsdp: FSDP) -> Parameter:
    ((_, parameter),) = fsdp.module.named_parameters()
    return parameter


def synced(fsdp: FSDP, gradient: Any) -> NDArray[Any]:
    """Forward of [1], a gradient of the full shape, `sync_gradients`; the gradient of this rank's piece."""
    fsdp(ONE)
    whole(fsdp).grad = np.array(gradient, np.float32)
    fsdp.sync_gradients()
    grad = piece(fsdp).grad
    assert grad is not None
    return grad


def operations(group: Group) -> int:
    return len(group.recorder.snapshot())


VECTORS: dict[str, tuple[Callable[[Group], Any], list[list[Any]]]] = {}
"""Name to what each rank does, and the results by rank, for each world in which it is done."""


def vector(name: str, *expected: list[Any]) -> Callable[[Callable[[Group], Any]], Callable[[Group], Any]]:
    def register(rank: Callable[[Group], Any]) -> Callable[[Group], Any]:
        VECTORS[f"fsdp::{name}"] = rank, list(expected)
        return rank

    return register


@vector("sharding", [[10, 20], [30, 40]])
def sharding(group: Group) -> list[Any]:
    fsdp = wrap(group, [10, 20, 30, 40])
    built = piece(fsdp).data.tolist()
    fsdp(ONE)
    assert piece(fsdp).data.tolist() == built
    return built


@vector("shard_requires_grad", [True, True])
def shard_requires_grad(group: Group) -> bool:
    return piece(wrap(group, [1, 2, 3, 4])).requires_grad


@vector("forward_restores_shards", [((2,), True)] * 2)
def forward_restores_shards(group: Group) -> Any:
    fsdp = wrap(group, [1, 2, 3, 4])
    fsdp(ONE)
    with pytest.raises(StepOrderError, match="unshard"):
        _ = whole(fsdp).data
    return piece(fsdp).data.shape, piece(fsdp).requires_grad


@vector("forward_produces_correct_output", [[20], [20]])
@vector("forward_without_prefetch_still_works", [[20], [20]])
def forward_produces_correct_output(group: Group) -> list[Any]:
    fsdp = wrap(group, [1, 2, 3, 4])
    assert not fsdp.has_pending_prefetch()
    return fsdp(TWO).tolist()


@vector("prefetched_forward_matches_sync_forward", [([20], [False, True, False], [20])] * 2)
def prefetched_forward_matches_sync_forward(group: Group) -> Any:
    fsdp = wrap(group, [1, 2, 3, 4])
    pending = [fsdp.has_pending_prefetch()]
    fsdp.prefetch_forward_params()
    pending.append(fsdp.has_pending_prefetch())
    y = fsdp(TWO).tolist()
    return y, [*pending, fsdp.has_pending_prefetch()], fsdp(TWO).tolist()


@vector("update_shards", [([100], [10, 20, 30, 40])])
def update_shards(group: Group) -> Any:
    fsdp = wrap(group, [1, 2, 3, 4])
    fsdp.update_shards([10, 20, 30, 40])
    return fsdp(ONE).tolist(), piece(fsdp).data.tolist()


@vector("update_shards_size_validation", [[1, 2, 3, 4]])
def update_shards_size_validation(group: Group) -> list[Any]:
    fsdp = wrap(group, [1, 2, 3, 4])
    with pytest.raises(SizeMismatch, match="expected 4 elements but got 2"):
        fsdp.update_shards([10, 20])
    return piece(fsdp).data.tolist()


@vector("shard_grad_op_keeps_full_params", [([1, 2, 3, 4], [1, 2, 3, 4])] * 2)
def shard_grad_op_keeps_full_params(group: Group) -> Any:
    fsdp = wrap(group, [1, 2, 3, 4], GRAD_OP)
    built = whole(fsdp).data.tolist()
    fsdp(ONE)
    return built, whole(fsdp).data.tolist()


@vector("shard_grad_op_sync_gradients_multi_rank", [[1, 2, 0, 0], [0, 0, 3, 4]])
def shard_grad_op_sync_gradients_multi_rank(group: Group) -> list[Any]:
    fsdp = wrap(group, [1, 2, 3, 4], GRAD_OP)
    synced(fsdp, [1, 2, 3, 4])
    padded = fsdp.padded_gradients()["w"]
    assert padded is not None
    return padded.tolist()


@vector("shard_grad_op_broadcast_updated_params", [([11, 12, 23, 24], [70])] * 2)
def shard_grad_op_broadcast_updated_params(group: Group) -> Any:
    fsdp = wrap(group, [1, 2, 3, 4], GRAD_OP)
    fsdp(ONE)
    whole(fsdp).data[...] = [[11, 12, 3, 4], [1, 2, 23, 24]][group.rank]
    fsdp.broadcast_updated_params()
    return whole(fsdp).data.tolist(), fsdp(ONE).tolist()


@vector("no_shard_broadcast_is_noop", [[1, 2, 3, 4]])
def no_shard_broadcast_is_noop(group: Group) -> list[Any]:
    fsdp = wrap(group, [1, 2, 3, 4], NO_SHARD)
    fsdp.broadcast_updated_params()
    return piece(fsdp).data.tolist()


@vector("prefetch_rejects_double_call", [None], [None, None])
def prefetch_rejects_double_call(group: Group) -> None:
    fsdp = wrap(group, [1, 2, 3, 4])
    for _ in range(2):  # it is allowed again after a forward pass
        fsdp.prefetch_forward_params()
        with pytest.raises(StepOrderError, match="called twice"):
            fsdp.prefetch_forward_params()
        assert fsdp(TWO).tolist() == [20]


@vector("prefetch_rejects_non_fullshard", [None], [None, None])
def prefetch_rejects_non_fullshard(group: Group) -> None:
    for strategy in (GRAD_OP, NO_SHARD):
        fsdp = wrap(group, [1, 2, 3, 4], strategy)
        with pytest.raises(UnsupportedOp, match=f"FULL_SHARD and HYBRID_SHARD.* {strategy.name}"):
            fsdp.prefetch_forward_params()
        assert not fsdp.has_pending_prefetch()


@vector("hybrid_shard_rejects_uneven_world_size", [None] * 4)
def hybrid_shard_rejects_uneven_world_size(group: Group) -> None:
    for size in (3, 0, -2, 8):
        with pytest.raises(InvalidWorldSize, match=rf"4 .*multiple .*{size}"):
            wrap(group, [1] * 8, HYBRID, size)
    assert operations(group) == 0


@vector("hybrid_shard_intra_node_sharding", [[10, 20], [30, 40]] * 2)
def hybrid_shard_intra_node_sharding(group: Group) -> list[Any]:
    return piece(wrap(group, [10, 20, 30, 40], HYBRID, 2)).data.tolist()


@pytest.mark.parametrize("name", VECTORS)
def test_vector(name: str, link: str) -> None:
    rank, worlds = VECTORS[name]
    for expected in worlds:
        assert run_over(link, len(expected), rank) == expected


class Reduction(NamedTuple):
    """Gradients by rank in, those of the pieces out."""

    strategy: ShardingStrategy
    given: list[list[float]]
    expected: list[list[float]]
    param: list[float]
    size: int | None = None
    tolerance: float = 0.0


SMALL, TO_4 = [0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0]
APART = [[2.0, 4.0, 6.0, 8.0]] * 2 + [[10.0, 20.0, 30.0, 40.0]] * 2
HALVES = [[1.0, 2.0], [3.0, 4.0]]

REDUCTIONS = {
    "fsdp::sync_gradients_single_rank": Reduction(FULL, [SMALL], [SMALL], TO_4),
    "fsdp::sync_gradients_multi_rank": Reduction(FULL, [TO_4] * 2, HALVES, TO_4),
    "fsdp::no_shard_is_ddp_equivalent": Reduction(NO_SHARD, [TO_4] * 2, [TO_4] * 2, TO_4),
    "fsdp::hybrid_shard_sync_gradients": Reduction(HYBRID, [TO_4] * 4, HALVES * 2, TO_4, 2),
    "fsdp::hybrid_shard_inter_node_averaging": Reduction(HYBRID, APART, [[6, 12], [18, 24]] * 2, [0.0] * 4, 2, 1e-4),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name: str, link: str) -> None:
    case = REDUCTIONS[name]

    def rank(group: Group) -> NDArray[Any]:
        fsdp = wrap(group, case.param, case.strategy, case.size)
        grad = synced(fsdp, case.given[group.rank])
        assert piece(fsdp).data.shape == grad.shape
        return grad

    for grad, expected in zip(run_over(link, len(case.given), rank), case.expected, strict=True):
        assert grad.dtype == np.float32
        np.testing.assert_allclose(grad, np.array(expected, np.float32), rtol=0, atol=case.tolerance)


def test_all_vectors_are_here() -> None:
    assert len({*VECTORS, *REDUCTIONS}) == len(VECTORS) + len(REDUCTIONS) == 21


# Rows of the table, and their edges.


def test_full_shard_is_the_default_and_construction_communicates_nothing(link: str) -> None:
    def rank(group: Group) -> None:
        module = Scaled([1, 2])
        fsdp = FSDP(module, group)
        assert (fsdp.strategy, fsdp.module, fsdp.group) == (FULL, module, group)
        for strategy in ShardingStrategy:
            wrap(group, [1, 2], strategy, 1 if strategy is HYBRID else None)
        assert operations(group) == 0

    run_over(link, 2, rank)


def test_what_cannot_be_is_a_typed_error_at_construction(link: str) -> None:
    def rank(group: Group) -> None:
        for dtype in (np.int64, np.float16):
            module = Scaled([1, 2])
            module.parameters.append(Parameter(np.ones(2, dtype)))
            with pytest.raises(UnsupportedOp, match="'u'"):
                FSDP(module, group)
        with pytest.raises(ValueError, match=r"HYBRID_SHARD.*NO_SHARD"):
            wrap(group, [1, 2], NO_SHARD, 2)
        with pytest.raises(ValueError, match="zero"):
            FSDP(Scaled([1]), group, "zero")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="-1"):
            FSDP(Scaled([1]), group, ahead=-1)
        with pytest.raises(UnsupportedOp, match="int8"):
            FSDP(Scaled([1]), group, communication_dtype=np.int8)
        assert operations(group) == 0

    run_over(link, 2, rank)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ShardingStrategy)
@pytest.mark.parametrize("n", [0, 1, 3, 5])
def test_any_size_fits_any_world(strategy: ShardingStrategy, n: int, link: str) -> None:
    """By the reference a size that W does not divide was a panic; under SHARD_GRAD_OP after the first step only."""
    w = np.arange(1, n + 1, dtype=np.float32)

    def rank(group: Group) -> NDArray[Any]:
        fsdp = wrap(group, w, strategy, 2 if strategy is HYBRID else None)
        assert fsdp(TWO).tolist() == [2 * w.sum()]
        fsdp.broadcast_updated_params()
        return synced(fsdp, w)

    held = run_over(link, 4, rank)
    copies = {FULL: [held], GRAD_OP: [held], NO_SHARD: [[one] for one in held], HYBRID: [held[:2], held[2:]]}[strategy]
    assert [np.concatenate(copy).tolist() for copy in copies] == [w.tolist()] * len(copies)


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_parameters_keep_their_shape_where_one_rank_has_them_whole(strategy: ShardingStrategy, link: str) -> None:
    size = 1 if strategy is HYBRID else None

    def rank(group: Group) -> None:
        fsdp = wrap(group, [[1, 2], [3, 4]], strategy, size)
        assert np.shares_memory(piece(fsdp).data, whole(fsdp).data)
        for _ in range(2):
            assert synced(fsdp, [[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
            assert piece(fsdp).data.tolist() == [[1, 2], [3, 4]]

    run_over(link, 1, rank)
    if strategy in (NO_SHARD, HYBRID):
        run_over(link, 2, rank)


def test_a_second_forward_keeps_the_gradients_of_the_first(link: str) -> None:
    """By the reference they were zeros then, and parameters were new objects after each forward."""

    def rank(group: Group) -> Any:
        fsdp = wrap(group, [[1, 2], [3, 4]])
        parameters = whole(fsdp), piece(fsdp)
        fsdp(ONE)
        whole(fsdp).grad = [[1, 2], [3, 4]]
        assert fsdp(ONE).tolist() == [10]
        fsdp.sync_gradients()
        assert (whole(fsdp), piece(fsdp)) == parameters
        assert piece(fsdp).grad is not None
        return piece(fsdp).grad.tolist()

    assert run_over(link, 2, rank) == HALVES


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NO_SHARD])
def test_sync_gradients_replaces_and_a_second_one_does_nothing(strategy: ShardingStrategy, link: str) -> None:
    def rank(group: Group) -> list[Any]:
        fsdp, found = wrap(group, [1, 2, 3, 4], strategy), []
        with pytest.raises(StepOrderError, match=r"Was forward\(\) called before backward\(\)\?"):
            fsdp.sync_gradients()
        for factor in (1, 3):
            found.append((synced(fsdp, np.arange(4) * factor)).tolist())
            fsdp.sync_gradients()
            assert piece(fsdp).grad.tolist() == found[-1]
        piece(fsdp).grad = whole(fsdp).grad = None
        fsdp(ONE)
        fsdp.backward(ONE)
        done = operations(group)
        fsdp.sync_gradients()
        assert operations(group) == done
        return [*found, piece(fsdp).grad.tolist()]

    steps = [[0, 1, 2, 3], [0, 3, 6, 9], [1, 1, 1, 1]]
    halves = [[step[:2] for step in steps], [step[2:] for step in steps]]
    assert run_over(link, 2, rank) == ([steps] * 2 if strategy is NO_SHARD else halves)


def test_update_shards_is_of_this_rank_alone_keeps_shapes_and_drops_gradients(link: str) -> None:
    def rank(group: Group) -> None:
        fsdp = FSDP(Scaled([[1, 2], [3, 4]], [5, 6]), group)
        fsdp.update_shards([[10, 20, 30], [40, 50, 60]][group.rank])  # before the first use it is kept too
        assert fsdp(ONE).tolist() == [210]
        fsdp.backward(ONE)
        done = operations(group)
        for wrong in (2, 4):
            with pytest.raises(SizeMismatch, match=f"expected 3 elements but got {wrong}"):
                fsdp.update_shards(np.zeros(wrong))
        assert all(p.grad is not None for _, p in fsdp.named_parameters() if p.data.size)
        fsdp.update_shards([[1, 2, 3], [4, 5, 6]][group.rank])
        assert [p.grad for _, p in fsdp.named_parameters()] == [None, None]
        assert operations(group) == done
        with fsdp.unshard():
            assert [p.data.tolist() for p in fsdp.module.parameters] == [[[1, 2], [3, 4]], [5, 6]]

    run_over(link, 2, rank)


def test_broadcast_updated_params_of_other_strategies_communicates_nothing(link: str) -> None:
    def rank(group: Group) -> None:
        for strategy in (FULL, HYBRID, NO_SHARD):
            fsdp = wrap(group, [1, 2, 3, 4], strategy, 1 if strategy is HYBRID else None)
            fsdp(ONE)
            before, done = piece(fsdp).data.copy(), operations(group)
            fsdp.broadcast_updated_params()
            np.testing.assert_array_equal(piece(fsdp).data, before)
            assert operations(group) == done

    run_over(link, 2, rank)
