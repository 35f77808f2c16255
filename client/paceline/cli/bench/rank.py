"""The side of a rank, the same for every implementation, and Paceline's own ranks.

    python -m paceline.cli.bench.rank SOCKET NAME MEMORY [THREADS]

A process for each rank; or, with a number of threads, one process with a rank in each thread and local links.

Every rank has a socket to the conductor (`measure`) and sleeps in a read of it until it has its turn. It does not wait
in a collective: Open MPI's ranks spin while they wait for each other, and would take the processor from the others.
There is one JSON object on a line, each way. Orders: {"do": "prepare", "collective", "bytes", "place"}, answered by {}
or by {"lacks": why}; {"do": "run", "calls", "schedule"}, answered by {"ns", "took_ns", "schedule", "links"};
{"do": "end"}.
"""

from __future__ import annotations

import abc
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import paceline
from paceline._arrays import Array
from paceline._collectives.choose import choose, nodes_of, only
from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from paceline._links.base import Purpose
from paceline.cli.bench.jobs import ELEMENT_BYTES, ROOT, SEPARATE, check_result, given, result_parts
from paceline.testing import run_ranks

__all__ = [
    "Call",
    "Lacking",
    "PacelineRanks",
    "RankSide",
    "arrays_of",
    "forced",
    "main",
    "make_call",
    "serve",
    "time_calls",
]

_PURPOSES = {"send_recv": Purpose.POINT_TO_POINT}
"""What links are for, where it is not for collectives."""


class Lacking(Exception):
    """The implementation has no such collective; the text says so."""


class Call(NamedTuple):
    """One collective on arrays of its own, in any implementation.

    Attributes:
        run: makes one call.
        result: where this rank's result lies afterwards; None if it gets none.
        in_place: the result of a sum replaces the argument.
    """

    run: Callable[[], object]
    result: Array | None
    in_place: bool = False


def arrays_of(
    collective: str,
    size: int,
    rank: int,
    world: int,
    *,
    in_place: bool,
    empty: Callable[[int], Array] = lambda n: np.empty(n, np.float32),
) -> tuple[Any, Any]:
    """The flat arrays (input, result) of a rank; None for one that it has not. The same for every implementation.

    Args:
        collective: as methods of `Group` spell it; or "send_recv".
        size: bytes of the whole array, see `measured_size`.
        rank: the rank.
        world: W.
        in_place: the result of a sum replaces its argument. That of a broadcast always does.
        empty: makes an array of so many elements.
    """
    n, root = size // ELEMENT_BYTES, rank == ROOT
    part = n // world

    def full(n: int | None, value: float) -> Any:
        if n is None:
            return None
        array = empty(n)
        array[:] = value  # at once: otherwise the calls that are timed would touch its pages for the first time
        return array

    gives = {"all_gather": part, "gather": part, "scatter": n if root else None, "barrier": None}
    gets = {"reduce_scatter": part, "scatter": part, "barrier": None} | dict.fromkeys(
        ("reduce", "gather"), n if root else None
    )
    x = full(gives.get(collective, n), given(rank, world, in_place=in_place))
    return x, x if in_place or collective == "broadcast" else full(gets.get(collective, n), 0.0)


class RankSide(abc.ABC):
    """One rank of an implementation.

    Attributes:
        rank: which one.
        world: of how many.
    """

    rank: int
    world: int

    @abc.abstractmethod
    def make_call(self, collective: str, size: int, place: str = "usual") -> Call:
        """A collective at a size in bytes, see `measured_size`; place: of an all_reduce's sum, one of `jobs.PLACES`.

        Raises:
            Lacking: the implementation does not have it.
        """

    @abc.abstractmethod
    def barrier(self) -> None:
        """Waits for all ranks."""

    @abc.abstractmethod
    def links(self, collective: str) -> Sequence[str]:
        """The kinds of links over which a collective's bytes move to and from this rank."""

    def lacks(self, error: RuntimeError) -> bool:
        """True if this error of the first call says that the implementation does not have the collective."""
        return False

    def scheduled(self, collective: str, schedule: str | None) -> AbstractContextManager[None]:
        """Has a collective take one schedule within the block, if the implementation lets us choose."""
        return nullcontext()

    def chosen(self, collective: str, size: int) -> str | None:
        """The schedule that a collective takes; None if there is no choice, or the implementation does not say."""
        return None


