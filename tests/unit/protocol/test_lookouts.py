"""Silent members are looked for on their hosts for as long as somebody waits, at a bounded cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from unit.protocol.test_meeting import elastic

from paceline_protocol import OURS, JobSettings, Meet, Process, Seat, Tag
from paceline_protocol._job_state import Session
from paceline_protocol._lookouts import _FIRST_S, _LONGEST_S, _NAMED, Lookouts
from paceline_protocol.coordinator import Effect, ExitReported, MetOthers, Registered, Ticked
from paceline_protocol.messages import Missing
from support.coordinator import PureJob, sent

_HERE, _THERE = Process("host-x", 1, "boot", 77, 4026), Process("host-y", 1, "other boot", 77, 4026)


def _worker(number: int, process: Process = _HERE) -> Session:
    settings = JobSettings(1, 9, 3.0)
    return Session(f"m{number}", b"", replace(process, pid=number), "", settings, None, 0, number, 1, 0.0, 0.0, OURS)


def _seats(count: int, process: Process = _HERE, first: int = 0) -> list[Seat]:
    return [
        Seat(rank, f"old{process.host}{rank}", replace(process, pid=1000 + rank), "", b"", rank)
        for rank in range(first, first + count)
    ]


def _sight(process: Process) -> tuple[str, str, int]:
    assert process.sight is not None
    return process.sight


def _asked(questions: Sequence[Effect]) -> list[str]:
    return [member_id for member_id, _ in sent(questions, Missing)]


def test_questions_repeat_after_doubling_pauses_to_alternating_workers() -> None:
    lookouts, workers, missing = Lookouts(), [_worker(1), _worker(2)], {_sight(_HERE): _seats(1)}
    times, asked, now = [], [], 10.0
    for _ in range(10):
        asked += _asked(lookouts.look(now, missing, workers))
        assert lookouts.look(now, missing, workers) == [], "not before it is due"
        times.append(now)
        now = lookouts.ask_at
    assert asked == ["m1", "m2"] * 5
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert [round(pause, 6) for pause in pauses] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_another_silent_member_is_asked_about_at_once() -> None:
    lookouts, workers = Lookouts(), [_worker(1)]
    lookouts.look(0.0, {_sight(_HERE): _seats(1)}, workers)
    lookouts.look(0.1, {_sight(_HERE): _seats(1)}, workers)
    ((_, question),) = sent(lookouts.look(0.11, {_sight(_HERE): _seats(2)}, workers), Missing)
    assert {process.pid for process in question.processes} == {1000, 1001}
    assert lookouts.ask_at == 0.11 + _FIRST_S
    assert lookouts.look(0.12, {_sight(_HERE): _seats(1)}, workers) == [], "one less is no reason"


def test_workers_are_not_asked_about_processes_of_another_host() -> None:
    lookouts, missing = Lookouts(), {_sight(_HERE): _seats(1), _sight(_THERE): _seats(1, _THERE)}
    assert _asked(lookouts.look(0.0, missing, [_worker(1, _THERE), _worker(2, replace(_HERE, boot_id=""))])) == ["m1"]
    assert _asked(lookouts.look(0.01, missing, [_worker(1, _THERE), _worker(3)])) == ["m3"], "he has just come"


def test_no_wake_up_is_set_without_a_silent_member_and_a_worker_to_ask() -> None:
    """A time that has passed, with nobody to ask, would wake the coordinator without end."""
    lookouts, missing = Lookouts(), {_sight(_HERE): _seats(1)}
    lookouts.look(0.0, missing, [])
    assert lookouts.ask_at == math.inf
    lookouts.look(0.0, missing, [_worker(1)])
    assert lookouts.ask_at == _FIRST_S
    lookouts.look(5.0, missing, [])
    assert lookouts.ask_at == math.inf
    assert _asked(lookouts.look(5.0, missing, [_worker(1)])) == ["m1"]
    lookouts.look(5.0, {}, [_worker(1)])
    assert lookouts.ask_at == math.inf


def test_each_silent_member_is_asked_about_once_per_round() -> None:
    lookouts, workers, missing = Lookouts(), [_worker(number) for number in range(500)], {_sight(_HERE): _seats(1000)}
    questions = sent(lookouts.look(0.0, missing, workers), Missing)
    named = [process.pid for _, question in questions for process in question.processes]
    assert sorted(named) == list(range(1000, 2000))
    assert max(len(question.processes) for _, question in questions) <= _NAMED
    assert len(dict(questions)) == len(questions), "no worker looks for all"
    for worker in workers:
        assert lookouts.look_too(0.0, [worker]) == [], "asked already, of others"


# With the whole job ---------------------------------------------------------------------------------------------------


def _silent(count: int) -> tuple[PureJob, list[str]]:
    """A line whose members are on one host; none of them has a stream any more."""
    job, members = elastic(count)
    assert job.state.view is not None
    for number, member in enumerate(members):
        job.becomes(member, replace(_HERE, pid=1 + number))
    seats = tuple(replace(seat, process=job.state.sessions[seat.member_id].process) for seat in job.state.view.seats)
    job.state.view = replace(job.state.view, seats=seats)
    for member in members:
        job.cut(member)
    return job, members


def _come(job: PureJob, name: str, pid: int) -> list[Effect]:
    settings = next(iter(job.state.sessions.values())).settings
    process = replace(_HERE, pid=pid)
    return job.do(Registered(name, b"token", 55 + pid, process, "host-x:1", settings, None, 0, OURS))


def _wait(job: PureJob) -> list[Effect]:
    """Time passes until something is due; the newcomer goes on heartbeating."""
    job.now = job.membership.next_deadline()
    for session in job.state.sessions.values():
        if session.stream is not None:
            session.heard = session.lease_from = job.now
    return job.do(Ticked())


def test_a_slowly_dying_process_is_asked_about_until_it_is_gone() -> None:
    """It was asked about once, when it was not dead yet, and nobody asked again."""
    job, _ = _silent(1)
    assert _asked(_come(job, "new", 9)) == ["new"]
    assert job.membership.next_deadline() == job.now + _FIRST_S
    came, asked = job.now, 0
    while job.now < came + 60.0:
        asked += len(_asked(_wait(job)))
    assert "rank 0" in job.reason
    assert "silent" in job.reason
    assert 10 <= asked <= 20, "for as long as it is waited for, and not too often"
    ((_, question),) = _until_asked(job)
    job.do(ExitReported(question.processes[0], 0, found_gone=True))
    job.do(MetOthers("new", Meet(0, Tag(0, 0), False)))
    _wait(job)
    assert job.state.live is not None, job.reason
    assert [seat.member_id for seat in job.state.live.seats] == ["new"]


def _until_asked(job: PureJob) -> list[tuple[str, Missing]]:
    while True:
        if asked := sent(_wait(job), Missing):
            return asked


def test_questions_stop_once_all_silent_members_have_ended() -> None:
    job, _ = _silent(2)
    _come(job, "new", 9)
    for pid in (1, 2):
        job.do(ExitReported(replace(_HERE, pid=pid), 0, found_gone=True))
    assert job.state.view is None
    end = job.now + 2 * _LONGEST_S
    while job.membership.next_deadline() < end:
        assert _asked(_wait(job)) == []


def test_a_repeated_report_that_a_member_is_gone_changes_nothing() -> None:
    job, _ = _silent(1)
    _come(job, "new", 9)
    gone = ExitReported(replace(_HERE, pid=1), 0, found_gone=True)
    job.do(gone)
    before = job.state.generation, dict(job.state.endings), job.reason
    job.do(gone)
    assert (job.state.generation, dict(job.state.endings), job.reason) == before
