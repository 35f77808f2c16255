"""Microbatches with DDP: weights, moments and buffers have the same bits in every world."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from unit.parallel.helpers import CLASSES, INPUTS, N, mlp, samples

from paceline import nn, optim
from paceline._base.sum_order import EVEN
from paceline._elastic.sampler import ElasticSampler
from paceline._group import Group
from paceline._parallel import DDP, Parameter
from paceline.testing import run_groups
from support.collective_calls import groups_by
from support.microbatches import microbatches as in_turn

STEPS = 12


class Normed:
    """A model with running statistics and a layer that one sample in two leaves unused."""

    def __init__(self, dtype: Any) -> None:
        self.body = mlp(3, dtype)
        self.mean = np.zeros(INPUTS, dtype)
        self.count = np.zeros((), np.int64)
        self.gate = Parameter(np.ones(CLASSES, dtype))
        self._gated = False

    def named_parameters(self) -> Any:
        yield from self.body.named_parameters()
        yield "gate", self.gate

    def named_buffers(self) -> Any:
        return [("mean", self.mean), ("count", self.count)]

    def forward(self, x: Any) -> Any:
        y = self.body.forward(x - self.mean)
        self.mean[...] = 0.9 * self.mean + 0.1 * x.mean(axis=0)
        self.count += 1
        self._y, self._gated = y, bool(x[0, 0] > 0)
        return y * self.gate.data if self._gated else y

    def backward(self, dy: Any) -> None:
        if self._gated:
            self.gate.accumulate((dy * self._y).sum(axis=0))
            dy = dy * self.gate.data
        self.body.backward(dy)


def train(group: Group, microbatches: int, *, dtype: Any, bucket_mb: float, batch: int) -> str:
    """What `session.steps` does with microbatches, without a coordinator; returns a digest of everything."""
    x, t = samples(dtype)
    model = Normed(dtype)
    ddp = DDP(model, group, bucket_mb=bucket_mb)
    optimizer = optim.Adam(ddp, lr=0.01)
    sampler = ElasticSampler(N, global_batch=batch, microbatches=microbatches)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in in_turn(group, microbatches):
            indices, weight = sampler.current_microbatch(number)
            group._core.set_gradient_weight(weight)
            kept = np.random.default_rng([step, number]).random((len(indices), INPUTS)) > 0.2
            _, dy = nn.softmax_cross_entropy(ddp(x[indices] * kept), t[indices])
            ddp.backward(dy)
        group._core.set_order(EVEN)
        ddp.clip_grad_norm(0.5)
        optimizer.step()
        sampler.advance(group.size)
    digest = hashlib.sha256()
    for array in [*(p.data for _, p in model.named_parameters()), model.mean, model.count]:
        digest.update(array.tobytes())
    for moments in optimizer.state_dict().values():
        digest.update(repr(moments).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("bucket_mb", [25.0, 1e-4])
@pytest.mark.parametrize(
    ("microbatches", "dtype", "batch"), [(8, "f4", 64), (8, "f8", 61), (5, "f4", 50), (6, "f4", 3)],
    ids=["even", "shares of two sizes", "no power of two", "empty microbatches"],
)  # fmt: skip
def test_every_world_size_has_the_bits_of_one_process(
    microbatches: int, dtype: str, batch: int, bucket_mb: float
) -> None:
    found = {
        world: set(
            run_groups(
                groups_by(world, "all_reduce", "direct"),
                lambda group: train(group, microbatches, dtype=np.dtype(dtype), bucket_mb=bucket_mb, batch=batch),
            )
        )
        for world in (1, 2, 3, 4, microbatches)
    }
    assert len(set.union(*found.values())) == 1, found
