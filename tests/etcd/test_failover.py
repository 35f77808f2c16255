"""Real coordinators, real etcd and real workers: the leader is killed, frozen, stopped, and training goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.etcd import cluster, needs_etcd
from support.failover import coordinators, resumed_at, training

pytestmark = [pytest.mark.etcd, needs_etcd, pytest.mark.timeout(120)]

MOST_S = 10.0
"""Seconds for sessions to be resumed: far more than it takes (bench/failover.py), for a machine that is busy."""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_training_goes_on_when_the_leader(number: signal.Signals, tmp_path: Path) -> None:
    """A worker that is killed in the same second is noticed, too."""
    with cluster(tmp_path) as etcd, coordinators(etcd, tmp_path) as pair:
        leader = pair.leader()
        pair.wait_for_standby(1 - leader)
        epoch = pair.epoch_of(leader)
        with training(pair, 3) as (first, second, third):
            struck = pair.signal(leader, number)
            third.signal(signal.SIGKILL)
            for worker in (first, second):
                at, _ = resumed_at(worker, struck)
                assert at - struck < MOST_S
            assert pair.leader() == 1 - leader
            assert pair.epoch_of(1 - leader) > epoch
            for worker in (first, second):
                while (event := worker.expect_any())["event"] != "step" or event["world"] != 2:
                    pass
            if number == signal.SIGSTOP:  # the zombie wakes: its next write is refused, and it stands by
                pair.signal(leader, signal.SIGCONT)
                while "leads no longer" not in pair.log(leader):
                    pass
                assert not pair.epoch_of(leader)
                steps = [first.expect("step") for _ in range(5)]
                assert all(step["world"] == 2 for step in steps)
