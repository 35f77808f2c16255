"""Trains replicas in microbatches in a storm of faults, seed after seed.

    python tests/pytorch/soak_replicas.py --seeds 10 --seconds 60

Each rank tells the digest of its shards after each step: it must be that of one replica without faults. Ranks are
killed and frozen, also two of different replicas at once; replicas join and leave; the coordinator is killed and
restarted; and now and then a rank of each replica is killed at once, so that all go on from a checkpoint.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/, for `support`

from support.command import Command, command, gone
from support.ports import free_port

__all__ = ["soak_replicas"]

_SCRIPT = str(Path(__file__).parent / "replica_microbatches.py")
_SIZE = 2
_AT_FIRST, _MOST = 3, 4
_FAILURE_TIMEOUT = 3.0
_STALL = 90.0
"""Seconds without any step applied after which the job counts as stuck; a replica needs ten to start on a busy box."""

_FAULTS = {"kill one": 6, "kill two": 2, "kill all": 1, "freeze": 3, "coordinator": 2, "join": 2, "leave": 1}


class _World:
    """One start of a replica, as its ranks have told."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.generation = self.step = 0
        self.frozen = self.leaving = False

    @property
    def is_whole(self) -> bool:
        return len(self.pids) == _SIZE and not any(map(gone, self.pids.values()))


class _Storm:
    """Faults upon the replicas of one job, whose launchers and coordinator it starts."""

    def __init__(self, folder: Path, seed: int, say: Callable[[str], None], stack: ExitStack) -> None:
        self.counts: Counter[str] = Counter()
        self.told: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        self.replicas: set[int] = set()
        self.longest = 0.0
        self._folder, self._say, self._stack = folder, say, stack
        self._random = random.Random(seed)
        self._port = str(free_port())
        self._worlds: defaultdict[str, _World] = defaultdict(_World)
        self.launchers: dict[Command, int] = {}  # with the number of replicas of each
        self._read: dict[Path, int] = {}
        self._start = self._applied_at = time.monotonic()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        (folder / "events").mkdir()
        self._bring_back()
        self._join(_AT_FIRST)

    def blow(self, seconds: float) -> None:
        """Strikes for so long; then mends everything, and waits until all replicas train."""
        self._until(lambda: len(self._holders()) == _AT_FIRST and self._step() > 5)
        self.longest = 0.0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._pass(self._random.uniform(0.2, 5.0))
            self._strike()
        while self._later:
            heapq.heappop(self._later)[2]()
        at = self._step() + 10
        self._until(lambda: self._step() > at and len(self._holders()) == self._wanted())

    def calm(self) -> None:
        """Lets all replicas leave."""
        running = self._running()
        for launcher in running:
            launcher.signal(signal.SIGTERM)
        for launcher in running:
            assert launcher.wait(60.0) == 0, str(launcher)
        self._look()

    def _strike(self) -> None:
        holders = self._holders()
        self._random.shuffle(holders)
        fault = self._random.choices(list(_FAULTS), weights=list(_FAULTS.values()))[0]
        match fault:
            case "kill one" if len(holders) >= 2:
                self._kill(holders[:1])
            case "kill two" if len(holders) >= 3:
                self._kill(holders[:2])
            case "kill all" if holders and len(holders) == self._wanted():
                self._kill(holders)
                self.counts["returns to a checkpoint"] += 1
                self._until(lambda: bool(self._holders()))
            case "freeze" if len(holders) >= 2:
                self._freeze(holders[0], self._random.choice([0.3, 1.0, 2.0]) * _FAILURE_TIMEOUT)
            case "coordinator" if not self._coordinator.process.poll():
                seconds = self._random.uniform(0.0, 2.5)
                self._coordinator.close()
                self._after(seconds, self._bring_back)
                self._tell("coordinator restarts", f"killed the coordinator, for {seconds:.1f} s")
            case "join" if self._wanted() < _MOST:
                self._join(1)
                self._tell("joins", "started a replica")
            case "leave" if len(holders) > 2 and (single := self._single(holders)):
                for world in self._worlds_of(single[0]):
                    world.leaving = True
                single[0].signal(signal.SIGTERM)
                self._tell("leaves", f"told launcher {single[0].process.pid} to leave")

    def _kill(self, worlds: list[_World]) -> None:
        pids = [self._random.choice(list(world.pids.values())) for world in worlds]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._until(lambda: all(map(gone, pids)))
        self._tell("kills", f"killed {', '.join(map(str, pids))}", len(pids))

    def _freeze(self, world: _World, seconds: float) -> None:
        pid = self._random.choice(list(world.pids.values()))
        os.kill(pid, signal.SIGSTOP)
        world.frozen = True

        def thaw() -> None:
            world.frozen = False
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self._after(seconds, thaw)
        self._tell("freezes", f"froze {pid} for {seconds:.1f} s")

    def _bring_back(self) -> None:
        arguments = ("--listen", f"127.0.0.1:{self._port}", "--state", str(self._folder / "state.db"))
        self._coordinator = self._stack.enter_context(command("coordinator", *arguments))

    def _join(self, replicas: int) -> None:
        bounds = ("-n", str(replicas * _SIZE), "--replica-size", str(_SIZE), "--min", "1", "--max", str(_MOST))
        options = ("--pace", "0.04", "--total", str(1 << 30), "--checkpoints", str(self._folder / "saved"))
        run = ("run", *bounds, "--restarts", "10000", _SCRIPT, *options, "--events", str(self._folder / "events"))
        settings = {"COORDINATOR": f"127.0.0.1:{self._port}", "FAILURE_TIMEOUT": str(_FAILURE_TIMEOUT)}
        environment = {f"PACELINE_{name}": value for name, value in settings.items()}
        self.launchers[self._stack.enter_context(command(*run, **environment))] = replicas

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), do))

    def _pass(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= end)

    def _until(self, is_true: Callable[[], bool]) -> None:
        """Waits, does what is due, and watches that the job goes on."""
        while not is_true():
            while self._later and self._later[0][0] <= time.monotonic():
                heapq.heappop(self._later)[2]()
            self._look()
            stalled = time.monotonic() - self._applied_at
            self.longest = max(self.longest, stalled)
            assert stalled < _STALL, f"no step was applied for {stalled:.0f} s"
            ended = [each for each in self.launchers if each.process.poll() not in (None, 0)]
            assert not ended, f"a launcher has failed:\n{ended[0]}"
            time.sleep(0.02)

    def _look(self) -> None:
        """Takes in what the ranks have told since the last time."""
        for path in (self._folder / "events").iterdir():
            with open(path) as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                self._take(int(path.name), json.loads(line))

    def _take(self, pid: int, event: dict[str, Any]) -> None:
        world = self._worlds[event["world"]]
        world.pids[event["position"]] = pid
        if not event.get("digest"):
            return
        world.generation, world.step = event["generation"], event["step"]
        self._applied_at = max(self._applied_at, event["at"])
        self.told[event["step"], event["position"]].add(event["digest"])
        self.replicas.add(event["replicas"])

    def _holders(self) -> list[_World]:
        """Returns the replicas that train in the newest generation, and so hold the state."""
        self._look()
        newest = max((world.generation for world in self._worlds.values()), default=0)
        return [
            world
            for world in self._worlds.values()
            if world.generation == newest > 0 and not world.frozen and not world.leaving and world.is_whole
        ]

    def _running(self) -> list[Command]:
        return [launcher for launcher in self.launchers if launcher.process.poll() is None]

    def _single(self, worlds: list[_World]) -> list[Command]:
        """Returns the launchers whose one replica is among these: one that still starts would end with an error."""
        alone = [each for each in self._running() if self.launchers[each] == 1]
        return [each for each in alone if any(world in worlds for world in self._worlds_of(each))]

    def _wanted(self) -> int:
        """Returns how many replicas there are when all have started."""
        return sum(self.launchers[each] for each in self._running())

    def _worlds_of(self, launcher: Command) -> list[_World]:
        return [world for name, world in self._worlds.items() if name.startswith(f"{launcher.process.pid}-")]

    def _step(self) -> int:
        return max((world.step for world in self._worlds.values()), default=0)

    def _tell(self, kind: str, what: str, count: int = 1) -> None:
        self.counts[kind] += count
        self._say(f"{time.monotonic() - self._start:7.2f} s {what}; {len(self._holders())} train, step {self._step()}")


