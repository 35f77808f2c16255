"""Real coordinators, real etcd and real workers: the leader is killed, frozen, stopped, and training goes on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from support.etcd import cluster, needs_etcd
from support.failover import Coordinators, coordinators, resumed_at, training
from support.processes import Worker

pytestmark = [pytest.mark.needs(what="etcd"), needs_etcd, pytest.mark.timeout(120)]

MOST_S = 10.0
"""Seconds for sessions to be resumed: far more than it takes (bench/failover.py), for a machine that is busy."""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_training_continues_after_the_leader_is_killed_frozen_or_stopped(
    number: signal.Signals, tmp_path: Path
) -> None:
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


def test_training_continues_after_all_etcd_keys_are_deleted(tmp_path: Path) -> None:
    """Members join anew with the states that they hold: no step is lost, and generations do not fall.

    One that was a step behind takes the other's state, so it takes that step with it.
    """
    with cluster(tmp_path) as etcd, coordinators(etcd, tmp_path) as pair:
        epoch = pair.epoch_of(pair.leader())
        with training(pair, 3) as (*survivors, third):
            third.signal(signal.SIGKILL)
            before = pair_trains(pair, epoch)
            etcd.wipe()
            assert pair_trains(pair, epoch + 1) > before
            after = time.monotonic()
            applied = [steps_until(worker, after) for worker in survivors]
    for steps in applied:
        assert steps == sorted(set(steps)), "a step was taken twice"
    first, last = max(steps[0] for steps in applied), min(steps[-1] for steps in applied)
    assert set(range(first, last + 1)) <= set(applied[0]) | set(applied[1]), "a step was lost"


def steps_until(worker: Worker, time_: float) -> list[int]:
    """The steps that a worker has applied since it was asked last, up to the first after a time."""
    steps: list[int] = []
    while True:
        event = worker.expect_any()
        if event["event"] in ("step", "gap"):
            steps.append(event["step"])
            if event["at"] >= time_:
                return steps


def pair_trains(pair: Coordinators, epoch: int) -> float:
    """Waits until two workers train at a leader of this epoch or a later one; the number of their generation."""
    give_up = time.monotonic() + 30.0
    while time.monotonic() < give_up:
        values = pair.metrics(pair.leader())
        training = [value for name, value in values.items() if "job_workers{" in name and '"training"' in name]
        if values.get("paceline_coordinator_epoch", 0) >= epoch and training == [2]:
            return next(value for name, value in values.items() if "job_generation{" in name)
    raise AssertionError(pair.logs())
