"""The life of a job: views, verdicts, resuming, leaving. Events in, effects out, and a clock moved by hand."""

import pytest

from paceline_protocol import Ending, Process
from paceline_protocol.coordinator import (
    DrainAsked,
    EndSession,
    ExitReported,
    ForgetView,
    Send,
    Standing,
    StoreEnding,
    StoreFailed,
    StoreVerdict,
    StoreView,
    StreamEnded,
    Ticked,
    ViewStored,
    Welcome,
)
from paceline_protocol.messages import Drain, Verdict, ViewFormed, Waiting
from paceline_server.errors import BadRequest, SessionEnded
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import PureJob, sent

DIFFERS = ErrorReason.ERROR_REASON_STEP_DIFFERS
LOST = ErrorReason.ERROR_REASON_PEER_LOST
MISMATCH = ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH
RAISED = ErrorReason.ERROR_REASON_PEER_RAISED
TIMEOUT = ErrorReason.ERROR_REASON_TIMEOUT


def kinds(effects: list[object]) -> list[str]:
    """Names of effects, and of messages."""
    return [type(effect.message if isinstance(effect, Send) else effect).__name__ for effect in effects]


def verdicts(effects: list[object]) -> dict[str, str]:
    """Who is told which verdict."""
    return {member_id: verdict.text for member_id, verdict in sent(effects, Verdict)}


# Views and their numbers ---------------------------------------------------------------------------------------------


def test_a_view_is_stored_before_it_is_announced() -> None:
    job = PureJob()
    job.slow_disk = True
    job.join(1, 1)
    assert kinds(job.effects) == ["Welcome", "StoreView"]
    assert kinds(job.do(ViewStored(1)))[0] == "ViewFormed"


def test_a_disconnected_candidate_is_dropped_before_its_failure_timeout() -> None:
    job = PureJob()
    gone = job.join(2, 2, timeout=86_400.0)
    job.cut(gone)
    job.pass_time(9.0)
    assert gone in job.state.sessions
    job.pass_time(2.0)
    assert gone not in job.state.sessions


def test_waits_since_is_set_only_while_a_view_is_waited_for() -> None:
    job = PureJob()
    assert job.membership.waits_since is None
    first = job.join(2, 2)
    assert job.membership.waits_since == job.now
    job.pass_time(5.0, [first])
    other = job.join(2, 2)
    assert job.membership.waits_since is None
    job.cut(other)
    job.pass_time(60.0, [first])
    assert job.membership.waits_since is not None
    assert job.membership.waits_since >= job.now - 60.0


def test_a_new_generation_is_above_any_that_a_member_has_seen() -> None:
    job = PureJob()
    job.join(2, 2, floor=7)
    job.join(2, 2, floor=3)
    assert job.state.live.generation == 8


def test_a_view_that_loses_a_member_while_stored_uses_up_its_number() -> None:
    job = PureJob()
    job.slow_disk = True
    job.join(2, 2)
    gone = job.join(2, 2)
    job.cut(gone)
    assert kinds(job.do(ViewStored(1)))[0] == "ForgetView"
    assert job.state.view is None
    job.join(2, 2)
    assert [effect.view.generation for effect in job.effects if isinstance(effect, StoreView)] == [2]


def test_a_view_that_cannot_be_stored_is_retried_under_a_new_number() -> None:
    job = PureJob()
    job.slow_disk = True
    began = job.now
    job.join(1, 1)
    job.do(StoreFailed(1, "no space left"))
    assert job.reason == "the state cannot be stored: no space left"
    job.now = job.membership.next_deadline()
    (store,) = job.do(Ticked())
    assert isinstance(store, StoreView)
    assert store.view.generation == 2
    assert job.membership.waits_since == began, "an alert about a job that waits is not put off by the tries"
    job.do(ViewStored(2))
    assert job.membership.waits_since is None


