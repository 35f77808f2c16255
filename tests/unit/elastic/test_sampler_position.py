"""The sampler's position moves with the steps that are applied: every index once in an epoch, whatever the worlds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._elastic.sampler import ElasticSampler

worlds = st.lists(st.integers(1, 9), min_size=1, max_size=40)


def one_step(sampler: ElasticSampler, world: int) -> list[int]:
    """What all ranks use in a step."""
    shares = [sampler.current(rank, world) for rank in range(world)]
    assert sum(weight for _, weight in shares) == pytest.approx(1, abs=1e-12)
    assert all(weight >= 0 and len(indices) >= 1 for indices, weight in shares)
    used = [int(i) for indices, weight in shares if weight > 0 for i in indices]
    for indices, weight in shares:
        assert weight == 0 or weight == pytest.approx(len(indices) / len(used))
    sampler.advance(world)
    return used


@given(n=st.integers(1, 120), size=st.integers(1, 50), per_rank=st.booleans(), seed=st.integers(0, 9), worlds=worlds)
@settings(deadline=None, max_examples=50)
def test_each_epoch_uses_every_index_once(n: int, size: int, per_rank: bool, seed: int, worlds: list[int]) -> None:
    kind: dict[str, Any] = {"per_rank_batch" if per_rank else "global_batch": size}
    sampler = ElasticSampler(n, seed=seed, **kind)
    epochs: list[list[int]] = [[]]
    for step in range(400):
        if sampler.epoch == 3:
            break
        world, epoch, offset = worlds[step % len(worlds)], sampler.epoch, sampler.offset
        used = one_step(sampler, world)
        assert len(used) == min(size * world if per_rank else size, n - offset)
        epochs[epoch] += used
        if sampler.epoch != epoch:
            assert sampler.epoch == epoch + 1
            assert sampler.offset == 0
            assert sorted(epochs[epoch]) == list(range(n))
            epochs.append([])
    assert len(set(epochs[-1])) == len(epochs[-1])


@given(n=st.integers(1, 60), size=st.integers(1, 20), steps=st.integers(0, 30), worlds=worlds)
@settings(deadline=None, max_examples=50)
def test_global_batches_do_not_depend_on_the_world_size(n: int, size: int, steps: int, worlds: list[int]) -> None:
    sampler = ElasticSampler(n, global_batch=size)
    for step in range(steps):
        assert one_step(sampler, worlds[step % len(worlds)]) == sampler.batch(step).tolist()


@given(n=st.integers(1, 60), size=st.integers(1, 9), per_rank=st.booleans(), at=st.integers(0, 20), worlds=worlds)
@settings(deadline=None, max_examples=50)
def test_a_sampler_is_restored_from_its_position_alone(
    n: int, size: int, per_rank: bool, at: int, worlds: list[int]
) -> None:
    """A step that is run again under another world uses what the first attempt would have; a copy goes on alike."""
    kind: dict[str, Any] = {"per_rank_batch" if per_rank else "global_batch": size}
    sampler, copy = ElasticSampler(n, **kind), ElasticSampler(n, **kind)
    for step in range(at):
        one_step(sampler, worlds[step % len(worlds)])
    copy.load_state_dict(sampler.state_dict())
    for world in worlds[:5]:
        undone = sampler.state_dict()
        once = one_step(sampler, world)
        sampler.load_state_dict(undone)
        assert one_step(sampler, world) == once == one_step(copy, world)


def test_lr_scale_grows_with_the_world_only_for_per_rank_batches() -> None:
    assert ElasticSampler(9, per_rank_batch=2).lr_scale(4) == 4.0
    assert ElasticSampler(9, global_batch=2).lr_scale(4) == 1.0


def test_bad_arguments_and_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="either"):
        ElasticSampler(4)
    with pytest.raises(ValueError, match="either"):
        ElasticSampler(4, 2, per_rank_batch=2)
    sampler = ElasticSampler(4, per_rank_batch=2)
    with pytest.raises(ValueError, match="depends on the size of the world"):
        sampler.batch(0)
    for epoch, offset in ((-1, 0), (0, -1), (0, 4)):
        with pytest.raises(ValueError, match="not a position"):
            sampler.load_state_dict({"epoch": epoch, "offset": offset})
    assert sampler.state_dict() == {"epoch": 0, "offset": 0}
    assert sampler.settings == {"sampler n": 4, "sampler per_rank_batch": 2, "sampler seed": 0}
