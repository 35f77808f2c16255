"""The state of a run of the demo, computed from the reports of its workers. Pure: all times are arguments.

    Ledger        which samples the committed steps used
    Recoveries    how long a killed worker and a new one held up the others
    DemoProgress  everything that is shown

Times are of the monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=+*#"

_FAR = 1e300
"""Stands for infinity in a curve, so that the distance between any two values is a number."""

_MAX_COUNT = 1 << 63
"""Counts in reports are below this; others are ignored."""

_RATE_OVER_S = 0.5
"""Steps per second are measured over the latest span of this length."""


@dataclass(slots=True)
class Ledger:
    """Which samples the committed steps used, computed from every worker's reports of every attempt.

    A worker reports the samples it takes before it computes, and whether the step was applied afterwards. So the
    samples of a worker that dies are known, and the others report whether they count. A step may be attempted in
    several generations; it counts in the greatest one in which a worker applied it. The other attempts were undone.
    """

    _taken: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """By (step, generation): samples of all workers, each as often as it was taken."""
    _counts: dict[int, int] = field(default_factory=dict)
    """By step: the generation in which it counts."""
    _losses: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    """By (step, generation): sum of the samples' losses, and how many samples were reported."""

    @property
    def generations(self) -> int:
        """Number of generations in which some step counts."""
        return len(set(self._counts.values()))

    def took(self, step: int, generation: int, samples: Sequence[int]) -> None:
        """Notes that a worker begins an attempt with these samples."""
        self._taken.setdefault((step, generation), []).extend(samples)

    def applied(self, step: int, generation: int, loss: float, samples: int) -> None:
        """Notes that a worker has applied a step; `loss` is the mean over its samples, of which there may be none."""
        self._counts[step] = max(generation, self._counts.get(step, 0))
        total, count = self._losses.get((step, generation), (0.0, 0))
        self._losses[step, generation] = total + loss * samples if samples else total, count + samples

    def mean_loss(self, steps: range) -> float | None:
        """Returns the mean training loss over the reported samples of some steps that count; None if there are none."""
        told = [self._losses[step, self._counts[step]] for step in steps if step in self._counts]
        samples = sum(count for _, count in told)
        return sum(total for total, _ in told) / samples if samples else None

    def samples_once(self, *, samples: int, steps_per_epoch: int, total: int) -> bool:
        """True if the steps 1 to `total` used every sample exactly once in every epoch.

        Args:
            samples: how many there are.
            steps_per_epoch: how many steps go through all of them.
            total: steps of the run; whole epochs.
        """
        if total < 1 or steps_per_epoch < 1 or total % steps_per_epoch:
            return False
        for first in range(1, total + 1, steps_per_epoch):
            used: list[int] = []
            for step in range(first, first + steps_per_epoch):
                if step not in self._counts:
                    return False
                used += self._taken.get((step, self._counts[step]), ())
            if len(used) != samples or sorted(used) != list(range(samples)):
                return False
        return True


@dataclass(frozen=True, slots=True)
class Recovery:
    """A change of the members after which the job went on.

    Attributes:
        cause: "killed" or "joined".
        detect_ms: killed: until the first survivor noticed, because its step was undone. joined: from the start of the
            new process until it was ready to be admitted.
        recover_ms: killed: until every survivor had applied a step in the next generation. joined: from the end of the
            above until the new worker had applied its first step.
        text: a sentence for the user.
    """

    cause: str
    detect_ms: float
    recover_ms: float
    text: str

    def as_dict(self) -> dict[str, object]:
        """Returns the form that `--json` prints."""
        return {
            "cause": self.cause,
            "detect_ms": round(self.detect_ms, 1),
            "recover_ms": round(self.recover_ms, 1),
        }


@dataclass(frozen=True, slots=True)
class _Kill:
    pid: int
    rank: int
    generation: int
    step: int
    at: float


