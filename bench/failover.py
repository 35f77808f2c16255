"""Measures how long sessions take to resume when the leader of two coordinators is lost (needs etcd).

    python bench/failover.py --rounds 30

Each round kills (SIGKILL), freezes (SIGSTOP) or stops (SIGTERM) the leader while two workers train, and prints the
time from the signal until each worker's session is resumed at the other coordinator, and the longest step meanwhile.
`etcd` kills the node that leads a cluster of three, and `both` that node and the leading coordinator.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for `support`

from support.etcd import Cluster, cluster
from support.failover import Coordinators, coordinators, resumed_at, training
from support.processes import Worker

_SETTLED_S = 1.0
"""Seconds between two rounds: a standby believes a refused connection only half a second after it saw a new leader."""

HOW = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


def strike(how: str, etcd: Cluster, pair: Coordinators) -> float:
    """Does what is measured; returns the time before it."""
    leader = pair.leader()
    now = time.monotonic()
    if how in ("etcd", "both"):
        etcd.kill(etcd.leader())
        now = time.monotonic()
    if how != "etcd":
        pair.signal(leader, HOW.get(how, signal.SIGKILL))
    return now


def restore(how: str, etcd: Cluster, pair: Coordinators, leader: int, dead: int | None) -> None:
    """Brings back what was struck, as a standby."""
    if how == "stop":
        pair.signal(leader, signal.SIGCONT)
        while pair.epoch_of(leader):
            pass
    elif how != "etcd":
        pair.start_again(leader)
    if dead is not None:
        etcd.start(dead)
        etcd.wait()
    pair.wait_for_standby(leader)
    time.sleep(_SETTLED_S)


def one_round(how: str, etcd: Cluster, pair: Coordinators, workers: list[Worker]) -> tuple[list[float], float]:
    """Returns the seconds until each session was resumed, and the longest step meanwhile."""
    leader = pair.leader()
    dead = etcd.leader() if how in ("etcd", "both") else None
    struck = strike(how, etcd, pair)
    found = [resumed_at(worker, struck, 60.0) for worker in workers]
    restore(how, etcd, pair, leader if how != "etcd" else pair.leader(), dead)
    return [at - struck for at, _ in found], max(longest for _, longest in found)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="the time of a takeover")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--how", default="kill,stop,term")
    asked = parser.parse_args()
    for how in asked.how.split(","):
        folder = Path(tempfile.mkdtemp(prefix="paceline-failover-"))
        size = 3 if how in ("etcd", "both") else 1
        with cluster(folder, size) as etcd, coordinators(etcd, folder) as pair:
            pair.wait_for_standby(1 - pair.leader())
            with training(pair, 2) as workers:
                times, steps = [], []
                for _ in range(asked.rounds):
                    seconds, longest = one_round(how, etcd, pair, workers)
                    times += seconds
                    steps.append(longest)
        times.sort()
        p99 = times[min(len(times) - 1, round(0.99 * len(times)))]
        print(
            f"{how}: resumed p50 {statistics.median(times):.2f} s, p99 {p99:.2f} s, least {times[0]:.2f} s; "
            f"longest step p50 {statistics.median(steps):.2f} s, most {max(steps):.2f} s; {asked.rounds} rounds",
            flush=True,
        )


if __name__ == "__main__":
    main()
