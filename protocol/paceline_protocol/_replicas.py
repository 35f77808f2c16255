"""Replicas: members that are k ranks, which hold one copy of the model between them (decision 30).

A session is one rank. Ranks with one position in their replicas form a *lane*, and know nothing of the other positions:
each has a place in a view of R members, at the rank of its replica. Here the ranks of a replica are kept together, and
what they are told is cut to their lane. A worker without mates is a replica of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline_protocol._values import JobSettings, Report, Seat, Verdict, View

if TYPE_CHECKING:
    from paceline_protocol._job_state import Session


def whole(sessions: Iterable[Session]) -> list[Session]:
    """Returns those whose mates are all among them, mates side by side, in the order in which replicas first occur.

    A rank may have an old session beside its new one for a while: the new one counts.
    """
    there = list(sessions)
    if not there or not there[0].replica:  # their settings agree
        return there
    found: dict[str, dict[int, Session]] = {}
    for session in sorted(there, key=lambda session: session.arrival):
        found.setdefault(session.replica, {})[session.position] = session
    seen = dict.fromkeys(session.replica for session in there)
    return [
        found[replica][position]
        for replica in seen
        if len(found[replica]) == found[replica][min(found[replica])].settings.replica_size
        for position in sorted(found[replica])
    ]


def apart(sessions: Sequence[Session]) -> list[Sequence[Session]]:
    """Divides what `whole` returned into replicas."""
    size = sessions[0].settings.replica_size if sessions else 1
    return [sessions[first : first + size] for first in range(0, len(sessions), size)]


def of_one_mind(sessions: Iterable[Session]) -> list[Session]:
    """Returns those whose mates are all among them and have said that they hold the same state."""
    there = whole(sessions)
    if not there or not there[0].replica:
        return there
    alike = (ranks for ranks in apart(there) if len({s.met.state for s in ranks if s.met is not None}) == 1)
    return [session for ranks in alike for session in ranks]


def torn_apart(sessions: Iterable[Session]) -> list[Session]:
    """Returns those that hold a state of which their mates hold none or another one."""
    there = list(sessions)
    alike = set(of_one_mind(there))
    return [s for s in there if s not in alike and s.met is not None and s.met.tag is not None]


def leavers(sessions: Iterable[Session]) -> set[Session]:
    """Returns those that want to leave, and their mates among them."""
    there = list(sessions)
    going = {session for session in there if session.met is not None and session.met.leaving}
    replicas = {session.replica for session in going if session.replica}
    return going | {session for session in there if session.replica in replicas} if replicas else going


def noun(settings: JobSettings, count: int) -> str:
    """Returns the noun for the members of a job: "workers", or "replicas" if each is several ranks."""
    return ("worker" if settings.replica_size == 1 else "replica") + "s"[: count != 1]


# What a rank is told, and what it says --------------------------------------------------------------------------------


def lane(view: View, position: int) -> Iterator[Seat]:
    """Yields the seats of the ranks with this position, at the ranks of their replicas."""
    size = view.settings.replica_size
    for seat in view.seats[position::size]:
        yield seat if size == 1 else replace(seat, rank=seat.number)


def in_lane(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    """Returns the replicas of these ranks of a view, ascending."""
    return tuple(sorted({rank // size for rank in ranks}))


def told(verdict: Verdict, settings: JobSettings) -> Verdict:
    """Returns a verdict as members hear it: it blames replicas, and its text names ranks."""
    if settings.replica_size == 1:
        return verdict
    return replace(verdict, culprits=in_lane(verdict.culprits, settings.replica_size))


def of_view(report: Report, session: Session) -> Report:
    """Returns a rank's report with the ranks of the view."""
    if report.accused is None or not session.replica:
        return report
    return replace(report, accused=report.accused * session.settings.replica_size + session.position)
