"""Named barriers: passing, timing out, and ending with the generation."""

import pytest

from paceline_protocol.coordinator import Send
from paceline_protocol.messages import BarrierFailed, BarrierPassed
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import PureJob, sent


def test_a_barrier_passes_when_all_members_have_entered() -> None:
    job = PureJob()
    members = job.form(3)
    assert job.enter(members[2], call=5) == []
    assert job.enter(members[0], call=6) == []
    assert job.enter(members[1], call=7) == [
        Send(members[2], BarrierPassed(5)),
        Send(members[0], BarrierPassed(6)),
        Send(members[1], BarrierPassed(7)),
    ]


def test_barriers_are_distinguished_by_name_and_round() -> None:
    job = PureJob()
    first, second = job.form(2)
    job.enter(first, "a", 0)
    job.enter(first, "b", 0)
    assert job.enter(second, "a", 1) == []
    assert len(job.enter(second, "b", 0)) == 2


def test_a_repeated_entry_is_answered_once_under_its_last_call() -> None:
    job = PureJob()
    first, second = job.form(2)
    job.enter(first, call=1)
    job.enter(first, call=9)
    assert job.enter(second, call=2) == [Send(first, BarrierPassed(9)), Send(second, BarrierPassed(2))]


def test_a_member_that_missed_barrier_passed_gets_it_when_it_reenters() -> None:
    job = PureJob()
    first, second = job.form(2)
    job.enter(first)
    job.enter(second)
    job.cut(first)
    job.resume(first, 1)
    assert job.enter(first, call=8) == [Send(first, BarrierPassed(8))]


def test_a_timeout_withdraws_one_member_and_lists_the_missing_ranks() -> None:
    job = PureJob()
    members = job.form(4)
    job.enter(members[0], timeout=1.0, call=1)
    job.enter(members[1], timeout=9.0, call=2)
    assert job.membership.next_deadline() == pytest.approx(job.now + 1.0)
    job.now += 0.7
    job.beat(members[2], 1)
    job.cut(members[3])
    failed = BarrierFailed(
        1,
        ErrorReason.ERROR_REASON_TIMEOUT,
        "barrier 'b' (round 0) timed out after 1 s: 2 of 4 members arrived; missing "
        "rank 2 (host-3): last heard 0.3 s ago; rank 3 (host-4): disconnected 0.3 s ago",
        (2, 3),
    )
    assert job.pass_time(0.3) == [Send(members[0], failed)]
    for member in (members[2], members[3]):
        assert job.enter(member) == []
    assert len(job.enter(members[0], call=3)) == 4  # it came again; the other has waited all the time


def test_a_verdict_fails_all_open_and_later_barriers() -> None:
    job = PureJob()
    members = job.form(3)
    job.enter(members[0], "a")
    job.enter(members[1], "b")
    effects = job.leave(members[2], cause="boom")
    failed = sent(effects, BarrierFailed)
    assert [member_id for member_id, _ in failed] == members[:2]
    assert {answer.reason for _, answer in failed} == {ErrorReason.ERROR_REASON_PEER_RAISED}
    assert {answer.text for _, answer in failed} == {"rank 2 (host-3, pid 1003) raised boom"}
    ((_, again),) = sent(job.enter(members[0], "a"), BarrierFailed)
    assert again.reason == ErrorReason.ERROR_REASON_PEER_RAISED
    assert (
        {answer.culprits for _, answer in failed} == {again.culprits} == {(2,)}
    )  # I8: whether it came before the verdict or after


@pytest.mark.parametrize("before", [True, False])
def test_a_barrier_fails_when_a_member_has_left_the_job(before: bool) -> None:
    job = PureJob()
    first, second = job.form(2)
    effects = job.enter(first) + job.leave(second) if before else job.leave(second) + job.enter(first)
    ((_, failed),) = sent(effects, BarrierFailed)
    assert failed.reason == ErrorReason.ERROR_REASON_PEER_LOST
    assert failed.text == "barrier 'b' cannot be passed: rank 1 (host-2, pid 1002) left the job"
    assert failed.culprits == (1,)


def test_entry_by_a_candidate_or_for_another_generation_fails() -> None:
    job = PureJob()
    candidate = job.join(2, 2)
    ((_, failed),) = sent(job.enter(candidate), BarrierFailed)
    assert failed.reason == ErrorReason.ERROR_REASON_STALE_GENERATION
    job.join(2, 2)
    job.state.generation = 9  # what the member says, that is
    ((_, failed),) = sent(job.enter(candidate), BarrierFailed)
    assert failed.text == "barrier 'b' is of generation 9, but the member is in generation 1"


def test_open_barriers_are_limited() -> None:
    job = PureJob(max_open_barriers=2)
    first, _ = job.form(2)
    job.enter(first, "a")
    job.enter(first, "b")
    ((_, failed),) = sent(job.enter(first, "c"), BarrierFailed)
    assert failed.reason == ErrorReason.ERROR_REASON_LIMIT
