"""The jobs of `replicas.py`: three replicas of two ranks in Paceline or torchft, and what their ranks tell.

torchft leaves it to others to start replicas again. Here the conductor does it, and kills the other rank of a replica
as soon as one has ended, which is sooner than any launcher would.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conductor import ONE_THREAD, clean_environment, tied
from paceline.cli.launcher import shim

REPLICAS, RANKS = 3, 2
"""Replicas, and ranks of each."""

LEAST = 2
"""Replicas that are enough to go on."""

TORCHFT = Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache/paceline") / "torchft/bin"
"""The programs of torchft's environment (`make torchft`)."""

LIGHTHOUSE = {
    "torchft": {"heartbeat_timeout_ms": 5000, "quorum_tick_ms": 100, "join_timeout_ms": 60000},
    "torchft-1s": {"heartbeat_timeout_ms": 1000, "quorum_tick_ms": 10, "join_timeout_ms": 60000},
    "torchft-join": {"heartbeat_timeout_ms": 1000, "quorum_tick_ms": 10, "join_timeout_ms": 200},
}
"""Settings of torchft's lighthouse by contender. The first ones are its defaults. With the last ones it does not wait
for the heartbeats of a lost replica to be overdue, nor for a replica that is 0.2 s later than the others."""

_SCRIPT = str(Path(__file__).with_name("replica_contenders.py"))

_LOOK_S = 0.005
"""Seconds between two looks at what ranks have told; no figure depends on it, as the ranks tell times."""

_PATIENCE_S = 180.0


@dataclass(slots=True)
class Rank:
    """A process and what it has told; `life` names the run of its replica."""

    pid: int
    life: str
    events: list[dict[str, Any]] = field(default_factory=list)
    read: int = 0

    def after(self, moment: float, kind: str) -> list[dict[str, Any]]:
        """Returns its events of a kind after a moment."""
        return [event for event in self.events if event["event"] == kind and event["at"] > moment]


class Job:
    """A job of a contender.

    Args:
        folder: for what its processes tell and say.
        size: layers and width of the model.

    Attributes:
        ranks: all processes so far that have told something, by pid.
    """

    def __init__(self, folder: Path, size: tuple[int, int]) -> None:
        self.ranks: dict[int, Rank] = {}
        self.folder = folder
        (folder / "told").mkdir()
        self._size = [str(number) for number in size]
        self._log = (folder / "log").open("wb")

    def close(self) -> None:
        """Kills all processes."""
        self._log.close()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for what the ranks tell.

        Raises:
            TimeoutError: it does not happen.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                said = (self.folder / "log").read_text(errors="replace")[-3000:]
                raise TimeoutError(f"{what}: not in {_PATIENCE_S:.0f} s:\n{said}")
            time.sleep(_LOOK_S)
            self._tend()
            self._read()

    def alive(self) -> list[Rank]:
        """Returns the processes that run."""
        return [rank for rank in self.ranks.values() if _runs(rank.pid)]

    def _tend(self) -> None:
        """Starts again what has ended."""

    def _read(self) -> None:
        for path in (self.folder / "told").glob("*.jsonl"):
            port, _, pid = path.stem.split("-")
            rank = self.ranks.setdefault(int(pid), Rank(int(pid), port))
            with path.open("rb") as file:
                file.seek(rank.read)
                whole = file.read().rpartition(b"\n")[0]
            rank.read += len(whole) + bool(whole)
            rank.events += [json.loads(line) for line in whole.splitlines()]

    def _start(self, command: list[str], more: dict[str, str]) -> subprocess.Popen[bytes]:
        environment = clean_environment(ONE_THREAD | {"GLOO_SOCKET_IFNAME": "lo"} | more)
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environment)

    def _script(self, contender: str) -> list[str]:
        return [_SCRIPT, str(self.folder / "told"), contender, *self._size]


class PacelineJob(Job):
    """Three replicas under one launcher, which starts them again."""

    def __init__(self, folder: Path, size: tuple[int, int]) -> None:
        super().__init__(folder, size)
        bounds = ["-n", str(REPLICAS * RANKS), "--replica-size", str(RANKS), "--min", str(LEAST), "--restarts", "1000"]
        self._launcher = self._start(tied(["-m", "paceline", "run", *bounds, *self._script("paceline")]), {})

    def close(self) -> None:
        """See `Job`: the kernel kills its processes when the launcher is gone."""
        self._launcher.kill()
        self._launcher.wait()
        super().close()


class TorchftJob(Job):
    """A lighthouse, and three replicas that this process starts again."""

    def __init__(self, folder: Path, size: tuple[int, int], settings: dict[str, int]) -> None:
        super().__init__(folder, size)
        self._port = free_port()
        options = {"min_replicas": LEAST, "bind": f"127.0.0.1:{self._port}", **settings}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._lighthouse = self._start(tied(["--", str(TORCHFT / "torchft_lighthouse"), *words]), {})
        self._replicas = [self._replica(number) for number in range(REPLICAS)]

    def close(self) -> None:
        """See `Job`."""
        for process in [self._lighthouse, *(process for replica in self._replicas for process in replica)]:
            process.kill()
            process.wait()
        super().close()

    def _tend(self) -> None:
        for number, replica in enumerate(self._replicas):
            if any(process.poll() is not None for process in replica):
                for process in replica:
                    process.kill()
                    process.wait()
                self._replicas[number] = self._replica(number)

    def _replica(self, number: int) -> list[subprocess.Popen[bytes]]:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
        world |= {"REPLICA_GROUP_ID": str(number), "NUM_REPLICA_GROUPS": str(REPLICAS)}
        world |= {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}"}
        words = [str(TORCHFT / "python"), str(shim.__file__), str(os.getpid()), *self._script("torchft")]
        return [self._start(words, {**world, "RANK": str(rank)}) for rank in range(RANKS)]


def start(contender: str, folder: Path, size: tuple[int, int]) -> Job:
    """Starts the job of a contender, "paceline" or one of `LIGHTHOUSE`."""
    if contender == "paceline":
        return PacelineJob(folder, size)
    return TorchftJob(folder, size, LIGHTHOUSE[contender])


def free_port() -> int:
    """Returns a port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def kill(rank: Rank) -> float:
    """Kills a process; returns the time."""
    at = time.monotonic()
    os.kill(rank.pid, signal.SIGKILL)
    return at


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
