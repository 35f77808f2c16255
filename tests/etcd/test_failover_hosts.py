"""Each edge between leader, standby, etcd and workers is cut: packets only stop coming, and training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.etcd import needs_etcd
from support.failover import TRAINING, Place, place, resumed_at
from support.netns import Host
from support.processes import Worker

pytestmark = [pytest.mark.needs(what="etcd"), needs_etcd, pytest.mark.timeout(120)]

MOST_S = 10.0
"""Seconds for a takeover on a busy machine; it takes less than 2 s (bench/failover.py)."""


class Training:
    """Coordinators, and two workers that train with them."""

    def __init__(self, made: Place, workers: list[Worker]) -> None:
        self.net, self.pair, self.workers, self.there = made.net, made.pair, workers, made.there
        (self.etcd,) = made.at_etcd
        self.leader = [made.pair.standing(n) for n in range(2)].index("leads")
        self.first, self.second = made.at[self.leader], made.at[1 - self.leader]

    def log(self, host: Host) -> str:
        """What the coordinator there has logged."""
        return self.pair.log(self.leader if host is self.first else 1 - self.leader)

    def until(self, true: Callable[[], bool]) -> None:
        """Reads steps until something holds; each step comes in its turn."""
        give_up = time.monotonic() + MOST_S
        while not true():
            assert time.monotonic() < give_up, self.pair.logs()
            assert self.workers[0].expect_any()["event"] in ("step", "resumed")

    def steps(self, count: int) -> None:
        """Reads so many steps of both."""
        for worker in self.workers:
            for _ in range(count):
                assert worker.expect_any()["event"] in ("step", "resumed")


@contextmanager
def training(folder: Path) -> Iterator[Training]:
    """All of it, for as long as the block lasts."""
    with place(folder, 1) as made:
        variables = {"COORDINATOR": made.pair.addresses, "MIN_WORKERS": "2", "MAX_WORKERS": "2"}
        environment = {f"PACELINE_{name}": value for name, value in variables.items()}
        workers: list[Worker] = []
        try:
            workers += [Worker(TRAINING, environment, made.there) for _ in range(2)]
            begun = Training(made, workers)
            begun.steps(3)
            yield begun
        finally:
            for worker in workers:
                worker.close()


def test_a_leader_cut_off_from_etcd_or_from_all_hosts_is_replaced(tmp_path: Path) -> None:
    with training(tmp_path) as made:
        struck = time.monotonic()
        made.net.cut_pair(made.first, made.etcd)
        for worker in made.workers:
            at, _ = resumed_at(worker, struck)
            assert at - struck < MOST_S
        assert "this coordinator leads in epoch 2" in made.log(made.second)
        assert "leads no longer: nothing could be stored" in made.log(made.first)
        made.net.heal_pair(made.first, made.etcd)
        made.until(lambda: "leads in epoch 2" in made.log(made.first))
        struck = time.monotonic()
        made.net.cut(made.second)
        for worker in made.workers:
            at, _ = resumed_at(worker, struck)
            assert at - struck < MOST_S
        assert "this coordinator leads in epoch 3" in made.log(made.first)
        made.net.heal(made.second)
        made.until(lambda: "leads no longer" in made.log(made.second))
        made.steps(3)


def test_a_partition_between_coordinators_causes_no_takeover(tmp_path: Path) -> None:
    with training(tmp_path) as made:
        made.net.cut_pair(made.first, made.second)
        began = time.monotonic()
        made.until(lambda: time.monotonic() - began > 2.5)  # longer than a standby waits
        assert "leads in epoch 2" not in made.log(made.second)


def test_workers_cut_off_from_the_leader_train_on_and_reconnect(tmp_path: Path) -> None:
    with training(tmp_path) as made:
        made.net.cut_pair(made.first, made.there)
        began = time.monotonic()
        made.until(lambda: time.monotonic() - began > 2.0)
        assert "leads in epoch 2" not in made.log(made.second)
        healed = time.monotonic()
        made.net.heal_pair(made.first, made.there)
        for worker in made.workers:
            at, _ = resumed_at(worker, healed)
            assert at - healed < MOST_S
        made.steps(3)
