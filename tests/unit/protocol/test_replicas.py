"""Replicas of a job: views have whole ones, and nobody waits for a rank that is known to have ended."""

from __future__ import annotations

import pytest
from unit.protocol.replicas import BEGINNING, ReplicaJob

from paceline_protocol import Meet, Process, Report, Tag
from paceline_protocol._replicas import apart, of_one_mind, torn_apart, whole
from paceline_protocol.coordinator import (
    BadRequest,
    DrainAsked,
    MetOthers,
    ReplicaLost,
    Reported,
    ViewStored,
)
from paceline_protocol.messages import CatchUp, Dismissed, Mismatch, Missing, Running, Spare, StateLost, Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason

LOST = ErrorReason.ERROR_REASON_PEER_LOST
TIMEOUT = ErrorReason.ERROR_REASON_TIMEOUT


# The first view -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_the_first_view_has_mates_side_by_side_however_they_come(size: int) -> None:
    job = ReplicaJob(size, most=2)
    for position in reversed(range(size)):
        job.come(f"B{position}", f"A{position}")
    assert job.seats() == job.replica("B", "A")
    assert [job.names[seat.member_id] for seat in job.state.live.seats if seat.number == 1] == job.replica("A")


def test_a_replica_that_comes_half_is_not_waited_for() -> None:
    job = ReplicaJob(least=1, most=3)
    job.come("A0", "B0", "A1")
    job.pass_time(1.0, list(job.ids.values()))
    assert job.seats() == job.replica("A")


def test_the_sentence_says_which_ranks_of_a_replica_are_there() -> None:
    job = ReplicaJob(3, least=1, most=1)
    job.come("A2", "A0")
    assert job.reason == (
        "waiting for the other ranks of 1 replica, of which host-A2 (pid 102), host-A0 (pid 100) are there"
    )
    job.come("A1")
    assert job.seats() == ["A0", "A1", "A2"]


def test_the_minimum_counts_replicas() -> None:
    job = ReplicaJob(least=2, most=2)
    job.come("A0", "A1", "B0")
    assert job.reason == "waiting for 1 more replica (1 of at least 2)"


def test_ranks_of_half_a_replica_that_want_to_leave_may() -> None:
    job = ReplicaJob(least=2, most=2)
    job.come("A0")
    job.meet("A0", leaving=True)
    assert job.told(job.pass_time(1.0, [job.ids["A0"]]), Dismissed)


def test_a_rank_gets_replica_lost_if_its_mate_leaves_before_the_first_view() -> None:
    job = ReplicaJob(least=2, most=2)
    job.come("A0", "A1")
    job.leave(job.ids["A0"])
    assert job.lost == {"A1": "host-A0 (pid 100), a rank of this worker's replica, left the job"}


def test_a_rank_gets_replica_lost_if_its_mate_is_dismissed_as_a_candidate() -> None:
    job = ReplicaJob()
    job.trains("A")
    job.come("B0", "B1")
    job.meet("B0", leaving=True)  # its mate has yet to say that it is ready
    job.leave(job.ids["B0"])
    assert "left the job" in job.lost["B1"]


# Newcomers ------------------------------------------------------------------------------------------------------------


def test_a_replica_joins_once_all_its_ranks_are_ready() -> None:
    job = ReplicaJob()
    job.trains("A")
    job.come("B0", "B1")
    job.meet("B0")
    assert job.reason == "1 replica is training"
    job.meet("B1")
    assert job.reason == "1 replica is training; 1 new replica will join after this step"
    job.meet("A0", "A1", tag=Tag(2, 1))
    assert job.seats() == job.replica("A", "B")
    assert job.state.live.newcomers == (2, 3)


def test_a_newcomer_is_told_of_the_members_with_its_position() -> None:
    job = ReplicaJob()
    job.trains("A")
    job.come("B1")
    assert job.told(job.effects, Running)["B1"].position == 1  # and the job has looked at the members themselves


