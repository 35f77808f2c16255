"""Gets the flight records of a job: from its members, or from the dumps on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from paceline._base.terminal import UsageError
from paceline._session.flight import flight_directory
from paceline.cli.admin import ask_members, coordinator_of, get_job
from paceline.cli.debug.dumps import newest_dumps
from paceline.errors import PacelineError
from pacelinepb.debug.gathered import Gathered, gathered_from
from pacelinepb.v1.session_pb2 import QUESTION_RECORDS

PATIENCE_S = 1.0
"""Seconds to wait for each member. One that runs Python answers within milliseconds."""


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


def _from_members(address: str, job: str, timeout: float) -> Gathered:
    answers = ask_members(address, job, QUESTION_RECORDS, timeout, patience=PATIENCE_S)
    return gathered_from(answers, get_job(address, job, timeout))


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