def serve(path: str, name: str, ranks: RankSide) -> None:
    """Does what the conductor orders until it orders the end, or is gone.

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
                    job = None  # frees its memory first
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

    def __init__(self, ranks: RankSide, collective: str, size: int, place: str) -> None:
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


def make_call(group: Group, collective: str, size: int, memory: str = "any", place: str = "usual") -> Call:
    """A collective of Paceline. Ranks give the values of `jobs.given`.

    Args:
        group: the group.
        collective: as its methods spell it; or "send_recv": to the next rank, and from the one before.
        size: bytes of the whole array, see `measured_size`.
        memory: one of `jobs.MEMORIES`.
        place: where an all_reduce's sum goes, one of `jobs.PLACES`; usually in place.
    """
    in_place = collective == "all_reduce" and place != "out"
    empty = (lambda n: group.empty(n)) if memory == "group" else (lambda n: np.empty(n, np.float32))
    x, out = arrays_of(collective, size, group.rank, group.size, in_place=in_place, empty=empty)
    if collective == "scatter" and x is not None:
        x = x.reshape(group.size, -1)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(x, out=out),
        "reduce": lambda: group.reduce(x, root=ROOT, out=out),
        "reduce_scatter": lambda: group.reduce_scatter(x, out=out),
        "broadcast": lambda: group.broadcast(x, root=ROOT, out=out),
        "scatter": lambda: group.scatter(x, root=ROOT, out=out),
        "all_gather": lambda: group.all_gather(x, out=out),
        "gather": lambda: group.gather(x, root=ROOT, out=out),
        "all_to_all": lambda: group.all_to_all(x, out=out),
        "send_recv": lambda: _shift(group, x, out),
        "barrier": group.barrier,
    }
    return Call(calls[collective], out, in_place)


def _shift(group: Group, x: Array, out: Array) -> None:
    group.send(x, (group.rank + 1) % group.size)
    group.recv((group.rank - 1) % group.size, out=out)


class PacelineRanks(RankSide):
    """A rank of a group (`rank.RankSide`).

    Args:
        group: the group.
        memory: one of `jobs.MEMORIES`.
    """

    def __init__(self, group: Group, memory: str = "any") -> None:
        self.rank, self.world = group.rank, group.size
        self._group, self._memory = group, memory

    def make_call(self, collective: str, size: int, place: str = "usual") -> Call:
        """See `calls.make_call`."""
        return make_call(self._group, collective, size, self._memory, place)

    def barrier(self) -> None:
        """The group's own."""
        self._group.barrier()

    def links(self, collective: str) -> Sequence[str]:
        """The kinds of links that have been opened so far for collectives, or for messages."""
        mesh, purpose = self._group.mesh, _PURPOSES.get(collective, Purpose.COLLECTIVE)
        return [mesh.link(peer, purpose).kind for peer in mesh.linked(purpose)]

    @contextmanager
    def scheduled(self, collective: str, schedule: str | None) -> Iterator[None]:
        """See `forced`."""
        with forced(self._group, collective, schedule):
            yield

    def chosen(self, collective: str, size: int) -> str | None:
        """The schedule that the group's table chooses, or the one that is forced."""
        if collective not in SCHEDULES:
            return None
        nodes = nodes_of(self._group.mesh.peers)
        return self._group.choose(collective, size, self.world, nodes=nodes).schedule


@contextmanager
def forced(group: Group, collective: str, schedule: str | None) -> Iterator[None]:
    """Has a group take one schedule for a collective within the block, whatever the size; None: the chosen one.

    All ranks enter the block between the same two calls.
    """
    ordinary = group.choose
    if schedule is not None:
        group.choose = partial(choose, rules=only(collective, schedule))
    try:
        yield
    finally:
        group.choose = ordinary


def main(path: str, name: str, memory: str, *, threads: int) -> None:
    """Serves the conductor until it ends the bench.

    Args:
        path: of the conductor's socket.
        name: of this contender.
        memory: one of `jobs.MEMORIES`.
        threads: number of ranks in this process; 0: one rank of the launcher's job.
    """
    if threads:
        # Without a timeout: the conductor ends it, or this process ends with the conductor.
        run_ranks(threads, lambda group: serve(path, name, PacelineRanks(group, memory)), timeout=threading.TIMEOUT_MAX)
    else:
        with paceline.join() as session:
            serve(path, name, PacelineRanks(session.group, memory))


if __name__ == "__main__":
    main(*sys.argv[1:4], threads=int(sys.argv[4]) if sys.argv[4:] else 0)
