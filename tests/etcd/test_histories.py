"""Histories of the store and readings of the generation while one leader after the other is lost."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from integration.store_clients import store_clients
from support.etcd import cluster, needs_etcd
from support.failover import coordinators
from support.generations import LEAVES_SOCKETS, TRAINER, Reading, going_back, until_world, watchers
from support.histories import check, overlapping
from support.processes import Worker

pytestmark = [pytest.mark.needs(what="etcd"), needs_etcd, pytest.mark.timeout(180)]


def test_histories_of_the_store_are_linearizable(tmp_path: Path) -> None:
    """A leader that was frozen wakes after another one has taken over, and has calls in its buffers."""
    with (
        cluster(tmp_path) as etcd,
        coordinators(etcd, tmp_path) as pair,
        store_clients([pair.addresses] * 3) as clients,
    ):
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSTOP):
            clients.go_on()
            leader = pair.leader()
            pair.wait_for_standby(1 - leader)
            pair.signal(leader, number)
            if number == signal.SIGSTOP:
                clients.go_on()
                pair.signal(leader, signal.SIGCONT)
                while pair.standing(leader) == "leads":  # until it notices what has happened meanwhile
                    pass
            else:
                pair.start_again(leader)
        clients.go_on()
        history = clients.stop()
        assert len(pair.epochs()) >= 5
    refusals = check(history)
    assert not refusals, "\n".join(refusals)
    assert len(history) > 1000
    assert overlapping(history) > 300


@LEAVES_SOCKETS
def test_readings_of_the_generation_are_linearizable(tmp_path: Path) -> None:
    views: list[Reading] = []
    with cluster(tmp_path) as etcd, coordinators(etcd, tmp_path) as pair, ExitStack() as stack:
        environment = {
            "PACELINE_COORDINATOR": pair.addresses,
            "PACELINE_MIN_WORKERS": "2",
            "PACELINE_MAX_WORKERS": "3",
            "PACELINE_FLIGHT_DIR": "off",
        }

        def worker() -> Worker:
            started = Worker(TRAINER, environment)
            stack.callback(started.close)
            return started

        stayers = [worker(), worker()]
        with watchers(pair.addresses) as watched:
            for number in (signal.SIGKILL, signal.SIGSTOP):
                third = worker()
                for each in (*stayers, third):
                    until_world(each, 3, views)
                watched.wait_for(views[-1].generation)
                leader = pair.leader()
                pair.wait_for_standby(1 - leader)
                pair.signal(leader, number)
                third.close()
                for each in stayers:
                    until_world(each, 2, views)
                if number == signal.SIGSTOP:
                    pair.signal(leader, signal.SIGCONT)
                else:
                    pair.start_again(leader)
                watched.wait_for(views[-1].generation)
        readings = [*watched.readings, *views]
    assert not going_back(readings)
    assert len({each.generation for each in views}) >= 4
