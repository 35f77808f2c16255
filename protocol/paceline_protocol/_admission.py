"""Whether a worker may register, and whether a member may report what it reports, or hold what it says that it holds.

A refusal is an exception, and nothing has changed then. Its text names the difference, so that the user can
tell which of two command lines is wrong.
"""

from __future__ import annotations

import secrets

from paceline_protocol._events import Registered, Reported
from paceline_protocol._job_state import JobState, Session, Standing, is_loopback
from paceline_protocol._refusals import (
    BadRequest,
    InvalidRank,
    InvalidWorldSize,
    RankTaken,
    SettingsDisagree,
    VersionMismatch,
)
from paceline_protocol._values import JobSettings, Meet, Seat
from pacelinepb.v1.errors_pb2 import ErrorReason

_REPORTABLE = {
    ErrorReason.ERROR_REASON_PEER_LOST,
    ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL,
    ErrorReason.ERROR_REASON_PEER_RAISED,
    ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH,
    ErrorReason.ERROR_REASON_TIMEOUT,
    ErrorReason.ERROR_REASON_STEP_DIFFERS,
    ErrorReason.ERROR_REASON_STEP_SKIPPED,
    ErrorReason.ERROR_REASON_VERSION,
}


def check(state: JobState, claim: Registered) -> list[Session]:
    """Checks a claim against itself and against the live and waiting members of its job, or raises `Refused`.

    Returns the candidates without a stream that have the newcomer's rank, other settings or no version of the protocol
    in common with it, and give way to it: a worker that died before the first view and was started again must not be
    refused because of its own former session.

    Settings disagree also if one of the two advertises a loopback address, which the other cannot reach.
    """
    _check_alone(claim)
    if not claim.replica and _fits_all(state, claim):
        return []
    stale_sessions: list[Session] = []
    others: list[Session] = []
    for other in state.concerned():
        (stale_sessions if other.stream is None and other.standing is Standing.CANDIDATE else others).append(other)
    if others:
        _check_agreement(claim, others[0])
    for other in others:
        if _is_out_of_reach(claim, other):
            raise SettingsDisagree(_why_out_of_reach(claim, other))
    for mate in state.sessions.of_replica(claim.replica):
        if mate.position == claim.position and mate.stream is not None and not was_this_member(claim, mate):
            raise RankTaken(
                f"position {claim.position} of replica {claim.replica} of job {state.name!r} is claimed twice: by "
                f"{mate.process.host} (pid {mate.process.pid}), which has it, and by {claim.process.host} (pid "
                f"{claim.process.pid})"
            )
    for holder in others:
        if claim.claimed_rank is None or holder.claimed_rank != claim.claimed_rank or holder.stream is None:
            continue
        if was_this_member(claim, holder):  # itself: it has moved, and we have yet to notice
            continue
        raise RankTaken(
            f"rank {claim.claimed_rank} of job {state.name!r} is claimed twice: by {holder.process.host} "
            f"(pid {holder.process.pid}), which holds it, and by {claim.process.host} (pid {claim.process.pid})"
        )
    _check_versions(state, claim)
    return [stale for stale in stale_sessions if _in_the_way(claim, stale)]


def was_this_member(claim: Registered, known: Session | Seat) -> bool:
    """True if the worker proves that it was this member: ids are no secret, and a member's end voids its view."""
    if not claim.former_member_id or claim.former_member_id != known.member_id:
        return False
    return secrets.compare_digest(claim.former_token_sha256, known.token_sha256)


def check_report(session: Session, event: Reported) -> None:
    """Checks that a report can be about the member's generation."""
    if session.standing is Standing.CANDIDATE or event.generation > session.generation:
        raise BadRequest(f"a report about generation {event.generation}, which the member is not in")
    if event.report.reason not in _REPORTABLE:
        raise BadRequest(f"reason {event.report.reason} cannot be reported")


def check_meet(session: Session, met: Meet) -> None:
    """Checks that the shares of a member are of a state that its job can have cut so."""
    cuts, most = {share.parts for share in met.shares}, session.settings.max_workers
    if session.replica and met.node_size != 1:
        raise BadRequest("a meeting about a state that replicas share: each of them has a copy of its own")
    if (parts := max(cuts | {met.node_size})) > most:
        raise BadRequest(f"a meeting about a state in {parts} parts, in a job of at most {most} members")
    if met.node_size and (others := cuts - {1, met.node_size}):
        raise BadRequest(f"a meeting about a share of {min(others)} parts, where {met.node_size} members hold a state")