@dataclass(slots=True)
class Recoveries:
    """How long a killed worker and a new one held up the others. Workers are known by their pids.

    Each worker reports on a pipe of its own, so an earlier event may be read later: facts are collected first, and then
    looked at together.

    Attributes:
        found: the recoveries so far, in the order in which they were complete.
    """

    found: list[Recovery] = field(default_factory=list)
    _worlds: dict[int, int] = field(default_factory=dict)
    _members: dict[int, set[int]] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _knew: dict[tuple[int, int], float] = field(default_factory=dict)
    """By (pid, generation): when the worker learned that the generation had failed."""
    _applied: dict[tuple[int, int], float] = field(default_factory=dict)
    """By (pid, generation): when the worker had applied its first step there."""
    _kill: _Kill | None = None
    _new: dict[int, tuple[float, float]] = field(default_factory=dict)
    """New workers that have yet to apply a step: when their process began, and when `join` had returned."""

    def formed(self, pid: int, generation: int, world: int, at: float) -> list[Recovery]:
        """Notes that a worker goes on in a generation. Returns the recoveries that this completes, like all methods."""
        self._worlds[generation] = world
        self._members.setdefault(generation, set()).add(pid)
        earlier = [before for before in self._members if before < generation and pid in self._members[before]]
        if earlier:  # between two steps a failure undoes no step: the worker learns of it here
            self._knew.setdefault((pid, max(earlier)), at)
        return self._look()

    def killing(self, pid: int, rank: int, generation: int, step: int, at: float) -> list[Recovery]:
        """Notes that a worker is about to kill itself."""
        self._kill = self._kill or _Kill(pid, rank, generation, step, at)
        return self._look()

    def undone(self, pid: int, generation: int, at: float) -> list[Recovery]:
        """Notes that a worker's step was undone."""
        self._knew.setdefault((pid, generation), at)
        return self._look()

    def applied(self, pid: int, generation: int, at: float) -> list[Recovery]:
        """Notes that a worker has applied a step."""
        if (pid, generation) in self._applied:
            return []
        self._applied[pid, generation] = at
        return self._look()

    def joined(self, pid: int, began: float, at: float) -> list[Recovery]:
        """Notes that a worker which replaces another one has joined."""
        self._new[pid] = began, at
        return self._look()

    def ended(self, pid: int) -> list[Recovery]:
        """Notes that a worker's process has ended; recoveries no longer depend on it."""
        self._ended.add(pid)
        return self._look()

    def _look(self) -> list[Recovery]:
        complete = [recovery for pid in list(self._new) if (recovery := self._replaced(pid)) is not None]
        if (survived := self._survived()) is not None:
            complete.insert(0, survived)
        self.found += complete
        return complete

    def _survived(self) -> Recovery | None:
        kill = self._kill
        if kill is None or any(recovery.cause == "killed" for recovery in self.found):
            return None
        members = self._members.get(kill.generation, set())
        if len(members) != self._worlds.get(kill.generation):  # some have not reported yet
            return None
        survivors = members - {kill.pid} - self._ended
        back = [self._first_step_after(pid, kill.generation) for pid in survivors]
        knew = [at for pid in survivors if (at := self._knew.get((pid, kill.generation))) is not None]
        went_on = [at for at in back if at is not None]
        if not knew or len(went_on) < len(back):
            return None
        after = _ms(kill.at, max(went_on))
        who = "1 worker" if len(survivors) == 1 else f"{len(survivors)} workers"
        text = f"rank {kill.rank} was killed in step {kill.step}; {who} went on after {after:.0f} ms"
        return Recovery("killed", _ms(kill.at, min(knew)), after, text)

    def _replaced(self, pid: int) -> Recovery | None:
        steps = [(at, generation) for (who, generation), at in self._applied.items() if who == pid]
        if not steps:
            return None
        began, joined = self._new.pop(pid)
        first, generation = min(steps)
        after = _ms(joined, first)
        world = self._worlds.get(generation, 0)
        text = f"a new worker joined; {world} train on after {after:.0f} ms"
        return Recovery("joined", _ms(began, joined), after, text)

    def _first_step_after(self, pid: int, generation: int) -> float | None:
        return min(
            (at for (who, later), at in self._applied.items() if who == pid and later > generation), default=None
        )


def _ms(start: float, end: float) -> float:
    return 1e3 * (end - start)


