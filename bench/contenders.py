"""The benchmark's interface to a rank of any implementation, and Paceline's own ranks.

    python contenders.py SOCKET NAME MEMORY [THREADS]

This is one rank's process; or, with a number of threads, one process with a rank in each thread and local links.

Every rank is connected to the conductor's socket and sleeps in a read from it until its turn comes. It does not wait in
a collective, because Open MPI's ranks spin while they wait for each other, and would take processor time from the
others. Each message is one line with a JSON object. The orders are {"do": "prepare", "collective", "bytes",
"place"}, answered by {} or by {"lacks": why}; {"do": "run", "calls", "schedule"}, answered by {"ns", "took_ns",
"schedule", "links"}; and {"do": "end"}.
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
from jobs import ROOT, SEPARATE, check_result, given, result_parts
from paceline._base.arrays import Array
from paceline._collectives.choose import choose, nodes_of, only
from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from paceline._links.base import Purpose
from paceline.cli.sizes import ELEMENT_BYTES
from paceline.testing import run_ranks

_PURPOSES = {"send_recv": Purpose.POINT_TO_POINT}
"""The purpose of the links that a measurement uses, if it is not collectives."""


class Lacking(Exception):
    """The implementation has no such collective; the text says so."""


class Call(NamedTuple):
    """A call of a collective with its arrays; `result` is None if this rank gets none."""

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
    """Makes a rank's flat arrays (input, result), alike for every implementation; None for one that it does not need.

    `size` is the bytes of the whole array, see `measured_size`. With `in_place` a sum replaces its argument; the result
    of a broadcast always does. `empty` makes an array with the given number of elements.
    """
    n, root = size // ELEMENT_BYTES, rank == ROOT
    part = n // world

    def full(n: int | None, value: float) -> Any:
        if n is None:
            return None
        array = empty(n)
        array[:] = value  # touches its pages now; otherwise the timed calls would do so first
        return array

    gives = {"all_gather": part, "gather": part, "scatter": n if root else None, "barrier": None}
    gets = {"reduce_scatter": part, "scatter": part, "barrier": None} | dict.fromkeys(
        ("reduce", "gather"), n if root else None
    )
    x = full(gives.get(collective, n), given(rank, world, in_place=in_place))
    return x, x if in_place or collective == "broadcast" else full(gets.get(collective, n), 0.0)


class RankSide(abc.ABC):
    """One rank of an implementation."""

    rank: int
    world: int

    @abc.abstractmethod
    def make_call(self, collective: str, size: int, place: str = "usual") -> Call:
        """Prepares a call of a collective of `Group`, or of "send_recv"; raises `Lacking` if there is none."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Waits for all ranks."""

    @abc.abstractmethod
    def links(self, collective: str) -> Sequence[str]:
        """Returns the kinds of links over which a collective's bytes move to and from this rank."""

    def lacks(self, error: RuntimeError) -> bool:
        """True if this error of the first call means that the implementation lacks the collective."""
        return False

    def scheduled(self, collective: str, schedule: str | None) -> AbstractContextManager[None]:
        """Makes a collective use one schedule within the block, if the implementation lets us choose."""
        return nullcontext()

    def chosen(self, collective: str, size: int) -> str | None:
        """Returns the schedule that a collective uses; None if there is no choice or it is not known."""
        return None


def serve(path: str, name: str, ranks: RankSide) -> None:
    """Executes the conductor's orders to the end; raises ArithmeticError if a job's first result is wrong."""
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
    """Returns the nanoseconds of each call at this rank.

    All ranks begin together, after a barrier. Then calls follow each other without a pause, as in nccl-tests, if the
    collective itself makes ranks wait for each other. In others, such as broadcast, the root would run ahead; there a
    barrier, which is not timed, comes before each call (`SEPARATE`).
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
    """A collective at a size, with its arrays made and one call done and checked."""

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
        """Times calls; returns the values of `measure.Turn`, in nanoseconds."""
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
    """Prepares a call of a Paceline collective. Ranks contribute the values of `jobs.given`.

    "send_recv" sends to the next rank and receives from the previous one. A sum is usually in place.
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
    """A rank of a group (`rank.RankSide`)."""

    def __init__(self, group: Group, memory: str = "any") -> None:
        self.rank, self.world = group.rank, group.size
        self._group, self._memory = group, memory

    def make_call(self, collective: str, size: int, place: str = "usual") -> Call:
        """Prepares a call; see the function `make_call`."""
        return make_call(self._group, collective, size, self._memory, place)

    def barrier(self) -> None:
        """Calls the group's barrier."""
        self._group.barrier()

    def links(self, collective: str) -> Sequence[str]:
        """Returns the kinds of links that are open for collectives, or for messages if `collective` is send_recv."""
        mesh, purpose = self._group._core.mesh, _PURPOSES.get(collective, Purpose.COLLECTIVE)
        return [mesh.link(peer, purpose).kind for peer in mesh.linked(purpose)]

    @contextmanager
    def scheduled(self, collective: str, schedule: str | None) -> Iterator[None]:
        """Makes the group use one schedule; see `forced`."""
        with forced(self._group, collective, schedule):
            yield

    def chosen(self, collective: str, size: int) -> str | None:
        """Returns the schedule that the group's table chooses, or the forced one; None for send_recv."""
        if collective not in SCHEDULES:
            return None
        nodes = nodes_of(self._group._core.mesh.peers)
        return self._group._core.choose(collective, size, self.world, nodes=nodes).schedule


@contextmanager
def forced(group: Group, collective: str, schedule: str | None) -> Iterator[None]:
    """Makes a group use one schedule for a collective at all sizes within the block; None for the chosen one.

    All ranks must enter the block between the same two calls.
    """
    ordinary = group._core.choose
    if schedule is not None:
        group._core.choose = partial(choose, rules=only(collective, schedule))
    try:
        yield
    finally:
        group._core.choose = ordinary


def main(path: str, name: str, memory: str, *, threads: int) -> None:
    """Serves the conductor with so many ranks in this process; with 0, with one rank of the launcher's job."""
    if threads:
        # It needs no timeout: the conductor ends it, or this process dies with the conductor.
        run_ranks(threads, lambda group: serve(path, name, PacelineRanks(group, memory)), timeout=threading.TIMEOUT_MAX)
    else:
        with paceline.join() as session:
            serve(path, name, PacelineRanks(session.group, memory))


if __name__ == "__main__":
    main(*sys.argv[1:4], threads=int(sys.argv[4]) if sys.argv[4:] else 0)
