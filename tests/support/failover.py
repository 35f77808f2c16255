"""Coordinator processes on one etcd, and workers that train with them, for tests and for bench/failover.py."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from support.etcd import Cluster, cluster
from support.netns import Host, Network, network
from support.ports import free_port
from support.processes import Worker, workers

__all__ = ["TRAINING", "Coordinators", "Place", "coordinators", "place", "resumed_at", "training"]

_READY_S = 30.0

_STARTED = "--- a process starts\n"
"""Stands in the log before the lines of each process."""

TRAINING = """
import logging
import paceline._session.control as control

class State:
    value = 0

logging.basicConfig(level=logging.CRITICAL)
honest = control.ControlStream._reconnect

async def reconnect(stream, request):
    call = await honest(stream, request)
    emit("resumed", epoch=stream._epoch)
    return call

control.ControlStream._reconnect = reconnect
from paceline import nn

x = np.eye(4, dtype=np.float32)
t = np.zeros(4, dtype=np.int64)
with paceline.join() as session:
    model = nn.Sequential(nn.Linear(4, 4, rng=np.random.default_rng(1)))
    ddp = paceline.DDP(model, session.group)
    optimizer = paceline.optim.SGD(ddp, lr=0.01)
    sampler = paceline.ElasticSampler(4, 4)
    state = paceline.TrainState(model=ddp, optimizer=optimizer, sampler=sampler)
    last, before = time.monotonic(), 0
    for step in session.steps(state, total=10**9):
        with step:
            time.sleep(0.02)
            loss, dy = nn.softmax_cross_entropy(ddp(x[step.indices]), t[step.indices])
            optimizer.zero_grad()
            ddp.backward(dy, step.weight)
            optimizer.step()
        if step.applied:
            now = time.monotonic()
            what = "step" if before in (0, step.number - 1) else "gap"
            emit(what, step=step.number, world=session.size, took=now - last)
            last, before = now, step.number
