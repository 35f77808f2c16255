"""The conductor's end: speaks with all ranks of one contender (`rank.py`)."""

from __future__ import annotations

import contextlib
import json
import subprocess
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from paceline.cli.bench.measure import Turn
from paceline.cli.bench.plan import Job
from paceline.cli.launcher.outcome import shell_code

__all__ = ["ContenderFailed", "Ensemble"]

_END_S = 20.0
"""For processes to end when they are told to; then they are killed."""


class ContenderFailed(Exception):
    """Processes of a contender ended before they were told to.

    Attributes:
        exit_code: what the command should end with.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class Ensemble:
    """The ranks of one contender (`measure.Contender`).

    Attributes:
        name: of the contender.
        impl: whose implementation.
        link: which kind is asked for.
        schedules: True if it can be told which schedule to take.
        process: that is, or started, all its ranks; None if somebody else answers for them.
        lines: to and from each rank, by rank.
    """

    name: str
    impl: str
    link: str
    schedules: bool
    process: subprocess.Popen[bytes] | None = None
    lines: dict[int, BinaryIO] = field(default_factory=dict)

    def prepare(self, job: Job) -> str | None:
        """Has all ranks make their arrays and one call; a reason if the implementation has no such collective.

        Raises:
            ContenderFailed: a rank is gone.
        """
        answers = self._ask({"do": "prepare", "collective": job.collective, "bytes": job.bytes, "place": job.place})
        return next((answer["lacks"] for answer in answers if "lacks" in answer), None)

    def run(self, calls: int, schedule: str | None) -> Turn:
        """Times calls at all ranks; each counts as long as its slowest rank.

        Raises:
            ContenderFailed: a rank is gone.
        """
        answers = self._ask({"do": "run", "calls": calls, "schedule": schedule})
        slowest = np.max([answer["ns"] for answer in answers], axis=0)
        links = sorted({link for answer in answers for link in answer["links"]})
        took_s = max(answer["took_ns"] for answer in answers) / 1e9
        return Turn((slowest / 1e9).tolist(), took_s, answers[0]["schedule"], tuple(links))

    def end(self) -> None:
        """Tells the ranks that it is over, and waits for them.

        Raises:
            ContenderFailed: a process does not end well.
        """
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
        """Leaves no process behind, whatever happened. Idempotent."""
        for stream in self.lines.values():
            with contextlib.suppress(OSError):  # what was not yet sent to a rank that is gone
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
        """The error for ranks that are gone; gives their launcher the time to say why."""
        for stream in self.lines.values():  # so that the other ranks end, too
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
