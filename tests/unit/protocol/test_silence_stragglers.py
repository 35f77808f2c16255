"""A member that does not stop though its generation is over: the others go on without it after `failure_timeout`."""

from __future__ import annotations

from unit.protocol.test_meeting import elastic

from paceline_protocol import Meet, Process, Tag
from paceline_protocol.coordinator import (
    EndSession,
    ExitReported,
    FinishedLine,
    MetOthers,
    Ticked,
)
from paceline_protocol.messages import CatchUp, ViewFormed
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import PureJob, sent

TIMEOUT = ErrorReason.ERROR_REASON_TIMEOUT


def ended(effects: list[object]) -> list[str]:
    return [effect.member_id for effect in effects if isinstance(effect, EndSession)]


def meet(job: PureJob, *members: str) -> None:
    for member in members:
        job.do(MetOthers(member, Meet(2, Tag(2, 3), True)))


def test_a_stuck_member_is_evicted_after_failure_timeout() -> None:
    """Its session heartbeats on."""
    job, members = elastic(4)
    first, second, stuck, _ = members
    job.do(ExitReported(Process("host-4", 1004), -9))
    meet(job, first)
    job.pass_time(2.9, members[:3])
    assert job.reason.endswith("waiting for rank 1 (host-2), rank 2 (host-3) to leave the step"), (
        "half have not stopped yet"
    )
    meet(job, second)
    job.pass_time(2.9, members[:3])
    assert job.state.generation == 2
    effects = job.pass_time(0.2, members[:3])
    assert ended(effects) == [stuck]
    assert "did not stop within 3 s" in next(e.refusal for e in effects if isinstance(e, EndSession)).args[0]
    assert {member_id for member_id, _ in sent(effects, ViewFormed)} == {first, second}
    assert job.state.generation == 3


def test_a_majority_blamed_for_a_timeout_is_evicted() -> None:
    """A disk that most data loaders read from is dead."""
    job, members = elastic(4)
    job.beat(members[0], 7, inside=True)
    job.report(members[0], TIMEOUT, None)
    job.pass_time(0.2, members)
    assert job.state.verdict is not None
    assert job.state.verdict.culprits == (1, 2, 3)
    meet(job, members[0])
    job.pass_time(2.7, members)
    assert job.state.generation == 2
    assert ended(job.pass_time(0.4, members)) == members[1:]
    assert job.state.generation == 3


def test_the_wait_for_a_straggler_ends_without_another_message() -> None:
    job, (first, stuck) = elastic(2)
    job.report(first, TIMEOUT, 1)
    job.pass_time(0.2, [first, stuck])
    meet(job, first)
    assert job.membership.next_deadline() <= job.now + 3.0
    assert ended(job.pass_time(3.1, [first, stuck])) == [stuck]


def test_members_that_compute_a_long_step_are_waited_for() -> None:
    """One was in a collective when another died; most compute on, and stop when they come to one."""
    job, members = elastic(4)
    job.do(ExitReported(Process("host-4", 1004), -9))
    meet(job, members[0])
    for _ in range(10):
        assert not ended(job.pass_time(2.0, members[:3]))
    meet(job, members[1], members[2])
    assert job.state.generation == 3


def test_a_majority_is_evicted_after_the_step_timeout() -> None:
    """Two of three hang at a dead disk when a fourth dies: no timeout is blamed on anybody."""
    job, members = elastic(4)
    first, *stuck = members[:3]
    job.do(ExitReported(Process("host-4", 1004), -9))
    job.do(MetOthers(first, Meet(2, Tag(2, 3), True, step_timeout=60.0)))
    for _ in range(29):
        assert not ended(job.pass_time(2.0, members[:3]))
    effects = job.pass_time(4.1, members[:3])  # its clock starts at the first look
    assert ended(effects) == stuck
    assert "did not stop within 60 s" in next(e.refusal for e in effects if isinstance(e, EndSession)).args[0]
    assert job.state.generation == 3


