"""DDP with compression: the same bits everywhere (I5), results near those without, and steps that can be undone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from unit.parallel.helpers import Branches, N, mlp, run_open, samples, scale, train_alone, weights

from paceline import nn
from paceline._elastic.sampler import ElasticSampler
from paceline._elastic.train_state import TrainState
from paceline._group import Group
from paceline._parallel import DDP
from paceline.compression import Codec, Int8
from paceline.errors import SettingsMismatch, UnsupportedOp
from paceline.optim import SGD
from paceline.testing import local_groups, next_generation, run_groups, run_ranks

WAYS: list[dict[str, Any]] = [
    {"compression": "bf16"},
    {"compression": "bf16", "error_feedback": True},
    {"compression": "int8"},
    {"compression": Int8(16), "error_feedback": False},
]
BUCKET_MB = 600 / 2**20
"""Several buckets."""


def name(way: dict[str, Any]) -> str:
    return " ".join(map(str, way.values()))


def residuals(ddp: DDP) -> list[Any]:
    """What error feedback has kept, by bucket."""
    assert ddp._model.reducer is not None
    return [bucket.memory.left_over for bucket in ddp._model.reducer.buckets]


def one_step(ddp: DDP, optimizer: SGD, sampler: ElasticSampler, step: int) -> None:
    x, labels = samples("float32")
    indices, weight = sampler.share(step, ddp.group.rank, ddp.group.size)
    _, dy = nn.softmax_cross_entropy(ddp(x[indices]), labels[indices])
    optimizer.zero_grad()
    ddp.backward(dy, weight)
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=name)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_compressed_training_stays_close_to_one_process(way: dict[str, Any], world: int) -> None:
    sampler, steps = ElasticSampler(N, 157, seed=3), 24
    alone = mlp(0, "float32")
    expected = train_alone(alone, SGD(alone, lr=0.1, momentum=0.9), sampler, steps)

    def rank(g: Group) -> dict[str, Any]:
        ddp = DDP(mlp(g.rank, "float32"), g, bucket_mb=BUCKET_MB, **way)
        optimizer = SGD(ddp, lr=0.1, momentum=0.9)
        for step in range(steps):
            one_step(ddp, optimizer, ElasticSampler(N, 157, seed=3), step)
        return weights(ddp)

    ranks = run_ranks(world, rank)
    for path, found in ranks[0].items():
        assert {other[path].tobytes() for other in ranks} == {found.tobytes()}
        tolerance = 0 if world == 1 else 0.05
        np.testing.assert_allclose(found, expected[path], atol=tolerance, rtol=0)


@pytest.mark.parametrize("way", WAYS, ids=name)
def test_sample_weights_and_usage_flags_are_sent_uncompressed(way: dict[str, Any]) -> None:
    """A rank of weight 1e-6 counts as much, and one parameter that a rank of many did not use is known as used."""

    def rank(g: Group) -> Any:
        module = Branches("a" if g.rank else "ab", a=scale(1.0), b=scale(1.0), c=scale(1.0))
        ddp = DDP(module, g, **way)
        ddp(np.ones((1, 1)))
        ddp.backward(np.ones((1, 1)), [1.0, 1e-6, 0.0][g.rank])
        return {path: None if p.grad is None else float(p.grad[0]) for path, p in ddp.named_parameters()}

    for found in run_ranks(3, rank):
        assert found["c"] is None
        assert found["a"] == pytest.approx(1, rel=0.02)
        assert found["b"] == pytest.approx(1, rel=0.02)


def test_a_repeated_step_after_an_undo_gives_the_same_bits() -> None:
    """As `session.steps` undoes it: before its reduction, behind it, and behind two reductions in one step."""

    def rank(g: Group, undone: bool) -> dict[str, bytes]:
        module = mlp(0, "float32")
        ddp = DDP(module, g, bucket_mb=BUCKET_MB, compression="int8")
        optimizer = SGD(ddp, lr=0.1, momentum=0.9)
        state = TrainState(model=ddp, optimizer=optimizer)
        sampler = ElasticSampler(N, 157, seed=3)
        x, labels = samples("float32")

        def reductions(step: int, count: int) -> None:
            indices, weight = sampler.share(step, g.rank, g.size)
            optimizer.zero_grad()
            for _ in range(count):
                ddp.backward(nn.softmax_cross_entropy(ddp(x[indices]), labels[indices])[1], weight)

        for step in range(8):
            if undone:
                for count in (0, 1, 2):
                    small = state._core.small()
                    reductions(step + 7, count)  # with other samples: the world was another one
                    state._core.undo(small)
            state._core.small()
            reductions(step, 1 + step % 2)
            optimizer.step()
        assert all(np.abs(left).max() > 0 for left in residuals(ddp))
        return {path: values.tobytes() for path, values in weights(ddp).items()}

    assert run_ranks(2, partial(rank, undone=True)) == run_ranks(2, partial(rank, undone=False))


def test_a_failed_backward_does_not_change_compressed_training() -> None:
    def rank(g: Group, fails: bool) -> dict[str, bytes]:
        module = mlp(0, "float32")
        ddp = DDP(module, g, bucket_mb=BUCKET_MB, compression="int8")
        optimizer = SGD(ddp, lr=0.1)
        for step in range(6):
            if fails:
                first, whole = module.modules[0], module.modules[0].backward

                def broken(dy: Any) -> Any:
                    raise ArithmeticError("as ordered")

                first.backward = broken  # type: ignore[method-assign]
                with pytest.raises(ArithmeticError):
                    one_step(ddp, optimizer, ElasticSampler(N, 157, seed=3), step)
                first.backward = whole  # type: ignore[method-assign]
                g._core.flush()
                g.barrier()
            one_step(ddp, optimizer, ElasticSampler(N, 157, seed=3), step)
        return {path: values.tobytes() for path, values in weights(ddp).items()}

    assert run_ranks(2, partial(rank, fails=True)) == run_ranks(2, partial(rank, fails=False))


def test_residuals_stay_with_their_rank_and_outside_the_state() -> None:
    groups = local_groups(2)
    sampler = ElasticSampler(N, 157, seed=3)
    before: dict[int, Any] = {}

    def make(g: Group) -> tuple[DDP, SGD]:
        ddp = DDP(mlp(0, "float32"), g, bucket_mb=BUCKET_MB, compression="int8")
        return ddp, SGD(ddp, lr=0.1)

    kept = [make(g) for g in groups]

    def first(g: Group) -> None:
        ddp, optimizer = kept[g.rank]
        for step in range(3):
            one_step(ddp, optimizer, sampler, step)
        state = TrainState(model=ddp, optimizer=optimizer)
        before[g.rank] = [left.copy() for left in residuals(ddp)], state.fingerprint()

    run_open(groups, first)
    assert before[0][1] == before[1][1]  # the same state, bit for bit (I5) ...
    assert any((a != b).any() for a, b in zip(before[0][0], before[1][0], strict=True))  # ... and leftovers that differ

    next_generation(groups)
    kept[1] = make(groups[1])  # a newcomer, which has none

    def second(g: Group) -> None:
        ddp, optimizer = kept[g.rank]
        ddp.prepare()
        if g.rank == 0:
            for left, was in zip(residuals(ddp), before[0][0], strict=True):
                np.testing.assert_array_equal(left, was)
        else:
            assert residuals(ddp) == [None] * len(before[0][0])
        one_step(ddp, optimizer, sampler, 3)

    run_groups(groups, second)


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        ("int8", "bf16", "compression is bf16 on rank 1 and int8 block=1024 on rank 0"),
        (Int8(64), Int8(32), "compression is int8 block=32 on rank 1 and int8 block=64 on rank 0"),
        (None, "int8", "compression is int8 block=1024 on rank 1 and None on rank 0"),
    ],
)
def test_different_compression_raises_settings_mismatch(
    mine: str | Codec | None, theirs: str | Codec, text: str
) -> None:
    def rank(g: Group) -> None:
        with pytest.raises(SettingsMismatch, match=text):
            DDP(mlp(), g, compression=theirs if g.rank else mine)(np.zeros((1, 12)))

    run_ranks(2, rank)


def test_bad_compression_arguments_are_refused() -> None:
    def rank(g: Group) -> None:
        with pytest.raises(UnsupportedOp, match="compression must be"):
            DDP(mlp(), g, compression="zip")
        with pytest.raises(ValueError, match="it needs compression="):
            DDP(mlp(), g, error_feedback=True)

    run_ranks(1, rank)
