"""What workers tell, folded into the state of the run. Pure."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, field
from typing import Any

from paceline.cli.launcher.outcome import Exit
from paceline.demo.ledger import Ledger
from paceline.demo.recoveries import Recoveries, Recovery

__all__ = ["Progress", "WorkerRow", "sparkline"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=+*#"

_FAR = 1e300
"""Stands for infinity in a curve, so that the distance between any two values is a number."""

_MAX_COUNT = 1 << 63
"""No run counts so far."""

_RATE_OVER_S = 0.5
"""Steps per second are those of the last time span of this length."""


@dataclass(slots=True)
class WorkerRow:
    """What is known of one worker.

    Attributes:
        pid: its process.
        rank: its rank, None before the view; that of the last one for a worker that has ended.
        state: one word.
        samples: samples that it has trained on.
        step: steps of the line that it has applied, counted from the first of all.
        rate: its steps per second, lately.
        bytes_sent: bytes that it has handed to its links.
    """

    pid: int
    rank: int | None = None
    state: str = "starting"
    samples: int = 0
    step: int = 0
    rate: float = 0.0
    bytes_sent: int = 0
    _since: float = -math.inf
    _since_step: int = 0
    _sent_before: int = 0
    """In earlier generations."""
    _sent_now: int = 0

    def applied(self, step: int, at: float) -> None:
        """It has applied a step."""
        self.step, self.state = step, "training"
        if self._since == -math.inf:
            self._since, self._since_step = at, step
        elif at - self._since >= _RATE_OVER_S:
            self.rate = (step - self._since_step) / (at - self._since)
            self._since, self._since_step = at, step

    def sent(self, count: int) -> None:
        """It has sent so many bytes in its generation, which begins anew in the next one."""
        if count < self._sent_now:
            self._sent_before += self._sent_now
        self._sent_now = count
        self.bytes_sent = self._sent_before + count


@dataclass(slots=True)
class Progress:
    """The state of the run.

    Attributes:
        rows: the workers by their pids: whoever was killed stays beside the one in its place.
        total: steps of the whole run, 0 while unknown.
        samples: training samples, 0 while unknown.
        steps_per_epoch: 0 while unknown.
        losses: mean training loss of each epoch so far.
        accuracy: share of the held-back samples that are recognised, after the last epoch.
        step: the last step that anybody has applied.
        ledger: which samples were used.
        recoveries: what killed and new workers cost.
        result: what rank 0 said at the end.
    """

    rows: dict[int, WorkerRow] = field(default_factory=dict)
    total: int = 0
    samples: int = 0
    steps_per_epoch: int = 0
    losses: list[float] = field(default_factory=list)
    accuracy: float | None = None
    step: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    recoveries: Recoveries = field(default_factory=Recoveries)
    result: dict[str, Any] | None = None
    _pids: dict[int, int] = field(default_factory=dict)
    """The first process in each place of the launcher's."""

    @property
    def epochs(self) -> int:
        """Epochs of the whole run, 0 while unknown."""
        return self.total // self.steps_per_epoch if self.steps_per_epoch else 0

    @property
    def bytes_sent(self) -> int:
        """Bytes that all workers have sent."""
        return sum(row.bytes_sent for row in self.rows.values())

    @property
    def rate(self) -> float:
        """Steps per second of the line: steps are made together, so this is no sum."""
        rates = [row.rate for row in self.rows.values() if row.rate and row.state == "training"]
        return sum(rates) / len(rates) if rates else 0.0

    @property
    def samples_once(self) -> bool:
        """Every training sample was used exactly once in every epoch; counted from the records, not assumed."""
        return self.ledger.samples_once(samples=self.samples, steps_per_epoch=self.steps_per_epoch, total=self.total)

    def told(self, index: int, pid: int, record: dict[str, Any]) -> list[str]:
        """A worker told something; what is not of the demo, or not as the demo says it, is left alone.

        Returns:
            What of it is worth a sentence.
        """
        row = self._row(index, pid)
        match record:
            case {"kind": "view", "rank": rank} if _are_counts(rank):
                row.rank = rank
                if row.state == "starting":
                    row.state = "joined"
            case {"kind": "plan", "samples": samples, "steps_per_epoch": each, "total": total} if _are_counts(
                samples, each, total
            ):
                self.samples, self.steps_per_epoch, self.total = samples, each, total
            case {"kind": "share", "step": step, "generation": generation, "samples": list(samples)} if _are_counts(
                step, generation, *samples
            ):
                self.ledger.took(step, generation, samples)
                row.samples += len(samples)
            case {
                "kind": "applied",
                "step": step,
                "generation": generation,
                "loss": float(loss),
                "samples": count,
                "bytes_sent": sent,
                "at": float(at),
            } if _are_counts(step, generation, count, sent) and math.isfinite(at):
                self.ledger.applied(step, generation, loss, count)
                self.step = max(self.step, step)
                row.applied(step, at)
                row.sent(sent)
                return _texts(self.recoveries.applied(pid, generation, at))
            case {"kind": "epoch", "epoch": epoch, "accuracy": float(accuracy)} if _are_counts(epoch):
                self._epoch_ended(epoch, accuracy)
            case {"kind": "pauses", "pause_ms": pause} if _are_counts(pause):
                return [f"nearly done before the new worker is there: each step waits {pause} ms until it is"]
            case {"kind": "result", "accuracy": float(), "steps": steps, "seconds": float(seconds), "world_size": size}:
                if _are_counts(steps, size) and seconds > 0:
                    self.result = record
            case {"at": float(at)} if math.isfinite(at):
                return _texts(self._about_members(index, pid, record, at))
        return []

    def ended(self, index: int, end: Exit) -> list[str]:
        """A worker ended. Returns what of it is worth a sentence beside that it did."""
        row = self._row(index, end.pid)
        row.state = _state_at_the_end(end)
        return _texts(self.recoveries.ended(end.pid))

    def _row(self, index: int, pid: int) -> WorkerRow:
        self._pids.setdefault(index, pid)
        return self.rows.setdefault(pid, WorkerRow(pid))

    def _epoch_ended(self, epoch: int, accuracy: float) -> None:
        self.accuracy = accuracy
        # Some workers' last records may still be on their way: a mean over fewer samples, for the eye.
        loss = self.ledger.mean_loss(range((epoch - 1) * self.steps_per_epoch + 1, epoch * self.steps_per_epoch + 1))
        if loss is not None:
            self.losses.append(loss)

    def _about_members(self, index: int, pid: int, record: dict[str, Any], at: float) -> list[Recovery]:
        match record:
            case {"kind": "formed", "generation": generation, "world": world} if _are_counts(generation, world):
                return self.recoveries.formed(pid, generation, world, at)
            case {"kind": "undone", "generation": generation} if _are_counts(generation):
                return self.recoveries.undone(pid, generation, at)
            case {"kind": "killing", "generation": generation, "step": step, "rank": rank} if _are_counts(
                generation, step, rank
            ):
                return self.recoveries.killing(pid, rank, generation, step, at)
            case {"kind": "joined", "began": float(began)} if math.isfinite(began) and self._pids[index] != pid:
                return self.recoveries.joined(pid, began, at)
        return []


def _texts(recoveries: list[Recovery]) -> list[str]:
    return [recovery.text for recovery in recoveries]


def _are_counts(*found: object) -> bool:
    return all(type(number) is int and 0 <= number < _MAX_COUNT for number in found)


def _state_at_the_end(end: Exit) -> str:
    """One word that tells a victim from those who gave up because of it."""
    if end.returncode == 0:
        return "done"
    if end.returncode == -signal.SIGTERM:
        return "stopped"
    if end.returncode < 0:
        return "killed"
    return "gave up" if end.follows else "failed"


def sparkline(values: list[float], width: int, *, unicode: bool = True) -> str:
    """A curve in one line of text, from its lowest to its highest value; the last `width` values, NaN as "?"."""
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    shown = [min(max(value, -_FAR), _FAR) for value in values[-width:]]
    numbers = [value for value in shown if not math.isnan(value)]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    span = (high - low) or 1.0
    heights = ("?" if math.isnan(value) else blocks[round((value - low) / span * (len(blocks) - 1))] for value in shown)
    return "".join(heights)
