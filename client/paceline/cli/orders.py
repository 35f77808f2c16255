"""`paceline drain` and `restart`: send an operator's order to a job, and print the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline._base.terminal import UsageError, say
from paceline.cli.admin import coordinator_of, drain, forget, get_job, is_heard, label, restart
from paceline.cli.output import print_json
from paceline.errors import PacelineError
from pacelinepb.v1.admin_pb2 import GetJobResponse, JobPhase, MemberStatus


def drain_members(
    coordinator: str | None, job: str, members: Sequence[str], timeout: float, *, everyone: bool, as_json: bool
) -> None:
    """Tells members, or `everyone`, to leave at the end of their step, and prints which ones were told."""
    if everyone and members:
        raise UsageError("name members, or say --all, but not both")
    if not everyone and not members:
        raise UsageError(f"name the members of {job!r} to drain (ranks or member ids, after the job), or say --all")
    address = coordinator_of(job, coordinator, timeout)
    before = {status.member.member_id: status for status in get_job(address, job, timeout).members}
    if everyone and not before:
        raise PacelineError(f"job {job!r} has no member that could leave")
    told = drain(address, job, members, timeout)
    # Of a member that joined between the two calls, only the id is known.
    known = [(member_id, before.get(member_id)) for member_id in told]
    for member_id, status in known:
        who = f"member {member_id}" if status is None else label(status)
        silent = ", once it is connected again" if status is not None and not status.attached else ""
        _say(f"{who} was told to leave at the end of its step{silent}", as_json)
    if everyone:
        _say(
            f"job {job!r} stops: it can be resumed from its checkpoints; without checkpoint_dir its state is lost",
            as_json,
        )
    if as_json:
        print_json({"job": job, "told": [_as_dict(member_id, status) for member_id, status in known]})


def restart_job(coordinator: str | None, job: str, timeout: float, *, force: bool, as_json: bool) -> None:
    """Declares a job's last workers dead, and prints which ones; with `force`, even if they are connected and train."""
    address = coordinator_of(job, coordinator, timeout)
    detail = get_job(address, job, timeout)
    alive = connected(detail)
    if alive and not force:
        raise PacelineError(
            f"job {job!r} is running, and {', '.join(map(label, alive))} {'is' if len(alive) == 1 else 'are'} "
            f"connected: to stop the job, use paceline drain {job} --all; to declare its members dead all the "
            "same, use --force"
        )
    dead = restart(address, job, timeout)
    for who in dead:
        _say(f"{who} was declared dead", as_json)
    if detail.summary.phase == JobPhase.JOB_PHASE_FINISHED:
        _say(f"job {job!r} was done; it starts anew with the workers that join now", as_json)
    elif dead:
        _say(f"job {job!r} starts again with the workers that wait or join", as_json)
    else:
        _say(f"job {job!r} has no member that could be declared dead; nothing has changed", as_json)
    if as_json:
        print_json({"job": job, "taken_for_dead": dead, "was_finished": _was_finished(detail)})


def forget_job(coordinator: str | None, job: str, timeout: float, *, as_json: bool) -> None:
    """Removes a job that is over from the coordinator."""
    forget(coordinator_of(job, coordinator, timeout), job, timeout)
    _say(f"job {job!r} is forgotten: its keys, its generation number, and whether it was done", as_json)
    if as_json:
        print_json({"job": job, "forgotten": True})


def connected(detail: GetJobResponse) -> list[MemberStatus]:
    """Returns the members of a running job's view that the coordinator hears; without force they stop a restart."""
    if detail.summary.phase != JobPhase.JOB_PHASE_RUNNING:
        return []
    return [status for status in detail.members if status.in_view and is_heard(status, detail.settings)]


def _was_finished(detail: GetJobResponse) -> bool:
    return bool(detail.summary.phase == JobPhase.JOB_PHASE_FINISHED)


def _as_dict(member_id: str, status: MemberStatus | None) -> dict[str, Any]:
    if status is None:
        return {"member_id": member_id, "rank": None, "host": None, "pid": None}
    process = status.member.process
    rank = status.member.rank if status.in_view else None
    return {"member_id": member_id, "rank": rank, "host": process.host, "pid": process.pid}


def _say(text: str, as_json: bool) -> None:
    """Prints a result for people, on standard output unless that carries JSON."""
    if as_json:
        say(text)
    else:
        print(text)
