"""Jobs and members as `paceline status` draws them, once or again and again. Pure: from the coordinator's answer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline._base.terminal import printable
from pacelinepb.status_json import HEARTBEATS, phase_name, seconds, seconds_left, stragglers
from pacelinepb.v1.admin_pb2 import GetJobResponse, GoneMember, JobEvent, JobSummary, JobTotals, MemberStatus
from pacelinepb.v1.session_pb2 import Heartbeat

PHASE_STYLE = {"running": "green", "waiting": "yellow", "void": "red", "finished": "blue", "stalled": "yellow"}

_NOTABLE_S = 1.0
"""Least seconds in one operation, or of silence, after which a member is shown as waiting or silent. Two heartbeats are
the least too: what a member did at its last one says little."""

EVENTS = 6
"""Most events shown."""


def jobs_picture(jobs: Sequence[JobSummary], trouble: str = "") -> RenderableType:
    """Draws all jobs, one in each row, below a sentence for the top if there is one."""
    parts: list[RenderableType] = [_trouble(trouble)] if trouble else []
    if not jobs:
        return Group(*parts) if parts else Text("The coordinator knows no job yet.")
    table = _table("job", "phase", "workers", "step", "rate", "lost", "why")
    for job in jobs:
        table.add_row(
            _plain(job.name),
            phase_text(job),
            _workers(job),
            _step(job),
            _rate(job.totals),
            str(job.totals.members_lost),
            _plain(why_text(job)),
        )
    return Group(*parts, table)


def job_picture(
    detail: GetJobResponse, *, trouble: str = "", events: int = EVENTS, members: int | None = None
) -> RenderableType:
    """Draws a job: what has been counted, its members, those that ended in the last minute, and its last events.

    `trouble` is a sentence for the top, such as that the answer is old. Of more than so many members, those that are
    well are left out.
    """
    job, totals = detail.summary, detail.summary.totals
    head = Text.assemble(
        ("job ", "dim"),
        (printable(job.name), "bold"),
        "  ",
        phase_text(job),
        ("  generation ", "dim"),
        str(job.generation),
    )
    head.append_text(Text.assemble(("  workers ", "dim"), _workers(job)))
    if job.waiting:
        head.append(f", {job.waiting} wait{'s' if job.waiting == 1 else ''}")
    counts = Text.assemble(("step ", "dim"), _step(job), "  ", _rate(totals))
    if (left := seconds_left(job)) is not None:
        counts.append(f"  {_about(left)} left")
    counts.append_text(Text.assemble(("  workers lost ", "dim")))
    counts.append(str(totals.members_lost), style="red" if totals.members_lost else "")
    counts.append_text(Text.assemble(("  steps undone ", "dim"), str(totals.undone), ("  goodput ", "dim")))
    counts.append(f"{totals.goodput:.1%}" if totals.goodput else "-")
    if totals.checkpoint_step:
        counts.append_text(Text.assemble(("  checkpoint ", "dim"), str(totals.checkpoint_step)))
        if totals.HasField("checkpoint_ago"):
            counts.append(f", {_about(seconds(totals.checkpoint_ago))} ago")
    for name, value in sorted(totals.logged.items()):
        counts.append_text(Text.assemble((f"  {printable(name)} ", "dim"), f"{value:.4g}"))
    parts: list[RenderableType] = [_trouble(trouble)] if trouble else []
    parts += [head, counts]
    if why_text(job):
        parts.append(Text(printable(why_text(job)), "bold yellow" if job.stall else "", overflow="fold"))
    if detail.HasField("verdict"):
        parts.append(Text(f"generation {detail.verdict.generation} ended: {printable(detail.verdict.text)}", "red"))
    if detail.members or detail.gone:
        parts += ["", _members(detail, members)]
    if shown := list(detail.events)[-events:] if events else []:
        parts += ["", _events(shown)]
    return Group(*parts)


def state_of(status: MemberStatus, detail: GetJobResponse, straggler: str | None = None) -> tuple[str, str]:
    """Says in words what a member does or waits for, or how it holds others up (`straggler`); returns a style, too."""
    silent, progress = seconds(status.silent), status.progress
    notable = max(_NOTABLE_S, 2 * seconds(detail.settings.failure_timeout) / HEARTBEATS)
    if not status.attached or status.standing == "silent" or silent >= notable:
        return f"silent for {silent:.1f} s{'' if status.attached else ', and its connection is lost'}", "red"
    if straggler is not None:
        return straggler, "yellow"
    since = seconds(progress.since)
    if status.in_view and progress.inside and since >= notable:
        doing = progress.doing or "operation"
        text = f"waits in {printable(doing)} {progress.operation} for {since:.1f} s"
        return text + _for_whom(status, detail), "yellow"
    if status.standing == "waiting" and detail.summary.generation:
        return "starts, and joins the next generation", "yellow"
    return _STANDINGS.get(status.standing, (printable(status.standing) or "-", "yellow"))


def step_of(status: MemberStatus, detail: GetJobResponse, straggler: str | None = None) -> str:
    """Returns the step that a member is shown in: the job's step, unless it lags, is silent or is in no view.

    What members said last is older for one than for another, so their own numbers would differ without meaning.
    """
    alike = status.in_view and straggler is None and state_of(status, detail)[1] != "red"
    return str((alike and detail.totals.step) or status.progress.step or "-")


_STANDINGS = {
    "training": ("training", "green"),
    "leaving": ("leaves after its step", "yellow"),
    "waiting": ("waits for the first generation", "yellow"),
    "ready to join": ("waits for the others to end their step", "yellow"),
    "spare": ("spare: waits for a seat", "blue"),
    "not stopped": ("has not stopped its last step: it may hang", "yellow"),
    "parked": ("waits for the next generation", "yellow"),
}


def _for_whom(status: MemberStatus, detail: GetJobResponse) -> str:
    """Names the ranks that have not entered the operation that a member waits in; empty if all have."""
    operation, size = status.progress.operation, detail.summary.replica_size or 1
    late = [
        _rank(other, size)
        for other in detail.members
        if other.in_view
        and other.progress.operation < operation
        and other.member.rank % size == status.member.rank % size
    ]
    if not late:
        return ""
    named = ", ".join(late[:3]) + (f" and {len(late) - 3} more" if len(late) > 3 else "")
    return f", for rank{'s'[: len(late) != 1]} {named}"


def _rank(status: MemberStatus | GoneMember, replica_size: int) -> str:
    """Writes a member's rank, "-" if it is in no view, and "1.0" for rank 0 of replica 1."""
    rank = status.member.rank
    if not status.in_view:
        return "-"
    return str(rank) if replica_size <= 1 else f"{rank // replica_size}.{rank % replica_size}"