def test_a_replica_of_which_one_rank_trains_something_else_gets_no_seat() -> None:
    job = ReplicaJob(least=1, most=3)
    job.trains("A")
    job.come("B0", "B1")
    job.meet("B0")
    effects = job.meet("B1", manifest=b"other")
    assert job.told(effects, Mismatch)["B1"].donor.member_id == job.ids["A1"]
    assert job.reason == "1 replica is training"
    job.meet("A0", "A1", tag=Tag(2, 1))
    assert job.seats() == job.replica("A")


# A rank ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dead", [0, 1])
def test_the_mates_of_a_rank_that_was_killed_hear_it_once_and_the_others_go_on(size: int, dead: int) -> None:
    job = ReplicaJob(size)
    job.trains("A", "B")
    effects = job.dies(f"B{dead}")
    text = f"rank {dead} of replica 1 (host-B{dead}, pid {100 + dead})"
    told = job.told(effects, Verdict)
    assert {*told} >= {*job.replica("A")}
    assert all(verdict.culprits == (1,) and verdict.text.startswith(text) for verdict in told.values())
    assert set(job.lost) == {*job.replica("B")} - {f"B{dead}"}
    assert job.lost[f"B{1 - dead}"] == f"{text}, a rank of this worker's replica, was killed by SIGKILL"
    job.meet(*job.replica("A"), tag=Tag(2, 5))
    assert job.seats() == job.replica("A")


def test_mates_that_are_killed_together_make_one_verdict() -> None:
    job = ReplicaJob()
    job.trains("A", "B")
    job.dies("B0", "B1")
    assert not job.lost or set(job.lost) == {"B1"}
    job.meet("A0", "A1", tag=Tag(2, 1))
    assert job.seats() == job.replica("A")


def test_a_rank_does_not_come_back_to_a_replica_that_has_lost_one() -> None:
    job = ReplicaJob()
    job.trains("A", "B")
    job.dies("B0")
    with pytest.raises(ReplicaLost, match=r"rank 0 of replica 1 \(host-B0, pid 100\).*was killed by SIGKILL"):
        job.come("B1")


def test_a_rank_that_waits_for_its_mate_hears_when_that_one_ends_generations_later() -> None:
    job = ReplicaJob()
    job.trains("A", "B")
    job.falls_silent("B0")
    job.meet("A0", "A1", tag=Tag(2, 1))
    assert job.seats() == job.replica("A")
    assert job.is_here("B1")
    job.dies("B0")
    assert set(job.lost) == {"B1"}


def test_a_rank_hears_that_a_silent_mate_which_never_had_a_seat_has_ended() -> None:
    job = ReplicaJob()
    job.come("A0", "A1", "B0", "B1")
    job.cut(job.ids["A0"])
    job.pass_time(5.0, [job.ids[name] for name in ("A1", "B0", "B1")])
    assert not job.is_here("A0")
    assert job.is_here("A1")
    job.dies("A0")
    assert set(job.lost) == {"A1"}


def test_the_last_replica_ends_and_another_begins_a_new_line() -> None:
    job = ReplicaJob()
    job.trains("A")
    job.dies("A0")
    assert set(job.lost) == {"A1"}
    job.come("B0", "B1")
    job.pass_time(5.0, [job.ids["B0"], job.ids["B1"]])
    assert job.seats() == job.replica("B")


def test_a_replica_does_not_lead_if_one_rank_has_lost_its_state() -> None:
    job = ReplicaJob()
    job.trains("A", "B")
    job.dies("A0")
    job.meet("B0", tag=Tag(2, 4))
    job.meet("B1", tag=None)
    assert job.state.live is None
    job.pass_time(5.0, [job.ids["B0"], job.ids["B1"]])
    assert not job.is_here("B1")
    job.pass_time(1.0)
    assert job.lost["B0"].endswith("a rank of this worker's replica, held no state")


# A rank is silent -----------------------------------------------------------------------------------------------------


