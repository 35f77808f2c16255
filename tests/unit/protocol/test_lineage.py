"""A line as the coordinator sees it: when it is done, and what becomes of a view while it is stored."""

from __future__ import annotations

import pytest
from unit.protocol.test_meeting import elastic

from paceline_protocol import Meet, Process, Progress, Tag
from paceline_protocol._meeting import what_is_lost
from paceline_protocol.coordinator import (
    AddressRefused,
    ExitReported,
    FinishedLine,
    FinishStored,
    ForgetView,
    Heard,
    JobState,
    MetOthers,
    RestartAsked,
    Send,
    StoreFinished,
    StoreReached,
    ViewStored,
    restore,
)
from paceline_protocol.messages import Dismissed, Finished, Summons, Verdict, ViewFormed
from support.coordinator import PureJob, sent

# The end of a line ----------------------------------------------------------------------------------------------------


def test_a_line_is_finished_only_once_the_finish_is_stored() -> None:
    job, (first, second) = elastic(2)
    job.slow_disk = True
    assert job.do(FinishedLine(first, 2, 9)) == [StoreFinished(9)]
    assert job.state.finished is None
    assert job.do(FinishedLine(second, 2, 9)) == [], "it is being stored already"
    effects = job.do(FinishStored(9))
    assert sent(effects, Finished) == [
        (first, Finished(9)),
        (second, Finished(9)),
    ]


@pytest.mark.parametrize("generation", [0, 1, 3])
def test_a_member_of_another_generation_cannot_finish_the_line(generation: int) -> None:
    job, (first, _) = elastic(2)
    assert job.do(FinishedLine(first, generation, 9)) == []
    assert job.state.finishing is job.state.finished is None


def test_a_line_without_a_base_cannot_be_finished() -> None:
    job = PureJob()
    first, _ = job.form(2)
    assert job.state.live.base is None
    assert job.do(FinishedLine(first, 1, 9)) == []
    assert job.state.finishing is job.state.finished is None


def test_a_candidate_cannot_finish_the_line() -> None:
    job, _ = elastic(2, most=9)
    candidate = job.join(1, 9)
    assert job.do(FinishedLine(candidate, 2, 9)) == []
    assert job.state.finishing is job.state.finished is None


def test_a_line_is_kept_until_silent_members_are_known_to_have_ended() -> None:
    """Both seem to be dead, but each may hold the state and be cut off. That one is gone has to be known for sure."""
    job, members = elastic(2)
    for member in members:
        job.cut(member)
        job.do(AddressRefused(member))
    newcomer = job.join(1, 9)
    job.do(MetOthers(newcomer, Meet(0, Tag(0, 0), False)))
    assert list(job.state.sessions) == [newcomer]
    assert job.state.view is not None
    assert job.state.view.generation == 2
    for number in (1, 2):
        job.do(ExitReported(Process(f"host-{number}", 1000 + number), -9))
    assert job.state.view is None, "all are known to have ended: the line is over"


def test_a_line_waits_for_a_returned_member_to_report_its_state() -> None:
    """It trained on while nobody heard of it. Those who waited must not begin from nothing in the meantime."""
    job, (first,) = elastic(1, most=2)
    waiting = [job.join(1, 2) for _ in range(2)]
    for member in waiting:
        job.do(MetOthers(member, Meet(0, Tag(0, 0), False)))
    job.cut(first)
    job.do(AddressRefused(first))
    again = job.join(1, 2, former=first, former_token=b"token-1")
    assert job.reason == "waiting for members that came back to report what they hold"
    job.do(MetOthers(again, Meet(0, Tag(2, 5), False)))
    assert job.state.live is not None
    seated = {seat.member_id for seat in job.state.live.seats}
    assert again in seated, "though two others came before it, and there are two seats"


def test_a_leaving_candidate_is_dismissed_while_the_line_runs() -> None:
    job, (first,) = elastic(1)
    waiting = job.join(1, 9)
    effects = job.do(MetOthers(waiting, Meet(0, Tag(1, 3), False, leaving=True, unproven=True)))
    assert Send(waiting, Dismissed(last=False)) in effects
    assert not sent(effects, Summons)
    job.do(MetOthers(first, Meet(2, Tag(2, 1), True)))
    assert job.state.live is not None
    assert [seat.member_id for seat in job.state.live.seats] == [first]


def test_a_leaving_candidate_stays_while_its_state_may_be_needed() -> None:
    job, (first,) = elastic(1)
    job.cut(first)
    job.do(AddressRefused(first))
    waiting = job.join(1, 9)
    effects = job.do(MetOthers(waiting, Meet(0, Tag(1, 3), False, leaving=True, unproven=True)))
    assert not sent(effects, Dismissed)
    assert waiting in job.state.sessions


def test_leaving_candidates_too_few_for_a_view_are_dismissed() -> None:
    """The one that came back holds the last state. No view in which it could be handed over will form."""
    job, (first, second) = elastic(2, least=2)
    job.cut(first)
    job.do(AddressRefused(first))
    again = job.join(2, 9, former=first, former_token=b"token-1")
    job.do(ExitReported(Process("host-2", 1002), -9))
    assert second not in job.state.sessions
    effects = job.do(MetOthers(again, Meet(0, Tag(2, 5), False, leaving=True, unproven=True)))
    assert not sent(effects, Dismissed), "others may be on their way back"
    assert Send(again, Dismissed(last=True)) in job.pass_time(0.3, [again]), "it writes the last checkpoint"


def test_a_leaving_candidate_waits_for_workers_to_hand_its_state_to() -> None:
    job = PureJob()
    waiting = [job.join(3, 9) for _ in range(2)]
    job.do(MetOthers(waiting[0], Meet(0, Tag(2, 5), False, leaving=True)))
    effects = job.pass_time(9.0, waiting)
    assert not sent(effects, Dismissed)


