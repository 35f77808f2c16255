"""Who leads the next generation, who takes the base first, and who waits for whom: `convene`, case by case."""

from dataclasses import replace

import pytest
from unit.protocol.meeting import BASE, SILENT, SURE, job, names

from paceline_protocol import Ending, Meet, Process, Report, Tag
from paceline_protocol._meeting import convene
from paceline_protocol.coordinator import (
    ExitReported,
    ForgetView,
    MetOthers,
    Reported,
    Send,
    Standing,
    StoreView,
    ViewStored,
)
from paceline_protocol.messages import CatchUp, Dismissed, Finished, Verdict, ViewFormed
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import PureJob, sent


def met(tag: Tag | None, holds_base: bool = True, **how: bool) -> Meet:
    return Meet(7, tag, holds_base, **how)


@pytest.mark.parametrize(
    ("members", "base", "laggards"),
    [
        ([met(BASE), met(BASE)], BASE, ""),
        ([met(Tag(7, 5)), met(BASE)], Tag(7, 5), "m1"),
        ([met(Tag(7, 5)), met(Tag(7, 5)), met(None)], Tag(7, 5), "m2"),  # its update was interrupted
        ([met(BASE), met(Tag(9, 9), holds_base=False)], BASE, "m1"),  # another line's, however great
    ],
)
def test_the_greatest_tag_among_base_holders_is_the_next_base(members: list[Meet], base: Tag, laggards: str) -> None:
    meeting = convene(job(list(members)))
    assert (meeting.base, names(meeting.laggards)) == (base, laggards)
    assert bool(meeting.members) == (not laggards)


def test_a_view_without_a_base_takes_the_greatest_tag_as_base() -> None:
    meeting = convene(job([met(Tag(0, 0), holds_base=False), met(Tag(3, 2), holds_base=False)], base=None))
    assert (meeting.base, names(meeting.laggards)) == (Tag(3, 2), "m0")


def test_no_view_forms_before_all_members_have_stopped() -> None:
    meeting = convene(job([met(BASE), None]))
    assert meeting.reason == "generation 7 has ended; waiting for rank 1 (host-1) to leave the step"


def test_a_silent_member_may_hold_the_state() -> None:
    meeting = convene(job([met(Tag(0, 0), holds_base=False), SILENT], newcomers=(0,)))
    assert not meeting.over
    assert meeting.reason == (
        "generation 7 cannot go on: rank 1 (host-1, pid 1) is silent and may hold the job's state; "
        "if you know that it has ended, run: paceline restart job"
    )


def test_a_reason_names_a_few_of_many_silent_members() -> None:
    meeting = convene(job([met(Tag(0, 0), holds_base=False), *[SILENT] * 2_000], newcomers=(0,)))
    assert "rank 8 (host-8, pid 1) and 1992 more are silent and may hold the job's state" in meeting.reason


def test_a_line_is_over_when_all_who_held_its_state_have_ended() -> None:
    assert convene(job([met(Tag(0, 0), holds_base=False), SURE], newcomers=(0,))).over


def test_a_newcomer_ordered_to_take_the_base_may_hold_it() -> None:
    state = job([met(Tag(5, 1), holds_base=False), SURE], newcomers=(0,))
    state.sessions["m0"].catching_up = True
    meeting = convene(state)
    assert not meeting.over
    assert meeting.reason == "waiting for rank 0 (host-0) to report whether the line's state arrived in time"


@pytest.mark.parametrize(
    ("newcomer", "other", "goes_on"),
    [
        (met(BASE), SILENT, False),  # whoever gave it the base may have gone on in generation 6
        (met(Tag(7, 5)), SILENT, True),  # the other was there
        (met(BASE), met(BASE), True),
    ],
)
def test_a_newcomer_leads_only_once_all_members_were_in_its_generation(
    newcomer: Meet, other: Meet | Ending, goes_on: bool
) -> None:
    meeting = convene(job([newcomer, other], newcomers=(0,)))
    assert bool(meeting.members) == goes_on
    assert not meeting.over


def test_a_line_is_over_if_only_newcomers_are_left() -> None:
    assert convene(job([met(BASE), SURE], newcomers=(0,))).over


def test_leavers_are_dismissed_when_others_hold_the_base() -> None:
    meeting = convene(job([met(BASE, leaving=True), met(BASE)], ready=1))
    assert (names(meeting.members), names(meeting.dismissed), meeting.newcomers) == ("m1 m2", "m0", (1,))


