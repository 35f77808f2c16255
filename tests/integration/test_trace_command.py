"""`paceline debug trace` of three workers, one of which is killed in the middle of training."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline._base.activity import FlightRecorder
from paceline._session.answers import record_answer, whole_record
from paceline.cli.debug import trace_command
from paceline.testing import coordinator
from pacelinepb.debug.gathered import Gathered
from pacelinepb.debug.records import read_record
from support.chrome_format import check_trace
from support.command import command
from support.processes import workers

TRAIN = """
from paceline import nn
with paceline.join(min_workers=1, max_workers=3) as session:
    model = paceline.DDP(nn.Sequential(nn.Linear(8, 4, rng=np.random.default_rng(1))), session.group)
    optimizer = paceline.optim.SGD(model, lr=0.1)
    state = paceline.TrainState(model=model, optimizer=optimizer)
    x, t = np.ones((4, 8), np.float32), np.zeros(4, np.int64)
    full = False
    for step in session.steps(state, total=1_000_000):
        with step:
            loss, dy = nn.softmax_cross_entropy(model(x), t)
            optimizer.zero_grad()
            model.backward(dy)
            optimizer.step()
        full = full or session.size == 3  # two may begin before the third is there
        if step.applied and full and (session.size == 2 or step.number >= 5):
            emit("applied", step=step.number, size=session.size, rank=session.rank)
            wait_for_go()
"""


def test_trace_shows_a_killed_worker_and_both_generations(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    environment = {"JOB": "digits", "FAILURE_TIMEOUT": "5"}
    with coordinator() as address, workers(3, TRAIN, COORDINATOR=address, **environment) as started:
        by_rank = {worker.expect("applied")["rank"]: worker for worker in started}
        by_rank[2].signal(signal.SIGKILL)
        for rank in (0, 1):
            by_rank[rank].go()
        assert {by_rank[rank].expect("applied")["size"] for rank in (0, 1)} == {2}
        result: dict[str, Any] = {}
        while not result or result["missing"]:  # until both have answered within a second
            with command("debug", "trace", "digits", "--coordinator", address, "-o", str(out), "--json") as ended:
                assert ended.wait() == 0, str(ended)
                result = json.loads(ended.stdout.splitlines()[-1])
    assert (result["job"], result["members"], result["missing"]) == ("digits", 2, [])
    assert 0 < result["uncertainty_s"] < 10
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    trace = json.loads(out.read_text())
    check_trace(trace)
    events = trace["traceEvents"]
    assert {each["pid"] for each in events if each["ph"] == "X"} == {0, 1}
    operations = [each for each in events if each["ph"] == "X" and each["cat"] == "all_reduce"]
    assert any(each["args"]["state"] == "failed" and "PeerLost" in each["args"]["error"] for each in operations)
    for drawn in (operations, [each for each in events if each.get("cat") == "step"]):
        assert len({each["args"]["generation"] for each in drawn}) >= 2, "before the kill and after it"
    assert any(each["ph"] == "f" for each in events)
    verdicts = [each["name"] for each in events if each["ph"] == "i" and each["cat"] == "verdict"]
    assert any(f"pid {by_rank[2].process.pid}" in text for text in verdicts), verdicts
    clocks = trace["otherData"]["clocks"]
    assert len(clocks) == 2
    assert clocks[0]["ahead_s"] == clocks[1]["ahead_s"], "one host, one clock"
    assert abs(clocks[0]["ahead_s"]) <= clocks[0]["uncertainty_s"], "it is the coordinator's, too"


def test_a_planted_symlink_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a file whose name others can foresee, in a folder in which they may write."""
    victim, out = tmp_path / "victim", tmp_path / "t.json"
    victim.write_text("precious")
    link = tmp_path / f"t.json.{os.getpid()}.tmp"
    link.symlink_to(victim)
    out.symlink_to(victim)
    record = read_record(record_answer(whole_record(FlightRecorder(), {"job": "digits", "member_id": "m"}), 5.0))
    found = Gathered("digits", "a test", [record], {}, [], {})
    monkeypatch.setattr(trace_command, "gather_records", lambda *_: found)
    trace_command.write_trace("digits", None, None, 1.0, out, as_json=False)
    assert victim.read_text() == "precious"
    assert not out.is_symlink()
    assert json.loads(out.read_text())["otherData"]["source"] == "a test"
    assert set(tmp_path.iterdir()) == {victim, link, out}