def test_a_silent_rank_and_its_mates_come_back_and_get_seats() -> None:
    job = ReplicaJob()
    job.trains("A", "B")
    job.falls_silent("B0")
    effects = job.meet("A0", "A1", tag=Tag(2, 1))
    assert {*job.told(effects, Spare)} == {"B1"}
    assert not job.lost
    job.come("B0")
    job.meet("B0", "B1", tag=Tag(2, 0))
    job.meet("A0", "A1", tag=Tag(3, 2))
    assert job.seats() == job.replica("A", "B")


def test_a_replica_comes_back_while_the_others_wait_for_it() -> None:
    job = ReplicaJob(least=2, most=2)
    job.trains("A", "B")
    job.falls_silent("B0")
    job.meet("A0", "A1", "B1", tag=Tag(2, 3))
    assert job.reason.startswith("waiting for 1 more replica (1 of at least 2)")
    job.come("B0")
    assert {*job.told(job.effects, Spare)} == {"B1"}
    job.meet("B0", "B1", tag=Tag(2, 3))
    assert job.seats() == job.replica("A", "B")


def test_the_only_replica_goes_on_when_its_silent_rank_comes_back() -> None:
    job = ReplicaJob(most=1)
    job.trains("A")
    job.falls_silent("A1")
    job.meet("A0", tag=Tag(2, 7))
    assert "rank 1 of replica 0 (host-A1, pid 101) is silent and may hold the job's state" in job.reason
    job.come("A1")
    job.meet("A1", tag=Tag(2, 7))
    job.meet("A0", tag=Tag(2, 7))
    job.pass_time(4.0, [job.ids["A0"], job.ids["A1"]])
    job.meet("A0", "A1", tag=Tag(2, 7))
    assert job.seats() == ["A0", "A1"]
    assert job.state.live.base == Tag(2, 7)


def test_workers_on_the_host_of_a_lost_rank_are_asked_whether_it_has_ended() -> None:
    job = ReplicaJob()
    job.come(*job.replica("A", "B"))
    for name in ("B0", "B1"):
        job.becomes(job.ids[name], Process("host-B", 100 + int(name[1]), "boot", 7, 9))
    job.pass_time(1.0, list(job.ids.values()))
    job.meet(*job.replica("A", "B"))
    job.falls_silent("B0")
    job.meet("A0", "A1", tag=Tag(2, 1))
    assert job.seats() == job.replica("A")
    asked = job.told(job.pass_time(6.0, [job.ids[name] for name in ("A0", "A1", "B1")]), Missing)
    assert [process.pid for process in asked["B1"].processes] == [100]


# Leaving --------------------------------------------------------------------------------------------------------------


def test_a_replica_leaves_when_one_of_its_ranks_does() -> None:
    job = ReplicaJob()
    job.trains("A", "B")
    job.do(DrainAsked((job.ids["B1"],), "drained"))
    job.meet("A0", "A1", "B0", tag=Tag(2, 1))
    effects = job.meet("B1", tag=Tag(2, 1), leaving=True)
    assert job.seats() == job.replica("A")
    assert {*job.told(effects, Dismissed)} == {"B0", "B1"}
    job.leave(job.ids["B0"])
    job.leave(job.ids["B1"])
    assert not job.lost


def test_all_replicas_leave_and_write_the_last_checkpoint_together() -> None:
    job = ReplicaJob()
    job.trains("A", "B")
    job.meet("A0", "A1", "B0", tag=Tag(2, 1), leaving=True)
    effects = job.meet("B1", tag=Tag(2, 1))
    assert {*job.told(effects, Dismissed)} == {*job.replica("A", "B")}
    assert all(dismissed.last for dismissed in job.told(effects, Dismissed).values())


def test_a_mate_that_stays_in_a_live_view_is_missed_once_the_view_is_void() -> None:
    job = ReplicaJob()
    job.trains("A", "B")
    job.leave(job.ids["B0"])
    assert not job.lost, "its mate may be about to leave too"
    job.report(job.ids["A0"], LOST, 1)
    assert set(job.lost) == {"B1"}