"""
"""What each worker runs: steps that show whether one was lost or taken twice."""


class Coordinators:
    """Processes that share a state.

    Args:
        etcd: has the state.
        folder: for their logs.
        count: how many.
        prefix: of the keys.
        hosts: of the test's network, one for each; none for this machine. Only on this machine they serve HTTP, and
            `epoch_of`, `leader` and `wait_for_standby` know something; `standing` and `epochs` know everywhere.

    Attributes:
        addresses: of all, for workers.
    """

    def __init__(
        self, etcd: Cluster, folder: Path, count: int, prefix: str = "paceline", hosts: Sequence[Host] = ()
    ) -> None:
        first = free_port(2 * count)
        self.ports = [first + 2 * n for n in range(count)]
        self._hosts = hosts
        self._listen = [f"{hosts[n].address if hosts else '127.0.0.1'}:{port}" for n, port in enumerate(self.ports)]
        self.addresses = ",".join(self._listen)
        self._folder = folder
        self._url = etcd.url(prefix)
        self.processes: list[subprocess.Popen[bytes]] = []
        for n in range(count):
            self.processes.append(self._start(n))

    def _start(self, n: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "paceline_server", "--listen", self._listen[n], "--state", self._url]
        command = self._hosts[n].command(command) if self._hosts else [*command, "--http", self._page(n)]
        with (self._folder / f"coordinator-{n}.log").open("ab", buffering=0) as log:
            log.write(_STARTED.encode())
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _page(self, n: int) -> str:
        return f"127.0.0.1:{self.ports[n] + 1}"

    def start_again(self, n: int) -> None:
        """Starts a process that has ended."""
        self.processes[n].wait()
        self.processes[n] = self._start(n)

    def metrics(self, n: int) -> dict[str, float]:
        """The metrics of a coordinator, by name with labels; none if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{self._page(n)}/metrics", timeout=1.0) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return {}
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    def epoch_of(self, n: int) -> int:
        """The epoch in which a coordinator leads; 0 if it does not lead, or does not answer."""
        values = self.metrics(n)
        return int(values["paceline_coordinator_epoch"]) if values.get("paceline_coordinator_leader") else 0

    def leader(self) -> int:
        """Waits until one leads; its number."""
        give_up = time.monotonic() + _READY_S
        while time.monotonic() < give_up:
            for n, process in enumerate(self.processes):
                if process.poll() is None and self.epoch_of(n):
                    return n
        raise AssertionError(f"nobody leads: {self.logs()}")

    def wait_for_standby(self, n: int) -> None:
        """Waits until a coordinator answers, and does not lead."""
        give_up = time.monotonic() + _READY_S
        while time.monotonic() < give_up:
            try:
                with urllib.request.urlopen(f"http://{self._page(n)}/healthz", timeout=1.0):
                    return
            except OSError:
                continue
        raise AssertionError(f"it does not come up: {self.logs()}")

    def signal(self, n: int, number: signal.Signals) -> float:
        """Sends a signal; returns the time before it."""
        now = time.monotonic()
        self.processes[n].send_signal(number)
        return now

    def log(self, n: int) -> str:
        """What a coordinator has logged."""
        return (self._folder / f"coordinator-{n}.log").read_text()

    def standing(self, n: int) -> str:
        """What a coordinator is by its log: "starting", "leads" or "stands by".

        A process that is dead or frozen has not written yet that it leads no longer.
        """
        began, _, last = self.log(n).rpartition(_STARTED)[2].rpartition("listening on ")
        if not began:
            return "starting"
        return "leads" if "this coordinator leads in epoch" in last and "leads no longer" not in last else "stands by"

    def epochs(self) -> list[int]:
        """All epochs in which one has led, by the logs."""
        return [
            int(e)
            for n in range(len(self.ports))
            for e in re.findall(r"this coordinator leads in epoch (\d+)", self.log(n))
        ]

    def logs(self) -> str:
        """What all have logged."""
        return "\n".join(path.read_text()[-6000:] for path in sorted(self._folder.glob("coordinator-*.log")))

    def close(self) -> None:
        """Kills all."""
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def coordinators(
    etcd: Cluster, folder: Path, count: int = 2, prefix: str = "paceline", hosts: Sequence[Host] = ()
) -> Iterator[Coordinators]:
    """Coordinators, for as long as the block lasts; see `Coordinators`."""
    started = Coordinators(etcd, folder, count, prefix, hosts)
    try:
        yield started
    finally:
        started.close()


class Place(NamedTuple):
    """Hosts with a node of etcd each, two with a coordinator each, and one for workers."""

    net: Network
    at_etcd: list[Host]
    at: list[Host]
    there: Host
    etcd: Cluster
    pair: Coordinators


@contextmanager
def place(folder: Path, nodes: int) -> Iterator[Place]:
    """All of it with so many nodes of etcd, for the block; one coordinator leads, and the other knows it."""
    with network(nodes + 3) as net:
        *at_etcd, first, second, there = net.hosts
        with (
            cluster(folder, nodes, at_etcd) as etcd,
            coordinators(etcd, folder, hosts=(first, second)) as pair,
        ):
            give_up = time.monotonic() + _READY_S
            while not all("leads in epoch 1" in pair.log(n) for n in range(2)):
                assert time.monotonic() < give_up, pair.logs()
            yield Place(net, at_etcd, [first, second], there, etcd, pair)


@contextmanager
def training(pair: Coordinators, count: int = 2, **environment: str) -> Iterator[list[Worker]]:
    """Workers that train; all have taken a step when the block begins."""
    bounds = {"MIN_WORKERS": "1", "MAX_WORKERS": str(count)}
    with workers(count, TRAINING, COORDINATOR=pair.addresses, **{**bounds, **environment}) as started:
        for worker in started:
            while (event := worker.expect_any())["event"] != "step" or event["world"] != count:
                pass
        yield started


def resumed_at(worker: Worker, after: float, timeout: float = 20.0) -> tuple[float, float]:
    """Returns when a worker's session was resumed, and the longest step of the time until then, in seconds."""
    longest = 0.0
    while True:
        event = worker.expect_any(timeout, "resumed")
        if event["event"] == "step":
            longest = max(longest, event["took"])
        elif event["event"] == "resumed":
            if event["at"] > after:
                return event["at"], longest
        else:
            raise AssertionError(event)
