"""Faults at random, one after the other and one into the other, upon a job that is to go on all the time.

A seed gives the choices; the moments, and so what they meet, are the machine's. What is kept safe is only what the
promises need: somebody who holds the line's state and is neither killed, nor frozen, nor on his way out.
"""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from support.elastic.cluster import Cluster, Trainer

__all__ = ["FAILURE_TIMEOUT", "Storm"]

FAILURE_TIMEOUT = 1.0
LEAST, MOST = 2, 6
STALL = 20.0
"""Seconds without any step applied after which the job counts as stuck: faults overlap, each may cost failure_timeout
and a worker's start."""

_FAULTS = {
    "kill one": 4,
    "kill two": 2,
    "freeze shortly": 2,
    "freeze long": 2,
    "drain": 2,
    "coordinator": 2,
    "start": 5,
}


class Storm:
    """Faults upon one cluster.

    Args:
        cluster: the job, with its first trainers running.
        seed: of the choices.
        say: where a line for each fault goes.
        kills: whether workers are killed too.
        mends: whether nobody is killed or frozen before all have applied a step since the fault before: of a state
            that is spread, one at a time may lose its share.
        gaps: least and greatest time in seconds between two faults.
        stall: seconds without any step applied after which the job counts as stuck.

    Attributes:
        done: the lines.
        counts: how often each fault has happened.
        harm: how many steps the faults may cost, one each at most.
        undone: generations of which somebody has undone a step.
        longest: the longest time in seconds in which no step was applied.
    """

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        say: Callable[[str], None],
        *,
        kills: bool = True,
        mends: bool = False,
        gaps: tuple[float, float] = (0.5, 2.0),
        stall: float = STALL,
    ) -> None:
        self.done: list[str] = []
        self.counts: Counter[str] = Counter()
        self.harm = 0
        self.undone: set[int] = set()
        self.longest = 0.0
        self._cluster = cluster
        self._random = random.Random(seed)
        self._say = say
        self._kills = kills
        self._mends = mends
        self._gaps, self._stall = gaps, stall
        self._start = time.monotonic()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._frozen: set[Trainer] = set()
        self._draining: set[Trainer] = set()
        self._away = False
        self._read: dict[Trainer, int] = {}
        self._last: dict[Trainer, tuple[int, int]] = {}
        self._last_at: dict[Trainer, float] = {}
        self._struck_at = 0.0  # when somebody was last killed or frozen
        self._applied_at = time.monotonic()

    def blow(self, seconds: float) -> None:
        """Faults for so long; then everything is mended and the job is to go on."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._wait(self._random.uniform(*self._gaps))
            self._strike()
        while self._later:
            heapq.heappop(self._later)[2]()
        at = self._step()
        while self._step() < at + 10 or len(self._holders(without=[])) < len(self._staying()):
            self._wait(0.2)  # all are back: who comes back when the others have left begins again from what he holds
            assert time.monotonic() < end + 60.0, "not all came back"

    def calm(self) -> None:
        """All who are there leave at the end of their step."""
        for trainer in self._running():
            if trainer not in self._draining:
                trainer.signal(signal.SIGTERM)

    def _strike(self) -> None:
        running = self._staying()
        kinds = list(_FAULTS)
        fault = self._random.choices(kinds, weights=list(_FAULTS.values()))[0]
        if len(running) < LEAST:
            fault = "start"
        victims = [trainer for trainer in running if trainer not in self._frozen]
        self._random.shuffle(victims)
        wanted = 2 if fault == "kill two" and not self._mends else 1
        safe = len(running) - wanted >= LEAST and len(self._holders(without=victims[:wanted])) >= 1
        if self._mends:
            mended = [each for each in self._holders(without=[]) if self._last_at[each] > self._struck_at]
            safe = safe and len(mended) == len(self._running())
        match fault:
            case "start" if len(running) < MOST:
                (new,) = self._cluster.start(1)
                self._tell("joins", f"started {new.pid}")
            case "kill one" | "kill two" if self._kills and safe and len(victims) >= wanted:
                self.harm += wanted
                for trainer in victims[:wanted]:
                    trainer.signal(signal.SIGKILL)
                for trainer in victims[:wanted]:
                    trainer.process.wait()
                self._struck_at = time.monotonic()
                names = " and ".join(str(trainer.pid) for trainer in victims[:wanted])
                self._tell("kills", f"killed {names}", wanted)
            case "freeze shortly" | "freeze long" if safe and victims:
                span = (0.2, 0.7) if fault == "freeze shortly" else (1.5, 3.0)
                self._freeze(victims[0], self._random.uniform(*span) * FAILURE_TIMEOUT)
            case "drain" if safe and victims:
                self._draining.add(victims[0])
                victims[0].signal(signal.SIGTERM)
                self._tell("drains", f"drained {victims[0].pid}")
            case "coordinator" if not self._away:
                seconds = self._random.uniform(0.0, 2.5)
                self._cluster.kill_coordinator()
                self._away = True
                self._after(seconds, self._bring_back)
                self._tell("coordinator restarts", f"killed the coordinator, for {seconds:.1f} s")

    def _freeze(self, trainer: Trainer, seconds: float) -> None:
        self.harm += 1
        trainer.signal(signal.SIGSTOP)
        self._struck_at = time.monotonic()
        self._frozen.add(trainer)

        def thaw() -> None:
            self._frozen.discard(trainer)
            with suppress(ProcessLookupError):
                trainer.signal(signal.SIGCONT)

        self._after(seconds, thaw)
        self._tell("freezes", f"froze {trainer.pid} for {seconds:.1f} s")

    def _bring_back(self) -> None:
        self._cluster.start_coordinator()
        self._away = False

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), do))

    def _wait(self, seconds: float) -> None:
        """Lets time pass, does what is due, and watches that the job goes on."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            while self._later and self._later[0][0] <= now:
                heapq.heappop(self._later)[2]()
            self._look()
            stalled = time.monotonic() - self._applied_at
            self.longest = max(self.longest, stalled)
            assert stalled < self._stall, f"no step was applied for {stalled:.0f} s"
            failed = [trainer for trainer in self._cluster.trainers if trainer.of("error")]
            assert not failed, f"{failed[0].pid} failed: {failed[0].of('error')}"
            time.sleep(0.02)

    def _look(self) -> None:
        """Takes in what the trainers have told since the last time."""
        for trainer in self._cluster.trainers:
            seen = self._read.get(trainer, 0)
            events = trainer.events[seen:]
            self._read[trainer] = seen + len(events)
            for event in events:
                if event["event"] == "applied":
                    self._last[trainer] = event["generation"], event["step"]
                    self._last_at[trainer] = event["at"]
                    self._applied_at = max(self._applied_at, event["at"])
                elif event["event"] == "undone":
                    self.undone.add(event["generation"])

    def _holders(self, without: list[Trainer]) -> list[Trainer]:
        """Who trains in the newest generation, will go on, and so holds the state of the line."""
        self._look()
        newest = max(self._last.values(), default=(0, 0))[0]
        return [
            trainer for trainer in self._running()
            if trainer not in without and trainer not in self._frozen and trainer not in self._draining
            and self._last.get(trainer, (0, 0))[0] == newest > 0
        ]  # fmt: skip

    def _running(self) -> list[Trainer]:
        return [trainer for trainer in self._cluster.trainers if trainer.process.poll() is None]

    def _staying(self) -> list[Trainer]:
        return [trainer for trainer in self._running() if trainer not in self._draining]

    def _step(self) -> int:
        self._look()
        return max((step for _, step in self._last.values()), default=0)

    def _tell(self, kind: str, what: str, count: int = 1) -> None:
        self.counts[kind] += count
        newest = max(self._last.values(), default=(0, 0))
        line = (
            f"{time.monotonic() - self._start:7.2f} s ({time.monotonic():.2f}) {what}; "
            f"{len(self._running())} are there, step {self._step()} of generation {newest[0]}"
        )
        self.done.append(line)
        self._say(line)
