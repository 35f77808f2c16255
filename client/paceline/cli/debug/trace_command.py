"""`paceline debug trace`: writes the flight records of a job as a trace for Perfetto."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from paceline._base.terminal import printable
from paceline.cli.admin import coordinator_of, list_events
from paceline.cli.debug.gathering import gather_records
from paceline.cli.output import print_json
from paceline.errors import PacelineError
from pacelinepb.debug.gathered import draw_trace


def write_trace(
    job: str | None, coordinator: str | None, directory: Path | None, timeout: float, out: Path, *, as_json: bool
) -> None:
    """Gathers records and events as `gather_records` does, and writes the trace; a file that is there is replaced."""
    found = gather_records(job, coordinator, directory, timeout)
    if not found.records:
        raise PacelineError("no flight record is there" + "".join(f"; {note}" for note in found.notes))
    listed = list_events(coordinator_of(found.job, coordinator, timeout), found.job, timeout) if found.answers else []
    trace = draw_trace(found, listed)
    partial = out.with_name(f"{out.name}.{secrets.token_hex(8)}.tmp")  # nobody can foresee it and lay a link there
    try:
        with partial.open("x", encoding="ascii") as file:  # not by tempfile, whose files are for this user alone
            file.write(json.dumps(trace))
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    number = sum(event["ph"] == "X" for event in trace["traceEvents"])
    doubts = [each["uncertainty_s"] for each in trace["otherData"]["clocks"] if each["uncertainty_s"] is not None]
    if as_json:
        facts = {"job": found.job, "file": str(out), "slices": number, "members": len(found.records)}
        print_json({**facts, "uncertainty_s": max(doubts) if doubts else None, "missing": found.missing})
        return
    known = f"clocks are aligned to {max(doubts) * 1e3:.1f} ms" if doubts else "clocks are not aligned"
    print(
        printable(f"{out}: {number} operations and steps of {len(found.records)} members of job {found.job!r}; {known}")
    )
    for line in found.missing:
        print(printable(f"  ({line})"))
    print("Open it at https://ui.perfetto.dev, which keeps it in the browser, or at chrome://tracing.")