def test_the_next_view_forms_from_candidates_when_the_last_is_void() -> None:
    job = PureJob()
    old = job.form(2)
    job.join(2, 2)
    job.leave(old[0], cause="ValueError: bad batch")
    assert job.reason == "waiting for 1 more worker (1 of at least 2)"
    job.join(2, 2)
    assert [seat.member_id for seat in job.state.live.seats] == ["m3", "m4"]
    assert job.state.live.generation == 2
    # m2 has yet to go. It is told of its own generation still, and disturbs nothing when it goes.
    assert kinds(job.cut(old[1])) == []
    assert verdicts(job.resume(old[1], 1)) == {old[1]: "rank 0 (host-1, pid 1001) raised ValueError: bad batch"}
    job.leave(old[1])
    assert not job.state.endings


# A stream's end is suspicion -----------------------------------------------------------------------------------------


def test_a_stream_end_alone_sends_nothing_and_keeps_the_member() -> None:
    job = PureJob()
    _, second = job.form(2)
    assert job.cut(second) == []
    assert job.state.sessions[second].standing is Standing.IN_VIEW


def test_stream_end_and_lost_link_give_a_verdict_at_once_in_either_order() -> None:
    for reported_first in (True, False):
        job = PureJob()
        first, second = job.form(2)
        if reported_first:
            assert job.report(first, LOST, 1) == []
            effects = job.cut(second)
        else:
            job.cut(second)
            effects = job.report(first, LOST, 1)
        text = "rank 1 (host-2, pid 1002) died: its session and its link to rank 0 ended"
        assert verdicts(effects) == {first: text}
        assert kinds(effects)[0] == "StoreVerdict"


def test_a_member_that_resumes_in_time_keeps_its_place() -> None:
    job = PureJob()
    _, second = job.form(2)
    job.cut(second)
    job.pass_time(2.9, beating=["m1"])
    assert kinds(job.resume(second, 1)) == ["Welcome"]
    assert not verdicts(job.pass_time(2.0, beating=["m1"]))
    assert job.state.live is not None


def test_a_member_that_missed_its_view_gets_it_when_it_resumes() -> None:
    job = PureJob()
    first, _ = job.form(2)
    job.cut(first)
    assert kinds(job.resume(first, 0)) == ["Welcome", "ViewFormed"]


def test_a_candidate_receives_a_missed_drain_when_it_resumes() -> None:
    job = PureJob()
    first = job.join(2, 2)
    job.cut(first)
    job.do(DrainAsked((first,), "the host goes down"))
    assert Send(first, Drain("the host goes down")) in job.resume(first, 0)


def test_the_end_of_a_replaced_stream_is_ignored() -> None:
    job = PureJob()
    first, _ = job.form(2)
    job.resume(first, 1, stream=55)
    job.do(StreamEnded(first, 1))
    assert job.state.sessions[first].stream == 55


def test_resuming_needs_the_token() -> None:
    job = PureJob()
    first, _ = job.form(2)
    job.cut(first)
    with pytest.raises(SessionEnded, match="no such session"):
        job.resume(first, 1, token=b"stolen")
    assert job.state.sessions[first].stream is None


def test_resuming_an_ended_session_is_refused_with_the_verdict() -> None:
    job = PureJob()
    _, second = job.form(2)
    job.cut(second)
    job.pass_time(3.0, beating=["m1"])
    with pytest.raises(SessionEnded, match=r"rank 1 \(host-2, .* lost its session and did not come back for 3.0 s"):
        job.resume(second, 1)


# Silence --------------------------------------------------------------------------------------------------------------


def test_silence_voids_the_view_and_ends_the_session() -> None:
    job = PureJob()
    first, second = job.form(2)
    effects = job.pass_time(3.1, beating=[first])
    assert kinds(effects) == ["StoreEnding", "StoreVerdict", "Verdict", "Verdict", "EndSession"]
    assert verdicts(effects)[first] == "rank 1 (host-2, pid 1002) was silent for 3.1 s"
    assert effects[-1].member_id == second
    assert job.state.verdict.culprits == (1,)


def test_a_heartbeat_between_the_two_looks_prevents_eviction() -> None:
    job = PureJob()
    first, second = job.form(2)
    job.now += 3.1
    assert job.do(Ticked()) == []
    job.beat(first, 1)
    job.beat(second, 1)
    job.now += 0.02
    assert job.do(Ticked()) == []


