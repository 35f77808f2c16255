"""The ranks of a replica exchange words over a Gloo group of their own, and notice that one has ended."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from pytorch.torch_ranks import finish

from support.processes import Worker, workers

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(120)]

BEGIN = """
import torch
import torch.distributed as dist
from paceline._elastic.mates import Mates
from paceline._elastic.rounds import Point
from paceline.errors import ReplicaLost, UnsupportedOp
from paceline_protocol import StepFlag

folder = os.environ["PACELINE_FOLDER"]
try:
    os.mkdir(folder + "/first")
    rank = 0
except FileExistsError:
    rank = 1
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mates = Mates(dist.group.WORLD, grace=0.2)
emit("mate", rank=rank, id=mates.id, position=mates.position, size=mates.size)
"""

SPEAK = (
    BEGIN
    + """
emit("found", most=mates.agree([rank, 5 - rank]), digests=[d.hex() for d in mates.gather(bytes([rank, 7]))],
     joint=mates.joint(bytes([rank])).hex())
mates.enter(3)
passed = [int(mates.go(Point.BEGIN, StepFlag.JOIN if rank else StepFlag.STOP))]
if rank:
    mates.leave()
passed.append(mates.go(Point.BEGIN))
mates.enter(4)
passed.append(int(mates.go(Point.BEGIN)))
mates.closed()
try:
    mates.refuse("checkpoint_dir")
except UnsupportedOp as error:
    emit("rounds", passed=passed, refused=str(error))
dist.destroy_process_group()
"""
)

LOSE = (
    BEGIN
    + """
mates.enter(1)
if rank:
    wait_for_go()
else:
    try:
        if os.environ["PACELINE_WHERE"] == "round":
            mates.go(Point.BEGIN)
        else:
            dist.all_reduce(torch.zeros(1))
    except ReplicaLost as error:
        emit("lost", text=str(error), cause=type(error.__cause__).__name__)
    except RuntimeError as error:
        lost = mates.loss(error)
        emit("lost", text=str(lost), cause=type(lost.__cause__).__name__)
    threading.Event().wait()
"""
)

ALIVE = (
    BEGIN
    + """
mates.enter(1)
if rank:
    wait_for_go()
else:
    emit("lost", found=repr(mates.loss(ValueError("a bug of this rank alone"))))
    wait_for_go()
os._exit(0)
"""
)


def by_rank(both: list[Worker]) -> tuple[Worker, Worker, list[dict[str, Any]]]:
    """Returns the workers with rank 0 and 1, and what they said of themselves."""
    said = [worker.expect("mate", 60.0) for worker in both]
    first = said[0]["rank"]
    return both[first], both[1 - first], [said[first], said[1 - first]]


def test_mates_agree_in_rounds_and_stop_together(tmp_path: Path) -> None:
    with workers(2, SPEAK, FOLDER=str(tmp_path)) as both:
        zero, one, said = by_rank(both)
        assert [(each["position"], each["size"]) for each in said] == [(0, 2), (1, 2)]
        assert said[0]["id"] == said[1]["id"]
        assert len(said[0]["id"]) == 32
        found = [worker.expect("found") for worker in (zero, one)]
        assert [each["most"] for each in found] == [[1, 5]] * 2
        assert [each["digests"] for each in found] == [["0007", "0107"]] * 2
        assert found[0]["joint"] == found[1]["joint"]
        for worker in (zero, one):
            rounds = worker.expect("rounds")
            assert rounds["passed"] == [9, None, 0], "JOIN and STOP; a mate has left; the next generation"
            assert rounds["refused"].startswith("checkpoint_dir is not there for replicas")
            assert worker.wait() == 0, worker.stderr


@pytest.mark.parametrize("where", ["round", "collective"])
def test_a_rank_ends_after_its_mate_was_killed_even_if_its_script_goes_on(where: str, tmp_path: Path) -> None:
    with workers(2, LOSE, FOLDER=str(tmp_path), WHERE=where) as both:
        zero, one, _ = by_rank(both)
        one.signal(signal.SIGKILL)
        lost = zero.expect("lost")
        assert (lost["text"].partition(",")[0], lost["cause"]) == (
            "another rank of this worker's replica has ended",
            "RuntimeError",
        )
        assert zero.wait() == 1
        assert "this process still ran after 0.2 s, and ends now" in zero.stderr


def test_an_error_is_no_loss_while_the_mate_lives(tmp_path: Path) -> None:
    with workers(2, ALIVE, FOLDER=str(tmp_path)) as both:
        zero, _, _ = by_rank(both)
        assert zero.expect("lost")["found"] == "None"


def test_torchruns_world_of_one_rank_is_a_replica_that_trains_alone() -> None:
    ranks = """
import paceline
os.environ["TORCHELASTIC_RUN_ID"] = "run"
with paceline.join(replica=dist.group.WORLD) as session:
    assert (session.replica, session.replicas) == (0, 1)
"""
    finish(1, ranks, BACKEND="gloo")
