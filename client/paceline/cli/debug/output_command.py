"""`paceline debug output`: the last lines that each worker has printed, as its `paceline run` keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline._base.terminal import printable
from paceline.cli.admin import ask_members, coordinator_of, get_job
from paceline.cli.output import print_json
from paceline.errors import PacelineError
from pacelinepb.debug.gathered import label_of, without_members
from pacelinepb.debug.output_answers import read_output_answer
from pacelinepb.status_json import seconds
from pacelinepb.v1.session_pb2 import QUESTION_OUTPUT, Member

PATIENCE_S = 1.0
"""Seconds to wait for each member."""


def show_output(job: str, ranks: Sequence[str], coordinator: str | None, timeout: float, *, as_json: bool) -> None:
    """Prints the last lines of the members with these ranks or ids; of all, and of those that have gone, without any.

    The coordinator keeps the lines of a few members that have gone, for a minute.
    """
    address = coordinator_of(job, coordinator, timeout)
    answers = ask_members(address, job, QUESTION_OUTPUT, timeout, members=ranks, patience=PATIENCE_S)
    detail = get_job(address, job, timeout)
    gone = [] if ranks else [each for each in detail.gone if each.output]
    if not answers and not gone:
        raise PacelineError(without_members(detail))
    found = [(each, *(([], each.trouble) if each.trouble else read_output_answer(each.data))) for each in answers]
    if as_json:
        members = [
            {**_place(each.member, each.rank), "lines": lines, "trouble": trouble} for each, lines, trouble in found
        ]
        ended = [
            {**_place(each.member, each.member.rank if each.in_view else None), "how": each.how}
            | {"ago_s": round(seconds(each.ago), 3), "lines": each.output.split("\n")}
            for each in gone
        ]
        print_json({"job": job, "members": members, "gone": ended})
        return
    for each, lines, trouble in found:
        print(printable(f"{each}: {trouble}" if trouble else f"{each}:" if lines else f"{each}: has printed nothing"))
        _print(lines)
    for last in gone:
        who = label_of(last.member, in_view=last.in_view)
        print(printable(f"{who} {last.how}, {seconds(last.ago):.1f} s ago:"))
        _print(last.output.split("\n"))


def _place(member: Member, rank: int | None) -> dict[str, Any]:
    return {"rank": rank, "member_id": member.member_id, "host": member.process.host, "pid": member.process.pid}


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"  {printable(line.expandtabs())}".rstrip())
