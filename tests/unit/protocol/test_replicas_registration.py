"""Ranks of replicas register, and come back after a restart of the coordinator, or are refused."""

from __future__ import annotations

import pytest
from unit.protocol.replicas import ReplicaJob

from paceline_protocol import Tag
from paceline_protocol.coordinator import (
    BadRequest,
    InvalidRank,
    RankTaken,
    ReplicaLost,
    RestartAsked,
    SettingsDisagree,
)

# The coordinator restarts ---------------------------------------------------------------------------------------------


def test_a_coordinator_that_restarts_knows_the_replicas_of_its_view() -> None:
    job = ReplicaJob()
    job.trains("A", "B")
    job.restarts_coordinator()
    for name in job.replica("A", "B"):
        job.resume(job.ids[name], 2)
    job.dies("B1")
    assert set(job.lost) == {"B0"}


def test_a_coordinator_that_restarts_ends_the_mates_of_a_rank_that_died_before() -> None:
    job = ReplicaJob()
    job.trains("A", "B")
    job.dies("A0")
    job.lost.clear()
    job.restarts_coordinator()
    for name in job.replica("B"):
        job.resume(job.ids[name], 2)
    job.meet("B0", "B1", tag=Tag(2, 1))
    assert job.seats() == job.replica("B")
    job.pass_time(3.5, [job.ids["B0"], job.ids["B1"]])
    with pytest.raises(ReplicaLost):
        job.come("A1")


def test_ranks_that_had_come_back_before_the_coordinator_restarts_come_back_again() -> None:
    job = ReplicaJob(least=2, most=2)
    job.trains("A", "B")
    job.falls_silent("B0")
    job.meet("A0", "A1", "B1", tag=Tag(2, 3))
    job.come("B0")
    job.restarts_coordinator()
    for name in job.replica("A"):
        job.resume(job.ids[name], 2)
    job.come("B0", "B1")
    job.meet(*job.replica("A", "B"), tag=Tag(2, 3))
    assert job.seats() == job.replica("A", "B")


def test_replicas_come_back_when_the_stored_state_is_old() -> None:
    job = ReplicaJob()
    job.trains("A", "B")
    job.restarts_coordinator()
    job.resume(job.ids["A0"], 9)  # a generation that the coordinator has never heard of
    job.come(*job.replica("A", "B"), floor=9)
    job.pass_time(5.0, [job.ids[name] for name in job.replica("A", "B")])
    assert job.seats() == job.replica("A", "B")


def test_replicas_that_an_operator_restarts_come_back_unless_a_rank_was_silent() -> None:
    job = ReplicaJob()
    job.trains("A", "B")
    job.cut(job.ids["B0"])
    job.do(RestartAsked())
    job.come("A0", "A1")
    with pytest.raises(ReplicaLost, match="declared dead by the operator"):
        job.come("B1")
    job.pass_time(5.0, [job.ids["A0"], job.ids["A1"]])
    assert job.seats() == job.replica("A")


# Who may register -----------------------------------------------------------------------------------------------------


def test_a_position_that_is_taken_is_refused() -> None:
    job = ReplicaJob()
    job.come("A0")
    with pytest.raises(RankTaken, match="position 0 of replica A of job 'job' is claimed twice: by host-A0"):
        job.come("A0", former="")


def test_a_position_outside_the_replica_is_refused() -> None:
    with pytest.raises(InvalidRank, match="position 2 is outside a replica of 2"):
        ReplicaJob(2).come("A2")


def test_replicas_of_different_sizes_do_not_mix() -> None:
    job = ReplicaJob(2)
    job.come("A0")
    with pytest.raises(SettingsDisagree, match="the number of ranks of a replica is 3 at host-B0"):
        job.come("B0", size=3)


def test_a_rank_of_a_replica_cannot_claim_a_rank() -> None:
    with pytest.raises(InvalidRank, match="the coordinator gives replicas numbers"):
        ReplicaJob(2, least=2, most=2).come("A0", rank=0)


@pytest.mark.parametrize(("replica", "size"), [("", 2), ("A", 1)])
def test_a_replica_has_an_id_and_more_than_one_rank(replica: str, size: int) -> None:
    job = ReplicaJob()
    with pytest.raises(BadRequest, match=f"in a job of replicas of {size}"):
        job.join(1, 2, replica=replica, size=size)
