"""After a restart: who is taken to be there, who vouches for whom, and where everyone was last seen.

And members that send no heartbeats: their doors are asked, and those that answer stay.
"""

import pytest
from unit.protocol.test_meeting import elastic

from paceline_protocol import OURS, Ending, JobSettings, Process, Progress, Seat, Tag, Verdict, View
from paceline_protocol.coordinator import (
    AskDoor,
    DoorAnswered,
    Heard,
    Send,
    Standing,
    StoreVerdict,
    StoreView,
    Ticked,
    Welcome,
    restore,
)
from paceline_protocol.messages import BarrierFailed
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import PureJob, sent

SEATS = tuple(
    Seat(rank, f"m{rank}", Process(f"host-{rank}", 1000 + rank), "", b"token-%d" % rank, rank) for rank in range(3)
)
VIEW = View(7, JobSettings(2, 3, 3.0), False, SEATS, OURS)


def restarted(verdict: Verdict | None = None, endings: dict[int, Ending] | None = None) -> PureJob:
    job = PureJob(restore(100.0, "job", generation=7, view=VIEW, verdict=verdict, endings=endings))
    job.pass_time(0.0)
    return job


def test_members_of_the_stored_view_may_resume() -> None:
    job = restarted()
    assert job.reason == "3 workers are training"
    assert [type(effect).__name__ for effect in job.resume("m1", 7)] == ["Welcome"]


def test_a_resumed_member_vouches_for_the_others() -> None:
    job = restarted()
    job.resume("m1", 7)
    assert job.pass_time(60.0, beating=["m1"]) == []
    assert job.state.live is not None


def test_vouching_ends_when_a_report_voids_the_view() -> None:
    job = restarted()
    job.resume("m1", 7)
    effects = job.report("m1", ErrorReason.ERROR_REASON_PEER_LOST, 2)
    assert [member_id for member_id, _ in sent(effects, Verdict)] == ["m1"]
    assert job.state.verdict.culprits == (2,)
    job.pass_time(3.0, beating=["m1"])
    assert list(job.state.sessions) == ["m1"]  # nobody vouches for members of a void view


def test_the_generation_ends_if_no_member_resumes_in_time() -> None:
    job = restarted()
    newcomers = [job.join(2, 3), job.join(2, 3)]
    assert job.state.generation == 7
    job.pass_time(2.5, beating=newcomers)
    effects = job.pass_time(0.6)
    (text,) = [effect.verdict.text for effect in effects if isinstance(effect, StoreVerdict)]
    assert "rank 0 (host-0, pid 1000) was not seen again within 3 s after the coordinator was started again" in text
    assert any(isinstance(effect, StoreView) and effect.view.generation == 8 for effect in effects)


def test_a_stall_after_the_restart_renews_the_time_to_resume() -> None:
    job = restarted()
    assert job.pass_time(5.0, slept=5.0) == []
    assert job.pass_time(2.5) == []
    assert job.state.live is not None
    job.pass_time(0.6)
    assert job.state.live is None


def test_a_member_stops_vouching_when_it_leaves() -> None:
    job = restarted()
    job.resume("m1", 7)
    job.leave("m1")
    job.pass_time(3.0)
    job.pass_time(3.0)
    assert job.state.sessions == {}
    assert job.state.view is None


def test_members_of_a_void_view_get_its_verdict() -> None:
    verdict = Verdict(7, ErrorReason.ERROR_REASON_PEER_LOST, (0,), 3, "rank 0 died")
    job = restarted(verdict, {0: Ending("died", orderly=False)})
    assert job.state.sessions["m1"].standing is Standing.VOID
    assert job.resume("m1", 7) == [Welcome("m1", 0.5), Send("m1", verdict)]
    job.pass_time(3.0, beating=["m1"])
    assert list(job.state.sessions) == ["m1"]


def test_a_view_that_all_have_left_is_not_restored() -> None:
    state = restore(
        0.0, "job", generation=7, view=VIEW, endings={rank: Ending("left the job", True) for rank in range(3)}
    )
    assert (state.view, state.generation, state.sessions) == (None, 7, {})


