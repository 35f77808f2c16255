"""The coordinator's state is lost, or an older copy is restored: numbers go on above all that workers show (I3)."""

from __future__ import annotations

from unit.protocol.test_meeting import elastic

from paceline_protocol import Meet, Process, Tag
from paceline_protocol.coordinator import (
    EndSession,
    ExitReported,
    ForgetView,
    JobState,
    MetOthers,
    StoreView,
    restore,
)
from paceline_protocol.messages import ViewFormed
from support.coordinator import PureJob, sent


def restored_from(job: PureJob) -> PureJob:
    """A coordinator that starts on what was stored when the job's view had formed."""
    state = job.state
    return PureJob(restore(100.0, "job", generation=state.generation, view=state.view))


def test_members_of_a_later_generation_come_back_with_their_state() -> None:
    before, (first, second) = elastic(2)
    job = restored_from(before)  # then came generation 3, and the file of before was put back
    effects = job.resume(first, 3)
    assert ForgetView(2) in effects
    refusals = [effect for effect in effects if isinstance(effect, EndSession)]
    assert {effect.member_id for effect in refusals} == {first, second}
    assert "it knows nothing of generation 3" in str(refusals[0].refusal)
    back = job.join(1, 9, floor=3, former=first)
    job.do(MetOthers(back, Meet(0, Tag(3, 20), False)))
    job.pass_time(2.9, [back])
    assert "former members of the job have time to come back" in job.reason
    other = job.join(1, 9, floor=3, former=second)
    effects = job.pass_time(0.3, [back, other])
    assert {formed.generation for _, formed in sent(effects, ViewFormed)} == {4}
    job.do(MetOthers(other, Meet(4, Tag(3, 19), False)))
    job.do(MetOthers(back, Meet(4, Tag(3, 20), False)))
    assert job.state.generation == 4, "the one that lacks a step takes it first"
    job.do(MetOthers(other, Meet(4, Tag(3, 20), False)))
    assert job.state.live is not None
    assert (job.state.live.generation, job.state.live.base) == (5, Tag(3, 20))


def test_registering_with_a_later_generation_discards_the_old_view() -> None:
    before, (first, second) = elastic(2)
    job = restored_from(before)
    job.resume(first, 2)  # it has been away since generation 2
    job.join(1, 9, floor=3)
    assert job.state.view is None
    assert first not in job.state.sessions
    assert second not in job.state.sessions


def test_a_newcomer_waits_for_former_members_to_come_back() -> None:
    """They may be in a generation that the stored copy knows nothing of, whose number must not be used again."""
    job = PureJob(restore(100.0, "job", generation=1))
    newcomer = job.join(1, 9, timeout=3.0)
    job.pass_time(2.9, [newcomer])
    assert "former members of the job have time to come back" in job.reason
    assert job.state.live is None
    job.pass_time(0.3, [newcomer])
    assert job.state.live is not None


def test_a_view_being_stored_is_discarded_with_the_old_state() -> None:
    before, (first, _) = elastic(2)
    job = restored_from(before)
    job.slow_disk = True
    job.resume(first, 2)
    job.do(ExitReported(Process("host-2", 1002), -9))
    effects = job.do(MetOthers(first, Meet(2, Tag(2, 1), True)))
    assert [effect.view.generation for effect in effects if isinstance(effect, StoreView)] == [3]
    job.join(1, 9, floor=7)
    assert {e.generation for e in job.effects if isinstance(e, ForgetView)} == {2, 3}
    assert job.state.forming is None


def test_a_view_formed_by_the_running_coordinator_is_not_discarded() -> None:
    """A worker that was away while the state was lost, and another line began, comes back to that one."""
    job, (first, second) = elastic(2)
    job.join(1, 9, floor=7)
    assert job.state.live is not None
    assert first in job.state.sessions
    assert second in job.state.sessions
    assert job.state.generation == 7, "the next view has a greater number"


def test_a_stored_view_is_not_discarded_once_all_members_resumed() -> None:
    """Nobody can have gone on from it. Who shows a greater number has slept since another line of the job was lost."""
    before, (first, second) = elastic(2)
    job = restored_from(before)
    job.resume(first, 2)
    job.resume(second, 2, stream=100)
    job.join(1, 9, floor=7)
    assert job.state.live is not None
    assert {first, second} <= set(job.state.sessions)
    assert job.state.generation == 7, "the next view has a greater number"


def test_a_checkpoint_tag_does_not_hide_that_the_stored_state_is_old() -> None:
    """A replacement that finds a checkpoint of generation 9 comes before the members of generation 9."""
    before, (first, second) = elastic(2)
    job = restored_from(before)
    late = job.join(1, 9)
    job.do(MetOthers(late, Meet(0, Tag(9, 50), False)))
    effects = job.resume(first, 9)
    assert {effect.member_id for effect in effects if isinstance(effect, EndSession)} == {first, second}
    assert job.state.patient_until > job.now, "the others have time to come back"


def test_the_next_generation_is_above_every_tag_brought() -> None:
    """A worker finds a checkpoint of a former life on its disk: its tags must not be made again with other bits."""
    job, (first,) = elastic(1)
    late = job.join(1, 9)
    job.do(MetOthers(late, Meet(0, Tag(9, 50), False)))
    job.do(MetOthers(first, Meet(2, Tag(2, 3), True)))
    assert job.state.live is not None
    assert (job.state.live.generation, job.state.live.base) == (10, Tag(2, 3))


def test_an_unknown_job_does_not_wait_for_former_members() -> None:
    job = PureJob(JobState("job"))
    job.join(1, 9)
    job.pass_time(0.3)
    assert job.state.live is not None