def test_a_mate_that_meets_the_others_is_not_waited_for_when_a_rank_has_left() -> None:
    job = ReplicaJob()
    job.come("A0", "A1")
    job.pass_time(0.3)  # a first view forms, whose members have yet to compare what they hold
    job.meet("A1")
    job.leave(job.ids["A0"])
    assert "left the job" in job.lost["A1"]
    job.come("B0", "B1")
    job.pass_time(5.0, [job.ids["B0"], job.ids["B1"]])
    assert job.seats() == job.replica("B")


def test_a_rank_can_leave_while_its_mate_is_silent() -> None:
    job = ReplicaJob(least=2, most=2)
    job.trains("A", "B")
    job.falls_silent("B0")
    job.meet("A0", "A1", tag=Tag(2, 3))
    assert {*job.told(job.meet("B1", tag=Tag(2, 3), leaving=True), Spare)} == {"B1"}
    assert {*job.told(job.meet("B1", tag=Tag(2, 3), leaving=True), Dismissed)} == {"B1"}


def test_a_rank_that_ends_while_its_view_is_stored_makes_that_void() -> None:
    job = ReplicaJob()
    job.trains("A", "B")
    job.come("C0", "C1")
    job.meet("C0", "C1")
    job.slow_disk = True
    job.meet(*job.replica("A", "B"), tag=Tag(2, 3))
    job.dies("C1")
    job.slow_disk = False
    effects = job.do(ViewStored(3))
    assert set(job.lost) == {"C0"}
    assert {*job.told(effects, Verdict)} >= {*job.replica("A", "B")}
    job.meet(*job.replica("A", "B"), tag=Tag(2, 3))
    assert job.seats() == job.replica("A", "B")


# States ---------------------------------------------------------------------------------------------------------------


def test_a_replica_that_is_a_step_ahead_gives_its_state_by_position() -> None:
    job = ReplicaJob()
    job.trains("A", "B", "C")
    job.dies("C1")
    job.meet("B0", "B1", tag=Tag(2, 4))
    effects = job.meet("A0", "A1", tag=Tag(2, 3))
    orders = job.told(effects, CatchUp)
    assert {name: [job.names[donor.member_id] for donor, _ in order.holders] for name, order in orders.items()} == {
        "A0": ["B0"],
        "A1": ["B1"],
    }
    assert all(order.base == Tag(2, 4) for order in orders.values())
    job.meet("A0", "A1", tag=Tag(2, 4))
    assert job.seats() == job.replica("A", "B")


def test_a_replica_torn_apart_by_the_death_of_its_donor_begins_anew() -> None:
    job = ReplicaJob(most=2)
    job.trains("A", "B")
    job.dies("B0")  # B1 is ended with it
    job.meet("A0", tag=Tag(2, 4))  # it has taken it from B, before that died; the other one has not
    job.meet("A1", tag=Tag(2, 3))
    job.pass_time(5.0, [job.ids["A0"], job.ids["A1"]])
    job.meet("A0", "A1", tag=BEGINNING)
    job.pass_time(5.0, [job.ids["A0"], job.ids["A1"]])
    job.meet("A0", "A1", tag=BEGINNING)
    assert job.seats() == job.replica("A")
    assert job.state.live.base == BEGINNING


def test_mates_that_hold_different_states_are_told_that_the_state_is_lost() -> None:
    job = ReplicaJob(most=2)
    job.trains("A", "B")
    job.dies("B0")
    job.meet("A0", tag=Tag(2, 4))
    effects = job.meet("A1", tag=Tag(2, 3)) + job.pass_time(5.0, [job.ids["A0"], job.ids["A1"]])
    assert {*job.told(effects, StateLost)} == {"A0", "A1"}


