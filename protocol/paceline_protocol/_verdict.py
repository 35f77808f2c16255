"""Who is to blame for the end of a generation.

`judge` weighs the evidence, and `Evidence` gathers it until it is time to judge. Kinds of evidence are weighed in the
order of cause and effect: a member that raised an error closes its links, so "the link ended" says little once "it
raised" is known, and a timeout says least of all.

A `PEER_LOST` report is an undirected edge: it says that a link ended, not at which end. To blame the accused would
blame the three sound members that one bad network card accuses, so the blame goes to a small set of members that covers
all edges. Members are trusted to report what they saw: there is no defence against lies.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

from paceline_protocol._job_state import JobState
from paceline_protocol._values import Progress, ProtocolSettings, Report, Seat, Verdict, View
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["Case", "Evidence", "cover", "describe_exit", "has_second_witness", "judge"]

_LOST = ErrorReason.ERROR_REASON_PEER_LOST


@dataclass(frozen=True, slots=True)
class Case:
    """All the evidence about one generation.

    Attributes:
        view: the members.
        reports: what they reported, in order of arrival.
        gone: ranks that are surely gone, each with how ("exited with code 1", "was silent for 3.1 s").
        left: ranks that left in good order: no failure, unless somebody still needed them.
        suspects: ranks whose session's stream has ended.
        progress: last heartbeats by rank.
    """

    view: View
    reports: tuple[Report, ...] = ()
    gone: Mapping[int, str] | None = None
    left: Set[int] = frozenset()
    suspects: Set[int] = frozenset()
    progress: Mapping[int, Progress] | None = None


def has_second_witness(case: Case) -> bool:
    """True if of each broken link that was reported one member has lost its stream or has left.

    Then no more evidence is needed. If one link has no such end it is better to wait: when two members die at once,
    news of the second may be on its way, and until then the member that reported its link looks as guilty as it.
    """
    known = case.suspects | case.left
    lost = [report for report in case.reports if report.reason == _LOST]
    return bool(lost) and all(report.accused in known or report.reporter in known for report in lost)


def judge(now: float, case: Case) -> Verdict:
    """The verdict on a generation. There must be a report, or a member that is gone.

    Args:
        now: the time, in seconds.
        case: the evidence.
    """
    by_reason: dict[int, list[Report]] = defaultdict(list)
    for report in case.reports:
        by_reason[report.reason].append(report)
    if raised := by_reason[ErrorReason.ERROR_REASON_PEER_RAISED]:
        return _directly(case, raised)
    if mismatch := by_reason[ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH]:
        first = mismatch[0]
        pair = {first.reporter} if first.accused is None else {first.reporter, first.accused}
        return _verdict(case, first, pair, first.text)
    if broke := by_reason[ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL]:
        return _directly(case, broke)
    lost = by_reason[_LOST]
    if case.gone or lost:
        return _lost(case, lost)
    return _timeout(now, case, by_reason[ErrorReason.ERROR_REASON_TIMEOUT][0])


def cover(edges: Set[frozenset[int]], suspects: Set[int], age: Mapping[int, int]) -> frozenset[int]:
    """The members to blame for broken links: every edge has an end among them.

    Suspects first; then, one by one, the member with the most broken links left; among equals the youngest, for it has
    the least to lose. That is greedy: not always the smallest set, but exact for pairs and stars, as bad hosts make
    them.

    Args:
        edges: pairs of ranks.
        suspects: ranks whose session's stream has ended.
        age: order of arrival by rank; the greater, the younger.
    """
    blamed = {rank for edge in edges for rank in edge if rank in suspects}
    open_edges = [edge for edge in edges if not edge & blamed]
    while open_edges:
        degree: dict[int, int] = defaultdict(int)
        for edge in open_edges:
            for rank in edge:
                degree[rank] += 1
        worst = max(degree, key=lambda rank: (degree[rank], age[rank]))
        blamed.add(worst)
        open_edges = [edge for edge in open_edges if worst not in edge]
    return frozenset(blamed)


def describe_exit(exit_code: int) -> str:
    """Completes "rank 2 (host-b, pid 4711) ..." for an exit code, or the negated number of a signal."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def _directly(case: Case, reports: list[Report]) -> Verdict:
    """Blames the member that the first report accuses, or its reporter if it accuses nobody else."""
    first = reports[0]
    culprit = first.reporter if first.accused is None else first.accused
    return _verdict(case, first, {culprit}, first.text)


def _lost(case: Case, reports: list[Report]) -> Verdict:
    gone = dict(case.gone or {})
    edges: set[frozenset[int]] = set()
    neighbours: dict[int, set[int]] = defaultdict(set)
    accused_leavers: dict[int, Report] = {}
    for report in reports:
        other = report.reporter if report.accused is None else report.accused
        if other in case.left:
            accused_leavers.setdefault(other, report)
        edge = frozenset((report.reporter, other))
        edges.add(edge)
        neighbours[other].add(report.reporter)
        neighbours[report.reporter].add(other)
    known = gone.keys() | accused_leavers.keys()
    rest = {edge for edge in edges if not edge & known}
    blamed = cover(rest, case.suspects, {seat.rank: seat.arrival for seat in case.view.seats})
    sentences: dict[int, str] = {rank: f"{case.view.seats[rank].label} {how}" for rank, how in gone.items()}
    for rank, report in accused_leavers.items():
        sentences[rank] = f"{case.view.seats[rank].label} left the job while others needed it: {report.text}"
    for rank in blamed:
        sentences[rank] = _broken(case.view.seats[rank], neighbours[rank] - {rank}, rank in case.suspects)
    return Verdict(
        generation=case.view.generation,
        reason=_LOST,
        culprits=tuple(sorted(sentences)),
        operation=reports[0].operation if reports else 0,
        text="; ".join(sentences[rank] for rank in sorted(sentences)),
    )


