"""What members are told once about a meeting, and who is asked to look for whom."""

from __future__ import annotations

from dataclasses import replace

from unit.protocol.test_meeting import elastic

from paceline_protocol import OURS, Meet, Process, Tag
from paceline_protocol.coordinator import ExitReported, MetOthers, Registered
from paceline_protocol.messages import CatchUp, Missing, Running
from support.coordinator import PureJob, sent

HERE = Process("host-x", 1, "boot", 77, 4026)


def test_a_newcomer_is_asked_about_silent_processes_of_its_own_host() -> None:
    job, (first, second) = elastic(2)
    for member, pid in ((first, 11), (second, 12)):
        job.becomes(member, replace(HERE, pid=pid))
    assert job.state.view is not None
    seats = tuple(replace(seat, process=job.state.sessions[seat.member_id].process) for seat in job.state.view.seats)
    job.state.view = replace(job.state.view, seats=seats)
    job.cut(first)
    job.cut(second)
    stranger = job.join(1, 9, host="elsewhere")
    assert not sent(job.effects, Missing), stranger
    job.do(registered(job, replace(HERE, pid=13)))
    ((_, asked),) = sent(job.effects, Missing)
    assert {process.pid for process in asked.processes} == {11, 12}
    job.do(ExitReported(replace(HERE, pid=11), 0, found_gone=True))
    assert not sent(job.effects, Missing), "not again before it is due"
    assert "is gone, as a worker on its host reported" in str(job.state.endings)
    job.do(ExitReported(replace(HERE, pid=12), 0, found_gone=True))
    assert job.state.view is None, "all are known to have ended: the line is over"


def registered(job: PureJob, process: Process) -> Registered:
    settings = next(iter(job.state.sessions.values())).settings
    return Registered("new", b"token", 55, process, "host-x:1", settings, None, 0, OURS)


def test_sight_is_equal_only_within_one_pid_namespace_and_boot() -> None:
    assert HERE.sight == replace(HERE, pid=2).sight is not None
    assert HERE.sight != replace(HERE, pid_namespace=1).sight
    assert HERE.sight != replace(HERE, boot_id="other").sight
    assert replace(HERE, pid_namespace=0).sight is None


def test_a_change_of_donors_alone_sends_no_new_catch_up() -> None:
    job, members = elastic(4)
    first, second, third, fourth = members
    generation = job.state.generation
    behind, ahead = Meet(generation, Tag(generation, 1), True), Meet(generation, Tag(generation, 2), True)
    job.do(ExitReported(job.state.sessions[fourth].process, -9))
    for member, met in ((first, behind), (second, behind), (third, ahead)):
        job.do(MetOthers(member, met))
    assert ordered(job) == {first: [third], second: [third]}
    job.do(MetOthers(first, ahead))
    assert ordered(job) == {}, "a donor more is no new order"
    job.do(MetOthers(second, behind))
    assert ordered(job) == {second: [third]}, "nobody gave it: it is told again"
    job.cut(third)
    assert ordered(job) == {}, "nor is a donor that may be dead"
    job.do(MetOthers(second, behind))
    assert ordered(job) == {second: [first, third]}


def ordered(job: PureJob) -> dict[str, list[str]]:
    orders = sent(job.effects, CatchUp)
    return {member_id: [holder.member_id for holder, _ in order.holders] for member_id, order in orders}


def test_a_candidate_receives_running_again_when_it_resumes() -> None:
    """It has said nothing yet that would make the coordinator tell it again, and would wait for ever."""
    job, _ = elastic(2)
    late = job.join(1, 9)
    assert [member_id for member_id, _ in sent(job.effects, Running)] == [late]
    job.cut(late)
    effects = job.resume(late, 0)
    assert [member_id for member_id, _ in sent(effects, Running)] == [late]
