"""Training between hosts on lines that are slow, far or lossy: four hosts, two trainers on each.

Nobody is to be taken for dead because what he says comes late or twice: the generation that trains first trains to the
end, no step is undone, and the weights are those of an undisturbed run.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.elastic.cluster import Cluster, cluster
from support.netns import Network, network
from support.tapnet import Cable, tap_network

pytestmark = [pytest.mark.alone, pytest.mark.needs(what="root")]

_HOSTS, _EACH = 4, 2
_WORLD = _HOSTS * _EACH


@contextmanager
def _trained(folder: Path, net: Network, total: int, **plan: Any) -> Iterator[Cluster]:
    """Eight trainers that have come to the end, as one generation and without a fault."""
    with cluster(folder, host=net.hosts[0], witness=False, least=_WORLD, total=total, **plan) as c:
        for host in net.hosts:
            c.start(_EACH, host=host)
        assert set(c.wait().values()) == {0}, str(c)
        assert len(set(c.line().values())) == 1, f"more than one generation trained: {c.line()}\n{c}"
        assert not c.redone(), str(c)
        assert {len(t.of("done")) for t in c.trainers} == {1}, str(c)
        yield c


def _pace(c: Cluster) -> float:
    """Steps a second, by the median time between two."""
    gaps = []
    for trainer in c.trainers:
        times = [event["at"] for event in trainer.of("applied")]
        gaps += [after - before for before, after in itertools.pairwise(times)]
    return float(1 / statistics.median(gaps))


def test_training_over_links_of_1_gbit(tmp_path: Path) -> None:
    """With 1.6 MB of gradients a step: 8 ranks in a ring send 2.8 MB each, every second one over a line: 22 ms."""
    total = 40
    with network(_HOSTS) as net:
        for host in net.hosts:
            host.limit(1000)
        with _trained(tmp_path, net, total, hidden=20_000) as c:
            assert len({t.of("done")[0]["digest"] for t in c.trainers}) == 1, str(c)
            c.check_samples(total)
            pace = _pace(c)
    assert pace > 2


@pytest.mark.parametrize(
    ("cable", "least"),
    [(Cable(loss=0.01), 10), (Cable(delay=0.02), 8), (Cable(delay=0.02, rate=125e6, loss=0.01), 3)],
    ids=["lossy", "far", "both"],
)
def test_training_over_links_with_loss_or_delay(cable: Cable, least: float, tmp_path: Path) -> None:
    """A step takes a few one-way delays, and now and then a retransmission (200 ms at least)."""
    with tap_network([cable] * _HOSTS) as net, _trained(tmp_path, net, 40) as c:
        c.check(count=_WORLD)
        pace = _pace(c)
    assert bool(net.told["lost"]) == bool(cable.loss)
    assert pace > least
