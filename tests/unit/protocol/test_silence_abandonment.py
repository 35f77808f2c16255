"""When the members of a generation are declared dead. Time is an argument."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline_protocol import Tag
from paceline_protocol.coordinator import Abandonment, JobState
from support.coordinator import PureJob


@pytest.fixture
def job() -> PureJob:
    """Two members of a line, both connected."""
    job = PureJob()
    job.form(2)
    assert job.state.view is not None
    job.state.view = replace(job.state.view, base=Tag(0, 0))
    return job


def desert(job: PureJob) -> None:
    for session in job.state.present():
        session.stream = None


def wait_in(job: PureJob) -> None:
    job.join(2, 2)


def test_members_are_never_declared_dead_by_default(job: PureJob) -> None:
    desert(job)
    wait_in(job)
    assert Abandonment(None).due_at(1e9, job.state) is None


def test_members_are_not_declared_dead_while_one_is_connected(job: PureJob) -> None:
    wait_in(job)
    job.state.present()[0].stream = None
    assert Abandonment(60.0).due_at(100.0, job.state) is None


def test_timer_counts_from_the_last_disconnect_but_needs_a_waiting_worker(job: PureJob) -> None:
    abandonment = Abandonment(60.0)
    desert(job)
    assert abandonment.due_at(100.0, job.state) is None, "nobody waits: nothing is gained"
    wait_in(job)
    assert abandonment.due_at(130.0, job.state) == 160.0, "the time without anybody who waits counts too"


def test_a_returning_member_restarts_the_abandonment_timer(job: PureJob) -> None:
    abandonment = Abandonment(60.0)
    desert(job)
    wait_in(job)
    assert abandonment.due_at(100.0, job.state) == 160.0
    job.state.present()[0].stream = 9
    assert abandonment.due_at(150.0, job.state) is None
    desert(job)
    assert abandonment.due_at(155.0, job.state) == 215.0


def test_time_the_coordinator_slept_does_not_count(job: PureJob) -> None:
    abandonment = Abandonment(60.0)
    desert(job)
    wait_in(job)
    abandonment.due_at(100.0, job.state)
    abandonment.slept(1000.0)
    assert abandonment.due_at(1100.0, job.state) == 1160.0


def test_members_evicted_for_silence_count_as_disconnected(job: PureJob) -> None:
    abandonment = Abandonment(60.0)
    wait_in(job)
    for session in job.state.present():
        del job.state.sessions[session.member_id]
    assert abandonment.due_at(100.0, job.state) == 160.0


def done(state: JobState) -> None:
    state.finished = 12


def without_line(state: JobState) -> None:
    assert state.view is not None
    state.view = replace(state.view, base=None)


def forming(state: JobState) -> None:
    state.forming = state.view


def without_view(state: JobState) -> None:
    state.view = None


@pytest.mark.parametrize("change", [done, without_line, forming, without_view])
def test_abandonment_is_not_due_if_finished_forming_or_without_a_base(job: PureJob, change: object) -> None:
    desert(job)
    wait_in(job)
    assert callable(change)
    change(job.state)
    assert Abandonment(60.0).due_at(100.0, job.state) is None


def test_done_returns_the_reason_and_restarts_the_timer(job: PureJob) -> None:
    abandonment = Abandonment(60.0)
    desert(job)
    wait_in(job)
    abandonment.due_at(100.0, job.state)
    assert abandonment.done(job.state) == (
        "no member of generation 1 has been connected for 60 s: all of them are declared dead (--restart-after)"
    )
    assert abandonment.due_at(160.0, job.state) == 220.0
