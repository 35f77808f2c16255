"""Times one job in every contender, turn and turn about. Pure: a contender is whatever answers.

What else the machine does falls on all of them alike: rounds go A B C A B C ..., and a row's figures are of the calls
of all rounds together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from paceline.cli.bench.plan import Job

__all__ = ["BUDGET_S", "Contender", "Measured", "Turn", "measure"]

BUDGET_S = 2.0
"""Aim at this much measuring for a row."""

_LEAST, _MOST = 10, 2000
"""Calls for a row: enough for a median of large arrays; for small ones, enough for a 99th percentile."""

_WARM_UP = 5

_ESTIMATE = 3

_TURNS = 10
"""How often contenders and schedules take turns, if there are several."""


class Turn(NamedTuple):
    """Some calls in a row.

    Attributes:
        seconds: of each call, as long as its slowest rank took.
        took_s: of all of them with what lies between, at the slowest rank.
        schedule: by which they went; None if nobody says.
        links: how bytes moved: kinds of links.
    """

    seconds: list[float]
    took_s: float
    schedule: str | None
    links: tuple[str, ...]


class Contender(Protocol):
    """All ranks of one implementation over one kind of link.

    Attributes:
        impl: "paceline", "gloo" or "openmpi".
        link: what is asked for.
        schedules: True if it can be told which to take.
    """

    impl: str
    link: str
    schedules: bool

    def prepare(self, job: Job) -> str | None:
        """Makes the arrays of a job in place of the one before, and one call; a reason if it cannot."""

    def run(self, calls: int, schedule: str | None) -> Turn:
        """Times so many calls of the job, one after the other."""


@dataclass(slots=True)
class Measured:
    """What a contender took for a job by one schedule.

    Attributes:
        contender: which.
        asked: the schedule that it was told to take, if any.
        turns: all rounds; none if it cannot.
        lacks: why it cannot, else None.
    """

    contender: Contender
    asked: str | None
    turns: list[Turn] = field(default_factory=list)
    lacks: str | None = None

    @property
    def seconds(self) -> list[float]:
        """Of each call, of all rounds."""
        return [second for turn in self.turns for second in turn.seconds]


def measure(job: Job, contenders: Sequence[Contender], budget_s: float = BUDGET_S) -> list[Measured]:
    """Times a job in all contenders, each by all the job's schedules if it has a choice.

    Args:
        job: what to measure.
        contenders: who takes turns.
        budget_s: seconds to measure for each result, about.
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


def _lanes(job: Job, contenders: Sequence[Contender]) -> Iterator[Measured]:
    for contender in contenders:
        reason = contender.prepare(job)
        for schedule in (job.schedules or (None,)) if contender.schedules and reason is None else (None,):
            yield Measured(contender, schedule, lacks=reason)


def _count(result: Measured, budget_s: float) -> int:
    """How many calls; what they take is known after some to warm up, where they are quick."""
    estimate = result.contender.run(1, result.asked).took_s
    if estimate * (_WARM_UP + _ESTIMATE) < budget_s:
        result.contender.run(_WARM_UP, result.asked)
        estimate = result.contender.run(_ESTIMATE, result.asked).took_s / _ESTIMATE
    return int(np.clip(math.ceil(budget_s / estimate), _LEAST, _MOST))
