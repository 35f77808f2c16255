"""Every index of an epoch exactly once (I6), in any world."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._elastic.sampler import ElasticSampler
from paceline.errors import InvalidRank, InvalidWorldSize


@given(
    n=st.integers(1, 200),
    global_batch=st.integers(1, 60),
    seed=st.integers(0, 2**70),
    epoch=st.integers(0, 3),
    data=st.data(),
)
@settings(deadline=None, max_examples=100)
def test_an_epoch_uses_every_index_once_in_changing_worlds(
    n: int, global_batch: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    sampler = ElasticSampler(n, global_batch, seed)
    used: list[int] = []
    for t in range(sampler.steps_per_epoch):
        world = data.draw(st.integers(1, 9))
        step = epoch * sampler.steps_per_epoch + t
        shares = [sampler.share(step, rank, world) for rank in range(world)]
        assert sum(weight for _, weight in shares) == pytest.approx(1, abs=1e-12)
        in_order = [int(i) for indices, weight in shares if weight > 0 for i in indices]
        assert in_order == sampler.batch(step).tolist()
        for indices, weight in shares:
            assert len(indices) == 1 or weight == pytest.approx(len(indices) / len(in_order))
            assert 0 <= indices.min() <= indices.max() < n
        sizes = [len(indices) if weight > 0 else 0 for indices, weight in shares]
        assert max(sizes) - min(sizes) <= 1
        used += in_order
    assert sorted(used) == list(range(n))


def test_shares_of_an_uneven_batch() -> None:
    sampler = ElasticSampler(157, 157)
    assert [len(sampler.share(0, rank, 4)[0]) for rank in range(4)] == [39, 39, 39, 40]


def test_rank_without_a_sample_gets_one_of_weight_zero() -> None:
    sampler = ElasticSampler(10, 2)
    shares = [sampler.share(0, rank, 4) for rank in range(4)]
    assert [weight for _, weight in shares] == [0, 0.5, 0, 0.5]
    assert [len(indices) for indices, _ in shares] == [1] * 4


def test_order_is_reproducible_and_differs_by_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [int(i) for i in ElasticSampler(50, 50, seed).batch(epoch)]

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_order_does_not_depend_on_earlier_calls() -> None:
    sampler = ElasticSampler(20, 6, seed=4)
    forth = [sampler.batch(step).tolist() for step in range(12)]
    back = [sampler.batch(step).tolist() for step in reversed(range(12))]
    assert forth == back[::-1]


def test_changing_a_batch_does_not_change_the_sampler() -> None:
    sampler = ElasticSampler(8, 8)
    kept = sampler.batch(0).tolist()
    sampler.batch(0)[:] = 0
    assert sampler.batch(0).tolist() == kept


def test_order_is_the_same_in_every_version() -> None:
    """Members of a job may run different versions of NumPy; a change of these numbers breaks I6 between them."""
    assert ElasticSampler(8, 8, seed=0).batch(0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert ElasticSampler(8, 8, seed=0).batch(1).tolist() == [7, 4, 5, 1, 6, 2, 0, 3]


def test_bad_arguments_are_refused() -> None:
    for arguments, text in [((0, 1), "n must be"), ((1, 0), "global_batch must be"), ((1, 1, -1), "seed must be")]:
        with pytest.raises(ValueError, match=f"{text} at least [01], not"):
            ElasticSampler(*arguments)
    for odd in ("4", 4.0, True):
        with pytest.raises(TypeError, match=f"global_batch must be a whole number, not {odd!r}"):
            ElasticSampler(4, odd)  # type: ignore[arg-type]
    sampler = ElasticSampler(4, 2)
    with pytest.raises(ValueError, match="negative"):
        sampler.batch(-1)
    with pytest.raises(InvalidWorldSize):
        sampler.share(0, 0, 0)
    for rank in (-1, 2):
        with pytest.raises(InvalidRank, match="not in a world of 2"):
            sampler.share(0, rank, 2)


def test_the_last_batch_of_an_epoch_has_the_remaining_samples() -> None:
    assert ElasticSampler(5, 2).steps_per_epoch == 3
    assert len(ElasticSampler(5, 2).batch(2)) == 1


def test_an_order_of_the_user_takes_the_place_of_shuffling() -> None:
    """It may name samples more than once, or leave some out."""
    sampler = ElasticSampler(5, 2, order=lambda epoch: [30 + epoch, 7, 7, 1, 0])
    assert [sampler.batch(step).tolist() for step in range(4)] == [[30, 7], [7, 1], [0], [31, 7]]
    assert sampler.settings != ElasticSampler(5, 2, order=lambda epoch: [0, 1, 2, 3, 4]).settings
    assert sampler.settings == ElasticSampler(5, 2, order=lambda epoch: [30, 7, 7, 1, 0]).settings


def test_an_order_has_as_many_samples_as_the_sampler() -> None:
    with pytest.raises(ValueError, match=r"order\(epoch\) must return 5 indices, and has returned \(4,\)"):
        ElasticSampler(5, 2, order=lambda epoch: range(4)).batch(0)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 60), st.integers(1, 200))
@settings(deadline=None, max_examples=50)
def test_unequal_shares_use_every_index_once_with_weights_of_their_counts(
    shares: list[int], batch: int, n: int
) -> None:
    sampler, world = ElasticSampler(n, batch), len(shares)
    used: list[int] = []
    while not sampler.epoch:
        parts = [sampler.current(rank, world, tuple(shares)) for rank in range(world)]
        ahead = [next(sampler.ahead(rank, world, tuple(shares))) for rank in range(world)]
        assert [(each.indices.tolist(), each.weight) for each in ahead] == [(i.tolist(), w) for i, w in parts]
        own = [indices.tolist() if weight else [] for indices, weight in parts]
        size = sum(map(len, own))
        assert [weight for _, weight in parts] == pytest.approx([len(each) / size for each in own])
        used += [index for each in own for index in each]
        sampler.advance(world)
    assert sorted(used) == list(range(n))
