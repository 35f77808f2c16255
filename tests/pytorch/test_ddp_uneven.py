"""`DDP.join`: ranks with unlike numbers of inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytorch.models import assert_same_bits, built, samples, weights

import paceline.torch
from paceline._group import Group
from paceline.testing import run_ranks

pytestmark = pytest.mark.needs(what="torch")

cross_entropy = torch.nn.functional.cross_entropy
X, T = samples()


def module() -> Any:
    """With buffers."""
    return torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)).double()


def batch(rank: int, number: int) -> tuple[Any, Any]:
    """Samples of a rank's input."""
    start = (rank * 8 + number * 16) % 40
    return X[start : start + 8], T[start : start + 8]


@pytest.mark.parametrize("counts", [(3, 1), (1, 3), (0, 2, 4), (2, 2), (0, 0)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_join_averages_over_ranks_that_still_have_inputs(counts: tuple[int, ...], accumulate: bool) -> None:
    def run(group: Group) -> Any:
        model = paceline.torch.DDP(built(module, group.rank), group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for number in range(counts[group.rank]):
                optimizer.zero_grad()
                x, t = batch(group.rank, number)
                if accumulate:
                    with model.no_sync():
                        (cross_entropy(model(x), t) / 2).backward()
                    (cross_entropy(model(x), t) / 2).backward()
                else:
                    cross_entropy(model(x), t).backward()
                optimizer.step()
        return weights(model)

    alone = built(module)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number in range(max(counts)):
        present = [rank for rank, count in enumerate(counts) if number < count]
        optimizer.zero_grad()
        (
            sum(cross_entropy(alone(x), t) for x, t in (batch(rank, number) for rank in present)) / len(present)
        ).backward()
        optimizer.step()

    ranks = run_ranks(len(counts), run)
    assert_same_bits(ranks)
    for path in ("1.weight", "1.bias"):
        torch.testing.assert_close(ranks[0][path], weights(alone)[path])


def test_ordinary_passes_work_after_join() -> None:
    def run(group: Group) -> Any:
        model = paceline.torch.DDP(built(module), group)
        with model.join():
            for number in range(1 + group.rank):
                x, t = batch(group.rank, number)
                cross_entropy(model(x), t).backward()
        model.zero_grad()
        sent = group._core.progress().operation
        x, t = batch(group.rank, 0)
        cross_entropy(model(x), t).backward()
        assert group._core.progress().operation - sent == 2  # a bucket, and the buffers
        return {path: p.grad.clone() for path, p in model.named_parameters()}

    assert_same_bits(run_ranks(2, run))