def _check_alone(claim: Registered) -> None:
    least, most = claim.settings.min_workers, claim.settings.max_workers
    if least < 1:
        raise InvalidWorldSize(f"min_workers must be 1 or more, not {least}")
    if most < least:
        raise InvalidWorldSize(f"max_workers ({most}) is below min_workers ({least})")
    size = claim.settings.replica_size
    if size < 1 or (size == 1) == bool(claim.replica):
        raise BadRequest(f"a worker with the replica {claim.replica!r}, in a job of replicas of {size}")
    if claim.position >= size:
        raise InvalidRank(f"position {claim.position} is outside a replica of {size}, whose first has number 0")
    if claim.claimed_rank is None:
        return
    if size > 1:
        raise InvalidRank("a rank of a replica cannot claim a rank in the job: the coordinator gives replicas numbers")
    if most != least:
        raise InvalidWorldSize(
            f"explicit ranks need min_workers and max_workers to be the world size, not {least} and {most}"
        )
    if claim.claimed_rank >= most:
        raise InvalidRank(f"rank {claim.claimed_rank} is outside the world of {most}: ranks go from 0 to {most - 1}")


def _fits_all(state: JobState, claim: Registered) -> bool:
    """True if the claim surely agrees with every session's, even where it need not agree."""
    sessions, rank = state.sessions, claim.claimed_rank
    if not sessions.all_agree(claim.settings, explicit=rank is not None) or (
        rank is not None and sessions.is_claimed(rank)
    ):
        return False
    return sessions.all_understand(claim.versions) and sessions.are_in_reach(claim.process, claim.address)


def _check_versions(state: JobState, claim: Registered) -> None:
    """Checks that the newcomer can be in any later view: each session that is not dismissed may be in the next one."""
    for other in state.sessions.values():
        if other.standing is Standing.DISMISSED or other.versions.overlap(claim.versions):
            continue
        if other.stream is None and other.standing is Standing.CANDIDATE:  # it gives way
            continue
        advice = "drain that one first (paceline drain)"
        if other.stream is None:
            advice = "wait until that one has come back, and drain it, or until it has been given up"
        elif other.standing is Standing.CANDIDATE:
            advice = "stop that one first"
        raise VersionMismatch(
            f"the worker at {claim.process.host} (pid {claim.process.pid}) speaks {claim.versions} of the protocol, "
            f"but the one at {other.process.host} (pid {other.process.pid}) speaks {other.versions}: start the worker "
            f"with that one's release, or {advice}"
        )


def _in_the_way(claim: Registered, stale: Session) -> bool:
    if claim.settings != stale.settings or (claim.claimed_rank is None) != (stale.claimed_rank is None):
        return True
    if _is_out_of_reach(claim, stale) or not claim.versions.overlap(stale.versions):
        return True
    return claim.claimed_rank is not None and claim.claimed_rank == stale.claimed_rank


def _is_out_of_reach(one: Registered | Session, other: Registered | Session) -> bool:
    """True if one of the two advertises a loopback address that the other cannot reach.

    Where both advertise one it is the machine that counts: its boot id, or its name where that is not known. Where one
    does not, it is on a network of its own (a container beside its host, say) if its host has another name.
    """
    here, there = one.process, other.process
    if here.host == there.host and here.boot_id == there.boot_id:
        return False
    loops = is_loopback(one.address) + is_loopback(other.address)
    if not loops:
        return False
    if here.boot_id and there.boot_id and here.boot_id != there.boot_id:
        return True
    if loops == 2 and here.boot_id and there.boot_id:
        return False
    return here.host != there.host


def _why_out_of_reach(claim: Registered, other: Session) -> str:
    local, far = (claim, other) if is_loopback(claim.address) else (other, claim)
    return (
        f"the worker at {local.process.host} (pid {local.process.pid}) advertises {local.address}, a loopback address, "
        f"which the worker at {far.process.host} (pid {far.process.pid}, {far.address}) cannot reach: start "
        "all workers with an address of the coordinator that every host can reach (--coordinator, "
        "PACELINE_COORDINATOR), or advertise another address (PACELINE_ADVERTISE)"
    )


def _check_agreement(claim: Registered, other: Session) -> None:
    for name, mine, theirs in _settings_side_by_side(claim.settings, other.settings):
        if mine != theirs:
            raise SettingsDisagree(
                f"{name} is {mine} at {claim.process.host} (pid {claim.process.pid}) but {theirs} at "
                f"{other.process.host} (pid {other.process.pid}) and the job's other members"
            )
    if (claim.claimed_rank is None) != (other.claimed_rank is None):
        explicit, free = (claim, other) if claim.claimed_rank is not None else (other, claim)
        raise SettingsDisagree(
            f"the rank is explicit ({explicit.claimed_rank}) at {explicit.process.host} (pid {explicit.process.pid}) "
            f"but left to the coordinator at {free.process.host} (pid {free.process.pid}): set it for all workers or "
            "for none"
        )


def _settings_side_by_side(mine: JobSettings, theirs: JobSettings) -> list[tuple[str, object, object]]:
    return [
        ("min_workers", mine.min_workers, theirs.min_workers),
        ("max_workers", mine.max_workers, theirs.max_workers),
        ("failure_timeout", f"{mine.failure_timeout:g} s", f"{theirs.failure_timeout:g} s"),
        ("the table of schedules (PACELINE_TUNING)", mine.tuning or "none", theirs.tuning or "none"),
        ("the number of ranks of a replica", mine.replica_size, theirs.replica_size),
    ]