def test_mates_that_hold_different_states_take_the_state_of_a_replica_that_comes_back() -> None:
    job = ReplicaJob(most=2)
    job.trains("A", "B")
    job.falls_silent("B0", "B1")
    job.meet("A0", tag=Tag(2, 4))  # it has taken it from B, before that fell silent
    job.meet("A1", tag=Tag(2, 3))
    job.come("B0", "B1")
    effects = job.meet("B0", "B1", tag=Tag(2, 4))
    effects += job.pass_time(4.0, [job.ids[rank] for rank in ("A0", "A1", "B0", "B1")])
    assert not job.told(effects, StateLost)
    job.meet("A0", "B0", "B1", tag=Tag(2, 4))  # in the first view of a new line
    job.meet("A1", tag=Tag(2, 3))
    job.meet("A1", tag=Tag(2, 4))
    assert sorted(job.seats()) == job.replica("A", "B")
    assert job.state.live.base == Tag(2, 4)


def test_a_state_cannot_be_sharded_over_replicas() -> None:
    job = ReplicaJob()
    job.trains("A")
    with pytest.raises(BadRequest, match="each of them has a copy of its own"):
        job.do(MetOthers(job.ids["A0"], Meet(2, Tag(2, 1), True, node_size=0)))


# Blame ----------------------------------------------------------------------------------------------------------------


def test_a_broken_link_is_between_replicas() -> None:
    job = ReplicaJob()
    job.trains("A", "B", "C")
    job.report(job.ids["A1"], LOST, 2)
    job.report(job.ids["B1"], LOST, 2)
    job.pass_time(1.0, list(job.ids.values()))
    verdict = job.state.verdict
    assert verdict is not None
    assert verdict.culprits == (5,), "rank 1 of replica 2, as the coordinator counts"
    assert verdict.text == "rank 1 of replica 2 (host-C1, pid 101) was cut off: its links to replicas 0, 1 ended"
    assert job.session("A0").verdict.culprits == (2,)


def test_a_timeout_blames_ranks_with_the_position_of_its_reporter() -> None:
    job = ReplicaJob()
    job.trains("A", "B", "C")
    for name, operation in {"A0": 2, "B0": 9, "C0": 9, "A1": 9, "B1": 8, "C1": 9}.items():
        job.beat(job.ids[name], operation)
    job.report(job.ids["A1"], TIMEOUT, 1, "waited for 600 s", operation=9)
    job.pass_time(0.1, list(job.ids.values()))
    assert job.state.verdict is not None
    assert job.state.verdict.culprits == (3,)
    assert "rank 1 of replica 1 (host-B1, pid 101)" in job.state.verdict.text


def test_a_report_about_a_replica_that_is_not_there_is_refused() -> None:
    job = ReplicaJob()
    job.trains("A", "B")
    with pytest.raises(BadRequest, match="accuses rank 2 in a world of 2"):
        job.do(Reported(job.ids["A1"], 2, Report(-1, LOST, 2, 1, "the link ended")))


# Pieces ---------------------------------------------------------------------------------------------------------------


def test_a_new_session_counts_instead_of_the_old_one_of_the_same_rank() -> None:
    job = ReplicaJob()
    job.come("A0")
    job.cut(job.ids["A0"])
    old = job.session("A0")
    job.come("A0", former="")
    job.come("A1")
    there = list(job.state.sessions.values())
    assert old in there
    assert whole(there) == [job.session("A0"), job.session("A1")]
    assert [list(ranks) for ranks in apart(whole(there))] == [[job.session("A0"), job.session("A1")]]


def test_mates_of_one_mind_have_said_the_same() -> None:
    job = ReplicaJob()
    job.come(*job.replica("A", "B"))
    job.meet("A0", "A1", "B0")
    job.meet("B1", tag=Tag(1, 1))
    there = list(job.state.sessions.values())
    assert of_one_mind(there) == [job.session("A0"), job.session("A1")]
    assert torn_apart(there) == [job.session("B0"), job.session("B1")]