def test_a_barrier_timeout_describes_the_missing_members() -> None:
    job = restarted()
    job.resume("m0", 7)
    job.resume("m1", 7)
    job.now += 0.1
    job.cut("m1")
    job.now += 0.2
    job.enter("m0", timeout=0.5)
    job.now += 0.5
    job.do(Heard("m0", Progress()))
    ((_, failed),) = sent(job.pass_time(0.0), BarrierFailed)
    assert failed.text == (
        "barrier 'b' (round 0) timed out after 0.5 s: 1 of 3 members arrived; missing rank 1 (host-1): disconnected "
        "0.7 s ago; rank 2 (host-2): not seen since the coordinator was started again"
    )
    assert failed.culprits == (1, 2)


def test_no_member_is_evicted_while_all_members_are_silent() -> None:
    """It may be the coordinator that is cut off, while they train on."""
    job, members = elastic(2)
    for _ in range(10):
        assert job.pass_time(6.0) == []
    assert list(job.state.sessions) == members
    for _ in range(3):  # the others have their time, from the first that is heard again
        assert job.pass_time(0.9, beating=members[:1]) == []
    job.pass_time(0.9, beating=members[:1])
    assert list(job.state.sessions) == members[:1]


def asked(job: PureJob, seconds: float, *, beating: list[str], answering: list[str] = []) -> list[tuple[float, str]]:  # noqa: B006
    """Lets time pass in small steps, in which some send heartbeats and the doors of others answer.

    Returns which doors were asked, and when, in seconds from now on.
    """
    began, found = job.now, []
    for _ in range(round(seconds / 0.05)):
        for effect in job.pass_time(0.03, beating=[each for each in beating if each in job.state.sessions]):
            if isinstance(effect, AskDoor):
                found.append((round(job.now - began, 1), effect.member_id))
                if effect.member_id in answering:
                    job.do(DoorAnswered(effect.member_id))
    return found


def test_a_member_without_heartbeats_is_kept_while_its_door_answers() -> None:
    """A call into C holds its interpreter, so no heartbeat comes; it stays for as long as its process runs."""
    job = PureJob()
    first, second = job.form(2)
    times = asked(job, 60.0, beating=[first], answering=[second])
    assert list(job.state.sessions) == [first, second]
    assert {member for _, member in times} == {second}
    assert 38 <= len(times) <= 40, "every half of a lease"
    job.do(Heard(second, Progress()))
    assert asked(job, 1.4, beating=[first]) == []


def test_a_busy_member_is_evicted_one_lease_after_its_last_door_answer() -> None:
    job = PureJob()
    first, second = job.form(2)
    asked(job, 10.0, beating=[first], answering=[second])
    asked(job, 3.2, beating=[first])
    assert list(job.state.sessions) == [first]


def test_a_silent_members_door_is_asked_three_times_before_eviction() -> None:
    """One answer may get lost. A member that has been evicted, or that sends heartbeats, is never asked."""
    job = PureJob()
    first, second = job.form(2)
    times = asked(job, 20.0, beating=[first])
    assert [member for _, member in times] == 3 * [second]
    assert 1.5 <= times[0][0] < times[2][0] < 2.7
    assert list(job.state.sessions) == [first]


def test_a_candidate_without_heartbeats_is_kept_while_its_door_answers() -> None:
    job = PureJob()
    busy = job.join(2, 2)
    asked(job, 10.0, beating=[], answering=[busy])
    assert list(job.state.sessions) == [busy]


def test_a_door_answer_does_not_replace_a_lost_stream() -> None:
    """A member that has lost its stream is on its way back, or cannot reach the coordinator any more."""
    job = PureJob()
    first, second = job.form(2)
    job.cut(second)
    assert asked(job, 2.0, beating=[first]) == []
    job.do(DoorAnswered(second))  # it was asked before
    asked(job, 1.1, beating=[first])
    assert list(job.state.sessions) == [first]


def test_a_door_answer_between_the_two_looks_prevents_eviction() -> None:
    job = PureJob()
    first, second = job.form(2)
    asked(job, 2.9, beating=[first])
    job.now = 103.0
    job.do(Heard(first, Progress()))
    job.do(Ticked())
    assert job.state.sessions[second].overdue_from == 103.0
    job.do(DoorAnswered(second))
    job.pass_time(0.02, beating=[first])
    assert list(job.state.sessions) == [first, second]


def test_each_door_is_asked_three_times_while_all_members_are_silent() -> None:
    """The coordinator may be cut off: then it would knock at a thousand hosts twice a second, for hours."""
    job, members = elastic(2)
    assert len(asked(job, 60.0, beating=[])) == 3 * len(members)
    assert list(job.state.sessions) == members


LONGEST = 3_600.0


