"""The JSON shapes of jobs and members, and the table of jobs, of `paceline status`."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from paceline._base.rpc import duration
from paceline.cli.pictures import job_picture, state_of
from paceline.cli.status import jobs_table
from pacelinepb.status_json import job_as_dict, member_as_dict, stragglers
from pacelinepb.v1 import admin_pb2, session_pb2


def member(in_view: bool, standing: str = "") -> admin_pb2.MemberStatus:
    process = session_pb2.ProcessIdentity(host="node[1]", pid=12)
    return admin_pb2.MemberStatus(
        member=session_pb2.Member(member_id="m", rank=0, process=process, address="10.0.0.1:5"),
        in_view=in_view,
        attached=True,
        silent=duration(0.25),
        progress=session_pb2.Heartbeat(operation=7, step=3),
        standing=standing or ("training" if in_view else "ready to join"),
    )


SUMMARY = admin_pb2.JobSummary(
    name="digits",
    phase=admin_pb2.JOB_PHASE_RUNNING,
    generation=3,
    world_size=4,
    waiting=1,
    reason="4 of at most 4 workers are in the view",
)


def test_job_as_dict_of_a_running_job() -> None:
    assert job_as_dict(SUMMARY) == {
        "name": "digits",
        "phase": "running",
        "generation": 3,
        "world_size": 4,
        "waiting": 1,
        "reason": "4 of at most 4 workers are in the view",
        "waited_s": None,
        "stalled_s": None,
        "stall": "",
        "min_workers": 0,
        "max_workers": 0,
        "replica_size": 1,
        "total": None,
        "left_s": None,
        "totals": {
            "committed": 0,
            "undone": 0,
            "samples": 0,
            "generations": 0,
            "members_lost": 0,
            "step": 0,
            "steps_per_second": 0.0,
            "goodput": 0.0,
            "sent_bytes": {},
            "operations": 0,
            "operations_per_second": 0.0,
            "logged": {},
            "checkpoint_step": 0,
            "checkpoint_ago_s": None,
        },
    }


def test_a_waiting_job_shows_for_how_long() -> None:
    summary = admin_pb2.JobSummary(name="digits", reason="waiting for 1 more worker", waited=duration(12.25))
    assert job_as_dict(summary)["waited_s"] == 12.25
    (cell,) = jobs_table([summary]).columns[-1].cells
    assert str(cell) == "waiting for 1 more worker; for 12 s now"


@pytest.mark.parametrize(("in_view", "rank"), [(True, 0), (False, None)])
def test_a_member_has_a_rank_only_in_a_view(in_view: bool, rank: int | None) -> None:
    assert member_as_dict(member(in_view)) == {
        "member_id": "m",
        "rank": rank,
        "host": "node[1]",
        "pid": 12,
        "address": "10.0.0.1:5",
        "attached": True,
        "silent_s": 0.25,
        "operation": 7,
        "inside": False,
        "doing": "",
        "step": 3,
        "standing": "training" if in_view else "ready to join",
        "straggler": None,
        "sent_bytes": {},
        "in_collectives_s": 0.0,
        "speed": 0.0,
        "share": 0.0,
        "cpu": None,
        "memory_bytes": None,
    }


def test_speeds_and_shares_are_shown_once_they_are_known() -> None:
    members = [member(True) for _ in range(3)]
    for rank, (status, speed) in enumerate(zip(members, (812.25, 400.0, 0.0), strict=True)):
        status.member.rank, status.member.member_id = rank, f"m{rank}"
        status.progress.speed, status.progress.share = speed, speed and 0.375
    assert (member_as_dict(members[0])["speed"], member_as_dict(members[0])["share"]) == (812.25, 0.375)

    def drawn() -> str:
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(job_picture(admin_pb2.GetJobResponse(summary=SUMMARY, members=members)))
        return console.export_text()

    assert re.search(r"step +samples/s +share +state", drawn())
    assert re.findall(r"3 +(\S+) +(\S+) +training", drawn()) == [("812", "37.5%"), ("400", "37.5%"), ("-", "-")]
    for status in members:
        status.progress.speed = 0.0
    assert "samples/s" not in drawn()


def test_job_as_dict_of_a_finished_job() -> None:
    assert job_as_dict(admin_pb2.JobSummary(phase=admin_pb2.JOB_PHASE_FINISHED))["phase"] == "finished"


def test_a_job_of_replicas_is_shown_with_the_numbers_of_its_replicas() -> None:
    summary = admin_pb2.JobSummary(name="digits", world_size=4, min_workers=1, max_workers=3, replica_size=2)
    members = [member(True) for _ in range(4)]
    for rank, status in enumerate(members):
        status.member.rank = rank
        status.member.member_id = f"m{rank}"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(job_picture(admin_pb2.GetJobResponse(summary=summary, members=members)))
    text = console.export_text()
    assert "workers 2 (1 to 3) replicas of 2 ranks" in text
    assert re.findall(r"^ *(\d\.\d) +node", text, re.MULTILINE) == ["0.0", "0.1", "1.0", "1.1"]


def test_a_rank_of_a_replica_lags_only_behind_ranks_of_its_position() -> None:
    members = [member(True) for _ in range(4)]
    for rank, status in enumerate(members):
        status.member.rank, status.member.member_id = rank, f"m{rank}"
        status.silent.CopyFrom(duration(0.1))
        status.progress.operation, status.progress.inside = (9, True) if rank % 2 else (7, True)
        status.progress.since.CopyFrom(duration(5.0))
    members[3].progress.operation = 8
    summary = admin_pb2.JobSummary(name="digits", replica_size=2)
    detail = admin_pb2.GetJobResponse(summary=summary, members=members)
    detail.settings.failure_timeout.CopyFrom(duration(3.0))
    assert set(stragglers(detail)) == {"m3"}
    assert state_of(members[1], detail)[0] == "waits in operation 9 for 5.0 s, for rank 1.1"


def test_jobs_table_has_a_row_for_each_job() -> None:
    assert jobs_table([SUMMARY, SUMMARY]).row_count == 2


def test_a_spare_has_no_rank() -> None:
    spare = member(False, "spare")
    assert member_as_dict(spare)["standing"] == "spare"
    assert member_as_dict(spare)["rank"] is None
