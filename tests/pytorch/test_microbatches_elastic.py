"""Parts with torch: through kills, joins and leaves each step has the bits of one undisturbed process."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.elastic.faults import kill
from support.elastic.same_bits import BitsSoak, check_bits, come_and_go, find_the_one_that_flips, in_microbatches

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.slow]

MODELS = [
    "cnn",
    "cnn/fake_device",
    "diloco",
    *(pytest.param(model, marks=pytest.mark.exhaustive) for model in ("diloco/fake_device", "characters")),
]


@pytest.mark.parametrize("model", MODELS)
def test_kills_joins_and_leaves_keep_the_bits(model: str, tmp_path: Path) -> None:
    come_and_go(model, tmp_path)


def test_a_worker_that_flips_a_bit_of_its_gradients_is_named(tmp_path: Path) -> None:
    find_the_one_that_flips("cnn", tmp_path)


@pytest.mark.parametrize(
    "model", ["cnn/full_shard", pytest.param("cnn/full_shard/fake_device", marks=pytest.mark.exhaustive)]
)
def test_sharded_training_keeps_its_bits_through_kills_and_joins(model: str, tmp_path: Path) -> None:
    """The others have a copy of the dead one's shard: there is no checkpoint."""
    come_and_go(model, tmp_path, total=26, digest_every=2)


@pytest.mark.parametrize("model", ["cnn", "cnn/full_shard"])
def test_a_slow_worker_gets_fewer_microbatches(model: str, tmp_path: Path) -> None:
    with in_microbatches(tmp_path, model, total=24, balance=True) as c:
        trainers = [c.start(1, go=False, microbatch_s=seconds)[0] for seconds in (0.02, 0.2)]
        for trainer in trainers:
            trainer.go()
        assert set(c.wait(90).values()) == {0}, str(c)
        assert check_bits(c, tmp_path, model) == 24
    fast, slow = ([len(event["microbatches"]) for event in trainer.of("attempt")[-4:]] for trainer in trainers)
    assert min(fast) > max(slow), f"{fast} and {slow} of 8\n{c}"


@pytest.mark.exhaustive
def test_hybrid_sharded_training_keeps_its_bits_as_nodes_change(tmp_path: Path) -> None:
    saved = {"checkpoint_dir": str(tmp_path / "runs"), "checkpoint_every": 1}
    nodes = {"begin": 4, "join": 1, "least": 2, "worlds": (2, 4)}
    come_and_go("cnn/hybrid_shard", tmp_path, reference="cnn/full_shard", total=26, **nodes, **saved)


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
@pytest.mark.parametrize("model", ["cnn", "characters"])
def test_a_30_second_soak_keeps_the_bits(model: str, tmp_path: Path) -> None:
    BitsSoak(model, 30, print).run(1, tmp_path)


def test_only_microbatches_of_a_killed_rank_0_are_computed_again(tmp_path: Path) -> None:
    """Another rank computes microbatch 0 again, and all take its buffers; what the others have computed is kept."""
    with in_microbatches(tmp_path, "cnn", total=6, tells_microbatches=True, pace=0.2) as c:
        c.start(3, [kill(at="forward", rank=0, step=3)])
        assert sorted(c.wait(90).values()) == [-9, 0, 0], str(c)
        assert check_bits(c, tmp_path, "cnn") == 6
        lived = [trainer for trainer in c.trainers if trainer.process.poll() == 0]
        told = [
            event["microbatch"]
            for t in lived
            for event in t.of("microbatch")
            if event["step"] == 3 and not event["is_check"]
        ]
        assert sorted(told) == list(range(8)), str(c)


def test_statistics_of_a_kept_microbatch_0_keep_the_bits(tmp_path: Path) -> None:
    """Rank 0 keeps microbatch 0, and its buffers; the last rank dies in its last microbatch, before any sum.

    A rank that dies in a sum may have sent all that the others need for the step, and nothing is repaired.
    """
    with in_microbatches(tmp_path, "cnn", total=6, pace=0.2, barrier_in=3) as c:
        c.start(3, [kill(at="forward", rank=2, step=3)])
        assert sorted(c.wait(90).values()) == [-9, 0, 0], str(c)
        assert check_bits(c, tmp_path, "cnn") == 6
        kept = [event["kept"] for trainer in c.trainers for event in trainer.of("attempt") if event["rank"] == 0]
        assert any(0 in numbers for numbers in kept), str(c)
