"""A rank's side of the bench, the same for every implementation: it sleeps until the conductor has a turn for it.

Every rank has a socket of its own and waits in a read of it, not in a collective: Open MPI's ranks spin while they wait
for each other, and would take the processor from whoever has the turn.

One JSON object on a line, each way. Orders: {"do": "prepare", "collective", "bytes", "place"}, answered by {} or by
{"lacks": why}; {"do": "run", "calls", "schedule"}, answered by {"ns", "took_ns", "schedule", "links"}; {"do": "end"}.
"""

from __future__ import annotations

import abc
import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from paceline.cli.bench.calls import SEPARATE, Call
from paceline.cli.bench.values import check_result, result_parts

__all__ = ["Lacking", "Ranks", "serve", "time_calls"]


class Lacking(Exception):
    """The implementation has no such collective; the text says so."""


class Ranks(abc.ABC):
    """One rank of an implementation.

    Attributes:
        rank: which one.
        world: of how many.
    """

    rank: int
    world: int

    @abc.abstractmethod
    def make_call(self, collective: str, size: int, place: str = "usual") -> Call:
        """A collective at a size in bytes, see `measured_size`; place: of an all_reduce's sum, one of `plan.PLACES`.

        Raises:
            Lacking: the implementation does not have it.
        """

    @abc.abstractmethod
    def barrier(self) -> None:
        """Waits for all ranks."""

    @abc.abstractmethod
    def links(self, collective: str) -> Sequence[str]:
        """How a collective's bytes move to and from this rank's peers: kinds of links."""

    def lacks(self, error: RuntimeError) -> bool:
        """True if the first call failed so because the implementation does not have it."""
        return False

    def scheduled(self, collective: str, schedule: str | None) -> AbstractContextManager[None]:
        """Within it a collective goes by one schedule, where there is a choice."""
        return nullcontext()

    def chosen(self, collective: str, size: int) -> str | None:
        """The schedule that it goes by; None where there is nothing to choose, or nobody says."""
        return None


def serve(path: str, name: str, ranks: Ranks) -> None:
    """Does what the conductor says until it says that it is over, or is gone.

    Args:
        path: of the conductor's socket.
        name: which contender this is a rank of.
        ranks: the rank.

    Raises:
        ArithmeticError: the first call of a job had a wrong result.
        OSError: the conductor cannot be reached.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rwb") as lines:
            _say(lines, {"name": name, "rank": ranks.rank})
            job: _Job | None = None
            while (line := lines.readline()) and (order := json.loads(line))["do"] != "end":
                if order["do"] == "prepare":
                    job = None  # gives its memory back first
                    try:
                        job = _Job(ranks, order["collective"], order["bytes"], order["place"])
                    except Lacking as reason:
                        _say(lines, {"lacks": str(reason)})
                    else:
                        _say(lines, {})
                else:
                    assert job is not None, "the conductor prepares before it runs"
                    _say(lines, job.turn(order["calls"], order["schedule"]))


def time_calls(barrier: Callable[[], object], call: Callable[[], object], count: int, *, separate: bool) -> list[int]:
    """Nanoseconds of each call at this rank.

    All begin together, after a barrier. Then calls follow each other without a pause, as in nccl-tests, where the
    collective makes ranks wait for each other by itself. The root of a broadcast, say, would run ahead: there a barrier
    comes before each call, and is not counted (`SEPARATE`).

    Args:
        barrier: waits for all ranks.
        call: what is timed.
        count: how often.
        separate: a barrier comes before each call.
    """
    clock, times = time.perf_counter_ns, [0] * count
    barrier()
    for index in range(count):
        if separate:
            barrier()
        start = clock()
        call()
        times[index] = clock() - start
    return times


class _Job:
    """A collective at a size, its arrays made and one call done."""

    def __init__(self, ranks: Ranks, collective: str, size: int, place: str) -> None:
        self._ranks, self._collective, self._size = ranks, collective, size
        self._call = ranks.make_call(collective, size, place)
        try:
            self._call.run()
        except RuntimeError as error:
            if ranks.lacks(error):
                raise Lacking(str(error).partition("\n")[0]) from None
            raise
        try:
            parts = result_parts(collective, ranks.rank, ranks.world, in_place=self._call.in_place)
            check_result(self._call.result, parts)
        except ArithmeticError as error:
            raise ArithmeticError(
                f"{collective} of {size} bytes, rank {ranks.rank} of {ranks.world}: {error}"
            ) from None

    def turn(self, count: int, schedule: str | None) -> dict[str, Any]:
        """What `measure.Turn` is made of, in nanoseconds."""
        ranks = self._ranks
        with ranks.scheduled(self._collective, schedule):
            start = time.perf_counter_ns()
            times = time_calls(ranks.barrier, self._call.run, count, separate=self._collective in SEPARATE)
            took = time.perf_counter_ns() - start
            chosen = ranks.chosen(self._collective, self._size)
        return {"ns": times, "took_ns": took, "schedule": chosen, "links": sorted(set(ranks.links(self._collective)))}


def _say(lines: Any, answer: dict[str, Any]) -> None:
    lines.write(json.dumps(answer).encode() + b"\n")
    lines.flush()