def _broken(seat: Seat, neighbours: Set[int], suspect: bool) -> str:
    ranks = f"rank{'s' if len(neighbours) > 1 else ''} {', '.join(map(str, sorted(neighbours)))}"
    links = f"its link{'s' if len(neighbours) > 1 else ''} to {ranks}"
    if suspect and neighbours:
        return f"{seat.label} died: its session and {links} ended"
    if suspect or not neighbours:
        return f"{seat.label} lost its session"
    return f"{seat.label} was cut off: {links} ended"


def _timeout(now: float, case: Case, report: Report) -> Verdict:
    """Blames the members that have not entered the operation; if all have, the one that the reporter waited for."""
    progress = case.progress or {}
    # A member that reports is inside its operation, whatever its last heartbeat said.
    inside = {r.reporter for r in case.reports if r.operation >= report.operation}
    late = {r for r, p in progress.items() if p.operation < report.operation and r not in inside}
    if not late:
        blamed = set() if report.accused is None else {report.accused}
        return _verdict(case, report, blamed, report.text)
    named = "; ".join(_late(now, case.view.seats[rank], progress[rank]) for rank in sorted(late))
    return _verdict(case, report, late, f"{report.text}; not in operation {report.operation} yet: {named}")


def _late(now: float, seat: Seat, progress: Progress) -> str:
    for_how_long = f"{max(0.0, now - progress.since):.1f} s"
    if not progress.operation:
        return f"{seat.label} has entered no operation so far"
    where = "has been inside" if progress.inside else "has been out of"
    return f"{seat.label} {where} operation {progress.operation} for {for_how_long}"


def _verdict(case: Case, report: Report, culprits: Set[int], text: str) -> Verdict:
    return Verdict(case.view.generation, report.reason, tuple(sorted(culprits)), report.operation, text)


_NEVER = float("inf")
_REPORTS_PER_MEMBER = 4
"""More reports than this times the number of members say nothing new; memory stays bounded."""


class Evidence:
    """The reports about the live view, gathered until they are judged.

    Reports gather for a moment because one death makes several, and the one that names the cause may come second. A
    second witness ends the wait. A broken link between two members that both seem well prolongs it, for news of a death
    may be on its way.

    Args:
        state: the job.
        settings: for how long to gather.
    """

    def __init__(self, state: JobState, settings: ProtocolSettings) -> None:
        self._state = state
        self._settings = settings
        self._reports: list[Report] = []
        self._first_at = _NEVER
        self.judge_at = _NEVER

    def add(self, now: float, report: Report) -> None:
        """Adds a report."""
        view = self._state.live
        assert view is not None, "reports are about the live view"
        if len(self._reports) >= _REPORTS_PER_MEMBER * len(view.seats):
            return
        if not self._reports:
            self._first_at, self.judge_at = now, now + self._settings.gather_time
        self._reports.append(report)

    def is_ripe(self, now: float) -> bool:
        """True when the verdict is due; moves `judge_at` on when it is better to wait a little longer."""
        if not self._reports:
            return False
        view = self._state.live
        assert view is not None
        if has_second_witness(self._case({})):
            return True
        if len({report.reporter for report in self._reports}) >= len(view.seats) - len(self._state.endings):
            return True
        if now < self.judge_at:
            return False
        doubtful = all(report.reason == ErrorReason.ERROR_REASON_PEER_LOST for report in self._reports)
        if doubtful and now < self._first_at + self._settings.doubt_time:
            self.judge_at = self._first_at + self._settings.doubt_time
            return False
        return True

    def judge(self, now: float, gone: dict[int, str]) -> Verdict:
        """The verdict on what is known now.

        Args:
            now: the time, in seconds.
            gone: ranks that are surely gone, each with how.
        """
        return judge(now, self._case(gone))

    def clear(self) -> None:
        """Forgets all reports, because the view is over."""
        self._reports = []
        self._first_at = self.judge_at = _NEVER

    def _case(self, gone: dict[int, str]) -> Case:
        view = self._state.view
        assert view is not None
        sessions = [(seat.rank, self._state.sessions.get(seat.member_id)) for seat in view.seats]
        return Case(
            view=view,
            reports=tuple(self._reports),
            gone=gone,
            left={rank for rank, ending in self._state.endings.items() if ending.orderly},
            # A member that was not seen since a restart is suspect too: it has no stream.
            suspects={rank for rank, session in sessions if session is not None and session.stream is None},
            progress={rank: session.progress for rank, session in sessions if session is not None},
        )
