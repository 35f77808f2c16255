"""What is counted of a job, and which events are told, after stories that the test tells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from unit.server.watched_job import WatchedJob

from paceline_protocol import Counters, Meet, Process, Progress, Tag
from paceline_protocol.coordinator import (
    AddressRefused,
    DrainAsked,
    Event,
    ExitReported,
    FinishedLine,
    Heard,
    JobState,
    LeftJob,
    MetOthers,
    RestartAsked,
    Standing,
)
from paceline_server.happenings import Happening
from paceline_server.history import MOST_POINTS
from paceline_server.observatory import MOST_EVENTS, SHOWN_EVENTS, Observatory
from paceline_server.tally import KEPT_S, Tally
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import PureJob

PEER_LOST = ErrorReason.ERROR_REASON_PEER_LOST


def test_seconds_between_steps_count_as_committed() -> None:
    job = WatchedJob(2)
    before = job.seconds
    job.step(job.members[0], 1, 0.48)
    assert job.seconds == before | {"reforming": 0.5}, "up to its first word the generation was forming"
    job.step(job.members[0], 2, 1.0)
    job.step(job.members[1], 2, 0.0)
    job.step(job.members[0], 5, 3.0)
    assert job.seconds == before | {"reforming": 0.5, "committed": 4.0}
    assert job.tally.committed == 4, "the fifth step is under way"
    assert job.tally.step == 4
    assert job.tally.goodput(job.now) == pytest.approx(4.0 / sum(job.seconds.values()))


def test_steps_between_two_heartbeats_are_spread_evenly() -> None:
    job = WatchedJob(2)
    before = job.seconds
    job.step(job.members[0], 4, 2.0)  # four words: the first ended the forming
    assert job.seconds == before | {"reforming": 0.52, "committed": 1.5}


def test_a_killed_member_is_counted_with_its_detection_and_recovery() -> None:
    job = WatchedJob(3)
    start = job.seconds
    for number in (1, 2, 3):
        job.step(job.members[0], number, 1.0, samples=10 * number, sent_bytes={"shm": 100 * number})
    job.step(job.members[2], 3, 0.0, samples=9, sent_bytes={"tcp": 7})
    job.now += 0.4
    job.cut(job.members[2])
    job.now += 0.1
    job.kill(3)
    assert job.told("lost") == ["rank 2 (host-3, pid 1003) was killed by SIGKILL"]
    assert job.told("verdict") == ["rank 2 (host-3, pid 1003) was killed by SIGKILL"]
    job.now += 0.05
    job.stop(job.members[:2], 2)
    assert job.told("view")[-1] == "generation 3 has begun from step 2 with 2 workers", "the verdict says why"
    job.step(job.members[0], 3, 0.2, samples=30, undone=1, sent_bytes={"shm": 300})
    job.step(job.members[1], 3, 0.0, undone=1)
    assert job.tally.recovery.total == 0, "its first step is under way"
    job.step(job.members[0], 4, 1.0, samples=40, undone=1, sent_bytes={"shm": 300})
    seconds = {use: round(value - start.get(use, 0.0), 6) for use, value in job.seconds.items()}
    assert seconds == {"reforming": 1.25, "committed": 3.0, "undone": 0.5, "waiting": 0.0}
    tally = job.tally
    assert (tally.committed, tally.undone, tally.step) == (3, 1, 3)
    assert dict(tally.losses(job.now)) == {"exited": 1}
    assert dict(tally.generations) == {"began": 2, "lost": 1}
    assert tally.detection.total == pytest.approx(0.1), "from the end of its stream to the verdict"
    assert tally.recovery.total == pytest.approx(0.1 + 0.05 + 0.2 + 1.0)
    assert tally.samples == 49
    assert dict(tally.sent_bytes) == {"shm": 300, "tcp": 7}
    (gone,) = tally.gone_lately(job.now)
    assert (gone.member_id, gone.session.rank) == (job.members[2], 2)
    assert tally.gone_lately(job.now + 61) == []


def test_a_joining_member_starts_a_generation_and_counts_a_join() -> None:
    job = WatchedJob(2)
    job.step(job.members[0], 1)
    job.step(job.members[0], 2)
    seconds = job.seconds
    newcomer = job.join(1, 9)
    job.now += 0.75
    job.do(MetOthers(newcomer, Meet(0, Tag(0, 0), False)))
    job.stop(job.members, 2)
    assert job.state.live is not None
    assert len(job.state.live.seats) == 3
    assert job.seconds["committed"] == seconds["committed"] + 0.75
    assert dict(job.tally.generations) == {"began": 2, "joined": 1}
    assert job.tally.undone == 0
    assert job.tally.committed == 2
    assert (sum(job.tally.join.counts), job.tally.join.total) == (1, pytest.approx(0.75))
    assert job.told("joined")[-1] == "rank 2 (host-3, pid 1003) joined"
    assert job.told("view")[-1] == "generation 3 has begun from step 2 with 3 workers: rank 2 (host-3) joined"


def test_a_drained_member_is_not_counted_as_lost() -> None:
    job = WatchedJob(2)
    job.step(job.members[0], 1)
    job.do(DrainAsked((job.members[1],), "an operator asked for it"))
    job.stop(job.members[:1], 1)
    job.stop(job.members[1:], 1, leaving=True)
    job.leave(job.members[1])
    assert job.told("drained") == ["rank 1 (host-2, pid 1002) is to leave: an operator asked for it"]
    assert job.told("left") == ["rank 1 (host-2, pid 1002) left after a drain"]
    assert job.told("view")[-1] == "generation 3 has begun from step 1 with 1 worker: rank 1 (host-2) left"
    assert not job.tally.members_lost
    assert job.tally.generations["drained"] == 1


def test_a_member_that_waits_for_another_seat_has_not_left() -> None:
    """The size of a view may have to be a multiple of a number."""
    job = WatchedJob(2)
    view = job.state.live
    assert view is not None
    smaller = replace(view, generation=3, seats=view.seats[:1])
    job.state.sessions[job.members[1]].standing = Standing.CANDIDATE
    told = job.tally._formed(job.now, smaller, job.state)
    assert [each.text for each in told] == ["generation 3 has begun from step 0 with 1 worker"]


def test_a_member_that_resumed_before_its_probe_is_not_suspected() -> None:
    job = WatchedJob(2)
    job.cut(job.members[0])
    job.resume(job.members[0], 1)
    job.do(AddressRefused(job.members[0]))
    job.pass_time(100.0, job.members)
    job.kill(1)
    assert sum(job.tally.detection.counts) == 1
    assert job.tally.detection.total < 1.0


def test_losses_are_counted_by_cause() -> None:
    job = WatchedJob(4)
    job.do(AddressRefused(job.members[0]))  # its stream is there: nothing follows
    job.cut(job.members[0])
    job.do(AddressRefused(job.members[0]))
    job.leave(job.members[1], "ValueError: no")
    job.pass_time(2.9, job.members[3:])
    job.pass_time(0.5, job.members[3:])
    assert dict(job.tally.losses(job.now + 6)) == {"refused": 1, "raised": 1, "silent": 1}
    assert job.told("lost")[1] == "rank 1 (host-2, pid 1002) raised ValueError: no"


def test_detection_of_silence_is_timed_from_the_last_sign_of_life() -> None:
    job = WatchedJob(2)
    job.pass_time(2.9, job.members[:1])
    job.pass_time(0.5, job.members[:1])
    assert job.tally.losses(job.now + 6)["silent"] == 1
    assert 3.0 < job.tally.detection.total < 4.0


def test_a_silent_member_that_was_killed_is_shown_as_killed() -> None:
    job = WatchedJob(2)
    job.pass_time(2.9, job.members[:1])
    job.pass_time(0.5, job.members[:1])
    (gone,) = job.tally.gone_lately(job.now)
    assert gone.how.startswith("was silent for")
    assert not job.tally.losses(job.now)
    job.kill(2)
    assert gone.how == "was killed by SIGKILL"
    assert dict(job.tally.losses(job.now)) == {"exited": 1}


def test_a_member_that_was_killed_long_after_its_loss_was_lost_as_it_was() -> None:
    job = WatchedJob(2)
    job.pass_time(2.9, job.members[:1])
    job.pass_time(0.5, job.members[:1])
    (gone,) = job.tally.gone_lately(job.now)
    silent = gone.how
    for _ in range(60):
        job.pass_time(0.5, job.members[:1])
    job.kill(2)
    assert gone.how == f"{silent}; 31 s later its process was killed by SIGKILL"
    assert job.told("lost") == [f"rank 1 (host-2, pid 1002) {silent}"]
    assert dict(job.tally.losses(job.now)) == {"silent": 1}


def test_only_the_last_end_of_a_process_that_came_back_is_its_own() -> None:
    job = WatchedJob(3)
    job.pass_time(2.9, job.members[:2])
    job.pass_time(0.5, job.members[:2])
    job.join(1, 9, host="host-3", pid=1003)
    job.kill(3)
    evicted, killed = job.tally.gone_lately(job.now)
    assert evicted.how.startswith("was silent for")
    assert killed.how == "was killed by SIGKILL"


def test_a_cut_off_member_is_shown_as_killed_once_its_launcher_reports() -> None:
    job = WatchedJob(3)
    job.step(job.members[0], 1)
    job.cut(job.members[2])
    for reporter in job.members[:2]:
        job.report(reporter, PEER_LOST, 2)
    job.stop(job.members[:2], 0)
    assert job.state.live is not None, "the others train on"
    assert job.told("lost") == ["rank 2 (host-3, pid 1003) was cut off from others"]
    assert (job.tally.members_lost, dict(job.tally.losses(job.now))) == (1, {})
    job.kill(3)
    assert job.told("lost")[1:] == ["rank 2 (host-3, pid 1003) was killed by SIGKILL"]
    assert (job.tally.members_lost, dict(job.tally.losses(job.now + 60))) == (1, {"exited": 1})


def test_a_gone_member_is_shown_as_killed_once_its_launcher_reports() -> None:
    job = WatchedJob(3)
    job.do(ExitReported(Process("host-3", 1003), 0, found_gone=True))
    (gone,) = job.tally.gone_lately(job.now)
    assert gone.how == "is gone, as a worker on its host reported"
    job.kill(3)
    assert gone.how == "was killed by SIGKILL"
    job.do(ExitReported(Process("host-3", 1003), 0, found_gone=True))
    assert gone.how == "was killed by SIGKILL"
    assert dict(job.tally.losses(job.now)) == {"exited": 1}
    assert len(job.told("lost")) == 2


def test_seconds_with_too_few_workers_count_as_waiting() -> None:
    job = WatchedJob(2, least=2)
    job.step(job.members[0], 1)
    job.step(job.members[0], 2)
    job.kill(2)
    before = job.seconds
    job.pass_time(100.0, job.members[:1])
    assert job.seconds["waiting"] - before.get("waiting", 0.0) == pytest.approx(100.02)
    assert job.seconds["reforming"] == before["reforming"]


def test_a_finished_job_counts_no_more_seconds() -> None:
    job = WatchedJob(1)
    (member,) = job.members
    job.step(member, 1)
    job.step(member, 2)
    job.now += 0.5
    job.do(FinishedLine(member, job.state.generation, 2))
    seconds = job.seconds
    job.now += 100.0
    job.leave(member)
    assert job.seconds == seconds
    assert job.tally.committed == job.tally.step == 2
    assert job.events[-1] == ("finished", "the job is done: its last step was 2")
    assert not job.tally.members_lost


def test_steps_before_a_restored_checkpoint_do_not_count_as_committed() -> None:
    job = WatchedJob(2, base=100)
    assert job.base == 100
    assert (job.tally.committed, job.tally.step) == (0, 100)
    job.step(job.members[0], 101)
    job.step(job.members[0], 103)
    assert (job.tally.committed, job.tally.step) == (2, 102)


def test_a_restored_tally_counts_only_later_steps() -> None:
    job = WatchedJob(2)
    job.step(job.members[0], 50)
    later = Tally(job.now, job.state)
    for number in (60, 62):
        job.now += 1.0
        later.saw(job.now, Heard(job.members[0], Progress(1, job.now, False, number, job.now)), [], job.state)
    assert (later.committed, later.step) == (2, 61)
    assert later.seconds(job.now) == {"committed": 1.0, "undone": 0.0, "reforming": 0.0, "waiting": 0.0}


def test_a_restored_tally_does_not_recount_member_counters() -> None:
    job = WatchedJob(2)
    past = {"samples": 10_000_000, "undone": 2, "sent_bytes": {"tcp": 5000}, "in_collectives": 70.0}
    job.step(job.members[0], 50, **past, checkpoint_failures=3)
    tally = job.tally = Tally(job.now, job.state)
    job._falls = {}
    job.step(job.members[0], 51, **past, checkpoint_failures=3)
    assert (tally.samples, tally.undone, tally.waited, tally.checkpoint_failures) == (0, 0, 0.0, 0)
    assert dict(tally.sent_bytes) == {"tcp": 0}
    now = {"samples": 10_000_064, "undone": 3, "sent_bytes": {"tcp": 5600, "shm": 7}, "in_collectives": 72.5}
    job.step(job.members[0], 52, **now, checkpoint_failures=4)
    for _ in range(2):  # then it goes
        assert (tally.samples, tally.undone, tally.waited, tally.checkpoint_failures) == (64, 1, 2.5, 1)
        assert dict(tally.sent_bytes) == {"tcp": 600, "shm": 7}
        job.kill(1)


def test_decreasing_member_counters_do_not_lower_the_tally() -> None:
    """Sums below 0 made ListJobs fail, for all jobs."""
    job = WatchedJob(1)
    past = {"samples": 1_000, "state_bytes": 9, "sent_bytes": {"tcp": 5}, "in_collectives": 7.0, "state_time": 1.0}
    tally, job._falls = Tally(job.now, job.state), {}
    job.tally = tally  # of a coordinator that was started again
    for step, counters in enumerate([past, {}, past | {"samples": 1_001}], start=51):
        job.step(job.members[0], step, **counters)
    assert (tally.samples, tally.state_bytes, tally.waited, tally.state_time) == (1_001, 9, 7.0, 1.0)
    assert dict(tally.sent_bytes) == {"tcp": 5}


def kept(step: int, checkpoints: int, seconds: float, failures: int = 0) -> dict[str, Any]:
    """What a member has counted of checkpoints."""
    return {
        "checkpoint_step": step,
        "checkpoints": checkpoints,
        "checkpoint_time": seconds,
        "checkpoint_failures": failures,
    }


def test_a_checkpoint_written_by_several_members_counts_once() -> None:
    job = WatchedJob(3)
    job.step(job.members[0], 12, **kept(10, 1, 0.4))
    job.step(job.members[1], 12, **kept(10, 1, 2.0))  # another host has its own disk
    assert job.told("checkpoint") == ["checkpoint of step 10 is complete, in 0.4 s"]
    job.step(job.members[0], 13, **kept(10, 1, 0.4))
    job.step(job.members[1], 22, **kept(20, 2, 3.0))
    job.step(job.members[0], 22, **kept(20, 2, 0.9))
    tally = job.tally
    assert (sum(tally.checkpoint.counts), tally.checkpoint.total) == (2, pytest.approx(1.4))
    assert (tally.checkpoint_step, tally.checkpoint_failures) == (20, 0)
    assert job.told("checkpoint")[1:] == ["checkpoint of step 20 is complete, in 1.0 s"]


def test_checkpoint_failures_stay_counted_after_their_members_are_gone() -> None:
    job = WatchedJob(2)
    job.step(job.members[0], 12, **kept(0, 0, 0.0, failures=2))
    job.step(job.members[1], 12, **kept(10, 1, 1.0, failures=1))
    job.kill(1)
    assert job.tally.checkpoint_failures == 3
    job.stop(job.members[1:], 12)
    job.step(job.members[1], 13, **kept(10, 1, 1.0, failures=2))
    assert job.tally.checkpoint_failures == 4


def test_checkpoints_of_a_later_writer_add_to_the_count() -> None:
    job = WatchedJob(2)
    job.step(job.members[0], 12, **kept(10, 5, 4.0))
    job.kill(1)
    job.stop(job.members[1:], 12)
    job.step(job.members[1], 22, **kept(20, 1, 0.5))
    assert (sum(job.tally.checkpoint.counts), job.tally.checkpoint_step) == (2, 20)


def test_checkpoints_written_again_after_a_rollback_count() -> None:
    job = WatchedJob(1)
    job.step(job.members[0], 30, **kept(20, 1, 1.0))
    job.kill(1)
    (member,) = job.members = [job.join(1, 9)]
    job.pass_time(0.3)
    generation = job.state.view.generation if job.state.view is not None else 0
    job.do(MetOthers(member, Meet(generation, Tag(1, 10), False)))  # the checkpoint of step 20 was damaged
    assert job.state.live is not None
    assert job.state.live.base == Tag(1, 10)
    job.step(member, 22, **kept(20, 1, 1.0))
    assert (sum(job.tally.checkpoint.counts), job.tally.checkpoint_step) == (2, 20)


def test_a_restored_tally_does_not_recount_checkpoints() -> None:
    job = WatchedJob(1)
    (member,) = job.members
    job.step(member, 12, **kept(10, 3, 3.0))
    later = Tally(job.now, job.state)

    def told(number: int, **counters: Any) -> list[str]:
        heard = Heard(member, Progress(1, job.now, False, number, job.now), Counters(**counters))
        return [happening.text for happening in later.saw(job.now, heard, [], job.state)]

    assert told(13, **kept(10, 3, 3.0)) == []
    assert (sum(later.checkpoint.counts), later.checkpoint_step) == (0, 10)
    assert told(22, **kept(20, 4, 3.5)) == ["checkpoint of step 20 is complete, in 0.5 s"]


def test_a_job_starts_with_its_first_worker_unless_an_earlier_coordinator_saw_that() -> None:
    job = WatchedJob(2)
    started = job.tally.started
    assert started is not None
    assert started < job.now
    job.now += 5
    job.join(1, 9)
    assert job.tally.started == started
    job.tally, job._falls = Tally(job.now, job.state), {}
    job.join(1, 9)
    assert job.tally.started is None


def test_a_restart_is_recorded_as_an_event() -> None:
    job = WatchedJob(1)
    job.do(RestartAsked())
    assert job.told("restarted") == ["the job is started anew: its last members are taken for dead"]


def test_the_number_of_link_kind_labels_is_bounded() -> None:
    job = WatchedJob(20, most=20)
    for number, member in enumerate(job.members):
        job.step(member, 1, sent_bytes={f"kind{each}": 1 for each in range(number, number + 8)})
    assert len(job.tally.sent_bytes) == 9
    assert job.tally.sent_bytes["other"] == 160 - sum(range(1, 9))


def test_new_reasons_are_recorded_at_most_once_a_second() -> None:
    tally = Tally(0.0, JobState("job"))
    told = [each.text for now in range(30) for each in tally.reason(now / 10, f"reason {now}")]
    assert told == ["reason 0", "reason 10", "reason 20"]
    assert [each.text for each in tally.reason(3.0, "reason 29")] == ["reason 29"]
    assert tally.reason(9.0, "reason 29") == []


def test_steps_per_second_covers_the_last_ten_seconds() -> None:
    job = WatchedJob(1)
    for number in range(1, 60):
        job.step(job.members[0], number, 0.5)
    assert job.tally.steps_per_second(job.now) == pytest.approx(2.0, rel=0.1)
    assert job.tally.steps_per_second(job.now + 60) == 0.0


def test_a_tally_takes_bounded_memory() -> None:
    job = WatchedJob(2)
    for number in range(1, 500):
        job.step(job.members[0], number)
    assert len(job.tally._speed._marks) == 64
    assert len(job.tally.history.times) <= MOST_POINTS
    for _ in range(150):
        job.kill(len(job.members))
        job.members.append(job.join(1, 9))
    assert len(job.tally.gone) == 100
    assert len(job.tally._members) < 10


# All jobs -------------------------------------------------------------------------------------------------------------


def observe(observatory: Observatory, now: float, job: str, reasons: int) -> None:
    """So many seconds pass, each with another reason."""
    state = JobState(job)
    observatory.begin(now, state)
    for second in range(reasons):
        observatory.saw(now + 2.0 * second, RestartAsked(), [], state, "")


def test_events_are_numbered_over_all_jobs_and_dropped_in_order() -> None:
    observatory = Observatory(epoch=1_000.0)
    observe(observatory, 0.0, "a", 3)
    observe(observatory, 0.0, "b", 3)
    found, looked = observatory.events("b", 2, 2)
    assert [(event.number, event.job, event.at) for event in found] == [(4, "b", 1000.0), (5, "b", 1002.0)]
    assert looked == 5
    assert [event.number for event in observatory.events("", 0, 100)[0]] == [1, 2, 3, 4, 5, 6]
    assert observatory.events("", 6, 100) == ([], 6)
    assert len(observatory.events("", 99, 100)[0]) == 6, "the caller knows another coordinator's numbers"
    observe(observatory, 0.0, "a", MOST_EVENTS)
    found, looked = observatory.events("", 0, 10)
    assert [event.number for event in found] == list(range(7, 17))
    assert looked == 16
    assert len(observatory.recent("a")) == SHOWN_EVENTS
    assert [event.number for event in observatory.recent("b")] == [4, 5, 6], "another job's events push none out"


def test_checkpoint_events_do_not_displace_other_recent_events() -> None:
    observatory = Observatory(0.0)
    observatory.begin(0.0, JobState("a"))
    for kind in ("restarted", *["checkpoint"] * 30):
        observatory._add(0.0, "a", Happening(kind, 1, "text"))
    assert [(event.kind, event.number) for event in observatory.recent("a")] == [("restarted", 1), ("checkpoint", 31)]
    assert len(observatory.events("a", 0, 100)[0]) == 31, "none is lost to who reads them in order"


def test_a_job_at_rest_is_counted_for_five_minutes() -> None:
    observatory = Observatory(0.0)
    for number in range(3):
        observatory.begin(0.0, JobState(f"job{number}"))
    observatory.rest(10.0, "job1")
    assert observatory.counted(300.0) == ["job0", "job2", "job1"]
    assert observatory.counted(311.0) == ["job0", "job2"]
    assert observatory.tally(311.0, "job1") is None
    observatory.begin(312.0, JobState("job1"))
    assert observatory.tally(313.0, "job1") is not None, "it has come back"


def test_jobs_at_rest_take_bounded_memory() -> None:
    observatory = Observatory(0.0)
    for number in range(1_100):
        observatory.begin(0.0, JobState(f"job{number}"))
        observatory.rest(1.0, f"job{number}")
    assert len(observatory.counted(2.0)) == 1_000
    assert observatory.tally(2.0, "job0") is None


def test_a_failing_tally_logs_one_warning_and_does_not_raise(caplog: pytest.LogCaptureFixture) -> None:
    observatory = Observatory(0.0)
    state = JobState("job")
    observatory.begin(0.0, state)
    for _ in range(2):
        observatory.saw(0.0, RestartAsked(), None, state, "")  # type: ignore[arg-type]
    assert sum("may be wrong" in record.message for record in caplog.records) == 1


def test_samples_of_a_replica_count_once() -> None:
    job = PureJob()
    tally = Tally(job.now, job.state)
    decide = job.membership.handle

    def handle(now: float, event: Event) -> list[Any]:
        effects = decide(now, event)
        tally.saw(now, event, effects, job.state)
        return effects

    job.membership.handle = handle  # type: ignore[method-assign]
    ranks = [job.join(1, 1, replica="a", position=position, size=2) for position in range(2)]
    for samples in (0, 32):
        for member in ranks:
            job.do(Heard(member, Progress(1, job.now, False), Counters(samples=samples)))
    assert tally.samples == 32


# Last lines -----------------------------------------------------------------------------------------------------------


def exit_of(number: int, output: str, code: int = 1) -> ExitReported:
    return ExitReported(Process(f"host-{number}", 1000 + number), code, output=output)


def outputs(job: WatchedJob) -> list[str]:
    return [gone.output for gone in job.tally.gone]


def test_the_last_lines_of_a_member_come_with_the_report_of_its_end() -> None:
    job = WatchedJob(3)
    job.do(exit_of(2, "about to die", -9))
    assert outputs(job) == ["about to die"]
    assert "about to die" not in str(job.state), "no state has them"
    assert not any("about to die" in text for _, text in job.events)


@pytest.mark.parametrize("cause", ["", "ValueError: x"])
def test_the_last_lines_of_a_member_that_has_left_come_later(cause: str) -> None:
    job = WatchedJob(3)
    member = job.members[2]
    process = job.state.sessions[member].process
    job.do(LeftJob(member, cause))
    how = job.tally.gone[0].how
    job.do(ExitReported(process, 0, output="the last line"))
    assert outputs(job) == ["the last line"]
    assert job.tally.gone[0].how == how
    job.do(ExitReported(process, 0))
    assert outputs(job) == ["the last line"], "a launcher may report twice"


def test_the_last_lines_of_the_first_eight_members_of_a_minute_are_kept() -> None:
    job = WatchedJob(12, most=20)
    processes = [job.state.sessions[member].process for member in job.members]
    for number, process in enumerate(processes[:9]):
        job.do(ExitReported(process, -9, output=f"last of {number}"))
    assert outputs(job) == [*(f"last of {number}" for number in range(8)), ""], "the first of them tells most"
    job.do(ExitReported(processes[8], -9, output="again"))
    assert outputs(job)[8] == ""
    job.pass_time(KEPT_S + 1)
    job.do(ExitReported(processes[9], -9, output="a minute later"))
    assert outputs(job) == [*[""] * 9, "a minute later"]


def test_the_last_lines_are_in_no_log_of_events() -> None:
    assert "secret" not in repr(exit_of(1, "secret"))
