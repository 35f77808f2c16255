"""What a wrapper is shown as: its model, and this rank's place."""

from __future__ import annotations

import numpy as np

from paceline import nn
from paceline._parallel import DDP, FSDP, ShardingStrategy
from paceline.testing import run_ranks


def layer() -> nn.Linear:
    return nn.Linear(2, 2, rng=np.random.default_rng(0))


def test_repr_shows_the_model_and_the_rank() -> None:
    assert run_ranks(2, lambda group: repr(DDP(layer(), group))) == [
        "<paceline.DDP of Linear, rank 0 of 2>",
        "<paceline.DDP of Linear, rank 1 of 2>",
    ]
    (shown,) = run_ranks(1, lambda group: repr(FSDP(layer(), group, ShardingStrategy.SHARD_GRAD_OP)))
    assert shown.startswith("<paceline.FSDP of Linear, ")
    assert shown.endswith(", rank 0 of 1>")
    (shown,) = set(run_ranks(2, lambda group: repr(FSDP(layer(), group)).partition(", rank")[0]))
    assert shown == "<paceline.FSDP of Linear, FULL_SHARD"
