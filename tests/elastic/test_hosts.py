"""Partitions between hosts: a host, a pair of hosts or the coordinator's host is cut off, and comes back.

Each trainer is on a host of its own; nobody tells of exits, and no link says that it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.elastic.cluster import Cluster, Trainer, cluster
from support.netns import Network, network

pytestmark = pytest.mark.needs(what="root")

_FAILURE_TIMEOUT = 2.0
_SOON = 3.0
"""Seconds beyond `failure_timeout` in which the others go on, while other tests run, too."""


@contextmanager
def _four_hosts(folder: Path, **settings: Any) -> Iterator[tuple[Network, Cluster]]:
    """The coordinator on the first host of five, a trainer on each of the others; they are in step 10."""
    plan = {"least": 2, "total": 300, "pace": 0.03, "failure_timeout": _FAILURE_TIMEOUT, **settings}
    with network(5) as net, cluster(folder, host=net.hosts[0], witness=False, **plan) as c:
        for host in net.hosts[1:]:
            c.start(1, host=host)
        c.wait_until(lambda: any(e["size"] == 4 for t in c.trainers for e in t.of("view") + t.of("joined")), "four")
        c.wait_for_step(_step(c) + 10)
        yield net, c


def _step(c: Cluster) -> int:
    """The last step that anybody has applied."""
    return max((e["step"] for t in c.trainers for e in t.of("applied")), default=0)


def _generation(trainer: Trainer) -> int:
    return int(max((e["generation"] for e in trainer.of("applied")), default=0))


def _of_rank(c: Cluster, rank: int) -> Trainer:
    return next(trainer for trainer in c.trainers if trainer.of("attempt")[-1]["rank"] == rank)


def _trains_after(c: Cluster, trainer: Trainer, generation: int, since: float) -> float:
    """Waits until it applies a step in a later generation; seconds from `since` until then."""

    def later() -> list[float]:
        return [e["at"] for e in trainer.of("applied") if e["generation"] > generation and e["at"] > since]

    c.wait_until(lambda: bool(later()), "training goes on", 20)
    return later()[0] - since


@pytest.mark.parametrize("seconds", [pytest.param(1, marks=pytest.mark.exhaustive), 12])
def test_a_partitioned_host_rejoins(seconds: int, tmp_path: Path) -> None:
    with _four_hosts(tmp_path, total=300 + 30 * seconds) as (net, c):
        *others, lost = c.trainers
        generation = _generation(others[0])
        cut = time.monotonic()
        net.cut(lost.host)
        without = max(_trains_after(c, trainer, generation, cut) for trainer in others)
        time.sleep(seconds)  # after 12 s TCP tries again every 6 s only
        generation = _generation(others[0])
        healed = time.monotonic()
        net.heal(lost.host)
        back = _trains_after(c, lost, generation, healed)
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=4)
        assert without < _FAILURE_TIMEOUT + _SOON, str(c)
        assert back < 5, str(c)
        assert sum(c.redone().values()) <= 1, str(c)


def test_a_partition_between_two_hosts_evicts_only_one(tmp_path: Path) -> None:
    with _four_hosts(tmp_path, total=420) as (net, c):
        first, second = (_of_rank(c, rank) for rank in (0, 1))  # neighbours in whatever way sums are made
        rest = [trainer for trainer in c.trainers if trainer not in (first, second)]
        generation = _generation(c.trainers[0])
        cut = time.monotonic()
        net.cut_pair(first.host, second.host)
        without = max(_trains_after(c, trainer, generation, cut) for trainer in rest)
        time.sleep(5)  # whoever went may try to come back meanwhile, and must not cost a step each time
        flaps = len({e["generation"] for t in c.trainers for e in t.of("undone")})
        sizes = {e["size"] for t in c.trainers for e in t.of("view") if e["at"] > cut}
        generation = max(map(_generation, c.trainers))
        away = min((first, second), key=_generation)
        healed = time.monotonic()
        net.heal_pair(first.host, second.host)
        assert _trains_after(c, away, generation - 1, healed) < 5, str(c)
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=4)
        assert without < _FAILURE_TIMEOUT + _SOON, str(c)
        assert 3 in sizes, f"not only one of the two was sent away: {sizes}\n{c}"
        assert 2 not in sizes, f"not only one of the two was sent away: {sizes}\n{c}"
        assert flaps <= 3, f"{flaps} steps undone in 5 s\n{c}"


def test_training_continues_while_the_coordinator_host_is_cut_off(tmp_path: Path) -> None:
    with _four_hosts(tmp_path) as (net, c):
        generation = _generation(c.trainers[0])
        net.cut(net.hosts[0])
        step = _step(c)
        time.sleep(2 * _FAILURE_TIMEOUT)
        assert _step(c) > step + 10, f"training does not need the coordinator\n{c}"
        net.heal(net.hosts[0])
        assert set(c.wait().values()) == {0}, str(c)
        c.check(count=4)
        assert max(c.line().values()) == generation, f"somebody was sent away\n{c}"
        assert not c.redone(), str(c)


@pytest.mark.parametrize("cable", [pytest.param("stays", marks=pytest.mark.exhaustive), "goes too"])
def test_survivors_train_on_after_a_host_dies(cable: str, tmp_path: Path) -> None:
    with _four_hosts(tmp_path, total=150) as (net, c):
        lost = c.trainers[1]
        (second,) = c.start(1, host=lost.host)
        c.wait_until(lambda: bool(second.of("applied")), "a second trainer on that host")
        generation = _generation(second)
        dead = time.monotonic()
        if cable == "goes too":
            net.cut(lost.host)
        lost.host.kill()
        rest = [trainer for trainer in c.trainers if trainer.host is not lost.host]
        without = max(_trains_after(c, trainer, generation, dead) for trainer in rest)
        assert sorted(c.wait().values()) == [-9, -9, 0, 0, 0], str(c)
        c.check(count=3)
        assert without < _FAILURE_TIMEOUT + _SOON, str(c)
        assert sum(c.redone().values()) <= 2, str(c)
