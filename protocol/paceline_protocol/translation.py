"""Writes the protocol's values to protobuf and reads them, for the coordinator and the members alike.

Of what the coordinator says everything is here. Of what a member says only `Meet` is: the coordinator checks the rest
where it comes in (`paceline_server.wire`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline_protocol._refusals import BadRequest
from paceline_protocol._values import WHOLE, Meet, Member, Process, Share, Tag, Verdict
from paceline_protocol._versions import UNTOLD
from paceline_protocol.messages import (
    BarrierFailed,
    BarrierPassed,
    CatchUp,
    Dismissed,
    Drain,
    Finished,
    MemberList,
    Message,
    Mismatch,
    Missing,
    Running,
    Spare,
    StateLost,
    Summons,
    ViewFormed,
    Waiting,
)
from pacelinepb.v1 import session_pb2 as pb

__all__ = [
    "check_number",
    "read_meet",
    "read_member",
    "read_message",
    "write_meet",
    "write_member",
    "write_message",
    "write_process",
    "write_verdict",
]

_MOST_PARTS = 1 << 16

_STORABLE = 1 << 62
"""Numbers from outside must be below this: the state file has signed 64-bit integers, and the coordinator counts on
from some of them."""


def write_message(message: Message) -> pb.SessionResponse:
    """Converts what the coordinator says; a message about a view announces the list of its members."""
    match message:
        case Waiting(reason):
            return pb.SessionResponse(waiting=pb.Waiting(reason=reason))
        case ViewFormed():
            return pb.SessionResponse(view_formed=_write_view_formed(message))
        case Verdict():
            return pb.SessionResponse(verdict=write_verdict(message))
        case Running(MemberList() as members, ended, _):
            running = pb.Running(
                generation=members.generation,
                world_size=members.world_size,
                members_sha256=members.sha256,
                pages=members.pages,
                ended=ended,
            )
            return pb.SessionResponse(running=running)
        case Summons(generation):
            return pb.SessionResponse(summons=pb.Summons(generation=generation))
        case CatchUp(generation, base, holders, share, fingerprint):
            order = pb.CatchUp(
                generation=generation,
                base=_write_tag(base),
                holders=[pb.Holder(member=write_member(each), shares=_write_shares(has)) for each, has in holders],
                fingerprint=fingerprint,
            )
            if share is not None:
                order.share.CopyFrom(*_write_shares([share]))
            return pb.SessionResponse(catch_up=order)
        case Mismatch(donor):
            return pb.SessionResponse(mismatch=pb.Mismatch(donor=write_member(donor)))
        case Missing(processes):
            return pb.SessionResponse(missing=pb.Missing(processes=map(write_process, processes)))
        case Drain(reason):
            return pb.SessionResponse(drain=pb.Drain(reason=reason))
        case Dismissed(last):
            return pb.SessionResponse(dismissed=pb.Dismissed(last=last))
        case Spare(reason, generation):
            return pb.SessionResponse(spare=pb.Spare(reason=reason, generation=generation))
        case StateLost(reason):
            return pb.SessionResponse(state_lost=pb.StateLost(reason=reason))
        case Finished(step):
            return pb.SessionResponse(finished=pb.Finished(step=step))
        case BarrierPassed(call):
            return pb.SessionResponse(barrier_passed=pb.BarrierPassed(call=call))
        case BarrierFailed(call, why, text, culprits):
            failed = pb.BarrierFailed(call=call, reason=why, text=text, culprits=culprits)
            return pb.SessionResponse(barrier_failed=failed)
    raise AssertionError(f"the list of its members is not announced: {message}")


def read_message(response: pb.SessionResponse) -> Message | None:
    """Converts what a member hears; None if it is about the session itself, or of a later release."""
    match response.WhichOneof("event"):
        case "waiting":
            return Waiting(response.waiting.reason)
        case "view_formed":
            return _read_view_formed(response.view_formed)
        case "verdict":
            word = response.verdict
            return Verdict(word.generation, word.reason, tuple(word.culprits), word.operation, word.text)
        case "running":
            return Running(_read_list(response.running), tuple(response.running.ended))
        case "summons":
            return Summons(response.summons.generation)
        case "catch_up":
            order = response.catch_up
            holders = tuple((read_member(each.member), _read_shares(each.shares)) for each in order.holders)
            share = Share(order.share.part, order.share.parts) if order.HasField("share") else None
            return CatchUp(
                order.generation, Tag(order.base.generation, order.base.step), holders, share, order.fingerprint
            )
        case "mismatch":
            return Mismatch(read_member(response.mismatch.donor))
        case "missing":
            return Missing(tuple(map(_read_process, response.missing.processes)))
        case "drain":
            return Drain(response.drain.reason)
        case "dismissed":
            return Dismissed(response.dismissed.last)
        case "spare":
            return Spare(response.spare.reason, response.spare.generation)
        case "state_lost":
            return StateLost(response.state_lost.reason)
        case "finished":
            return Finished(response.finished.step)
        case "barrier_passed":
            return BarrierPassed(response.barrier_passed.call)
        case "barrier_failed":
            failed = response.barrier_failed
            return BarrierFailed(failed.call, failed.reason, failed.text, tuple(failed.culprits))
    return None


def _write_view_formed(message: ViewFormed) -> pb.ViewFormed:
    members = message.members
    assert isinstance(members, MemberList), "the coordinator announces the list when it sends the message"
    return pb.ViewFormed(
        generation=members.generation,
        world_size=members.world_size,
        rank=message.rank,
        members_sha256=members.sha256,
        pages=members.pages,
        base=None if message.base is None else _write_tag(message.base),
        newcomers=message.newcomers,
        lost=message.lost,
        protocol_version=message.version,
    )


def _read_view_formed(view: pb.ViewFormed) -> ViewFormed:
    base = Tag(view.base.generation, view.base.step) if view.HasField("base") else None
    version = view.protocol_version or UNTOLD.newest
    return ViewFormed(_read_list(view), view.rank, base, tuple(view.newcomers), view.lost, version)


def _read_list(view: pb.ViewFormed | pb.Running) -> MemberList:
    return MemberList(view.generation, view.world_size, view.members_sha256, view.pages)


def write_meet(meet: Meet) -> pb.Meet:
    """Converts what a member says when it has stopped."""
    said = pb.Meet(
        generation=meet.generation,
        tag=None if meet.tag is None else _write_tag(meet.tag),
        holds_base=meet.holds_base,
        fingerprint=meet.fingerprint,
        manifest=meet.manifest,
        leaving=meet.leaving,
        closed=meet.closed,
        prepared=None if meet.prepared is None else _write_tag(meet.prepared),
        unproven=meet.unproven,
    )
    if math.isfinite(meet.step_timeout):
        said.step_timeout.FromMilliseconds(round(1e3 * meet.step_timeout))
    if meet.node_size != 1:
        said.node_size, said.stored = meet.node_size, meet.stored
        said.shares.extend(_write_shares(meet.shares))
    return said


def read_meet(message: pb.Meet) -> Meet:
    """Reads what a member says at a meeting."""
    timeout = message.step_timeout
    if timeout.seconds < 0 or not 0 <= timeout.nanos < 1_000_000_000:
        raise BadRequest("meet.step_timeout must be a duration of 0 s or more")
    return Meet(
        generation=check_number(message.generation, "meet.generation"),
        tag=_check_tag(message.tag) if message.HasField("tag") else None,
        holds_base=message.holds_base,
        fingerprint=message.fingerprint,
        manifest=message.manifest,
        leaving=message.leaving,
        closed=message.closed,
        shares=_check_shares(message),
        node_size=message.node_size if message.HasField("node_size") else 1,
        prepared=_check_tag(message.prepared) if message.HasField("prepared") else None,
        stored=message.stored,
        unproven=message.unproven,
        step_timeout=timeout.seconds + timeout.nanos * 1e-9 if message.HasField("step_timeout") else math.inf,
    )


def _check_shares(message: pb.Meet) -> tuple[Share, ...]:
    if not message.HasField("node_size"):
        return (WHOLE,)
    if any(not share.part < share.parts <= _MOST_PARTS for share in message.shares):
        raise BadRequest(f"the part of a share must be below the number of parts, and that at most {_MOST_PARTS}")
    return _read_shares(message.shares)


def _check_tag(message: pb.Tag) -> Tag:
    return Tag(check_number(message.generation, "tag.generation"), check_number(message.step, "tag.step"))


def check_number(number: int, name: str) -> int:
    """Checks that a number can be stored, and counted on from."""
    if number >= _STORABLE:
        raise BadRequest(f"{name} must be below 2^62")
    return number


def write_member(member: Member) -> pb.Member:
    """Converts a member to its message."""
    process = write_process(member.process)
    return pb.Member(member_id=member.member_id, rank=member.rank, process=process, address=member.address)


def read_member(message: pb.Member) -> Member:
    """Converts a member from its message."""
    return Member(message.rank, message.member_id, _read_process(message.process), message.address)


def write_process(process: Process) -> pb.ProcessIdentity:
    """Converts a process to its message."""
    return pb.ProcessIdentity(
        host=process.host,
        pid=process.pid,
        boot_id=process.boot_id,
        start_ticks=process.start_ticks,
        pid_namespace=process.pid_namespace,
        node=process.node,
    )


def _read_process(of: pb.ProcessIdentity) -> Process:
    return Process(of.host, of.pid, of.boot_id, of.start_ticks, of.pid_namespace, of.node)


def write_verdict(verdict: Verdict) -> pb.Verdict:
    """Converts a verdict to its message."""
    return pb.Verdict(
        generation=verdict.generation,
        reason=verdict.reason,
        culprits=verdict.culprits,
        operation=verdict.operation,
        text=verdict.text,
    )


def _write_tag(tag: Tag) -> pb.Tag:
    return pb.Tag(generation=tag.generation, step=tag.step)


def _write_shares(shares: Iterable[Share]) -> list[pb.Share]:
    return [pb.Share(part=share.part, parts=share.parts) for share in shares]


def _read_shares(shares: Iterable[pb.Share]) -> tuple[Share, ...]:
    return tuple(Share(share.part, share.parts) for share in shares)
