"""What workers tell, folded into the state of the run. Pure."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, field
from typing import Any

from paceline.cli.launcher.outcome import Exit

__all__ = ["Progress", "WorkerRow", "sparkline"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=+*#"

_FAR = 1e300
"""Stands for infinity in a curve, so that the distance between any two values is a number."""

_MAX_COUNT = 1 << 63
"""No run counts so far."""


@dataclass(slots=True)
class WorkerRow:
    """What is known of one worker.

    Attributes:
        pid: its process.
        rank: its rank, None before the view.
        state: one word.
        samples: samples that it has trained on.
        step: steps that it has done.
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


@dataclass(slots=True)
class Progress:
    """The state of the run.

    Attributes:
        rows: the workers by their number at the launcher.
        total: steps of the whole run, 0 while unknown.
        epochs: epochs of the whole run, 0 while unknown.
        losses: mean training loss of each epoch so far.
        accuracy: share of the held-back samples that are recognised, after the last epoch.
        generations: numbers of the generations that were formed.
        world_size: members of the last one.
        result: what rank 0 said at the end.
    """

    rows: dict[int, WorkerRow] = field(default_factory=dict)
    total: int = 0
    epochs: int = 0
    losses: list[float] = field(default_factory=list)
    accuracy: float | None = None
    generations: set[int] = field(default_factory=set)
    world_size: int = 0
    result: dict[str, Any] | None = None

    @property
    def step(self) -> int:
        """Steps that all workers have done."""
        return min((row.step for row in self.rows.values()), default=0)

    @property
    def bytes_sent(self) -> int:
        """Bytes that all workers have sent."""
        return sum(row.bytes_sent for row in self.rows.values())

    @property
    def rate(self) -> float:
        """Steps per second of the line: steps are made together, so this is no sum."""
        rates = [row.rate for row in self.rows.values() if row.rate]
        return sum(rates) / len(rates) if rates else 0.0

    def told(self, index: int, pid: int, record: dict[str, Any]) -> None:
        """A worker told something; what is not of the demo, or not as the demo says it, is left alone."""
        row = self.rows.setdefault(index, WorkerRow(pid))
        match record:
            case {"kind": "view", "rank": rank, "generation": generation, "world_size": size} if _are_counts(
                rank, generation, size
            ):
                row.rank, row.state = rank, "joined"
                self.generations.add(generation)
                self.world_size = size
            case {
                "kind": "step",
                "step": step,
                "total": total,
                "samples": samples,
                "rate": float(rate),
                "bytes_sent": sent,
            } if _are_counts(step, total, samples, sent):
                row.state = "training"
                row.step, row.samples = step, samples
                row.rate, row.bytes_sent = rate, sent
                self.total = total
            case {"kind": "epoch", "of": of, "loss": float(loss), "accuracy": float(accuracy)} if _are_counts(of):
                self.epochs = of
                self.losses.append(loss)
                self.accuracy = accuracy
            case {
                "kind": "result",
                "accuracy": float(),
                "steps": steps,
                "samples_once": bool(),
                "seconds": float(seconds),
                "world_size": size,
            } if _are_counts(steps, size) and seconds > 0:
                self.result = record

    def ended(self, index: int, end: Exit) -> None:
        """A worker ended."""
        row = self.rows.setdefault(index, WorkerRow(end.pid))
        row.state = _state_at_the_end(end)


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
