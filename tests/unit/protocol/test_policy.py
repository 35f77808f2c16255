"""When a view forms, and the sentence that says why not yet."""

import pytest

from paceline_protocol.coordinator import Send, StoreView
from paceline_protocol.messages import ViewFormed, Waiting
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import PureJob, sent


def test_the_reason_counts_the_workers_missing_from_min_workers() -> None:
    job = PureJob()
    job.join(4, 8)
    assert job.reason == "waiting for 3 more workers (1 of at least 4)"
    job.join(4, 8)
    assert job.reason == "waiting for 2 more workers (2 of at least 4)"


def test_a_view_forms_at_once_with_max_workers() -> None:
    job = PureJob()
    members = job.form(3)
    assert [seat.member_id for seat in job.state.view.seats] == members
    assert [formed.rank for _, formed in sent(job.effects, ViewFormed)] == [0, 1, 2]


def test_members_of_one_host_get_ranks_side_by_side() -> None:
    job = PureJob()
    for host in ("b", "a", "c", "a", "b"):
        job.join(5, 5, host=host)
    assert [seat.process.host for seat in job.state.view.seats] == ["b", "b", "a", "a", "c"]
    assert [seat.member_id for seat in job.state.view.seats] == ["m1", "m5", "m2", "m4", "m3"]


def test_a_view_below_max_workers_forms_after_the_settle_time() -> None:
    job = PureJob(settle_time=0.2)
    job.join(2, 8)
    job.join(2, 8)
    assert job.state.view is None
    assert job.membership.next_deadline() == pytest.approx(job.now + 0.2)
    job.now += 0.15
    job.join(2, 8)  # an arrival starts the time anew
    job.now += 0.15
    job.pass_time(0.0)
    assert job.state.view is None
    job.pass_time(0.05)
    assert len(job.state.view.seats) == 3


def test_waiting_workers_give_departed_members_time_to_return() -> None:
    job = PureJob(settle_time=0.2)
    member = job.join(1, 8)
    job.pass_time(0.2)
    job.join(1, 8)
    job.join(1, 8)
    job.pass_time(1.0)
    job.report(member, ErrorReason.ERROR_REASON_PEER_RAISED, None, "another node has come")
    job.leave(member)
    job.pass_time(0.1)
    again = job.join(1, 8)
    job.pass_time(0.2)
    assert {seat.member_id for seat in job.state.view.seats} == {"m2", "m3", again}


def test_explicit_ranks_become_the_ranks_of_the_seats() -> None:
    job = PureJob()
    last = job.join(3, 3, rank=2)
    assert job.reason == "waiting for ranks 0, 1 of 3"
    first = job.join(3, 3, rank=0)
    assert job.reason == "waiting for rank 1 of 3"
    middle = job.join(3, 3, rank=1)
    assert [seat.member_id for seat in job.state.view.seats] == [first, middle, last]


def test_the_reason_for_a_huge_world_names_only_a_few_ranks() -> None:
    job = PureJob()
    job.join(2**31, 2**31, rank=0)
    assert job.reason.startswith("waiting for ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2147483639 more of 2147483648")


def test_a_candidate_without_a_stream_does_not_count() -> None:
    job = PureJob()
    first = job.join(2, 2)
    job.cut(first)
    job.join(2, 2)
    assert job.reason == "waiting for 1 more worker (1 of at least 2)"
    job.resume(first, 0)
    assert len(job.state.view.seats) == 2


def test_a_newcomer_waits_while_a_generation_is_live() -> None:
    job = PureJob()
    job.form(2)
    job.join(2, 2)
    assert Send("m3", Waiting("2 workers are training; 1 more waits until they have ended")) in job.effects


def test_workers_beyond_max_workers_wait() -> None:
    job = PureJob(settle_time=0.2)
    job.slow_disk = True
    for _ in range(3):
        job.join(1, 2)
    (store,) = [effect for effect in job.effects if isinstance(effect, StoreView)] or [None]
    assert store is None  # the third came while the view of two was being stored
    assert job.reason == "generation 1 is being stored"
    assert [seat.member_id for seat in job.state.forming.seats] == ["m1", "m2"]


def test_a_changed_reason_is_announced_at_a_limited_rate() -> None:
    job = PureJob(announce_interval=0.5)
    job.join(9, 9)
    job.join(9, 9)
    assert Send("m1", Waiting("waiting for 7 more workers (2 of at least 9)")) in job.effects
    job.join(9, 9)
    told = [member_id for member_id, _ in sent(job.effects, Waiting)]
    assert told == ["m3"]
    assert job.membership.next_deadline() == pytest.approx(job.now + 0.5)
    told = [member_id for member_id, _ in sent(job.pass_time(0.5), Waiting)]
    assert told == ["m1", "m2"]