def test_if_all_leave_base_holders_stay_for_the_newcomers() -> None:
    meeting = convene(job([met(BASE, leaving=True), met(Tag(0, 0), holds_base=False, leaving=True)], ready=1))
    assert (names(meeting.members), names(meeting.dismissed), meeting.newcomers) == ("m0 m2", "m1", (1,))


def test_all_are_dismissed_if_members_and_newcomers_all_leave() -> None:
    state = job([met(BASE, leaving=True), met(BASE, leaving=True)], ready=1)
    state.sessions["m2"].met = Meet(0, Tag(0, 0), False, leaving=True)
    meeting = convene(state)
    assert (names(meeting.members), names(meeting.dismissed)) == ("", "m0 m1 m2")


def test_a_leaving_candidate_gets_no_seat_and_is_dismissed() -> None:
    state = job([met(BASE)], ready=2, least=3)
    state.sessions["m2"].met = Meet(0, Tag(2, 3), False, leaving=True)
    meeting = convene(state)
    assert (names(meeting.members), names(meeting.dismissed)) == ("", "m2")
    assert meeting.reason.startswith("waiting for 1 more worker (2 of at least 3)")


def test_all_are_dismissed_if_all_leave_and_no_newcomer_is_ready() -> None:
    assert names(convene(job([met(BASE, leaving=True), met(BASE, leaving=True)])).dismissed) == "m0 m1"


def test_a_closed_meeting_admits_no_newcomer_and_accepts_too_few() -> None:
    meeting = convene(job([met(BASE, closed=True), SURE], ready=1, least=2))
    assert (names(meeting.members), meeting.newcomers) == ("m0", ())


def test_in_a_closed_meeting_all_leavers_stay_and_admit_no_newcomer() -> None:
    meeting = convene(job([met(BASE, leaving=True, closed=True), met(BASE, leaving=True)], ready=1, least=3))
    assert (names(meeting.members), names(meeting.dismissed), meeting.newcomers) == ("m0 m1", "", ())


def test_with_explicit_ranks_leavers_admit_the_missing_rank() -> None:
    """Else they wait for somebody who stands there: such a job never goes on with fewer."""
    state = job([met(BASE, leaving=True, closed=True), SURE], ready=1)
    assert state.view is not None
    state.view = replace(state.view, explicit=True, settings=replace(state.view.settings, max_workers=2))
    for member_id, rank in (("m0", 0), ("m2", 1)):
        state.sessions[member_id].claimed_rank = rank
    assert names(convene(state).members) == "m0 m2"


def test_too_few_members_wait_for_more_workers() -> None:
    meeting = convene(job([met(BASE), SURE], least=2))
    assert meeting.reason == "waiting for 1 more worker (1 of at least 2)"


# What the membership makes of it --------------------------------------------------------------------------------------


def elastic(world: int, *, least: int = 1, most: int = 9) -> tuple[PureJob, list[str]]:
    """A job whose generation 2 starts from (0, 0)."""
    job = PureJob()
    members = [job.join(least, most) for _ in range(world)]
    job.pass_time(0.3)
    for member in members:
        job.do(MetOthers(member, Meet(1, Tag(0, 0), False)))
    assert job.state.live is not None
    assert job.state.live.base == Tag(0, 0)
    return job, members


def test_a_line_is_kept_when_its_members_die_while_a_view_is_stored() -> None:
    """Else its secret, which is stored with it, would be another than the one that sessions have."""
    job = PureJob()
    members = [job.join(1, 9) for _ in range(2)]
    job.pass_time(0.3)
    newcomer = job.join(1, 9)
    job.slow_disk = True
    for member, generation in zip([newcomer, *members], (0, 1, 1), strict=True):
        job.do(MetOthers(member, Meet(generation, Tag(0, 0), False)))
    assert job.state.forming is not None
    ended = [job.do(ExitReported(Process(f"host-{number}", 1000 + number), -9)) for number in (1, 2)]
    assert not any(isinstance(effect, ForgetView) for effects in ended for effect in effects)
    job.do(ViewStored(2))
    assert job.state.view is not None
    assert job.state.view.generation == 2


def test_a_candidates_meet_is_ignored_once_it_is_in_a_view() -> None:
    job, (first, _) = elastic(2)
    assert job.do(MetOthers(first, Meet(0, Tag(0, 0), False))) == []
    assert not job.state.sessions[first].has_met


