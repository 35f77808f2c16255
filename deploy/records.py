"""Reads what workers record under `audited.py`, while they run; needs no Paceline.

Each process has its own file, HOST-PID-TIME.jsonl, with a line for each event: which samples it is about to use
(`attempt`), that it applied a step (`applied`), that a step is committed (`committed`), that a view began (`view`),
that the last step is done (`ended`). All times are `time.time()` of one machine.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Records"]

T = TypeVar("T")

_LOOK_S = 0.02


class Records:
    """All events so far.

    Args:
        folder: the folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.workers: dict[str, list[dict[str, Any]]] = {}

    def refresh(self) -> None:
        """Reads new lines, except a line that is not complete yet."""
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, end, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(end)
            events = self.workers.setdefault(path.stem, [])
            events += [json.loads(line) for line in whole.splitlines()]

    def wait(self, look: Callable[[], T | None], what: str, timeout: float = 60.0) -> T:
        """Reads new events until `look` returns an answer.

        Raises:
            TimeoutError: there is no answer in time.
        """
        deadline = time.time() + timeout
        while True:
            self.refresh()
            answer = look()
            if answer:
                return answer
            if time.time() > deadline:
                raise TimeoutError(f"this did not happen within {timeout:.0f} s: {what}")
            time.sleep(_LOOK_S)

    # When something happened ------------------------------------------------------------------------------------------

    def committed(self, hosts: Sequence[str], since: float) -> float | None:
        """Returns when one of these hosts first committed a step after that time; None for not yet."""
        times = [e["at"] for host in hosts for e in self._of(host) if e["event"] == "committed" and e["at"] > since]
        return min(times, default=None)

    def back(self, hosts: Sequence[str], since: float, size: int | None = None) -> float | None:
        """Returns when all hosts had committed a step of a view that began after `since`; None for not yet.

        Args:
            hosts: names of containers.
            since: the time.
            size: number of members that the view must have; None for any number.
        """
        times = [self._first_commit(host, since, size) for host in hosts]
        return None if None in times else max((at for at in times if at is not None), default=None)

    def by_rank(self, hosts: Sequence[str]) -> list[str]:
        """Sorts hosts by their rank in the last view."""
        ranks = {host: [e["rank"] for e in self._of(host) if e["event"] == "view"][-1] for host in hosts}
        return sorted(hosts, key=lambda host: ranks[host])

    def longest_gap(self, since: float, until: float) -> float:
        """Returns the longest time between `since` and `until`, in seconds, in which no worker committed a step."""
        found: list[float] = [event["at"] for event in self._all("committed")]
        times = [since, *sorted(at for at in found if since < at < until), until]
        return max(b - a for a, b in pairwise(times))

    # The result -------------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """True once a worker has made the last step."""
        return bool(self._all("ended"))

    @property
    def steps(self) -> int:
        """The last step that any worker applied."""
        return max((e["step"] for e in self._all("applied")), default=0)

    def wrong(self) -> list[str]:
        """Says what is wrong with the samples; each epoch must use each exactly once, in the steps of the line."""
        job = next(iter(self._all("job")), None)
        if job is None:
            return ["no worker began"]
        line: dict[int, int] = {}  # step -> the last generation that applied it, for steps that were redone
        for event in self._all("applied"):
            line[event["step"]] = max(line.get(event["step"], 0), event["generation"])
        missing = sorted(set(range(1, job["steps"] + 1)) - set(line))
        faults = [f"steps that no worker applied: {missing[:10]}"] if missing else []
        used: dict[int, Counter[int]] = {}
        for event in self._all("attempt"):
            if line.get(event["step"]) == event["generation"]:
                used.setdefault((event["step"] - 1) // job["steps_per_epoch"], Counter()).update(event["indices"])
        once = Counter(range(job["samples"]))
        for epoch, counted in sorted(used.items()):
            if counted != once:
                lost, twice = once - counted, counted - once
                faults.append(f"epoch {epoch + 1}: {len(lost)} samples not used, {len(twice)} used more than once")
        return faults

    def __str__(self) -> str:
        lines = []
        for name, events in self.workers.items():
            lines.append(f"--- {name}")
            for event in events[:5] + events[-5:] if len(events) > 10 else events:
                lines.append(f"  {event}"[:200])
            lines += [f"  {e}" for e in events if e["event"] == "view"]
        return "\n".join(lines)

    def _all(self, kind: str) -> list[dict[str, Any]]:
        return [event for events in self.workers.values() for event in events if event["event"] == kind]

    def _of(self, host: str) -> list[dict[str, Any]]:
        """Returns the events of a container's processes, in order; each restart of a container adds a process."""
        return [
            event for name in sorted(self.workers, key=_began) if _host(name) == host for event in self.workers[name]
        ]

    def _first_commit(self, host: str, since: float, size: int | None) -> float | None:
        generations: set[int] = set()
        steps: set[int] = set()
        for event in self._of(host):
            if event["at"] <= since:
                continue
            if event["event"] == "view" and size in (None, event["size"]):
                generations.add(event["generation"])
            elif event["event"] == "applied" and event["generation"] in generations:
                steps.add(event["step"])
            elif event["event"] == "committed" and event["step"] in steps:
                return float(event["at"])
        return None


def _host(name: str) -> str:
    return name.rpartition("-")[0].rpartition("-")[0]


def _began(name: str) -> int:
    return int(name.rpartition("-")[2])
