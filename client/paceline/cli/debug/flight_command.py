"""`paceline debug flight`: names the ranks that are stuck, the operation that each is stuck in, and since when."""

from __future__ import annotations

from pathlib import Path

from paceline._base.terminal import printable
from paceline.cli.debug.gathering import gather_records
from paceline.cli.debug.stuck import find_stuck
from paceline.cli.output import print_json
from paceline.errors import PacelineError
from pacelinepb.debug.records import MemberRecord


def show_flight(
    job: str | None, coordinator: str | None, directory: Path | None, timeout: float, *, as_json: bool
) -> None:
    """Compares the flight records of a job's ranks, and prints what was found.

    Without a `job` it is that of the newest dump in `directory`. The dumps there are read in place of asking the
    members.
    """
    found = gather_records(job, coordinator, directory, timeout)
    if not found.records and not found.silent:
        raise PacelineError(
            f"no flight record is there: {found.source} have none" + "".join(f"; {n}" for n in found.notes)
        )
    report = find_stuck(found.records, found.silent)
    if as_json:
        members = [_as_dict(record) for record in found.records]
        facts = {"job": found.job, "source": found.source, "generation": report.generation, "size": report.size}
        findings = [finding.as_dict() for finding in report.findings]
        print_json({**facts, "findings": findings, "members": members, "notes": found.notes})
        return
    source = "" if found.answers else f"; from {found.source}"
    print(printable(f"generation {report.generation} of job {found.job!r}, {report.size} ranks{source}"))
    for finding in report.findings:
        first, *rest = finding.text.split("; ")
        print("- " + "\n    ".join(map(printable, (first, *rest))))
    for note in found.notes:
        print(printable(f"  ({note})"))


def _as_dict(record: MemberRecord) -> dict[str, object]:
    last = record.operations[-1] if record.operations else None
    return {
        "rank": record.rank,
        "host": record.host,
        "pid": record.pid,
        "member_id": record.member_id,
        "generation": record.generation,
        "at": record.at,
        "reason": record.reason,
        "last": None
        if last is None
        else {"operation": last.number, "group": last.group[0], "call": last.signature, "state": last.state},
    }
