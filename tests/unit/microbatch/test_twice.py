"""Microbatches that are computed twice: which, by whom, who is named, and that they leave no trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline._microbatch.twice import computed_twice, odd_ones
from paceline.errors import DivergenceError, StepOrderError, UnsupportedOp
from paceline.nn import Linear, softmax_cross_entropy

X = np.random.default_rng(1).standard_normal((30, 5)).astype("f4")
T = np.arange(30) % 3


@given(seed=st.integers(0, 99), step=st.integers(1, 99), world=st.integers(1, 9), more=st.integers(0, 9))
def test_a_checked_microbatch_has_an_owner_and_up_to_two_checkers(seed: int, step: int, world: int, more: int) -> None:
    found = computed_twice(seed, step, world, world + more, 1)
    assert found is not None
    assert found.number * world // (world + more) <= found.owner <= found.number
    assert len(found.checkers) == max(1, min(2, world - 1))
    assert world == 1 or len({found.owner, *found.checkers}) == len(found.checkers) + 1
    same = computed_twice(seed, step, 1, world + more, 1)
    assert same is not None
    assert same.number == found.number


def test_every_microbatch_is_checked_eventually() -> None:
    found = [computed_twice(0, step, 2, 8, 5) for step in range(1, 401)]
    assert [number for number, twice in enumerate(found, 1) if twice is not None] == list(range(5, 401, 5))
    assert {micro.number for micro in found if micro is not None} == set(range(8))
    assert computed_twice(0, 5, 2, 8, 0) is None


def test_with_unequal_shares_the_owner_is_the_rank_that_computes_the_microbatch() -> None:
    found = [computed_twice(0, step, 3, 8, 1, (1, 6, 1)) for step in range(1, 200)]
    owners = {twice.number: twice.owner for twice in found if twice is not None}
    assert owners == {0: 0, **dict.fromkeys(range(1, 7), 1), 7: 2}


def test_odd_ones_are_the_ranks_that_differ_from_a_majority() -> None:
    assert odd_ones([(0, b"a"), (1, b"a"), (2, b"a")]) == []
    assert odd_ones([(2, b"b"), (0, b"a"), (1, b"a")]) == [2]
    assert odd_ones([(0, b"a"), (1, b"b")]) == [0, 1]
    assert odd_ones([(0, b"a"), (1, b"b"), (2, b"c")]) == [0, 1, 2]
    assert odd_ones([(0, b"a"), (0, b"b")]) == [0]
    assert odd_ones([(0, b"a"), (0, b"a")]) == []


def train(every: int, *, wrong_in: int = 0, leaves_out: bool = False) -> tuple[bytes, int]:
    """Four steps of one process; returns the digest, and how many microbatches were computed."""
    session = paceline.join()
    ddp = paceline.DDP(Linear(5, 3, rng=np.random.default_rng(0)), session.group)
    optimizer = paceline.optim.Adam(ddp, lr=0.1)
    sampler = paceline.ElasticSampler(30, global_batch=11, microbatches=4, check_every=every)
    state = paceline.TrainState(model=ddp, optimizer=optimizer, sampler=sampler)
    computed = 0
    with session:
        for step in session.steps(state, total=4):
            with step:
                optimizer.zero_grad()
                for micro in step.microbatches:
                    if leaves_out and micro.is_check:
                        continue
                    with micro:
                        _, dy = softmax_cross_entropy(ddp(X[micro.indices]), T[micro.indices])
                        ddp.backward(dy * (1 + (micro.is_check and step.number == wrong_in)))
                        computed += 1
                optimizer.step()
    return state.fingerprint(), computed


def test_computing_a_microbatch_twice_does_not_change_the_result() -> None:
    plain, checked = train(0), train(2)
    assert (plain[1], checked[1]) == (16, 18)
    assert plain[0] == checked[0]


def test_a_single_worker_detects_its_own_divergence() -> None:
    with pytest.raises(
        DivergenceError, match=r"rank 0 .* computed different gradients of microbatch \d in step 4 in two"
    ):
        train(2, wrong_in=4)


def test_skipping_a_check_is_an_error() -> None:
    with pytest.raises(StepOrderError, match="is checked here in step 2, but was left out"):
        train(2, leaves_out=True)


@pytest.mark.parametrize("settings", [{"check_every": 2}, {"check_every": -1, "microbatches": 4}])
def test_check_every_without_microbatches_or_negative_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="check_every"):
        paceline.ElasticSampler(30, global_batch=11, **settings)


@pytest.mark.parametrize("strategy", list(paceline.ShardingStrategy))
def test_fsdp_refuses_checks(strategy: paceline.ShardingStrategy) -> None:
    nodes = {"intra_node_size": 1} if strategy is paceline.ShardingStrategy.HYBRID_SHARD else {}
    with paceline.join() as session:
        fsdp = paceline.FSDP(Linear(5, 3, rng=np.random.default_rng(0)), session.group, strategy, **nodes)
        sampler = paceline.ElasticSampler(30, global_batch=11, microbatches=4, check_every=2)
        optimizer = paceline.optim.Adam(fsdp, lr=0.1)
        state = paceline.TrainState(model=fsdp, optimizer=optimizer, sampler=sampler)
        with pytest.raises(UnsupportedOp, match="check_every with FSDP"):
            next(iter(session.steps(state, total=1)))
