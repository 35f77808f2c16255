"""What torch prints of a wrapped model: the tree as it always does, and one line about this rank."""

from __future__ import annotations

import pytest
from torch import nn

from paceline.testing import run_ranks
from paceline.torch import DDP, FSDP

pytestmark = pytest.mark.needs(what="torch")

DDP_TEXT = """DDP(
  rank 1 of 2
  (module): Sequential(
    (0): Linear(in_features=2, out_features=2, bias=True)
  )
)"""
FSDP_TEXT = """FSDP(
  FULL_SHARD, rank 1 of 2
  (module): Sequential(
    (0): Linear(in_features=2, out_features=2, bias=True)
  )
)"""


def test_repr_shows_the_rank_above_the_module_tree() -> None:
    assert run_ranks(2, lambda group: repr(DDP(nn.Sequential(nn.Linear(2, 2)), group)))[1] == DDP_TEXT
    assert run_ranks(2, lambda group: repr(FSDP(nn.Sequential(nn.Linear(2, 2)), group)))[1] == FSDP_TEXT
