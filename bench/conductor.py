"""The conductor of `compare.py`: times jobs in several contenders, which take turns.

A contender is all ranks of one implementation over one kind of link. All contenders exist side by side, but only one
works at a time, and rounds go A B C A B C ..., so that other load on the machine affects all of them alike. A row's
figures cover the calls of all rounds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from jobs import Job
from paceline.cli.launcher import shim
from paceline.config import LINKS as BETWEEN_PROCESSES
from paceline.launch._supervision import shell_code

LINKS = (*BETWEEN_PROCESSES, "local")
"""Kinds of links that can be requested; "local" links are between threads of one process."""

SOCKET = "{socket}"
"""Stands in a recipe's command for the path of the conductor's socket."""

BUDGET_S = 2.0
"""About how many seconds to measure for a row."""

_LEAST, _MOST = 10, 2000
"""Least and most calls for a row: for large arrays enough for a median, for small ones for a 99th percentile."""

_WARM_UP = 5

_ESTIMATE = 3

_TURNS = 10
"""Number of rounds if there are several contenders or schedules."""

_END_S = 20.0
"""Seconds in which processes must end after the order; then they are killed."""

_POLL_S = 0.1
"""Seconds between two checks whether a process ended before its ranks connected."""

_JOB = (
    "PACELINE_ADVERTISE",
    "PACELINE_COORDINATOR",
    "PACELINE_JOB",
    "PACELINE_MAX_WORKERS",
    "PACELINE_MIN_WORKERS",
    "PACELINE_RANK",
    "PACELINE_WORLD_SIZE",
)
"""Variables of the job to which this process may belong; the contenders have jobs of their own."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""Variables that `paceline run` sets for its workers; other implementations get the same."""


class Turn(NamedTuple):
    """The results of some successive calls: the seconds of each, at its slowest rank.

    `took_s` includes the time between them. `schedule` is None if the implementation does not say. `links` are the
    kinds over which bytes moved.
    """

    seconds: list[float]
    took_s: float
    schedule: str | None
    links: tuple[str, ...]


@dataclass(slots=True)
class Measured:
    """The times of a contender for a job and one schedule, the one that it was told to use, if any.

    If it cannot do the job, there are no turns, and `lacks` says why.
    """

    contender: Ensemble
    asked: str | None
    turns: list[Turn] = field(default_factory=list)
    lacks: str | None = None

    @property
    def seconds(self) -> list[float]:
        """Returns the seconds of each call in all rounds."""
        return [second for turn in self.turns for second in turn.seconds]


def measure(job: Job, contenders: Sequence[Ensemble], budget_s: float = BUDGET_S) -> list[Measured]:
    """Times a job in all contenders, each with all the job's schedules if we can choose its schedule.

    Args:
        job: what to measure.
        contenders: the contenders, which take turns.
        budget_s: about how many seconds to measure for each result.
    """
    results = list(_lanes(job, contenders))
    able = [result for result in results if result.lacks is None]
    turns = _TURNS if len(able) > 1 else 1
    counts = [_count(result, budget_s) for result in able]
    for turn in range(turns):
        for result, count in zip(able, counts, strict=True):
            calls = (turn + 1) * count // turns - turn * count // turns
            result.turns.append(result.contender.run(calls, result.asked))
    return results


def _lanes(job: Job, contenders: Sequence[Ensemble]) -> Iterator[Measured]:
    for contender in contenders:
        reason = contender.prepare(job)
        for schedule in (job.schedules or (None,)) if contender.schedules and reason is None else (None,):
            yield Measured(contender, schedule, lacks=reason)


def _count(result: Measured, budget_s: float) -> int:
    """Estimates how many calls fit into the budget, from one call, or from a few after a warm-up if calls are quick."""
    estimate = result.contender.run(1, result.asked).took_s
    if estimate * (_WARM_UP + _ESTIMATE) < budget_s:
        result.contender.run(_WARM_UP, result.asked)
        estimate = result.contender.run(_ESTIMATE, result.asked).took_s / _ESTIMATE
    return int(np.clip(math.ceil(budget_s / estimate), _LEAST, _MOST))


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start a contender.

    No two have one name. `command` is that of the process that is, or starts, all its ranks; SOCKET stands for the
    conductor's socket. `schedules` is True if we can choose its schedule.
    """

    name: str
    impl: str
    link: str
    command: Sequence[str]
    environment: Mapping[str, str]
    schedules: bool = False


def paceline_recipe(link: str, world: int, memory: str) -> Recipe:
    """Makes the recipe for Paceline over one kind of link; two members that cannot open one fall back to gRPC."""
    name = f"paceline over {link}"
    worker = [str(Path(__file__).with_name("contenders.py")), SOCKET, name, memory]
    if link == "local":
        return Recipe(
            name, "paceline", link, tied([*worker, str(world)]), clean_environment(ONE_THREAD), schedules=True
        )
    command = tied(["-m", "paceline", "run", "-n", str(world), *worker])
    kinds = ",".join(dict.fromkeys([link, "grpc"]))
    return Recipe(name, "paceline", link, command, clean_environment({"PACELINE_LINKS": kinds}), schedules=True)


def tied(arguments: Sequence[str]) -> list[str]:
    """Returns the command of a Python process that the kernel kills when this process dies."""
    return [sys.executable, str(shim.__file__), str(os.getpid()), *arguments]


def clean_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's variables without those of its job, with `more` added."""
    inherited = {name: value for name, value in os.environ.items() if name not in _JOB}
    return inherited | dict(more)