def test_leases_are_renewed_after_the_coordinator_slept() -> None:
    job = PureJob()
    members = job.form(2)
    assert job.pass_time(4.0, slept=4.0) == []
    assert not verdicts(job.pass_time(2.9))
    assert len(verdicts(job.pass_time(0.1))) == len(members)


def test_a_sleep_shorter_than_a_heartbeat_renews_no_lease() -> None:
    job = PureJob()
    job.form(2)
    assert verdicts(job.pass_time(3.0, slept=0.4))


def test_a_silent_candidate_is_forgotten() -> None:
    job = PureJob()
    job.join(2, 2)
    assert kinds(job.pass_time(3.0)) == ["EndSession"]
    assert job.state.sessions == {}


# Reports --------------------------------------------------------------------------------------------------------------


def test_reports_are_gathered_before_they_are_judged() -> None:
    job = PureJob()
    members = job.form(3)
    assert job.report(members[1], TIMEOUT, 0, "slow") == []
    job.now += 0.01
    assert job.report(members[2], RAISED, None, "KeyError: 'x'") == []
    assert job.membership.next_deadline() == pytest.approx(job.now + 0.01)
    effects = job.pass_time(0.01)
    assert set(verdicts(effects).values()) == {"KeyError: 'x'"}
    assert set(verdicts(effects)) == set(members)


def test_reports_are_judged_at_once_when_all_members_have_reported() -> None:
    job = PureJob()
    members = job.form(2)
    job.report(members[0], TIMEOUT, 1)
    assert verdicts(job.report(members[1], TIMEOUT, 0))


def test_a_broken_link_between_live_members_waits_for_a_death() -> None:
    job = PureJob()
    members = job.form(3)
    job.report(members[0], LOST, 1)
    assert job.pass_time(0.05, beating=members) == []
    assert verdicts(job.cut(members[1]))[members[0]].startswith("rank 1 (host-2, pid 1002) died")


def test_a_broken_link_is_judged_without_a_death_in_the_end() -> None:
    job = PureJob()
    members = job.form(3)
    job.report(members[0], LOST, 1)
    job.pass_time(0.02)
    effects = job.pass_time(0.08)
    assert verdicts(effects)[members[2]] == "rank 1 (host-2, pid 1002) was cut off: its link to rank 0 ended"


@pytest.mark.parametrize("own", ["left the step out", "", "it is gone"])
def test_a_mismatch_waits_for_the_word_of_the_member_that_is_accused(own: str) -> None:
    """A member that left out an update says so itself, and its word may come late from a busy machine."""
    job = PureJob()
    members = job.form(3)
    job.report(members[0], MISMATCH, 1, "calls do not match")
    if own == "it is gone":
        effects = job.do(ExitReported(job.state.sessions[members[1]].process, -9))
        assert set(verdicts(effects + job.pass_time(0.02)).values()) == {"calls do not match"}
        return
    assert job.pass_time(0.05) == []
    if own:
        job.report(members[1], DIFFERS, None, own)
    effects = job.pass_time(0.05) + job.pass_time(0.02)  # and one more look
    assert set(verdicts(effects).values()) == {own or "calls do not match"}


def test_a_mismatch_that_the_accused_reports_as_well_is_judged_after_the_usual_time() -> None:
    job = PureJob()
    members = job.form(3)
    job.report(members[0], MISMATCH, 1, "calls do not match")
    job.report(members[1], MISMATCH, 0, "calls do not match")
    assert verdicts(job.pass_time(0.02))


def test_a_late_report_is_answered_with_the_verdict() -> None:
    job = PureJob()
    members = job.form(3)
    job.leave(members[0], cause="boom")
    effects = job.report(members[1], LOST, 0)
    assert kinds(effects) == ["Verdict"]
    assert effects[0].message is job.state.verdict


