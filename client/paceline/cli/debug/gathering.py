"""Gets the flight records of a job: from its members, or from the dumps on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline._base.terminal import UsageError
from paceline._session.flight import flight_directory
from paceline.cli.admin import Answered, ask_members, coordinator_of, get_job
from paceline.cli.debug.records import MemberRecord, newest_dumps, read_record
from paceline.errors import PacelineError
from pacelinepb.status_json import seconds
from pacelinepb.v1.admin_pb2 import GetJobResponse, JobPhase
from pacelinepb.v1.session_pb2 import QUESTION_RECORDS

PATIENCE_S = 1.0
"""Seconds to wait for each member. One that runs Python answers within milliseconds."""


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


def gather_records(job: str | None, coordinator: str | None, directory: Path | None, timeout: float) -> Gathered:
    """Asks a job's members, or reads dumps if a folder is named, or if the job has no members any more."""
    if directory is not None:
        return _from_dumps(directory, job)
    if job is None:
        raise UsageError("name the job, or a folder of dumps (--dir)")
    own = flight_directory(os.environ)
    try:
        found = _from_members(coordinator_of(job, coordinator, timeout), job, timeout)
    except (UsageError, PacelineError) as error:
        dumps = _dumps_of(own, job)
        if dumps is None and own is not None:
            kind = UsageError if isinstance(error, UsageError) else type(error)
            raise kind(f"{error}; and no dump of job {job!r} is in {own}") from None
        if dumps is None:
            raise
        dumps.notes.insert(0, f"no member was asked: {error}")
        return dumps
    if not found.answers:
        dumps = _dumps_of(own, job)
        if dumps is None:
            where = "" if own is None else f", and no dump is in {own}"
            raise PacelineError(found.source + where)
        return dumps
    return found


def without_members(detail: GetJobResponse) -> str:
    """Says why a job has no members."""
    name, step = detail.summary.name, detail.totals.step
    if detail.summary.phase != JobPhase.JOB_PHASE_FINISHED:
        return f"job {name!r} has no members now"
    return f"job {name!r} is done{f' (last step {step})' if step else ''}: it has no members"


def _from_members(address: str, job: str, timeout: float) -> Gathered:
    answers = ask_members(address, job, QUESTION_RECORDS, timeout, patience=PATIENCE_S)
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
    detail = get_job(address, job, timeout)
    there = {record.rank for record in records} | set(silent)
    missing = set(range(max((record.size for record in records), default=0))) - there
    for gone in detail.gone:
        if gone.in_view and gone.member.rank in missing:
            process = gone.member.process
            how = f"(was {process.host}, pid {process.pid}) {gone.how}, {seconds(gone.ago):.1f} s ago"
            silent[gone.member.rank] = how
    if detail.HasField("verdict"):
        notes.append(f"generation {detail.verdict.generation} ended: {detail.verdict.text}")
    by_id = {each.member.member_id: each for each in answers}
    source = f"the members of job {job!r}" if answers else without_members(detail)
    return Gathered(job, source, records, silent, notes, by_id)


def _dumps_of(directory: Path | None, job: str) -> Gathered | None:
    try:
        found = None if directory is None else _from_dumps(directory, job)
    except OSError:
        return None
    return found if found is not None and found.records else None


def _from_dumps(directory: Path, job: str | None) -> Gathered:
    records, troubles = newest_dumps(directory, job)
    name = job if job is not None else records[0].job if records else ""
    return Gathered(name, f"the dumps in {directory}", records, {}, troubles, {})