# A view that is being stored ------------------------------------------------------------------------------------------


def forming() -> tuple[PureJob, list[str]]:
    """Generation 3 of a line is being stored."""
    job, members = elastic(2)
    job.slow_disk = True
    for member in members:
        job.do(MetOthers(member, Meet(2, Tag(2, 4), True)))
    assert job.state.forming is not None
    return job, members


def test_a_view_is_kept_if_a_member_disconnects_while_it_is_stored() -> None:
    """On the disk it has replaced the one before, whose members would be forgotten."""
    job, (first, second) = forming()
    job.cut(second)
    effects = job.do(ViewStored(3))
    assert not any(isinstance(effect, ForgetView) for effect in effects)
    assert first in [member_id for member_id, _ in sent(effects, ViewFormed)]
    assert job.state.view is not None
    assert job.state.view.generation == 3


def test_a_member_that_dies_while_its_view_is_stored_is_blamed() -> None:
    job, (first, _) = forming()
    job.do(ExitReported(Process("host-2", 1002), -9))
    effects = job.do(ViewStored(3))
    assert [member_id for member_id, _ in sent(effects, ViewFormed)] == [first]
    assert [verdict.culprits for _, verdict in sent(effects, Verdict)] == [(1,)]


def test_a_meet_from_before_the_latest_view_is_ignored() -> None:
    """It was under way while the view formed."""
    job, (first, second) = forming()
    job.do(ViewStored(3))
    assert job.do(MetOthers(first, Meet(2, Tag(2, 4), True))) == []
    assert not job.state.sessions[first].has_met
    assert not job.state.sessions[second].has_met


# A line that all have died of -----------------------------------------------------------------------------------------

LOST = "no worker held the state of the job any more, and no checkpoint was found: training began at step 1 again"


@pytest.mark.parametrize(
    ("reached", "base", "expected"),
    [
        (None, Tag(0, 0), ""),
        (None, Tag(3, 40), ""),
        (57, Tag(0, 0), f"{LOST}; at least 57 steps are lost"),
        (1, Tag(0, 0), f"{LOST}; at least 1 step is lost"),
        (0, Tag(0, 0), LOST),
        (57, Tag(3, 40), "so training went on from step 40; at least 17 steps are lost"),
        (57, Tag(3, 57), ""),
        (57, Tag(3, 60), ""),
    ],
)
def test_lost_steps_are_described_in_words(reached: int | None, base: Tag, expected: str) -> None:
    text = what_is_lost(reached, base)
    assert text.endswith(expected)
    assert bool(text) == bool(expected)


def _all_die(job: PureJob, members: list[str], step: int) -> list[object]:
    """The members have begun this step together, and are killed; returns what followed."""
    effects: list[object] = []
    for member in members:
        job.do(Heard(member, Progress(step=step, step_at=job.now)))
    for member in members:
        effects += job.do(ExitReported(job.state.sessions[member].process, -9))
    return effects


def _begin(job: PureJob, tag: Tag) -> list[str]:
    """Two workers come and bring this state; returns what their first view with a base says is lost."""
    members = [job.join(2, 9) for _ in range(2)]
    job.pass_time(0.3)
    effects: list[object] = []
    for member in members:
        effects += job.do(MetOthers(member, Meet(job.state.generation, tag, False)))
    return [formed.lost for _, formed in sent(effects, ViewFormed) if formed.base == tag]


def test_a_new_line_tells_all_its_members_how_many_steps_are_lost() -> None:
    job, members = elastic(2, least=2)
    effects = _all_die(job, members, 58)
    assert effects[-2:] == [StoreReached(57), ForgetView(2)]
    assert _begin(job, Tag(0, 0)) == [f"{LOST}; at least 57 steps are lost"] * 2
    assert LOST in job.reason, "status shows it"

    newcomer = job.join(2, 9)
    job.do(MetOthers(newcomer, Meet(0, Tag(0, 0), False)))
    effects = [e for m in list(job.state.sessions)[:2] for e in job.do(MetOthers(m, Meet(4, Tag(4, 3), True)))]
    assert [LOST in formed.lost for _, formed in sent(effects, ViewFormed)] == [True] * 3

    _all_die(job, list(job.state.sessions), 10)  # the next line begins without what this one had
    assert _begin(job, Tag(5, 9)) == ["", ""]


def test_a_restarted_coordinator_knows_how_many_steps_are_lost() -> None:
    job = PureJob(restore(0.0, "job", generation=2, reached=57))
    assert _begin(job, Tag(2, 40)) == [what_is_lost(57, Tag(2, 40))] * 2


def test_a_finished_job_reports_no_lost_steps_when_restarted() -> None:
    job, members = elastic(2)
    for member in members:
        job.do(Heard(member, Progress(step=9, step_at=job.now)))
    job.do(FinishedLine(members[0], 2, 9))
    for member in members:
        job.do(ExitReported(job.state.sessions[member].process, 0))
    assert job.reason == "the job is done: its last step was 9"
    assert job.do(RestartAsked()) == [StoreFinished(None), StoreReached(None)]
    assert _begin(job, Tag(0, 0)) == ["", ""]


def test_the_first_line_of_a_job_reports_no_lost_steps() -> None:
    job = PureJob(JobState("job"))
    assert _begin(job, Tag(0, 0)) == ["", ""]
    assert _begin_again_without_steps() == ["", ""]


def _begin_again_without_steps() -> list[str]:
    """A job without steps has ended before."""
    job = PureJob()
    _all_die(job, job.form(2), 0)
    return _begin(job, Tag(0, 0))
