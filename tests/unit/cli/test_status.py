"""The JSON shapes of jobs and members, and the table of jobs, of `paceline status`."""

from __future__ import annotations

import pytest

from paceline._base.rpc import duration
from paceline.cli.status import jobs_table
from pacelinepb.status_json import job_as_dict, member_as_dict
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
        "min_workers": 0,
        "max_workers": 0,
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
    }


def test_job_as_dict_of_a_finished_job() -> None:
    assert job_as_dict(admin_pb2.JobSummary(phase=admin_pb2.JOB_PHASE_FINISHED))["phase"] == "finished"


def test_jobs_table_has_a_row_for_each_job() -> None:
    assert jobs_table([SUMMARY, SUMMARY]).row_count == 2


def test_a_spare_has_no_rank() -> None:
    spare = member(False, "spare")
    assert member_as_dict(spare)["standing"] == "spare"
    assert member_as_dict(spare)["rank"] is None
