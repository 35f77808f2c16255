"""Decides which members a breach of the protocol evicts, and which processes are refused after it (decision 06).

A member that receives what no correct program sends names the sender. The word of one member proves nothing, for it may
be the one that is broken. So a member goes if two others have named it, or if it has named itself. A member that names
others again and again goes in their place if no other member confirms it: else one broken member could stop all.

Words are added up over generations that begin from the same base, because members that hear of a failure from a peer
see nothing of it themselves. Once a step was applied they are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline_protocol._job_state import JobState
from paceline_protocol._refusals import Barred
from paceline_protocol._values import Process, Report, Tag

_ALONE = 3
"""Generations in which a member may name others alone. A step is given up after five (`StepVoid`): one more is left for
a second witness, after the one that was alone has gone."""

_TAKEN = 2
"""How often a process is parted with before it is not taken any more."""

_KEPT_PROCESSES = 1_000


class Breaches:
    """The reports of breaches of the protocol, and the members that were evicted for them.

    Kept in memory only: after a restart of the coordinator everybody begins with a clean slate.
    """

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._base: Tag | None = None
        self._named_by: dict[Process, set[Process]] = {}
        self._said: dict[Process, set[tuple[int, Process]]] = {}  # by accuser: in which generation it named whom
        self._parted: dict[Process, list[str]] = {}

    def hear(self, reports: Iterable[Report]) -> None:
        """Takes the breaches that members of the last view have reported."""
        view = self._state.view
        assert view is not None
        if view.base != self._base or len(self._said) > _KEPT_PROCESSES:
            self._base = view.base
            self._named_by.clear()
            self._said.clear()
        for report in reports:
            accused = view.seats[report.reporter if report.accused is None else report.accused].process
            accuser = view.seats[report.reporter].process
            self._named_by.setdefault(accused, set()).add(accuser)
            self._said.setdefault(accuser, set()).add((view.generation, accused))

    def due(self) -> dict[int, str]:
        """The members of the last view to part with, by rank, each with what it did."""
        view = self._state.view
        assert view is not None
        enough = len(self._state.present()) > 2  # the others check each other; of two nobody knows which is broken
        due: dict[int, str] = {}
        for seat in view.seats:
            if self._is_guilty(seat.process):
                due[seat.rank] = "broke the protocol"
                continue
            said = self._said.get(seat.process, set())
            times = len({generation for generation, accused in said if not self._is_guilty(accused)})
            if enough and times >= _ALONE:
                due[seat.rank] = f"was alone {times} times in saying that others broke the protocol"
        return due

    def _is_guilty(self, process: Process) -> bool:
        by = self._named_by.get(process, set())
        return len(by) > 1 or process in by

    def part(self, process: Process, how: str) -> bool:
        """Notes that a process is parted with; returns whether it is not taken any more.

        What it was accused of is settled with that: should it come back, new words are needed.
        """
        self._named_by.pop(process, None)
        self._said.pop(process, None)
        for said in self._said.values():
            said.difference_update([word for word in said if word[1] == process])
        hows = self._parted.pop(process, [])
        self._parted[process] = [*hows, how]
        while len(self._parted) > _KEPT_PROCESSES:
            del self._parted[next(iter(self._parted))]
        return len(hows) + 1 >= _TAKEN

    def check(self, process: Process) -> None:
        """Checks that a worker may register: it was not parted with too often."""
        hows = self._parted.get(process, [])
        if len(hows) >= _TAKEN:
            raise Barred(
                f"job {self._state.name!r} has parted with this worker ({process.host}, pid {process.pid}) "
                f"{len(hows)} times, because it {' and '.join(dict.fromkeys(hows))}, and does not take it any more: "
                "start another one; if that goes the same way, look for bad memory or another version of Paceline on "
                "this host"
            )
