"""A host comes back with another address: as where a container is connected to its network again, or a lease ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.elastic.cluster import Cluster, Trainer, cluster
from support.netns import network

pytestmark = pytest.mark.needs(what="root")

_FAILURE_TIMEOUT = 2.0
_SETTINGS = {"least": 2, "failure_timeout": _FAILURE_TIMEOUT, "pace": 0.03, "witness": False}


def _generation(trainer: Trainer) -> int:
    return int(max((e["generation"] for e in trainer.of("applied")), default=0))


def _first_after(c: Cluster, trainer: Trainer, generation: int, since: float) -> float:
    """Waits until it applies a step of a later generation; seconds from `since` until then."""

    def later() -> list[float]:
        return [e["at"] for e in trainer.of("applied") if e["generation"] > generation and e["at"] > since]

    c.wait_until(lambda: bool(later()), "training goes on", 20)
    return later()[0] - since


def _until_all_train(c: Cluster) -> None:
    """Waits until all trainers apply steps of a generation that has all of them."""

    def together() -> bool:
        size = {e["generation"]: e["size"] for t in c.trainers for e in t.of("view") + t.of("joined")}
        return all(size.get(_generation(trainer)) == len(c.trainers) for trainer in c.trainers)

    c.wait_until(together, "all train together")


@pytest.mark.parametrize(
    "seconds", [pytest.param(0.0, marks=pytest.mark.exhaustive), 5.0], ids=["at once", "after it was taken for lost"]
)
def test_a_host_rejoins_with_another_address(seconds: float, tmp_path: Path) -> None:
    """It is a member again at the new one, and the others lose a generation when it goes and one when it comes."""
    with network(4) as net, cluster(tmp_path, host=net.hosts[0], total=500, **_SETTINGS) as c:
        for host in net.hosts[1:]:
            c.start(1, host=host)
        _until_all_train(c)
        *others, moved = c.trainers
        assert moved.host is not None
        generation = _generation(others[0])
        gone = time.monotonic()
        net.readdress(moved.host, None)
        time.sleep(seconds)
        back = time.monotonic()
        net.readdress(moved.host, "10.77.0.99")
        without = max(_first_after(c, trainer, generation, gone) for trainer in others)
        again = _first_after(c, moved, generation, back)
        assert set(c.wait(60).values()) == {0}, str(c)
        c.check(count=3)
        assert "this worker's address was" in moved.stderr
        assert without < _FAILURE_TIMEOUT + 3, str(c)
        assert again < (5 if seconds else _FAILURE_TIMEOUT + 5), str(c)
        later = {e["generation"] for t in others for e in t.of("applied") if e["generation"] > generation}
        assert len(later) <= 2, f"generations {later}\n{c}"
        assert sum(c.redone().values()) <= 2, str(c)


def test_an_unreachable_newcomer_is_refused_with_the_reason(tmp_path: Path) -> None:
    """It reaches all members; what it advertises is an address where packets are lost. Nobody is disturbed."""
    with network(4) as net, cluster(tmp_path, host=net.hosts[0], total=250, **_SETTINGS) as c:
        for host in net.hosts[1:3]:
            c.start(1, host=host)
        _until_all_train(c)
        generation = _generation(c.trainers[0])
        net.lose("10.77.0.99")
        c.environment["PACELINE_ADVERTISE"] = "10.77.0.99"
        (newcomer,) = c.start(1, host=net.hosts[3])
        c.wait_until(lambda: newcomer.stderr.count("cannot join the other members") >= 2, "it has tried twice", 30)
        assert max(map(_generation, c.trainers)) == generation, str(c)
        newcomer.close()
        c.wait(60)
        c.check(count=2)
        assert not c.redone(), str(c)
        assert set(c.line().values()) == {generation}, str(c)
        for member in net.hosts[1:3]:
            assert f"({member.name}, pid " in newcomer.stderr
            assert f"at {member.address}:" in newcomer.stderr
        assert "cannot connect to this worker at 10.77.0.99:" in newcomer.stderr
        assert "tell peers another address (--advertise)" in newcomer.stderr
