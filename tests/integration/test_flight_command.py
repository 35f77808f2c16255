"""`paceline debug flight` against real workers: alive, late, dead, and over."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from paceline.testing import coordinator
from pacelinepb.debug.gathered import without_members
from pacelinepb.v1.admin_pb2 import GetJobResponse, JobPhase, JobSummary, JobTotals
from support.command import Command, command
from support.processes import workers

JOB = """
session = paceline.join(min_workers=3, max_workers=3)
g = session.group
g.all_reduce(np.ones(4, np.float32))
emit("summed", rank=g.rank)
if g.rank == 2:
    wait_for_go()
try:
    g.all_reduce(np.ones(1024, np.float32))
    emit("done")
except paceline.PacelineError as error:
    emit_error(error)
wait_for_go()
session.leave()
"""


TOKEN = "0123456789abcdef0123456789abcdef"


def flight(*arguments: str, code: int = 0, **environment: str) -> Command:
    with command("debug", "flight", *arguments, **environment) as ended:
        assert ended.wait() == code, str(ended)
        return ended


def findings(*arguments: str, **environment: str) -> list[dict[str, Any]]:
    ended = flight(*arguments, "--json", **environment)
    found: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])["findings"]
    return found


def findings_of_two_that_wait(*arguments: str, **environment: str) -> dict[str, dict[str, Any]]:
    """By kind, once two ranks have waited 0.5 s, and both have answered within the second that the command waits."""
    found: dict[str, dict[str, Any]] = {}
    while "wait" not in found or len(found["wait"]["waiting"]) < 2:
        found = {each["kind"]: each for each in findings(*arguments, **environment)}
    return found


def test_flight_names_a_late_rank_without_stopping_training() -> None:
    with coordinator(token=TOKEN) as address, workers(3, JOB, COORDINATOR=address, JOB="late", TOKEN=TOKEN) as three:
        by_rank = {worker.expect("summed")["rank"]: worker for worker in three}
        where = ("late", "--coordinator", address)
        found: list[dict[str, Any]] = []
        # Until they have waited 0.5 s, and all three have answered within the second that the command waits for them.
        while [each["kind"] for each in found] != ["wait"] or len(found[0]["waiting"]) < 2:
            found = findings(*where, PACELINE_TOKEN=TOKEN)
        (first,) = found
        assert (first["operation"], sorted(first["waiting"])) == (2, ["0", "1"])
        assert first["text"].startswith("ranks 0, 1 have waited ")
        assert "s in all_reduce 2 (op=sum float32[1024]); rank 2 (" in first["text"]
        assert f", pid {by_rank[2].process.pid}): has not entered it: its last was all_reduce 1, done " in first["text"]
        assert "- ranks 0, 1 have waited" in flight(*where, PACELINE_TOKEN=TOKEN).stdout
        by_rank[2].go()
        for worker in three:
            worker.expect("done")
            worker.go()
        assert [worker.wait() for worker in three] == [0, 0, 0]


def test_flight_reports_no_answer_from_a_stopped_rank(tmp_path: Path) -> None:
    with coordinator() as address, workers(3, JOB, COORDINATOR=address, JOB="stopped", FAILURE_TIMEOUT="60") as three:
        by_rank = {worker.expect("summed")["rank"]: worker for worker in three}
        by_rank[2].signal(signal.SIGSTOP)
        found = findings_of_two_that_wait("stopped", "--coordinator", address)
        assert found["no answer"]["text"].endswith("has not answered within 1.0 s")
        assert list(found["no answer"]["missing"]) == ["2"]
        assert "has not answered" in found["wait"]["missing"]["2"]


def test_flight_names_the_dead_rank_live_and_from_dumps(tmp_path: Path) -> None:
    environment = {"FLIGHT_DIR": str(tmp_path), "JOB": "over", "FAILURE_TIMEOUT": "1"}
    with coordinator() as address, workers(3, JOB, COORDINATOR=address, **environment) as three:
        by_rank = {worker.expect("summed")["rank"]: worker for worker in three}
        findings_of_two_that_wait("over", "--coordinator", address)  # else one may not begin to wait at all
        by_rank[2].signal(signal.SIGKILL)
        for rank in (0, 1):
            by_rank[rank].expect("error")
        live = findings("over", "--coordinator", address)
        assert [each["kind"] for each in live] == ["wait", "no answer"]
        assert f"pid {by_rank[2].process.pid}) " in live[0]["missing"]["2"]
        # Whether the coordinator has ended its session yet, or only knows that its stream is gone.
        assert live[0]["missing"]["2"].endswith((" s ago", "is not connected"))
        for rank in (0, 1):
            by_rank[rank].go()
            assert by_rank[rank].wait() == 0
    (wait, silent) = findings("--dir", str(tmp_path))
    assert wait["kind"] == "wait"
    assert sorted(wait["waiting"]) == ["0", "1"]
    assert "which then failed (PeerLost" in wait["text"]
    assert wait["missing"] == {"2": "has left no record"}
    assert silent["text"] == "rank 2: has left no record"
    with command("debug", "flight", "over", PACELINE_FLIGHT_DIR=str(tmp_path)) as ended:
        assert ended.wait() == 0, str(ended)
        assert f"from the dumps in {tmp_path}" in ended.stdout


def test_flight_without_records_or_job_name_is_an_error(tmp_path: Path) -> None:
    assert "no flight record is there" in flight("--dir", str(tmp_path), code=1).stderr
    assert "name the job" in flight(code=2).stderr


def test_flight_trace_and_stacks_fail_for_a_job_without_members(tmp_path: Path) -> None:
    with coordinator() as address:
        with workers(1, "paceline.join(min_workers=1, max_workers=1).leave()", COORDINATOR=address, JOB="x") as one:
            assert [worker.wait() for worker in one] == [0]
        no_dump = f", and no dump is in {tmp_path}"
        for name, more in (("flight", no_dump), ("trace", no_dump), ("stacks", "")):
            with command("debug", name, "x", "--coordinator", address, PACELINE_FLIGHT_DIR=str(tmp_path)) as ended:
                assert ended.wait() == 1, str(ended)
                assert ended.stderr == f"paceline: job 'x' has no members now{more}\n"


def test_without_members_says_that_a_finished_job_is_done() -> None:
    done = GetJobResponse(summary=JobSummary(name="x", phase=JobPhase.JOB_PHASE_FINISHED), totals=JobTotals(step=100))
    assert without_members(done) == "job 'x' is done (last step 100): it has no members"
