"""Measures how long 4 members on one host take to reconfigure, and how soon all learn of an abort or a death.

`-s` prints the figures: the best and the median, in ms. It needs torch 2.15 or newer.
"""

from __future__ import annotations

import json
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from figures import QUIET
from support.processes import Worker

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(600)]

MEMBERS, ROUNDS, DEATHS = 4, 30, 5
PLACES = {"first": 0, "middle": 1, "last": 3}

ASKED_S = 0.1 if QUIET else 0.3
"""The highest median allowed, in seconds, for each of these times."""

INSIDE_S = 0.1
"""Seconds that members get to enter the call that hangs."""

MEMBER = """
import torch, torch.distributed as dist
from datetime import timedelta
torch.set_num_threads(1)
backend, path, rank, size = sys.stdin.readline().split()
store = dist.FileStore(path, int(size)) if backend == "gloo" else dist.HashStore()
dist.init_process_group(backend, store=store, rank=int(rank), world_size=int(size), enable_reconfigure=True,
                        timeout=timedelta(seconds=30))

def reconfigure(uuid, handles):
    began = time.monotonic()
    dist._reconfigure(uuid, handles).wait()
    ended = time.monotonic()
    dist.all_reduce(torch.ones(4))
    emit("made", began=began, ended=ended, handle=dist._get_reconfigure_handle())

def roll(elements):
    tensor = torch.ones(elements)
    while True:
        emit("rolling")
        dist.all_reduce(tensor)

def abort():
    emit("aborts")
    dist.group.WORLD.abort()

emit("handle", handle=dist._get_reconfigure_handle())
for line in sys.stdin:
    order = json.loads(line)
    try:
        globals()[order.pop("do")](**order)
    except Exception as error:
        emit("error", type=type(error).__name__, text=str(error), ranks=list(getattr(error, "ranks", ())))
"""


def tell(worker: Worker, **order: Any) -> None:
    assert worker.process.stdin is not None
    worker.process.stdin.write(json.dumps(order) + "\n")
    worker.process.stdin.flush()


class Line:
    """The members in rank order, and the former members."""

    def __init__(self, backend: str, path: Path) -> None:
        self._backend, self._path = backend, path
        self._uuid = 0
        self._handles: dict[Worker, str] = {}
        self.members: list[Worker] = []
        self.fill()

    def fill(self) -> None:
        new = [Worker(MEMBER, {}) for _ in range(MEMBERS - len(self.members))]
        self.members += new
        for rank, worker in enumerate(new):
            self._handles[worker] = ""
            assert worker.process.stdin is not None
            worker.process.stdin.write(f"{self._backend} {self._path} {rank} {MEMBERS}\n")
            worker.process.stdin.flush()
        for worker in new:
            self._handles[worker] = worker.expect("handle", 120.0)["handle"]

    def reconfigure(self) -> float:
        """Reconfigures; returns the seconds from the first member's call to the last one's return."""
        self._uuid += 1
        for worker in self.members:
            tell(worker, do="reconfigure", uuid=self._uuid, handles=[self._handles[each] for each in self.members])
        made = [worker.expect("made", 60.0) for worker in self.members]
        self._handles.update(zip(self.members, (each["handle"] for each in made), strict=True))  # Gloo's are new
        return max(each["ended"] for each in made) - min(each["began"] for each in made)

    def errors(self, since: float, rest: list[Worker]) -> list[float]:
        """Returns the seconds from `since` until each of the workers in `rest` had its typed error."""
        found = []
        for worker in rest:
            while (event := worker.expect_any(60.0))["event"] == "rolling":
                pass
            assert event["event"] == "error", event
            found.append(event["at"] - since)
            assert event["ranks"], event
        return found

    def close(self) -> None:
        for worker in self._handles:
            worker.close()


@contextmanager
def line(backend: str = "paceline") -> Iterator[Line]:
    """Starts the members for the block; skips the test if torch has no reconfiguration."""
    try:
        known = tuple(map(int, version("torch").split(".")[:2])) >= (2, 15)
    except PackageNotFoundError:
        known = False
    if not known:
        pytest.skip("needs torch 2.15 or newer")
    with TemporaryDirectory() as folder:
        made = Line(backend, Path(folder) / "store")
        try:
            yield made
        finally:
            made.close()


def show(what: str, found: list[float]) -> float:
    median = statistics.median(found)
    print(f"\n{what:<46} best {min(found) * 1e3:6.1f} ms, median {median * 1e3:6.1f} ms of {len(found)}", end="")
    return median


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_a_reconfiguration_is_fast(backend: str) -> None:
    with line(backend) as members:
        show(f"{backend}: first reconfiguration", [members.reconfigure()])
        median = show(f"{backend}: later reconfigurations", [members.reconfigure() for _ in range(ROUNDS)])
    assert backend == "gloo" or median <= ASKED_S


@pytest.mark.parametrize("place", PLACES)
def test_an_abort_ends_hanging_calls_of_other_members_in_time(place: str) -> None:
    with line() as members:
        here: list[float] = []
        for _ in range(ROUNDS // 3):
            members.reconfigure()
            aborts = members.members[PLACES[place]]
            rest = [worker for worker in members.members if worker is not aborts]
            for worker in rest:
                tell(worker, do="roll", elements=4)
            for worker in rest:
                worker.expect("rolling")
            time.sleep(INSIDE_S)
            tell(aborts, do="abort")
            here += members.errors(aborts.expect("aborts")["at"], rest)
        assert show(f"abort at the {place} place, error at others", here) <= ASKED_S


@pytest.mark.parametrize("place", PLACES)
def test_a_death_during_a_64_mib_all_reduce_is_reported_in_time(place: str) -> None:
    with line() as members:
        found: list[float] = []
        ended: list[float] = []
        for _ in range(DEATHS):
            members.reconfigure()
            victim = members.members[PLACES[place]]
            for worker in members.members:
                tell(worker, do="roll", elements=16 << 20)
            for _ in range(3):
                victim.expect("rolling", 60.0)
            members.members.remove(victim)
            at = victim.signal(signal.SIGKILL)
            victim.process.wait()
            ended.append(time.monotonic() - at)
            found += members.errors(at, members.members)
            members.fill()
        show(f"SIGKILL at the {place} place, end of the process", ended)
        assert show(f"SIGKILL at the {place} place, error at others", found) <= ASKED_S
