"""HYBRID_SHARD on several hosts: each holds the whole state between its workers, so a host may die."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.elastic.cluster import cluster
from support.netns import network

pytestmark = pytest.mark.needs(what="root")

_FAILURE_TIMEOUT = 2.0


@pytest.mark.parametrize(("order", "dies"), [("0101", 0), ("0110", 1)])
def test_the_other_host_trains_on_with_its_copy_of_the_state(order: str, dies: int, tmp_path: Path) -> None:
    """Two workers on each of two hosts, which come in this order. There is no checkpoint: the other host has it all."""
    plan = {"least": 2, "most": 4, "total": 150, "pace": 0.03, "wrapper": "hybrid_shard", "witness": False}
    with network(3) as net, cluster(tmp_path, host=net.hosts[0], failure_timeout=_FAILURE_TIMEOUT, **plan) as c:
        hosts = net.hosts[1:]
        for number in order:
            c.start(1, host=hosts[int(number)])
        c.wait_until(lambda: all(trainer.of("applied") for trainer in c.trainers), "all four train")
        rest = [trainer for trainer in c.trainers if trainer.host is not hosts[dies]]
        generation = max(event["generation"] for trainer in rest for event in trainer.of("applied"))
        dead = time.monotonic()
        hosts[dies].kill()
        assert sorted(c.wait().values()) == [-9, -9, 0, 0], str(c)
        c.check(count=2)
        first = min(e["at"] for t in rest for e in t.of("applied") if e["generation"] > generation)
        assert first - dead < _FAILURE_TIMEOUT + 3, str(c)
        assert sum(c.redone().values()) <= 1, str(c)