@pytest.mark.parametrize(("reason", "accused"), [(LOST, 2), (ErrorReason.ERROR_REASON_LIMIT, 1)])
def test_an_impossible_report_raises_bad_request(reason: int, accused: int) -> None:
    job = PureJob()
    first, _ = job.form(2)
    with pytest.raises(BadRequest):
        job.report(first, reason, accused)


def test_a_report_by_a_candidate_raises_bad_request() -> None:
    job = PureJob()
    first = job.join(2, 2)
    with pytest.raises(BadRequest, match="which the member is not in"):
        job.report(first, LOST, 0)


# Going ----------------------------------------------------------------------------------------------------------------


def test_a_reported_exit_ends_the_session_and_gives_a_verdict() -> None:
    job = PureJob()
    first, second = job.form(2)
    effects = job.do(ExitReported(Process("host-2", 1002), -9))
    assert verdicts(effects)[first] == "rank 1 (host-2, pid 1002) was killed by SIGKILL"
    assert second not in job.state.sessions


def test_the_exit_of_a_process_in_another_container_is_ignored() -> None:
    job = PureJob()
    first, _ = job.form(2)
    job.becomes(first, Process("box", 1, "boot", 0, pid_namespace=7))
    assert job.do(ExitReported(Process("box", 1, "boot", 0, pid_namespace=8), -9)) == []
    assert first in job.state.sessions


def test_the_exit_of_another_process_on_the_host_is_ignored() -> None:
    job = PureJob()
    job.form(2)
    assert job.membership.find(Process("host-2", 1003)) == []
    assert job.do(ExitReported(Process("host-2", 1003), 1)) == []


def test_an_orderly_leave_does_not_void_the_view() -> None:
    job = PureJob()
    first, second = job.form(2)
    effects = job.leave(second)
    assert effects[:2] == [StoreEnding(1, 1, Ending("left the job", orderly=True)), EndSession(second, None)]
    assert job.state.live is not None
    assert job.reason == "1 worker is training"
    assert job.leave(first)[-1] == ForgetView(1)
    assert (job.state.view, job.state.verdict, job.state.sessions) == (None, None, {})


def test_leaving_while_others_need_the_member_voids_the_view() -> None:
    job = PureJob()
    first, second = job.form(2)
    job.leave(second)
    effects = job.report(first, LOST, 1, "the link to rank 1 ended in all_reduce 3")
    assert verdicts(effects)[first].startswith(
        "rank 1 (host-2, pid 1002) left the job while rank 0 (host-1, pid 1001) needed it"
    )
    assert job.state.verdict.culprits == (1,)


def test_leaving_with_a_cause_names_it_in_the_verdict() -> None:
    job = PureJob()
    first, second = job.form(2)
    effects = job.leave(second, cause="ZeroDivisionError: division by zero")
    assert verdicts(effects) == {first: "rank 1 (host-2, pid 1002) raised ZeroDivisionError: division by zero"}
    assert job.state.verdict.reason == RAISED


def test_sessions_and_endings_do_not_leak_after_members_leave() -> None:
    job = PureJob()
    for round_ in range(50):
        members = job.form(2)
        job.leave(members[0], cause=f"error {round_}")
        job.leave(members[1])
    assert job.state.sessions == {}
    assert job.state.endings == {}
    assert job.state.view is None
    assert job.state.generation == 50


def test_events_of_sessions_that_have_ended_are_ignored() -> None:
    job = PureJob()
    first, second = job.form(2)
    job.leave(second)
    assert job.leave(second) == []
    assert job.enter(second) == []
    assert job.report(second, LOST, 0) == []
    job.beat(second, 3)
    assert list(job.state.sessions) == [first]


def test_effects_of_a_first_registration() -> None:
    job = PureJob()
    job.join(2, 2)
    assert job.effects == [Welcome("m1", 0.5), Send("m1", Waiting("waiting for 1 more worker (1 of at least 2)"))]
    job.join(2, 2)
    assert kinds(job.effects) == ["Welcome", "StoreView", "ViewFormed", "ViewFormed"]
    assert [formed.rank for _, formed in sent(job.effects, ViewFormed)] == [0, 1]
    assert not [effect for effect in job.effects if isinstance(effect, StoreVerdict)]
