"""Recovery over each kind of link; shared memory is what all other tests of elastic training use on one host."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.elastic.cluster import cluster
from support.elastic.faults import flip, freeze, kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize(("wrapper", "world", "kind"), [("ddp", 3, "grpc"), ("hybrid_shard", 4, "tcp")])
def test_survivors_train_on_after_a_kill_in_an_all_reduce(wrapper: str, world: int, kind: str, tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=world, total=6, wrapper=wrapper) as c:
        c.environment["PACELINE_LINKS"] = kind
        c.start(world, [kill(at="mid_all_reduce", rank=1, step=3)])
        assert sorted(c.wait().values()) == [-9] + [0] * (world - 1), str(c)
        c.check(count=2)
        assert sum(c.redone().values()) <= 1, f"more than one step was redone\n{c}"


@pytest.mark.parametrize(
    ("wrapper", "kind"), [("ddp", "tcp"), pytest.param("full_shard", "grpc", marks=pytest.mark.exhaustive)]
)
def test_a_member_rejoins_after_a_long_freeze(wrapper: str, kind: str, tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=3, total=60, pace=0.05, failure_timeout=1.0, wrapper=wrapper) as c:
        c.environment["PACELINE_LINKS"] = kind
        c.start(3, [freeze(at="mid_all_reduce", rank=1, step=3)])
        c.wait_until(lambda: any(t.of("undone") for t in c.trainers), "the others have given it up")
        (frozen,) = [t for t in c.trainers if t.of("fault")]
        frozen.thaw()
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=3)
        assert sum(c.redone().values()) <= 2, str(c)
        assert frozen.of("applied")[-1]["generation"] > frozen.of("applied")[0]["generation"], str(c)


@pytest.mark.parametrize(("wrapper", "kind"), [("ddp", "grpc"), ("hybrid_shard", "tcp")])
@pytest.mark.sampled(2)
def test_a_flipped_bit_on_a_link_is_detected_and_training_recovers(wrapper: str, kind: str, tmp_path: Path) -> None:
    """The link breaks; the member that is taken for cut off comes back, and the end is that of an undisturbed run."""
    world = 3 if wrapper == "ddp" else 4
    with cluster(tmp_path, least=2, most=world, total=60, pace=0.05, wrapper=wrapper) as c:
        c.environment["PACELINE_LINKS"] = kind
        c.start(world, [flip(at="forward", rank=1, step=3)])
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=world)
        assert sum(c.redone().values()) <= 2, str(c)
        assert sum("changed on the way" in trainer.stderr for trainer in c.trainers) == 1, str(c)
