"""What workers tell, folded into the state of the run. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from paceline.cli.launcher.outcome import Exit

__all__ = ["Progress", "WorkerRow", "sparkline"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=+*#"


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
        """A worker told something; what is not of the demo is left alone."""
        row = self.rows.setdefault(index, WorkerRow(pid))
        match record["kind"]:
            case "view":
                row.rank, row.state = record["rank"], "joined"
                self.generations.add(record["generation"])
                self.world_size = record["world_size"]
            case "step":
                row.state = "training"
                row.step, row.samples = record["step"], record["samples"]
                row.rate, row.bytes_sent = record["rate"], record["bytes_sent"]
                self.total = record["total"]
            case "epoch":
                self.epochs = record["of"]
                self.losses.append(record["loss"])
                self.accuracy = record["accuracy"]
            case "result":
                self.result = record

    def ended(self, index: int, end: Exit) -> None:
        """A worker ended."""
        row = self.rows.setdefault(index, WorkerRow(end.pid))
        row.state = _state_at_the_end(end)


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
    """A curve in one line of text, from its lowest to its highest value; the last `width` values."""
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in shown)
