"""`paceline debug trace`: writes the flight records of a job as a trace for Perfetto."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from paceline._base.terminal import printable
from paceline.cli.admin import coordinator_of, list_events
from paceline.cli.debug.chrome_trace import Happened, make_trace
from paceline.cli.debug.clocks import Clock, Sighting, align
from paceline.cli.debug.gathering import Gathered, gather_records
from paceline.cli.output import print_json
from paceline.errors import PacelineError


def write_trace(
    job: str | None, coordinator: str | None, directory: Path | None, timeout: float, out: Path, *, as_json: bool
) -> None:
    """Gathers records and events as `gather_records` does, and writes the trace; a file that is there is replaced."""
    found = gather_records(job, coordinator, directory, timeout)
    if not found.records:
        raise PacelineError("no flight record is there" + "".join(f"; {note}" for note in found.notes))
    clocks = _clocks(found)
    events = []
    if found.answers:
        listed = list_events(coordinator_of(found.job, coordinator, timeout), found.job, timeout)
        events = [Happened(each.at.ToNanoseconds() / 1e9, each.kind, each.generation, each.text) for each in listed]
    trace = make_trace(found.records, events, clocks)
    trace["otherData"] |= {"source": found.source, "missing": _missing(found)}
    partial = out.with_name(f"{out.name}.{secrets.token_hex(8)}.tmp")  # nobody can foresee it and lay a link there
    try:
        with partial.open("x", encoding="ascii") as file:  # not by tempfile, whose files are for this user alone
            file.write(json.dumps(trace))
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    number = sum(event["ph"] == "X" for event in trace["traceEvents"])
    doubts = [clock.uncertainty for clock in clocks.values() if clock.uncertainty is not None]
    if as_json:
        facts = {"job": found.job, "file": str(out), "slices": number, "members": len(found.records)}
        print_json({**facts, "uncertainty_s": round(max(doubts), 6) if doubts else None, "missing": _missing(found)})
        return
    known = f"clocks are aligned to {max(doubts) * 1e3:.1f} ms" if doubts else "clocks are not aligned"
    print(
        printable(f"{out}: {number} operations and steps of {len(found.records)} members of job {found.job!r}; {known}")
    )
    for line in _missing(found):
        print(printable(f"  ({line})"))
    print("Open it at https://ui.perfetto.dev, which keeps it in the browser, or at chrome://tracing.")


def _clocks(found: Gathered) -> dict[str, Clock]:
    sightings = []
    for record in found.records:
        answer = found.answers.get(record.member_id)
        if answer is not None and record.read_at is not None and record.sent_at is not None:
            at = answer.asked_at, record.read_at, record.sent_at, answer.answered_at
            sightings.append(Sighting(record.member_id, answer.member.process.boot_id, *at))
    return align(sightings)


def _missing(found: Gathered) -> list[str]:
    return [f"rank {rank}: {text}" for rank, text in sorted(found.silent.items())] + found.notes