def test_before_the_first_step_a_straggler_has_the_step_timeout() -> None:
    job = PureJob()
    first, second, third = job.form(3)
    job.do(ExitReported(Process("host-3", 1003), -9))
    job.do(MetOthers(first, Meet(1, Tag(0, 0), False, step_timeout=60.0)))
    for _ in range(29):
        assert not ended(job.pass_time(2.0, [first, second]))
    assert ended(job.pass_time(4.1, [first, second])) == [second]
    assert third not in job.state.sessions


def test_before_the_first_step_no_member_is_evicted_without_a_failure() -> None:
    job = PureJob()
    first, second = job.form(2)
    job.do(MetOthers(first, Meet(1, Tag(0, 0), False, step_timeout=60.0)))
    for _ in range(60):
        assert not ended(job.pass_time(2.0, [first, second]))


def test_the_only_possible_state_holder_is_not_evicted() -> None:
    """The only one that has stopped is a newcomer, which may not have taken the state."""
    job, (first,) = elastic(1)
    late = job.join(1, 9)
    job.do(MetOthers(late, Meet(0, Tag(0, 0), False)))
    job.do(MetOthers(first, Meet(2, Tag(2, 3), True)))
    assert job.state.generation == 3
    job.report(late, TIMEOUT, 0)
    job.pass_time(0.2, [first, late])
    job.do(MetOthers(late, Meet(3, Tag(0, 0), False)))
    for _ in range(5):
        assert not ended(job.pass_time(2.0, [first, late]))
        assert job.membership.next_deadline() > job.now, "the clock does not spin"


def test_a_meeting_without_a_failure_waits_for_the_step_timeout() -> None:
    """A member may evaluate between two steps. Or a coordinator was killed before it had stored the verdict."""
    job, (first, second) = elastic(2)
    job.do(MetOthers(first, Meet(2, Tag(2, 3), True, step_timeout=60.0)))
    for _ in range(29):
        assert not ended(job.pass_time(2.0, [first, second]))
    assert ended(job.pass_time(4.1, [first, second])) == [second]
    assert job.state.generation == 3


def test_pending_messages_are_read_before_eviction_after_a_sleep() -> None:
    job, (first, second) = elastic(2)
    job.report(first, TIMEOUT, 1)
    job.pass_time(0.2, [first, second])
    meet(job, first)
    job.now += 9.0
    assert not ended(job.do(Ticked(9.0)))
    meet(job, second)
    assert job.state.generation == 3


def test_a_stall_in_the_middle_of_a_round_evicts_no_member() -> None:
    """What is left of the round comes before its clock finds out."""
    job, (first, second, third) = elastic(3)
    job.report(first, TIMEOUT, None)
    job.pass_time(0.5, [first, second, third])
    meet(job, first, second)
    job.now += 9.0
    meet(job, first)
    assert third in job.state.sessions
    job.do(Ticked(9.0))
    meet(job, third)
    assert job.state.generation == 3


def test_no_straggler_is_evicted_for_a_member_with_a_spoiled_state() -> None:
    """It cannot go on alone, and would end with an error; the one that hangs may wake up, and has the state."""
    job, (first, second, third) = elastic(3)
    job.report(first, TIMEOUT, None)
    job.pass_time(0.5, [first, second, third])
    job.do(MetOthers(third, Meet(2, None, True)))
    job.do(ExitReported(Process("host-1", 1001), -9))
    for _ in range(3):
        assert not ended(job.pass_time(2.0, [second, third]))
        assert job.membership.next_deadline() > job.now
    effects = job.do(MetOthers(second, Meet(2, Tag(2, 4), True)))
    assert [member_id for member_id, _ in sent(effects, CatchUp)] == [third]


def test_a_member_that_finished_the_job_is_not_evicted() -> None:
    """Its last collective failed elsewhere only. It is past its steps, and its session is to live on."""
    job, (first, second) = elastic(2)
    job.report(second, TIMEOUT, None)
    job.pass_time(0.5, [first, second])
    meet(job, second)
    job.do(FinishedLine(first, 2, 9))
    assert job.state.finished == 9
    for _ in range(3):
        assert not ended(job.pass_time(2.0, [first, second]))
