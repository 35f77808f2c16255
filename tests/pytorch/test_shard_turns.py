"""Shards take turns, and a step has the same samples whatever is known of the shards when it is shared out."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.torch._shard_turns import ShardTurns
from support.shard_turns import one_by_one

pytestmark = [pytest.mark.needs(what="torch")]


@pytest.mark.parametrize("seed", range(60))
def test_shares_are_those_of_taking_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, rng.integers(1, 40), rng.integers(1, 12)).tolist()
    batch = int(rng.integers(1, 30))
    turns, found = ShardTurns.begin(len(lengths)), list[list[int]]()
    while not turns.is_over:
        shares = turns.share_out(batch)
        if shares is None:  # the readers read on, some more than others
            known = np.minimum(turns.known + rng.integers(1, 20, len(lengths)), lengths)
            turns = turns.learned(known, (known == lengths) & (rng.random(len(lengths)) < 0.8))
        elif shares.any():
            found.append(shares.tolist())
            turns = turns.after(shares)
    assert found == one_by_one(lengths, batch)


def test_a_step_is_shared_out_once_its_samples_are_known() -> None:
    turns = ShardTurns.begin(2)
    assert turns.share_out(4) is None
    turns = turns.learned(np.array([2, 1]), np.array([0, 0]))
    assert turns.share_out(4) is None
    turns = turns.learned(np.array([2, 1]), np.array([0, 1]))
    assert turns.share_out(4) is None, "the first shard may have a third sample"
    turns = turns.learned(np.array([2, 1]), np.array([1, 0]))
    shares = turns.share_out(4)
    assert shares is not None
    assert shares.tolist() == [2, 1]
    assert turns.after(shares).is_over


@pytest.mark.parametrize("seed", range(20))
def test_every_step_is_shared_out_once_readers_have_read_the_wanted_samples(seed: int) -> None:
    """Also where many shards have ended and few have to give all."""
    rng = np.random.default_rng(seed)
    lengths = [*rng.integers(0, 30, 60).tolist(), *rng.integers(200, 400, rng.integers(1, 4)).tolist()]
    batch, turns, found, asked = int(rng.integers(1, 100)), ShardTurns.begin(len(lengths)), list[list[int]](), 0
    while not turns.is_over:
        if (shares := turns.share_out(batch)) is None:
            known = np.minimum(turns.wanted(batch, 8), lengths)
            turns = turns.learned(known, known < turns.wanted(batch, 8))
            asked += 1
            assert asked <= 3 * len(lengths) + sum(lengths) // batch
        elif shares.any():
            found.append(shares.tolist())
            turns = turns.after(shares)
    assert found == one_by_one(lengths, batch)
