"""Paceline's ranks in `paceline bench`: python -m paceline.cli.bench.worker SOCKET NAME MEMORY [THREADS].

A process for each rank; or, with a number of threads, one process with a rank in each thread and local links.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import paceline
from paceline.cli.bench.calls import Call, make_call
from paceline.cli.bench.rank import Ranks, serve
from paceline.collectives.choose import choose, nodes_of, only
from paceline.collectives.schedules import SCHEDULES
from paceline.group import Group
from paceline.links.base import Purpose
from paceline.testing import run_ranks

__all__ = ["PacelineRanks", "forced", "main"]

_PURPOSES = {"send_recv": Purpose.POINT_TO_POINT}
"""What links are for, where it is not for collectives."""


class PacelineRanks(Ranks):
    """A rank of a group (`rank.Ranks`).

    Args:
        group: the group.
        memory: one of `calls.MEMORIES`.
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
        """Kinds of the links that have been opened so far for collectives, or for messages."""
        mesh, purpose = self._group.mesh, _PURPOSES.get(collective, Purpose.COLLECTIVE)
        return [mesh.link(peer, purpose).kind for peer in mesh.linked(purpose)]

    @contextmanager
    def scheduled(self, collective: str, schedule: str | None) -> Iterator[None]:
        """See `forced`."""
        with forced(self._group, collective, schedule):
            yield

    def chosen(self, collective: str, size: int) -> str | None:
        """The schedule by the group's table, or the one that is forced."""
        if collective not in SCHEDULES:
            return None
        nodes = nodes_of(self._group.mesh.peers)
        return self._group.choose(collective, size, self.world, nodes=nodes).schedule


@contextmanager
def forced(group: Group, collective: str, schedule: str | None) -> Iterator[None]:
    """Within it a group does a collective by one schedule, whatever the size; None for the one that is chosen.

    All ranks enter it between the same two calls.
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
        memory: one of `calls.MEMORIES`.
        threads: that many ranks in this process; 0: one rank, of the job that the launcher tells of.
    """
    if threads:
        # As long as it takes: the conductor ends it, or this process ends with it.
        run_ranks(threads, lambda group: serve(path, name, PacelineRanks(group, memory)), timeout=threading.TIMEOUT_MAX)
    else:
        with paceline.join() as session:
            serve(path, name, PacelineRanks(session.group, memory))


if __name__ == "__main__":
    main(*sys.argv[1:4], threads=int(sys.argv[4]) if sys.argv[4:] else 0)
