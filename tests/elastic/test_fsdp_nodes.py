"""HYBRID_SHARD where the first workers do not make up nodes: as many as do train, the rest are spare."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.admin import get_job
from paceline.cli.pictures import state_of
from support.elastic.cluster import cluster

pytestmark = pytest.mark.slow


def test_a_third_worker_is_a_spare_until_its_node_is_complete(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, most=4, total=30, wrapper="hybrid_shard", pace=0.05) as c:
        trainers = c.start(3)
        c.wait_until(lambda: sum(bool(trainer.of("applied")) for trainer in trainers) == 2, "two workers train")
        status = get_job(c.address, "job", 5.0)
        assert sorted(member.standing for member in status.members) == ["spare", "training", "training"]
        assert "spare: waits for a seat" in [state_of(member, status)[0] for member in status.members]
        (spare,) = [trainer for trainer in trainers if not trainer.of("applied")]
        c.start(1)
        c.wait_until(lambda: bool(spare.of("applied")), "the spare comes in")
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=4)


def test_a_fixed_world_not_divisible_by_the_node_size_is_refused(tmp_path: Path) -> None:
    with cluster(tmp_path, least=3, most=3, total=4, wrapper="hybrid_shard") as c:
        c.start(3)
        assert set(c.wait().values()) == {3}
        for trainer in c.trainers:
            (error,) = trainer.of("error")
            assert error["type"] == "InvalidWorldSize"
            assert "world_size=3 must be a positive multiple of intra_node_size=2" in error["text"]