class ContenderFailed(Exception):
    """Processes of a contender ended before they were told to; `exit_code` is what the command should end with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class Ensemble:
    """A contender: all ranks of one implementation over one kind of link.

    `process` is, or started, all its ranks; None if the caller manages them. `lines` has the connection to each rank,
    by rank.
    """

    name: str
    impl: str
    link: str
    schedules: bool
    process: subprocess.Popen[bytes] | None = None
    lines: dict[int, BinaryIO] = field(default_factory=dict)

    def prepare(self, job: Job) -> str | None:
        """Tells all ranks to make their arrays and one call; returns a reason if the collective is not implemented."""
        answers = self._ask({"do": "prepare", "collective": job.collective, "bytes": job.bytes, "place": job.place})
        return next((answer["lacks"] for answer in answers if "lacks" in answer), None)

    def run(self, calls: int, schedule: str | None) -> Turn:
        """Times calls at all ranks; the time of a call is that of its slowest rank."""
        answers = self._ask({"do": "run", "calls": calls, "schedule": schedule})
        slowest = np.max([answer["ns"] for answer in answers], axis=0)
        links = sorted({link for answer in answers for link in answer["links"]})
        took_s = max(answer["took_ns"] for answer in answers) / 1e9
        return Turn((slowest / 1e9).tolist(), took_s, answers[0]["schedule"], tuple(links))

    def end(self) -> None:
        """Tells the ranks to end, and waits for them; raises `ContenderFailed` if one does not end well in time."""
        for rank in self.lines:
            self._say(rank, {"do": "end"})
        for stream in self.lines.values():
            stream.close()
        self.lines.clear()
        if self.process is not None:
            try:
                code = self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                raise ContenderFailed(f"{self.name} did not end in {_END_S:.0f} s", 1) from None
            if code:
                raise ContenderFailed(f"{self.name} ended with exit code {code}", shell_code(code))

    def stop(self) -> None:
        """Ends all processes, whatever happened. Idempotent."""
        for stream in self.lines.values():
            with contextlib.suppress(OSError):  # the rank is gone, and an order to it is still in the buffer
                stream.close()
        self.lines.clear()
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()  # its ranks are tied to it (`launcher.shim`)
                self.process.wait()

    def failed(self, what: str) -> ContenderFailed:
        """Returns the error for ranks that are gone; waits for their launcher to report why."""
        for stream in self.lines.values():  # makes the other ranks end too
            with contextlib.suppress(OSError):
                stream.close()
        self.lines.clear()
        code = None
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(_END_S)
        ended = "" if code is None else f" (exit code {shell_code(code)})"
        return ContenderFailed(f"{self.name}: {what}{ended}", shell_code(code or 1))

    def _ask(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        for rank in sorted(self.lines):
            self._say(rank, order)
        return [self._hear(rank) for rank in sorted(self.lines)]

    def _say(self, rank: int, order: dict[str, Any]) -> None:
        try:
            self.lines[rank].write(json.dumps(order).encode() + b"\n")
            self.lines[rank].flush()
        except OSError:
            raise self.failed(f"rank {rank} is gone") from None

    def _hear(self, rank: int) -> dict[str, Any]:
        try:
            line = self.lines[rank].readline()
        except ConnectionError:
            line = b""
        if not line:
            raise self.failed(f"rank {rank} is gone")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def stage(recipes: Sequence[Recipe], world: int) -> Iterator[list[Ensemble]]:
    """Runs all contenders for the block; enter it in the main thread, because their processes die with that thread."""
    ensembles: list[Ensemble] = []
    # Only this user can access the folder: a process that can open the socket could pretend to be a rank.
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = str(Path(folder) / "conductor")
        listener.bind(path)
        listener.listen(len(recipes) * world)
        before = signal.signal(signal.SIGTERM, _leave)
        try:
            for recipe in recipes:
                ensembles.append(_start(recipe, path))
            _gather(listener, ensembles, world)
            yield ensembles
            for ensemble in ensembles:
                ensemble.end()
        finally:
            for ensemble in ensembles:
                ensemble.stop()
            signal.signal(signal.SIGTERM, before)


def _leave(signum: int, frame: FrameType | None) -> None:
    """Ends the command as Ctrl-C does, so that it leaves no process and no file behind."""
    raise SystemExit(128 + signum)


def _start(recipe: Recipe, path: str) -> Ensemble:
    process = subprocess.Popen(
        [path if word == SOCKET else word for word in recipe.command],
        stdin=subprocess.DEVNULL,
        stdout=2,  # standard output is for rows only
        env={**recipe.environment},
    )
    return Ensemble(recipe.name, recipe.impl, recipe.link, recipe.schedules, process)


def _gather(listener: socket.socket, ensembles: Sequence[Ensemble], world: int) -> None:
    """Waits until all ranks have connected, or the process of one has ended."""
    by_name = {ensemble.name: ensemble for ensemble in ensembles}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while missing := [ensemble for ensemble in ensembles if len(ensemble.lines) < world]:
            if selector.select(_POLL_S):
                connection, _ = listener.accept()
                with connection:
                    stream = connection.makefile("rwb")
                if line := stream.readline():  # otherwise the rank ended at once, and so does its process
                    hello = json.loads(line)
                    by_name[hello["name"]].lines[hello["rank"]] = cast(BinaryIO, stream)
                continue
            for ensemble in missing:
                if ensemble.process is not None and ensemble.process.poll() is not None:
                    raise ensemble.failed("not all of its ranks started")
