"""Reads the flight records that workers have left in a folder."""

from __future__ import annotations

from pathlib import Path

from pacelinepb.debug.records import MemberRecord, read_record

MAX_DUMP_BYTES = 16 << 20
"""The longest file that is read: a dump of 1,000 operations with the longest names has some 3 MB."""


def newest_dumps(directory: Path, job: str | None) -> tuple[list[MemberRecord], list[str]]:
    """Reads the newest dump of each rank in a folder: the records by rank, and a sentence about each unreadable file.

    Without a `job` it is the one that the folder's newest dump is about. Raises OSError if the folder cannot be read.
    """
    newest: dict[tuple[str, int | None], MemberRecord] = {}
    troubles = []
    for path in sorted(directory.iterdir()):
        if path.suffix != ".json":
            continue
        try:
            with path.open("rb") as file:
                record = read_record(file.read(MAX_DUMP_BYTES))
        except (OSError, ValueError) as error:
            troubles.append(f"{path} is left out: {error}")
            continue
        key = record.job, record.rank
        if key not in newest or newest[key].at < record.at:
            newest[key] = record
    if job is None and newest:
        job = max(newest.values(), key=lambda record: record.at).job
    found = [record for record in newest.values() if record.job == job]
    return sorted(found, key=lambda record: -1 if record.rank is None else record.rank), troubles
