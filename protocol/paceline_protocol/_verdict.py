"""Finds the members that are to blame for the end of a generation.

`judge` weighs the evidence, and `Evidence` gathers it until it is time to judge. Kinds of evidence are weighed in the
order of cause and effect: a member that raised an error closes its links, so "the link ended" says little once "it
raised" is known, and a timeout says least of all.

A `PEER_LOST` report is an undirected edge: it says that a link ended, not at which end. A member that is gone, or has
lost its stream, explains all links to it. If there is such a member nobody else is blamed, whatever other links have
ended: news of another death may be on its way, and a link that is broken for another reason ends the next generation as
well. If there is none, to blame the accused would blame the three sound members that one bad network card accuses, so
the blame goes to a small set of members that covers all edges. Of two members that explain as many, the one that has
been quiet since goes, and not the one that has just spoken. A newcomer that could not open a link to a member that the
others reach has only itself to blame.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from paceline_protocol._job_state import JobState
from paceline_protocol._replicas import in_lane
from paceline_protocol._silence import LOOK_AGAIN
from paceline_protocol._values import Progress, ProtocolSettings, Report, Seat, Verdict, View
from pacelinepb.v1.errors_pb2 import ErrorReason

_LOST = ErrorReason.ERROR_REASON_PEER_LOST
_BROKE = ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL
_MISMATCH = ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH
_VERSION = ErrorReason.ERROR_REASON_VERSION

_TOLD_BY_ITSELF = (
    ErrorReason.ERROR_REASON_PEER_RAISED,
    ErrorReason.ERROR_REASON_STEP_DIFFERS,
    ErrorReason.ERROR_REASON_STEP_SKIPPED,
)
"""The reasons that a culprit reports about itself. It knows more than those that saw calls which do not match."""

_NAMED = 10
"""So many culprits are described in words; `Verdict.culprits` has all."""


@dataclass(frozen=True, slots=True)
class Case:
    """All the evidence about one generation.

    `reports` are in order of arrival. `gone` are ranks that are surely gone, each with how ("exited with code 1", "was
    silent for 3.1 s"). Those that have `left` went in good order: no failure, unless somebody still needed them.
    `suspects` are those whose session's stream has ended; the `quiet` have said nothing since the first report.
    `progress` is the last heartbeats.
    """

    view: View
    reports: tuple[Report, ...] = ()
    gone: Mapping[int, str] | None = None
    left: Set[int] = frozenset()
    suspects: Set[int] = frozenset()
    quiet: Set[int] = frozenset()
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
    """The verdict on a generation. There must be a report, or a member that is gone."""
    by_reason: dict[int, list[Report]] = defaultdict(list)
    for report in case.reports:
        by_reason[report.reason].append(report)
    for reason in _TOLD_BY_ITSELF:
        if told := by_reason[reason]:
            return _directly(case, told)
    if mismatch := by_reason[_MISMATCH]:
        first = mismatch[0]
        pair = {first.reporter} if first.accused is None else {first.reporter, first.accused}
        return _verdict(case, first, pair, first.text)
    if broke := by_reason[_BROKE]:
        return _directly(case, _strongest(broke))
    if (refused := by_reason[_VERSION]) and not case.gone:
        return _directly(case, refused)
    lost = by_reason[_LOST]
    if case.gone or lost:
        return _lost(case, lost)
    return _timeout(now, case, by_reason[ErrorReason.ERROR_REASON_TIMEOUT][0])


def cover(edges: Set[frozenset[int]], age: Mapping[int, int], quiet: Set[int] = frozenset()) -> frozenset[int]:
    """Returns the members to blame for broken links: every edge has an end among them.

    One by one, the member with the most broken links left. Among equals a quiet one, for it may be dead; then the
    youngest (the greatest `age`), for it has the least to lose. That is greedy: not always the smallest set, but exact
    for pairs and stars, as bad hosts make them.
    """
    blamed: set[int] = set()
    open_edges = list(edges)
    while open_edges:
        degree: dict[int, int] = defaultdict(int)
        for edge in open_edges:
            for rank in edge:
                degree[rank] += 1
        worst = max(degree, key=lambda rank: (degree[rank], rank in quiet, age[rank]))
        blamed.add(worst)
        open_edges = [edge for edge in open_edges if worst not in edge]
    return frozenset(blamed)


def _directly(case: Case, reports: list[Report]) -> Verdict:
    """Blames the member that the first report accuses, or its reporter if it accuses nobody else."""
    first = reports[0]
    culprit = first.reporter if first.accused is None else first.accused
    return _verdict(case, first, {culprit}, first.text)


def _strongest(reports: list[Report]) -> list[Report]:
    """The reports that accuse one member: itself, or else the one that most members accuse, or else the first."""
    by_accused: dict[int, list[Report]] = defaultdict(list)
    for report in reports:
        by_accused[_other_end(report)].append(report)
    return max(
        by_accused.values(),
        key=lambda against: (
            any(_other_end(report) == report.reporter for report in against),
            len({report.reporter for report in against}),
        ),
    )


def _other_end(report: Report) -> int:
    return report.reporter if report.accused is None else report.accused


def _edge(report: Report) -> frozenset[int]:
    return frozenset((report.reporter, _other_end(report)))


def _at_fault(case: Case, reports: list[Report]) -> frozenset[int]:
    """The members to blame for broken links of which no end is known to have gone."""
    newcomers = frozenset(case.view.newcomers)

    def is_weak(report: Report) -> bool:
        return report.unopened and report.reporter in newcomers and _other_end(report) not in newcomers

    firm = {_edge(report) for report in reports if not is_weak(report)}
    missed = {rank for edge in firm if edge.isdisjoint(newcomers) for rank in edge}  # not all members reach them
    weak = {_edge(report): report.reporter for report in reports if is_weak(report)}
    weak = {edge: newcomer for edge, newcomer in weak.items() if edge not in firm and edge.isdisjoint(missed)}
    edges = {_edge(report) for report in reports} - weak.keys()
    blamed = cover(edges, {seat.rank: seat.arrival for seat in case.view.seats}, case.quiet)
    return blamed | {newcomer for edge, newcomer in weak.items() if not edge & blamed}


def _lost(case: Case, reports: list[Report]) -> Verdict:
    gone = dict(case.gone or {})
    neighbours: dict[int, set[int]] = defaultdict(set)
    accused_leavers: dict[int, Report] = {}
    for report in reports:
        other = _other_end(report)
        if other in case.left:
            accused_leavers.setdefault(other, report)
        neighbours[other].add(report.reporter)
        neighbours[report.reporter].add(other)
    known = gone.keys() | accused_leavers.keys()
    rest = [report for report in reports if not _edge(report) & known]
    blamed = frozenset(rank for report in rest for rank in _edge(report) if rank in case.suspects)
    if not known and not blamed:
        blamed = _at_fault(case, rest)
    sentences: dict[int, str] = {rank: f"{case.view.seats[rank].label} {how}" for rank, how in gone.items()}
    for rank, report in accused_leavers.items():
        leaver, reporter = case.view.seats[rank], case.view.seats[report.reporter]
        operation = report.text.partition(": ")[0]  # what follows says again that it is gone, and who saw that
        text = operation if operation.startswith("operation ") else report.text
        sentences[rank] = f"{leaver.label} left the job while {reporter.label} needed it: {text}"
    for rank in blamed:
        sentences[rank] = _broken(case.view, rank, neighbours[rank] - {rank}, rank in case.suspects)
    return Verdict(
        generation=case.view.generation,
        reason=_LOST,
        culprits=tuple(sorted(sentences)),
        operation=reports[0].operation if reports else 0,
        text=_listed([sentences[rank] for rank in sorted(sentences)]),
    )


def _broken(view: View, rank: int, neighbours: Set[int], suspect: bool) -> str:
    seat, size = view.seats[rank], view.settings.replica_size
    other = "rank" if size == 1 else "replica"
    ranks = f"{other}{'s' if len(neighbours) > 1 else ''} {_listed(in_lane(neighbours, size), ', ')}"
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
    size = case.view.settings.replica_size
    lane = {r: p for r, p in progress.items() if r % size == report.reporter % size}  # each lane counts for itself
    late = {r for r, p in lane.items() if p.operation < report.operation and r not in inside}
    if not late:
        blamed = set() if report.accused is None else {report.accused}
        return _verdict(case, report, blamed, report.text)
    named = _listed([_late(now, case.view.seats[rank], progress[rank]) for rank in sorted(late)])
    return _verdict(case, report, late, f"{report.text}; not in operation {report.operation} yet: {named}")


def _late(now: float, seat: Seat, progress: Progress) -> str:
    for_how_long = f"{max(0.0, now - progress.since):.1f} s"
    if not progress.operation:
        return f"{seat.label} has entered no operation so far"
    where = "has been inside" if progress.inside else "has been out of"
    return f"{seat.label} {where} operation {progress.operation} for {for_how_long}"


def _listed(items: Sequence[object], between: str = "; ") -> str:
    """The first of these, and how many more there are: each member gets the text, and a job may have many culprits."""
    more = f"{between}and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return between.join(map(str, items[:_NAMED])) + more


def _verdict(case: Case, report: Report, culprits: Set[int], text: str) -> Verdict:
    return Verdict(case.view.generation, report.reason, tuple(sorted(culprits)), report.operation, text)


_NEVER = float("inf")
_REPORTS_PER_MEMBER = 4
"""More reports than this times the number of members say nothing new; memory stays bounded."""


class Evidence:
    """The reports about the live view, gathered until they are judged.

    Reports gather for a moment because one death makes several, and the one that names the cause may come second. A
    second witness ends the wait. A broken link between two members that both seem well prolongs it, for news of a death
    may be on its way. So does a call that does not match, until the member that is accused of it has spoken.
    """

    def __init__(self, state: JobState, settings: ProtocolSettings) -> None:
        self._state = state
        self._settings = settings
        self._reports: list[Report] = []
        self._first_at = self._since = _NEVER
        self._looked = False
        self.judge_at = _NEVER

    def add(self, now: float, report: Report) -> None:
        """Adds a report."""
        view = self._state.live
        assert view is not None, "reports are about the live view"
        if len(self._reports) >= _REPORTS_PER_MEMBER * len(view.seats):
            return
        if not self._reports:
            self._first_at, self.judge_at = now, now + self._settings.gather_time
            self._since = now  # as `_first_at`, but a stall does not move it
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
        if not self._is_doubtful():
            return True
        # Members wait for the verdict for no longer than their heartbeat interval; then each believes what it saw (I8).
        patience = min(self._settings.doubt_time, view.settings.heartbeat_interval / 2)
        if now < self._first_at + patience:
            self.judge_at = self._first_at + patience
            return False
        if not self._looked:  # what came in time may still be in the inbox
            self._looked, self.judge_at = True, now + LOOK_AGAIN
            return False
        return True

    def _is_doubtful(self) -> bool:
        """True if more evidence is likely to come.

        That is news of a death, a second witness of a breach, or the word of a member whose call does not match: it may
        say why (`_TOLD_BY_ITSELF`).
        """
        reasons = {report.reason for report in self._reports}
        if _MISMATCH in reasons and reasons.isdisjoint(_TOLD_BY_ITSELF):
            silent = {report.accused for report in self._reports if report.reason == _MISMATCH} - {None}
            return not silent <= {report.reporter for report in self._reports} | self._state.endings.keys()
        broke = [report for report in self._reports if report.reason == _BROKE]
        if len(broke) + sum(report.reason == _LOST for report in self._reports) < len(self._reports):
            return False
        strongest = _strongest(broke) if broke else []
        by = {report.reporter for report in strongest}
        return len(by) < 2 and not any(_other_end(report) in by for report in strongest)

    def renew_after_stall(self, slept: float) -> None:
        """Adds the seconds for which the coordinator did not run: it has yet to read what members said meanwhile."""
        if slept:
            self._first_at, self.judge_at, self._looked = self._first_at + slept, self.judge_at + slept, False

    def judge(self, now: float, gone: dict[int, str]) -> Verdict:
        """Returns the verdict on what is known now; `gone` says how members went."""
        return judge(now, self._case(gone))

    def breaches(self) -> list[Report]:
        """The reports of breaches of the protocol."""
        return [report for report in self._reports if report.reason == _BROKE]

    def unexplained(self, verdict: Verdict) -> frozenset[frozenset[int]]:
        """The broken links, as pairs of ranks, of which neither end is a culprit."""
        lost = (_edge(report) for report in self._reports if report.reason == _LOST)
        return frozenset(edge for edge in lost if edge.isdisjoint(verdict.culprits))

    def clear(self) -> None:
        """Forgets all reports, because the view is over."""
        self._reports, self._looked = [], False
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
            quiet={rank for rank, session in sessions if session is not None and session.heard < self._since},
            progress={rank: session.progress for rank, session in sessions if session is not None},
        )
