"""Faults of two coordinators, of their etcd and of the network between all: one in each round, and then it is mended.

None of them may cost a step. A worker that is killed in the same second may cost one, and must be noticed.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from support.elastic.cluster import Cluster, Trainer
from support.elastic.storm import STALL, Storm
from support.failover import Place
from support.netns import Host

__all__ = ["PATIENCE", "Rounds"]

PATIENCE = 5.0
"""The job's failure timeout in seconds. A leader that is cut off from workers for longer counts them as dead."""

_SHORTEST, _LONGEST = 0.3, 2.8
"""Seconds for which a fault stays: a standby tries to take over after one."""

_WORKERS = 4
_KILLS = 0.3
"""The share of rounds in which a worker is killed too."""

_Fault = tuple[str, Callable[[], object], Callable[[], object]]
"""What it is, how it begins, and how it is mended."""


class Rounds(Storm):
    """Rounds upon one cluster.

    Args:
        cluster: see `Storm`.
        seed: see `Storm`.
        say: see `Storm`.
        place: hosts with coordinators, etcd of three nodes, and the cluster's trainers.
    """

    def __init__(self, cluster: Cluster, seed: int, say: Callable[[str], None], place: Place) -> None:
        super().__init__(cluster, seed, say)
        self._place = place

    def play(self, rounds: int) -> None:
        """Plays so many rounds; the text of an error says in which it came."""
        for number in range(1, rounds + 1):
            try:
                self._round(number)
            except AssertionError as error:
                raise AssertionError(f"round {number}: {error}") from error

    def _round(self, number: int) -> None:
        name, strike, mend = self._random.choice(self._faults())
        kills = self._random.random() < _KILLS
        seconds, early = self._random.uniform(_SHORTEST, _LONGEST), self._random.random() < 0.5
        pause = self._random.uniform(0.0, min(1.0, seconds))
        missing = _WORKERS - len(self._running())
        victim = self._random.choice(self._running()) if kills and not missing else None
        if missing:  # somebody joins during the fault
            self._cluster.start(missing, host=self._place.there)
        self._tell(name, f"round {number}: {name} for {seconds:.1f} s" + (f", killed {victim.pid}" if victim else ""))
        if victim is not None and early:
            self._kill(victim)
            self._wait(pause)
        strike()
        self._wait(pause)
        if victim is not None and not early:
            self._kill(victim)
        self._wait(seconds - pause)
        mend()
        self._wait_until_well(victim)

    def _kill(self, victim: Trainer) -> None:
        self.harm += 1
        victim.signal(signal.SIGKILL)
        victim.process.wait()

    def _faults(self) -> list[_Fault]:
        """All that can happen, given who leads now."""
        pair, etcd, at_etcd = self._place.pair, self._place.etcd, self._place.at_etcd
        leader, node = self._leader(), etcd.leader()
        other = self._random.choice([n for n in range(len(at_etcd)) if n != node])
        found: list[_Fault] = []
        for name, n in (("leader", leader), ("standby", 1 - leader)):
            again = partial(pair.start_again, n)
            found += [
                (f"SIGKILL to the {name}", partial(pair.signal, n, signal.SIGKILL), again),
                (f"SIGTERM to the {name}", partial(pair.signal, n, signal.SIGTERM), again),
                _freeze(f"the {name}", partial(pair.signal, n)),
            ]
        for name, n in (("the leading node of etcd", node), ("another node of etcd", other)):
            found += [
                (f"SIGKILL to {name}", partial(etcd.kill, n), partial(etcd.start, n)),
                _freeze(name, partial(etcd.signal, n)),
            ]
        leads, stands, first = self._place.at[leader], self._place.at[1 - leader], at_etcd[node]
        there = self._place.there
        found += [
            self._cut("leader and etcd", [leads], at_etcd),
            self._cut("leader and the leading node of etcd", [leads], [first]),
            self._cut("standby and etcd", [stands], at_etcd),
            self._cut("leader and standby", [leads], [stands]),
            self._cut("leader and workers", [leads], [there]),
            self._cut("standby and workers", [stands], [there]),
            self._cut("two nodes of etcd", [first], [at_etcd[other]]),
            self._cut("the leading node of etcd and the others", [first], [at for at in at_etcd if at is not first]),
            self._cut("leader and all others", [leads], [stands, there, *at_etcd]),
        ]
        return found

    def _cut(self, name: str, here: Sequence[Host], others: Sequence[Host]) -> _Fault:
        def each(do: Callable[[Host, Host], None]) -> None:
            for pair in product(here, others):
                do(*pair)

        return f"cut between {name}", partial(each, self._place.net.cut_pair), partial(each, self._place.net.heal_pair)

    def _leader(self) -> int:
        standing = [self._place.pair.standing(n) for n in range(2)]
        return standing.index("leads")

    def _wait_until_well(self, victim: Trainer | None) -> None:
        """Waits until one coordinator leads, all workers train in one generation with sessions, and etcd is whole."""
        mended, at = time.monotonic(), self._step()
        lost = 0 if victim is None else self._last[victim][0]
        while why := self._ill(at, lost):
            assert time.monotonic() < mended + 2 * STALL, why
            self._wait(0.1)
        epochs = self._place.pair.epochs()
        assert len(epochs) == len(set(epochs)), f"two coordinators have led in one epoch: {epochs}"
        assert len(self.undone) <= self.harm, f"generations {self.undone} have lost a step, and {self.harm} were killed"

    def _ill(self, at: int, lost: int) -> str:
        """What is not as it was yet."""
        standing = [self._place.pair.standing(n) for n in range(2)]
        if sorted(standing) != ["leads", "stands by"]:
            return f"the coordinators are {standing}"
        if self._step() < at + 5 or len(self._holders(without=[])) < len(self._running()):
            return "not all train"
        if max(self._last.values())[0] <= lost:
            return f"nobody has noticed the death in generation {lost}"
        for trainer in self._running():
            if trainer.stderr.count("lost the stream to") != trainer.stderr.count("reconnected to the coordinator"):
                return f"{trainer.pid} has no session"
        try:
            self._place.etcd.leader()
        except (subprocess.CalledProcessError, ValueError) as error:  # a node is away, or knows no leader
            return f"etcd is not whole: {error}"
        return ""


def _freeze(name: str, send: Callable[[signal.Signals], object]) -> _Fault:
    return f"SIGSTOP to {name}", partial(send, signal.SIGSTOP), partial(send, signal.SIGCONT)
