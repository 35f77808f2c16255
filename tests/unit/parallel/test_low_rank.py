"""PowerSGD: what travels, how near the sums are, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.parallel.helpers import mlp, samples, weights

from paceline import nn
from paceline._group import Group
from paceline._parallel import DDP, Parameter
from paceline._parallel._low_rank import LowRankBucket, shrinks
from paceline.compression import PowerSGD
from paceline.errors import SettingsMismatch
from paceline.optim import SGD
from paceline.testing import local_groups, next_generation, run_groups, run_ranks

N, M, RANK = 12, 20, 3


class Matrix:
    """A module that has a matrix and a vector, and whose gradients are given."""

    def __init__(self) -> None:
        self.matrix, self.vector = Parameter(np.zeros((N, 4, 5))), Parameter(np.zeros(7))

    def named_parameters(self) -> Any:
        return [("matrix", self.matrix), ("vector", self.vector)]

    def forward(self, x: Any) -> Any:
        return x

    def backward(self, dy: Any) -> None:
        self.vector.accumulate(dy[0, 0] * np.arange(7.0))
        self.matrix.accumulate(self.given * dy[0, 0])

    given: Any = None


def gradient(rank: int, step: int, of_rank: int) -> Any:
    """Of a low rank, shape [N, 4, 5]."""
    rng = np.random.default_rng([rank, step])
    return (rng.standard_normal((N, of_rank)) @ np.random.default_rng(7).standard_normal((of_rank, M))).reshape(N, 4, 5)


def test_shrinks_only_matrices_larger_than_their_factors() -> None:
    assert shrinks(Parameter(np.zeros((N, 4, 5))), RANK)
    assert not shrinks(Parameter(np.zeros((4, 4))), 2)
    assert not shrinks(Parameter(np.zeros(99)), 1)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_of_low_rank_gradients_are_exact(world: int) -> None:
    def run(group: Group) -> Any:
        module = Matrix()
        ddp = DDP(module, group, compression=PowerSGD(RANK))
        ddp(np.ones((2, 2)))
        module.given = gradient(group.rank, 0, RANK)
        ddp.backward(np.ones((2, 2)), weight=group.rank + 1.0)
        return module.matrix.grad.copy(), module.vector.grad.copy()

    expected = sum((rank + 1) * gradient(rank, 0, RANK) for rank in range(world)) / sum(range(1, world + 1))
    ranks = run_ranks(world, run)
    for matrix, vector in ranks:
        np.testing.assert_allclose(matrix, expected, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(vector, np.arange(7.0))
        assert matrix.tobytes() == ranks[0][0].tobytes()


def test_error_feedback_accounts_for_the_whole_compression_error() -> None:
    """Sums over all steps differ from the exact ones by what is left over now, whatever the rank of the gradients."""
    steps = 40

    def run(group: Group) -> Any:
        module = Matrix()
        ddp = DDP(module, group, compression=PowerSGD(1))
        total = np.zeros((N, 4, 5))
        for step in range(steps):
            module.matrix.grad = module.vector.grad = None
            ddp(np.ones((2, 2)))
            module.given = gradient(group.rank, step, 5)
            ddp.backward(np.ones((2, 2)))
            total += module.matrix.grad
        bucket: Any = ddp._model.reducer.buckets[0]  # type: ignore[union-attr]
        return total, bucket._layout.home(bucket.memory.left_over, 1).reshape(N, 4, 5)

    ranks = run_ranks(2, run)
    exact = sum(gradient(rank, step, 5) for rank in range(2) for step in range(steps)) / 2
    left = sum(left for _, left in ranks) / 4  # each rank counts 2
    np.testing.assert_allclose(ranks[0][0] + left, exact, rtol=1e-9, atol=1e-9)
    assert np.linalg.norm(left) < 0.5 * np.linalg.norm(exact)


def test_an_undone_step_does_not_change_later_sums() -> None:
    groups = local_groups(2)
    made = [DDP(Matrix(), group, compression="powersgd") for group in groups]

    def step(group: Group, number: int) -> Any:
        ddp: Any = made[group.rank]
        ddp.begin_step()
        ddp.module.matrix.grad = ddp.module.vector.grad = None
        ddp(np.ones((2, 2)))
        ddp.module.given = gradient(group.rank, number, 5)
        ddp.backward(np.ones((2, 2)))
        return ddp.module.matrix.grad.copy()

    def run(undone: bool) -> Any:
        def both(group: Group) -> Any:
            step(group, 0)
            if undone:
                step(group, 8)
                made[group.rank].drop_gradients()
            bucket: Any = made[group.rank]._model.reducer.buckets[0]  # type: ignore[union-attr]
            bucket.new_generation()  # as in the next generation
            return step(group, 1)

        return both

    disturbed = run_groups(groups, run(undone=True))
    groups = local_groups(2)
    made = [DDP(Matrix(), group, compression="powersgd") for group in groups]
    quiet = run_groups(groups, run(undone=False))
    assert {found.tobytes() for found in disturbed} == {quiet[0].tobytes()}


def test_a_new_generation_resets_the_directions() -> None:
    group = local_groups(1)[0]
    ddp = DDP(Matrix(), group, compression="powersgd")
    ddp.prepare()
    assert ddp._model.reducer is not None
    (bucket,) = ddp._model.reducer.buckets
    assert isinstance(bucket, LowRankBucket)
    first = bucket._directions.copy()
    bucket._directions[...] = 7
    next_generation([group])
    ddp.prepare()
    np.testing.assert_array_equal(bucket._directions, first)


@pytest.mark.parametrize("feedback", [None, False])
def test_power_sgd_training_stays_close_to_exact_training(feedback: bool | None) -> None:
    def run(group: Group) -> Any:
        module = mlp(group.rank)
        ddp = DDP(module, group, compression=PowerSGD(2), error_feedback=feedback)
        optimizer = SGD(ddp, lr=0.1)
        x, labels = samples()
        for _ in range(60):
            loss, dy = nn.softmax_cross_entropy(ddp(x), labels)
            optimizer.zero_grad()
            ddp.backward(dy)
            optimizer.step()
        return loss, weights(module)

    def exactly() -> float:
        module = mlp()
        optimizer = SGD(module, lr=0.1)
        x, labels = samples()
        for _ in range(60):
            loss, dy = nn.softmax_cross_entropy(module.forward(x), labels)
            optimizer.zero_grad()
            module.backward(dy)
            optimizer.step()
        return float(loss)

    ranks = run_ranks(2, run)
    assert {path: w.tobytes() for path, w in ranks[0][1].items()} == {
        path: w.tobytes() for path, w in ranks[1][1].items()
    }
    assert abs(ranks[0][0] - exactly()) < 0.05


def test_non_finite_gradients_do_not_stay_in_the_residual() -> None:
    def run(group: Group) -> Any:
        module = Matrix()
        ddp = DDP(module, group, compression="powersgd")
        found = []
        for step in range(3):
            module.matrix.grad = module.vector.grad = None
            ddp(np.ones((2, 2)))
            module.given = gradient(group.rank, step, 2) * (np.inf if step == 1 else 1.0)
            ddp.backward(np.ones((2, 2)))
            found.append(bool(np.isfinite(module.matrix.grad).all()))
        return found

    for found in run_ranks(2, run):
        assert found == [True, False, True]


def test_bad_or_different_ranks_of_power_sgd_are_refused() -> None:
    with pytest.raises(ValueError, match="rank of 1 to 64"):
        PowerSGD(0)

    def run(group: Group) -> None:
        with pytest.raises(SettingsMismatch, match="powersgd rank=2"):
            DDP(Matrix(), group, compression=PowerSGD(2 + group.rank)).prepare()

    run_ranks(2, run)
