"""Parts through torch's FSDP: every strategy has the bits of DDP and of one process in every world."""

from __future__ import annotations

import hashlib
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from unit.parallel.sharding.models import chosen

import paceline
import paceline.torch
from paceline._base.sum_order import EVEN
from paceline._group import Group
from paceline.testing import run_ranks
from support.microbatches import microbatches as in_turn

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.usefixtures("place")]

V, N, BATCH = 8, 90, 29

_seeding = threading.Lock()
"""Ranks are threads, which share torch's generator."""


class Block(nn.Module):
    """A unit with a parameter that not every microbatch uses; its 31 features make shards of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(31, 31)
        self.gate = nn.Parameter(torch.ones(31))

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.lin(x))
        return x + (y * self.gate if int(x.abs()[0, 0] * 1000) % 2 else y)


class Net(nn.Module):
    """Convolutions, running statistics and units."""

    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(5) if normed else nn.Identity()
        self.head = nn.Sequential(nn.Conv1d(1, 5, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(50, 31))
        self.body = nn.Sequential(Block(), Block())
        self.out = nn.Linear(31, 4)

    def forward(self, x: Any) -> Any:
        return self.out(self.body(self.head(x)))


def train(group: Group, name: str, kind: str, optimizer_of: Any) -> tuple[str, str]:
    """What `session.steps` does with microbatches, without a coordinator.

    Returns:
        A digest of weights and buffers, and one of the whole state.
    """
    dtype = torch.float64 if kind == "float64" else torch.float32
    precision = "bf16" if kind == "bf16" else None
    rng = np.random.default_rng(5)
    x, t = torch.from_numpy(rng.standard_normal((N, 1, 12))).to(dtype), torch.from_numpy(rng.integers(0, 4, N))
    with _seeding, torch.random.fork_rng():
        torch.manual_seed(1)
        net = Net(normed=precision is None).to(dtype)
    model: Any = (
        paceline.torch.DDP(net, group, bucket_mb=1e-3)
        if name == "ddp"
        else paceline.torch.FSDP(net, group, auto_wrap=Block, mixed_precision=precision, **chosen(name))
    )
    optimizer = optimizer_of(model.parameters())
    sampler = paceline.ElasticSampler(N, global_batch=BATCH, microbatches=V)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    for _ in range(3):
        optimizer.zero_grad()
        for number in in_turn(group, V):
            indices, weight = sampler.current_microbatch(number)
            group._core.set_gradient_weight(weight)
            nn.functional.cross_entropy(model(x[indices]), t[indices]).backward()
        model.clip_grad_norm(0.4)
        optimizer.step()
        sampler.advance(group.size)
    group._core.set_order(EVEN)
    weights = net.state_dict() if name == "ddp" else model.state_dict()
    digest = hashlib.sha256()
    for path, tensor in sorted(weights.items()):
        digest.update(path.encode() + tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest(), state.fingerprint().hex()


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


KINDS = {
    "float32": [
        (2, "ddp"),
        *((world, "full") for world in (1, 2, 3, 4)),
        (3, "grad"),
        (4, "none"),
        (2, "hybrid1"),
        (4, "hybrid2"),
    ],
    "float64": [(1, "full"), (3, "full")],
    "bf16": [(1, "hybrid1"), (2, "grad"), (3, "full")],
}


@pytest.mark.parametrize("dtype", KINDS)
def test_every_strategy_and_world_trains_the_same_bits(dtype: str) -> None:
    optimizer_of = momentum if dtype == "float64" else adamw
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {
            (world, name): set(
                run_ranks(world, partial(train, name=name, kind=dtype, optimizer_of=optimizer_of), timeout=60)
            )
            for world, name in KINDS[dtype]
        }
    finally:
        torch.set_num_threads(before)
    assert len({weights for digests in found.values() for weights, _ in digests}) == 1, found
    assert len({whole for (_, name), digests in found.items() if name != "ddp" for _, whole in digests}) == 1, found
