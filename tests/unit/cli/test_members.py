"""Who holds the others up, by what heartbeats say."""

from __future__ import annotations

import pytest

from paceline._base.rpc import duration
from paceline.cli.admin import label
from paceline.cli.orders import connected
from pacelinepb.status_json import in_order, stragglers
from pacelinepb.v1 import admin_pb2, session_pb2


def member(
    rank: int,
    operation: int,
    since: float,
    *,
    inside: bool = True,
    silent: float = 0.2,
    attached: bool = True,
    in_view: bool = True,
) -> admin_pb2.MemberStatus:
    process = session_pb2.ProcessIdentity(host="node", pid=10 + rank)
    return admin_pb2.MemberStatus(
        member=session_pb2.Member(member_id=f"m{rank}", rank=rank, process=process),
        in_view=in_view,
        attached=attached,
        silent=duration(silent),
        progress=session_pb2.Heartbeat(operation=operation, since=duration(since), inside=inside),
        standing="training" if attached else "silent",
    )


def detail(*members: admin_pb2.MemberStatus, phase: int = admin_pb2.JOB_PHASE_RUNNING) -> admin_pb2.GetJobResponse:
    return admin_pb2.GetJobResponse(
        summary=admin_pb2.JobSummary(name="digits", phase=phase),  # type: ignore[arg-type]
        settings=session_pb2.JobSettings(min_workers=1, max_workers=4, failure_timeout=duration(3.0)),
        members=members,
    )


WAITING = member(0, 42, 2.0)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (member(1, 41, 2.04, inside=False), "has been computing for 2.0 s; others wait for it in operation 42"),
        (member(1, 41, 3.0), "has been in operation 41 for 3.0 s; others wait for it in operation 42"),
        (member(1, 0, 0.0, inside=False), "has entered no operation yet; others wait for it in operation 42"),
        (member(1, 42, 1.0), None),
        (member(1, 42, 0.1, inside=False), None),
        (member(1, 41, 2.0, inside=False, silent=2.5), None),  # what it did since the others entered is not known
        (member(1, 41, 2.0, inside=False, attached=False), None),  # silent is another thing than slow
        (member(1, 0, 0.0, inside=False, in_view=False), None),
    ],
)
def test_a_member_behind_a_waiting_rank_is_a_straggler(other: admin_pb2.MemberStatus, sentence: str | None) -> None:
    assert stragglers(detail(WAITING, other)).get("m1") == sentence
    assert "m0" not in stragglers(detail(WAITING, other))


def test_a_member_that_takes_five_times_as_long_for_its_share_is_a_straggler() -> None:
    members = [member(rank, 42, 0.0, inside=False) for rank in range(3)]
    for status, speed in zip(members, (100.0, 19.0, 120.0), strict=True):
        status.progress.speed, status.progress.share = speed, 1 / 3
    text = "takes 5.3 times as long as others for its share of the batch"
    assert stragglers(detail(*members)) == {"m1": text}
    members[1].progress.share = 0.2
    assert stragglers(detail(*members)) == {}, "it has a smaller share"
    members[1].progress.speed, members[1].progress.share = 0.0, 1 / 3
    assert stragglers(detail(*members)) == {}, "its speed is not known"


def test_a_short_wait_makes_no_straggler() -> None:
    assert stragglers(detail(member(0, 42, 0.3), member(1, 41, 0.3, inside=False, silent=0.1))) == {}


def test_without_a_waiting_rank_there_is_no_straggler() -> None:
    assert stragglers(detail(member(0, 42, 2.0, inside=False), member(1, 41, 2.0, inside=False))) == {}
    assert stragglers(detail()) == {}


def test_in_order_lists_silent_members_first() -> None:
    members = [member(0, 1, 0.0), member(1, 1, 0.0, attached=False), member(2, 1, 0.0)]
    assert [status.member.rank for status in in_order(members)] == [1, 0, 2]


def test_label_names_the_rank_or_the_member_id() -> None:
    assert label(member(3, 1, 0.0)) == "rank 3 (node, pid 13)"
    assert label(member(3, 1, 0.0, in_view=False)) == "member m3 (node, pid 13)"


@pytest.mark.parametrize(
    ("status", "phase", "is_connected"),
    [
        (member(0, 1, 0.0), admin_pb2.JOB_PHASE_RUNNING, True),
        (member(0, 1, 0.0, silent=3.5), admin_pb2.JOB_PHASE_RUNNING, False),
        (member(0, 1, 0.0, attached=False), admin_pb2.JOB_PHASE_RUNNING, False),
        (member(0, 1, 0.0, in_view=False), admin_pb2.JOB_PHASE_RUNNING, False),
        (member(0, 1, 0.0), admin_pb2.JOB_PHASE_VOID, False),
        (member(0, 1, 0.0), admin_pb2.JOB_PHASE_FINISHED, False),
    ],
)
def test_connected_lists_only_live_members_of_a_running_job(
    status: admin_pb2.MemberStatus, phase: int, is_connected: bool
) -> None:
    assert bool(connected(detail(status, phase=phase))) is is_connected