def stored(failure_timeout: float, base: Tag | None = None) -> PureJob:
    """A job of before a restart."""
    view = View(7, JobSettings(2, 3, failure_timeout), False, SEATS, OURS, base=base)
    return PureJob(restore(100.0, "job", generation=7, view=view))


def unheard(how: str) -> tuple[PureJob, list[str], list[str]]:
    """A job, the members that are heard, and those without a stream that must go in time: something excuses them."""
    if how == "all have hung up":
        job, members = elastic(2)
        for member in members:
            job.cut(member)
        return job, [], members
    if how == "another one says that all train":
        job, members = elastic(2)
        job.cut(members[1])
        return job, members[:1], members[1:]
    if how == "another one vouches for them since a restart":
        job = stored(3.0)
        job.resume("m1", 7)
        return job, ["m1"], ["m0", "m2"]
    if how == "none was seen since a restart":
        return stored(3_000.0, Tag(6, 9)), [], ["m0", "m1", "m2"]
    a_day = 86_400.0  # as an earlier version has allowed
    if how == "each may be silent for a day":
        return stored(a_day), [], ["m0", "m1", "m2"]
    gone = ["m0"] if how == "one was back that may be silent for a day" else ["m0", "m1", "m2"]
    job = stored(a_day) if gone == ["m0"] else stored(3_000.0, Tag(6, 9))
    for member in ("m0", "m1", "m2"):
        job.resume(member, 7)
    job.do(Ticked())
    for member in gone:
        job.cut(member)
    return job, [], gone


HOW = (
    "all have hung up",
    "another one says that all train",
    "another one vouches for them since a restart",
    "none was seen since a restart",
    "each may be silent for a day",
    "one was back that may be silent for a day",
    "all have hung up that may be silent for long",
)


@pytest.mark.parametrize("how", HOW)
def test_no_session_without_a_stream_outlives_the_coordinators_limit(how: str) -> None:
    job, heard, gone = unheard(how)
    began, step = job.now, 1
    while set(gone) & set(job.state.sessions):
        assert set(gone) <= set(job.state.sessions)
        beat = job.now + 1.0 if heard else float("inf")
        job.now = min(max(job.now, job.membership.next_deadline()), beat)
        for member in heard if job.now == beat else ():
            step += 1
            job.do(Heard(member, Progress(step=step, step_at=job.now)))
        job.do(Ticked())
        assert job.now < began + LONGEST + 1.0
    assert job.now > began + LONGEST - 0.1
    if how == HOW[0]:
        assert job.state.view is not None, "the line waits for those that may hold its state (I2)"


@pytest.mark.parametrize("how", HOW)
def test_time_the_coordinator_slept_does_not_count_toward_the_limit(how: str) -> None:
    job, _, gone = unheard(how)
    for _ in range(2):
        job.pass_time(0.9 * LONGEST, slept=0.9 * LONGEST)
    assert set(gone) <= set(job.state.sessions)


def test_silent_members_with_streams_are_kept_while_all_are_silent() -> None:
    """The network to all of them is cut: the coordinator sees only that nothing comes."""
    job, members = elastic(2)
    for _ in range(10):
        job.pass_time(LONGEST)
    assert list(job.state.sessions) == members


def test_the_limit_counts_from_the_stream_end_not_the_last_message() -> None:
    """Its interpreter was held, or the network to all was cut, for longer than the limit; now they come back."""
    job = PureJob()
    first, second = job.form(2)
    for _ in range(2):
        job.now += LONGEST
        job.do(Heard(first, Progress()))
        job.do(DoorAnswered(second))
        job.do(Ticked())
    job.cut(second)
    job.pass_time(2.9, beating=[first])
    assert list(job.state.sessions) == [first, second]

    job, members = elastic(2)
    for _ in range(2):
        job.pass_time(LONGEST)
    for member in members:
        job.cut(member)
    job.pass_time(LONGEST - 1.0)
    assert list(job.state.sessions) == members
    job.pass_time(2.0)
    job.pass_time(1.0)
    assert not job.state.sessions


def test_a_stall_does_not_move_a_stream_end_into_the_future() -> None:
    """The loop may handle the end of a stream after a stall, and before it notices the stall."""
    job = PureJob()
    _, second = job.form(2)
    job.now += 100.0
    job.cut(second)
    job.do(Ticked(slept=100.0))
    session = job.state.sessions[second]
    assert session.stream_ended == job.now
    assert session.heard == job.now - 100.0