def soak_replicas(seconds: float, seed: int, folder: Path, say: Callable[[str], None]) -> None:
    """Trains for so long while ranks and the coordinator fail, and checks the digest of each step.

    Args:
        seconds: how long.
        seed: of the faults.
        folder: for the files of the job.
        say: where lines for people go.

    Raises:
        AssertionError: a step has other bits than in one replica without faults, or the job did not go on.
    """
    with ExitStack() as stack:
        storm = _Storm(folder, seed, say, stack)
        try:
            storm.blow(seconds)
            storm.calm()
            expected = _undisturbed(folder / "one", max(step for step, _ in storm.told))
            odd = sorted(place for place, digests in storm.told.items() if digests != {expected[place]})
            assert not odd, f"other bits than in one replica, first in step {odd[0][0]} at position {odd[0][1]}"
            said = "".join(each.stderr for each in storm.launchers)
            if storm.counts["returns to a checkpoint"]:  # it may be of the last step: then nothing is lost
                assert "resumed from step" in said, "no return to a checkpoint was told"
            else:
                assert "no worker held the latest state" not in said, "the state was lost"
        except BaseException as error:
            (folder / "log.txt").write_text("\n".join(map(str, storm.launchers)))
            raise AssertionError(f"seed {seed}: {error}; what the launchers said is in {folder}/log.txt") from error
    told = ", ".join(f"{count} {what}" for what, count in storm.counts.items())
    say(
        f"seed {seed}: {len({step for step, _ in storm.told})} steps with {min(storm.replicas)} to "
        f"{max(storm.replicas)} replicas; {told}; the longest pause was {storm.longest:.1f} s; all with the same bits"
    )


def _undisturbed(folder: Path, total: int) -> dict[tuple[int, int], str]:
    """Returns the digest of each step and position in one replica without faults."""
    folder.mkdir()
    with command(
        "run", "-n", str(_SIZE), "--replica-size", str(_SIZE), _SCRIPT, "--total", str(total), "--events", str(folder)
    ) as run:
        assert run.wait(300.0) == 0, str(run)
    events = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
    return {(event["step"], event["position"]): event["digest"] for event in events if event.get("digest")}


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description="the same bits of replicas in a storm of faults")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each seed")
    wanted = parser.parse_args()
    for seed in range(wanted.first, wanted.first + wanted.seeds):
        folder = Path(tempfile.mkdtemp(prefix="paceline-replicas-"))
        soak_replicas(wanted.seconds, seed, folder, say)
        shutil.rmtree(folder)


def say(line: str) -> None:
    """A line at once."""
    print(line, flush=True)  # noqa: T201  its task


if __name__ == "__main__":
    main()
