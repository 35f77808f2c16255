"""Puts the answers of a job's members about their flight records together, and draws them as a trace. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pacelinepb.debug.chrome_trace import Happened, make_trace
from pacelinepb.debug.clocks import Clock, Sighting, align
from pacelinepb.debug.records import MemberRecord, read_record
from pacelinepb.status_json import seconds
from pacelinepb.v1.admin_pb2 import AskMembersResponse, GetJobResponse, JobEvent, JobPhase
from pacelinepb.v1.session_pb2 import Member


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer of one member, or the reason why there is none.

    The member's rank is meaningful only if `in_view`. Nobody has checked its `data` yet. `asked_at` and `answered_at`
    are seconds since 1970 on the coordinator's clock.
    """

    member: Member
    in_view: bool
    data: bytes
    trouble: str
    asked_at: float
    answered_at: float

    @property
    def rank(self) -> int | None:
        """Its rank; None if it is in no view."""
        return self.member.rank if self.in_view else None

    def __str__(self) -> str:
        return label_of(self.member, in_view=self.in_view)


def label_of(member: Member, *, in_view: bool) -> str:
    """Names a member as sentences do: its rank or member id, host and process id."""
    name = f"rank {member.rank}" if in_view else f"member {member.member_id}"
    return f"{name} ({member.process.host}, pid {member.process.pid})"


def read_answers(responses: Iterable[AskMembersResponse]) -> list[Answered]:
    """Returns members' answers by rank, then those of members in no view."""
    found = []
    for each in responses:
        at = [time.ToNanoseconds() / 1e9 for time in (each.asked_at, each.answered_at)]
        found.append(Answered(each.member, each.in_view, each.data, each.trouble, *at))
    return sorted(found, key=lambda each: (not each.in_view, each.member.rank))


@dataclass(frozen=True, slots=True)
class Gathered:
    """Flight records of one job, of members that have answered, or left a dump.

    `job` is empty if no record tells. `source` says in words where they come from. `silent` says why there is no record
    of a rank, by rank. `notes` are sentences about what is not there or was left out. `answers` are by member id, and
    empty for dumps.
    """

    job: str
    source: str
    records: list[MemberRecord]
    silent: dict[int, str]
    notes: list[str]
    answers: Mapping[str, Answered]

    @property
    def missing(self) -> list[str]:
        """Sentences about what is not there."""
        return [f"rank {rank}: {text}" for rank, text in sorted(self.silent.items())] + self.notes


def gathered_from(answers: Sequence[Answered], detail: GetJobResponse) -> Gathered:
    """Reads what the members of a job have answered about their records."""
    records, silent, notes = [], {}, []
    for each in answers:
        trouble = each.trouble
        if not trouble:
            try:
                records.append(read_record(each.data))
                continue
            except ValueError as error:
                trouble = f"gave an answer that cannot be read: {error}"
        if each.in_view:
            process = each.member.process
            silent[each.member.rank] = f"({process.host}, pid {process.pid}) {trouble}"
        else:
            notes.append(f"{each} {trouble}")
    there = {record.rank for record in records} | set(silent)
    missing = set(range(max((record.size for record in records), default=0))) - there
    for gone in detail.gone:
        if gone.in_view and gone.member.rank in missing:
            process = gone.member.process
            how = f"(was {process.host}, pid {process.pid}) {gone.how}, {seconds(gone.ago):.1f} s ago"
            silent[gone.member.rank] = how
    if detail.HasField("verdict"):
        notes.append(f"generation {detail.verdict.generation} ended: {detail.verdict.text}")
    job = detail.summary.name
    source = f"the members of job {job!r}" if answers else without_members(detail)
    return Gathered(job, source, records, silent, notes, {each.member.member_id: each for each in answers})


def without_members(detail: GetJobResponse) -> str:
    """Says why a job has no members."""
    name, step = detail.summary.name, detail.totals.step
    if detail.summary.phase != JobPhase.JOB_PHASE_FINISHED:
        return f"job {name!r} has no members now"
    return f"job {name!r} is done{f' (last step {step})' if step else ''}: it has no members"


def draw_trace(found: Gathered, events: Iterable[JobEvent]) -> dict[str, Any]:
    """Draws records and events as a trace (`make_trace`), with the clocks of members that have answered aligned."""
    happened = [Happened(each.at.ToNanoseconds() / 1e9, each.kind, each.generation, each.text) for each in events]
    trace = make_trace(found.records, happened, _clocks(found))
    trace["otherData"] |= {"source": found.source, "missing": found.missing}
    return trace


def _clocks(found: Gathered) -> dict[str, Clock]:
    sightings = []
    for record in found.records:
        answer = found.answers.get(record.member_id)
        if answer is not None and record.read_at is not None and record.sent_at is not None:
            at = answer.asked_at, record.read_at, record.sent_at, answer.answered_at
            sightings.append(Sighting(record.member_id, answer.member.process.boot_id, *at))
    return align(sightings)