def _members(detail: GetJobResponse, most: int | None) -> RenderableType:
    """Makes a table of members: those that need attention first if not all fit, otherwise by rank."""
    behind = stragglers(detail)
    rows = [(status, *state_of(status, detail, behind.get(status.member.member_id))) for status in detail.members]
    gone = list(detail.gone)[::-1]
    left_out = 0
    if most is not None and len(rows) + len(gone) > most:
        gone = gone[: max(1, most // 2)]
        room = max(0, most - len(gone))
        rows.sort(key=lambda row: row[2] == "green")  # stable: each part keeps its order
        left_out = len(rows) - room
        rows = rows[:room]
    shows_speeds = any(status.progress.speed for status in detail.members)
    shows_usage = any(status.progress.memory for status in detail.members)
    extra = (*(("samples/s", "share") if shows_speeds else ()), *(("cores", "memory") if shows_usage else ()))
    table = _table("rank", "host", "pid", "step", *extra, "state")
    for status, text, style in rows:
        process, step = status.member.process, step_of(status, detail, behind.get(status.member.member_id))
        rank = _rank(status, detail.summary.replica_size)
        speeds = _speed_and_share(status.progress) if shows_speeds else ()
        usage = _cores_and_memory(status.progress) if shows_usage else ()
        table.add_row(rank, _plain(process.host), str(process.pid), step, *speeds, *usage, Text(text, style))
    for ended in gone:
        process = ended.member.process
        rank = _rank(ended, detail.summary.replica_size)
        dashes = ("-",) * len(extra)
        how = Text(_gone_text(ended), "red")
        table.add_row(rank, _plain(process.host), str(process.pid), "-", *dashes, how, style="dim")
    return Group(table, Text(f"and {left_out} more", "dim")) if left_out > 0 else table


def _speed_and_share(progress: Heartbeat) -> tuple[str, str]:
    """Writes the samples that a member computes in a second, and its part of a batch."""
    speed = f"{progress.speed:.3g}" if progress.speed < 1000 else f"{progress.speed:.0f}"
    return speed if progress.speed else "-", f"{progress.share:.1%}" if progress.share else "-"


def _cores_and_memory(progress: Heartbeat) -> tuple[str, str]:
    """Writes the processor time and the memory that a member uses."""
    memory = progress.memory / 1e9
    return (
        f"{progress.cpu:.1f}" if progress.cpu else "-",
        "-" if not memory else f"{memory:.1f} GB" if memory >= 1 else f"{1000 * memory:.0f} MB",
    )


def why_text(job: JobSummary) -> str:
    """Returns the coordinator's sentence about a job, and for how long it has been true if the job waits or hangs."""
    if job.stall:
        return f"stalled for {seconds(job.stalled):.0f} s: {job.stall}"
    return f"{job.reason}; for {seconds(job.waited):.0f} s now" if job.HasField("waited") else job.reason


def _gone_text(gone: GoneMember) -> str:
    """Says how and when a member has ended, to complete "rank 2 ..."."""
    return f"{printable(gone.how)}, {seconds(gone.ago):.0f} s ago"


def _events(events: Sequence[JobEvent]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for event in reversed(events):
        at = datetime.fromtimestamp(event.at.ToNanoseconds() / 1e9).astimezone()
        table.add_row(f"{at:%H:%M:%S}", _plain(event.text))
    return table


def _table(*columns: str) -> Table:
    """Makes a table without lines, whose cells go on in the next row instead of being cut."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        number = name in ("rank", "pid", "step", "samples/s", "share", "cores", "memory", "rate", "lost")
        table.add_column(name, overflow="fold", justify="right" if number else "left", no_wrap=number)
    return table


def _plain(text: str) -> Text:
    """Makes text that a user or a member chose safe to draw."""
    return Text(printable(text), overflow="fold")


def phase_text(job: JobSummary) -> Text:
    """Returns a job's phase in its colour; a job that hangs is "stalled"."""
    name = "stalled" if job.stall else phase_name(job)
    return Text(name, PHASE_STYLE.get(name, ""))


def _workers(job: JobSummary) -> str:
    if not job.max_workers:
        return str(job.world_size)
    least, most = job.min_workers, job.max_workers
    bounds = str(least) if least == most else f"{least} to {most}"
    if (size := job.replica_size) > 1:
        return f"{job.world_size // size} ({bounds}) replicas of {size} ranks"
    return f"{job.world_size} ({bounds})"


def _step(job: JobSummary) -> str:
    step = job.totals.step
    return "-" if not step else f"{step} of {job.total}" if job.total else str(step)


def _rate(totals: JobTotals) -> str:
    """Writes steps in a second; of a job without steps, collectives in a second."""
    if totals.steps_per_second:
        return f"{totals.steps_per_second:.1f} steps/s"
    if totals.step or not totals.operations_per_second:
        return "-"
    return f"{totals.operations_per_second:.0f} operations/s"


def _about(seconds_: float) -> str:
    """Writes a time in the largest unit of which there are two."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds_ >= 2 * size:
            return f"{seconds_ / size:.0f} {unit}"
    return f"{seconds_:.0f} s"


def _trouble(text: str) -> Text:
    return Text(printable(text), "bold red")
