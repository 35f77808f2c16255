"""What members are told once about a meeting, and who is asked to look for whom."""

from __future__ import annotations

from dataclasses import replace

from unit.server.test_meeting import elastic

from paceline_server.effects import PushMissing
from paceline_server.events import ExitReported, Registered
from paceline_server.model import Process
from support.coordinator import PureJob

HERE = Process("host-x", 1, "boot", 77, 4026)


def test_a_newcomer_is_asked_for_processes_of_its_own_host_that_are_silent() -> None:
    job, (first, second) = elastic(2)
    for member, pid in ((first, 11), (second, 12)):
        session = job.state.sessions[member]
        session.process = replace(HERE, pid=pid)
    assert job.state.view is not None
    seats = tuple(replace(seat, process=job.state.sessions[seat.member_id].process) for seat in job.state.view.seats)
    job.state.view = replace(job.state.view, seats=seats)
    job.cut(first)
    job.cut(second)
    stranger = job.join(1, 9, host="elsewhere")
    assert not [effect for effect in job.effects if isinstance(effect, PushMissing)], stranger
    job.do(registered(job, replace(HERE, pid=13)))
    (asked,) = [effect for effect in job.effects if isinstance(effect, PushMissing)]
    assert {process.pid for process in asked.processes} == {11, 12}
    job.do(ExitReported(replace(HERE, pid=11), 0, found_gone=True))
    assert not [effect for effect in job.effects if isinstance(effect, PushMissing)], "asked once"
    assert "is gone, as a worker on its host found" in str(job.state.endings)
    job.do(ExitReported(replace(HERE, pid=12), 0, found_gone=True))
    assert job.state.view is None, "all are known to have ended: the line is over"


def registered(job: PureJob, process: Process) -> Registered:
    settings = next(iter(job.state.sessions.values())).settings
    return Registered("new", b"token", 55, process, "host-x:1", settings, None, 0)


def test_only_a_process_of_the_same_pid_namespace_can_tell() -> None:
    assert HERE.can_see(replace(HERE, pid=2))
    assert not HERE.can_see(replace(HERE, pid_namespace=1))
    assert not HERE.can_see(replace(HERE, boot_id="other"))
    assert not replace(HERE, pid_namespace=0).can_see(replace(HERE, pid_namespace=0))
    assert not HERE.can_see(replace(HERE, start_ticks=0)), "whose start is unknown may be any"