def test_a_meet_may_be_repeated_after_its_line_is_over() -> None:
    job, (first,) = elastic(1)
    second = job.join(1, 9)
    job.do(MetOthers(second, Meet(0, Tag(0, 0), False)))
    job.do(MetOthers(first, Meet(2, Tag(2, 1), True)))
    assert job.state.generation == 3
    job.do(MetOthers(second, Meet(3, Tag(0, 0), False)))
    effects = job.do(ExitReported(Process("host-1", 1001), -9))
    assert ForgetView(3) in effects
    job.do(MetOthers(second, Meet(3, Tag(0, 0), False)))
    assert job.report(second, ErrorReason.ERROR_REASON_PEER_LOST, 0) == []


def test_a_dismissed_members_report_does_not_void_the_next_view() -> None:
    job, (first, second) = elastic(2)
    job.do(MetOthers(first, Meet(2, Tag(2, 1), True, leaving=True)))
    job.do(MetOthers(second, Meet(2, Tag(2, 1), True)))
    assert job.state.sessions[first].standing is Standing.DISMISSED
    report = Report(-1, ErrorReason.ERROR_REASON_PEER_LOST, 0, 7, "the link ended")
    assert job.do(Reported(first, 2, report)) == []
    assert job.pass_time(1.0, beating=[second]) == []
    assert job.state.live is not None


def test_a_resuming_candidate_receives_finished_when_the_job_is_done() -> None:
    job = PureJob()
    waiting = job.join(2, 9)
    job.state.finished = 8
    assert Send(waiting, Finished(8)) in job.resume(waiting, 0)


def test_no_deadline_is_due_while_a_view_is_being_stored() -> None:
    job = PureJob()
    job.slow_disk = True
    job.join(2, 2)
    job.join(2, 2)
    assert [type(effect) for effect in job.effects][-1] is StoreView
    assert job.membership.next_deadline() > job.now


def test_an_order_to_catch_up_is_open_until_it_is_answered() -> None:
    job, (first, second) = elastic(2)
    job.do(MetOthers(first, Meet(2, Tag(0, 0), True)))
    effects = job.do(MetOthers(second, Meet(2, Tag(2, 1), True)))
    assert [member_id for member_id, _ in sent(effects, CatchUp)] == [first]
    assert job.state.sessions[first].catching_up
    effects = job.do(MetOthers(first, Meet(2, Tag(2, 1), True)))
    assert not job.state.sessions[first].catching_up
    assert len(sent(effects, ViewFormed)) == 2


def test_the_reason_names_paceline_restart_if_all_members_are_silent() -> None:
    job, (first, second) = elastic(2)
    job.cut(first)
    job.cut(second)
    job.join(1, 9)
    assert job.reason.endswith(
        "rank 0 (host-1, pid 1001), rank 1 (host-2, pid 1002) are silent and may hold the job's state; "
        "if you know that they have ended, run: paceline restart job"
    )


def test_a_dismissed_member_receives_dismissed_again_when_it_resumes() -> None:
    job, (first, second) = elastic(2)
    job.do(MetOthers(first, Meet(2, Tag(2, 1), True, leaving=True)))
    job.do(MetOthers(second, Meet(2, Tag(2, 1), True)))
    job.cut(first)
    assert Send(first, Dismissed(last=False)) in job.resume(first, 2)


def test_members_that_all_leave_are_dismissed_as_last_together() -> None:
    job, (first, second) = elastic(2)
    job.do(MetOthers(first, Meet(2, Tag(2, 1), True, leaving=True)))
    effects = job.do(MetOthers(second, Meet(2, Tag(2, 1), True, leaving=True)))
    assert {Send(first, Dismissed(last=True)), Send(second, Dismissed(last=True))} <= set(effects)
    effects = job.do(ExitReported(Process("host-1", 1001), -9))
    assert second in [member_id for member_id, _ in sent(effects, Verdict)], "it waits for it"
    assert job.state.sessions[second].standing is Standing.DISMISSED


def test_a_member_that_leaves_alone_is_not_dismissed_as_last() -> None:
    job, (first, second) = elastic(2, least=2)
    job.do(MetOthers(first, Meet(2, Tag(2, 1), True, leaving=True)))
    assert Send(first, Dismissed(last=False)) in job.do(MetOthers(second, Meet(2, Tag(2, 1), True)))
    assert Send(second, Dismissed(last=True)) in job.do(MetOthers(second, Meet(2, Tag(2, 1), True, leaving=True)))


def test_a_void_member_is_not_dismissed_when_others_form_a_view() -> None:
    job = PureJob()
    first, second = job.form(2)
    job.leave(first, cause="ValueError: bad batch")
    job.form(2)
    assert job.state.sessions[second].standing is Standing.VOID