@dataclass(slots=True)
class WorkerRow:
    """The row of one worker in the view.

    Attributes:
        pid: its process.
        rank: its rank, None before the view; for a worker that has ended, its last rank.
        state: one word.
        samples: samples the worker has trained on.
        step: steps of the line that it has applied, counted from the job's first step.
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
    """Bytes sent in earlier generations."""
    _sent_now: int = 0

    def applied(self, step: int, at: float) -> None:
        """Notes that the worker has applied a step."""
        self.step, self.state = step, "training"
        if self._since == -math.inf:
            self._since, self._since_step = at, step
        elif at - self._since >= _RATE_OVER_S:
            self.rate = (step - self._since_step) / (at - self._since)
            self._since, self._since_step = at, step

    def sent(self, count: int) -> None:
        """Notes how many bytes the worker has sent in its generation; the count starts again with the next one."""
        if count < self._sent_now:
            self._sent_before += self._sent_now
        self._sent_now = count
        self.bytes_sent = self._sent_before + count


class Stage(enum.Enum):
    """How far the run is."""

    COORDINATOR = enum.auto()
    """The coordinator starts."""
    IMPORTS = enum.auto()
    """The workers start, and import what they need."""
    JOINS = enum.auto()
    """The workers meet at the coordinator."""
    TRAINS = enum.auto()


@dataclass(slots=True)
class DemoProgress:
    """The state of the run.

    Attributes:
        expected: how many workers start, 0 until the coordinator is there.
        rows: the workers by their pids; a killed worker stays beside its replacement.
        total: steps of the whole run, 0 while unknown.
        samples: training samples, 0 while unknown.
        steps_per_epoch: 0 while unknown.
        losses: mean training loss of each epoch so far.
        accuracy: share of the held-back samples that the model recognises, after the last epoch.
        step: the last step that a worker has applied.
        ledger: which samples were used.
        recoveries: what killed and new workers cost.
        result: what rank 0 reported at the end.
    """

    expected: int = 0
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
    """The pid of the first process in each of the launcher's places."""

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
        """Steps per second of the job. Workers make each step together, so this is a mean and not a sum."""
        rates = [row.rate for row in self.rows.values() if row.rate and row.state == "training"]
        return sum(rates) / len(rates) if rates else 0.0

    @property
    def samples_once(self) -> bool:
        """True if every training sample was used exactly once in every epoch, computed from the reports."""
        return self.ledger.samples_once(samples=self.samples, steps_per_epoch=self.steps_per_epoch, total=self.total)

    @property
    def stage(self) -> Stage:
        """How far the run is; it trains, and does not go back, once a worker has applied a step."""
        if self.step:
            return Stage.TRAINS
        if not self.expected:
            return Stage.COORDINATOR
        return Stage.JOINS if len(self.rows) - self._count("starting") >= self.expected else Stage.IMPORTS

    @property
    def waits_for(self) -> str:
        """What is waited for before the first step, in a sentence; empty afterwards."""
        of = f"of {self.expected} worker{'s'[: self.expected != 1]}"
        match self.stage:
            case Stage.COORDINATOR:
                return "starting the coordinator"
            case Stage.IMPORTS:
                ready = len(self.rows) - self._count("starting")
                return f"the workers load NumPy and the digits: {ready} {of} have done so"
            case Stage.JOINS:
                return f"waiting for all to join: {self._count('joined')} {of} are there"
            case Stage.TRAINS:
                return ""

    def _count(self, state: str) -> int:
        return sum(row.state == state for row in self.rows.values())

    def told(self, index: int, pid: int, record: dict[str, Any]) -> list[str]:
        """Takes a worker's report; ignores a report that the demo does not make.

        Returns:
            Sentences to show.
        """
        row = self._row(index, pid)
        match record:
            case {"kind": "ready"} if row.state == "starting":
                row.state = "ready"
            case {"kind": "view", "rank": rank} if _are_counts(rank):
                row.rank = rank
                if row.state in ("starting", "ready"):
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
                return [
                    f"training is nearly done, but the new worker is not ready: each step waits {pause} ms until it is"
                ]
            case {"kind": "result", "accuracy": float(), "steps": steps, "seconds": float(seconds), "world_size": size}:
                if _are_counts(steps, size) and seconds > 0:
                    self.result = record
            case {"at": float(at)} if math.isfinite(at):
                return _texts(self._about_members(index, pid, record, at))
        return []

    def ended(self, index: int, pid: int, returncode: int, *, follows: bool = False) -> list[str]:
        """Notes that a worker's process has ended.

        Args:
            index: the launcher's place of the worker.
            pid: its process.
            returncode: its exit code, or the negated number of the signal that killed it.
            follows: True if the worker failed because another member did, and said so.

        Returns:
            Sentences to show, besides one that it ended.
        """
        self._row(index, pid).state = _state_at_the_end(returncode, follows)
        return _texts(self.recoveries.ended(pid))

    def _row(self, index: int, pid: int) -> WorkerRow:
        self._pids.setdefault(index, pid)
        return self.rows.setdefault(pid, WorkerRow(pid))

    def _epoch_ended(self, epoch: int, accuracy: float) -> None:
        self.accuracy = accuracy
        # Some workers' last reports may still be on their way; then the curve shows a mean over fewer samples.
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


def _state_at_the_end(returncode: int, follows: bool) -> str:
    """Returns one word, which tells a killed worker from workers that gave up because of it."""
    if returncode == 0:
        return "done"
    if returncode == -signal.SIGTERM:
        return "stopped"
    if returncode < 0:
        return "killed"
    return "gave up" if follows else "failed"


def sparkline(values: list[float], width: int, *, unicode: bool = True) -> str:
    """Draws a curve in one line of text, from its lowest to its highest value: the last `width` values, NaN as "?"."""
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    shown = [min(max(value, -_FAR), _FAR) for value in values[-width:]]
    numbers = [value for value in shown if not math.isnan(value)]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    span = (high - low) or 1.0
    heights = ("?" if math.isnan(value) else blocks[round((value - low) / span * (len(blocks) - 1))] for value in shown)
    return "".join(heights)
