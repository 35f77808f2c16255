"""A line as the coordinator sees it: when it is done, and what becomes of a view while it is stored."""

from __future__ import annotations

import pytest
from unit.server.test_meeting import elastic

from paceline_server.effects import ForgetView, PushFinished, PushVerdict, PushView, StoreFinished
from paceline_server.events import AddressRefused, ExitReported, FinishedLine, FinishStored, MetOthers, ViewStored
from paceline_server.model import Met, Process, Tag
from support.coordinator import PureJob

# The end of a line ----------------------------------------------------------------------------------------------------


def test_a_line_is_done_when_that_is_stored() -> None:
    job, (first, second) = elastic(2)
    job.slow_disk = True
    assert job.do(FinishedLine(first, 2, 9)) == [StoreFinished(9)]
    assert job.state.finished is None
    assert job.do(FinishedLine(second, 2, 9)) == [], "it is being stored already"
    effects = job.do(FinishStored(9))
    assert [effect for effect in effects if isinstance(effect, PushFinished)] == [
        PushFinished(first, 9),
        PushFinished(second, 9),
    ]


@pytest.mark.parametrize("generation", [0, 1, 3])
def test_a_member_of_another_generation_ends_no_line(generation: int) -> None:
    job, (first, _) = elastic(2)
    assert job.do(FinishedLine(first, generation, 9)) == []
    assert job.state.finishing is job.state.finished is None


def test_nobody_ends_a_line_whose_members_have_yet_to_compare_their_states() -> None:
    job = PureJob()
    first, _ = job.form(2)
    assert job.state.live.base is None
    assert job.do(FinishedLine(first, 1, 9)) == []
    assert job.state.finishing is job.state.finished is None


def test_a_candidate_ends_no_line() -> None:
    job, _ = elastic(2, most=9)
    candidate = job.join(1, 9)
    assert job.do(FinishedLine(candidate, 2, 9)) == []
    assert job.state.finishing is job.state.finished is None


def test_a_line_is_kept_for_members_that_are_only_silent() -> None:
    """Both seem to be dead, but each may hold the state and be cut off. That one is gone has to be known for sure."""
    job, members = elastic(2)
    for member in members:
        job.cut(member)
        job.do(AddressRefused(member))
    newcomer = job.join(1, 9)
    job.do(MetOthers(newcomer, Met(0, Tag(0, 0), False)))
    assert list(job.state.sessions) == [newcomer]
    assert job.state.view is not None
    assert job.state.view.generation == 2
    for number in (1, 2):
        job.do(ExitReported(Process(f"host-{number}", 1000 + number), -9))
    assert job.state.view is None, "all are known to have ended: the line is over"


# A view that is being stored ------------------------------------------------------------------------------------------


def forming() -> tuple[PureJob, list[str]]:
    """Generation 3 of a line is being stored."""
    job, members = elastic(2)
    job.slow_disk = True
    for member in members:
        job.do(MetOthers(member, Met(2, Tag(2, 4), True)))
    assert job.state.forming is not None
    return job, members


def test_a_lines_view_stays_though_a_member_is_cut_off_while_it_is_stored() -> None:
    """On the disk it has replaced the one before, whose members would be forgotten."""
    job, (first, second) = forming()
    job.cut(second)
    effects = job.do(ViewStored(3))
    assert not any(isinstance(effect, ForgetView) for effect in effects)
    assert first in [effect.member_id for effect in effects if isinstance(effect, PushView)]
    assert job.state.view is not None
    assert job.state.view.generation == 3


def test_a_member_that_dies_while_its_view_is_stored_is_the_verdict_on_it() -> None:
    job, (first, _) = forming()
    job.do(ExitReported(Process("host-2", 1002), -9))
    effects = job.do(ViewStored(3))
    assert [effect.member_id for effect in effects if isinstance(effect, PushView)] == [first]
    assert [effect.verdict.culprits for effect in effects if isinstance(effect, PushVerdict)] == [(1,)]


def test_a_meet_from_before_the_latest_view_is_of_no_use() -> None:
    """It was under way while the view formed."""
    job, (first, second) = forming()
    job.do(ViewStored(3))
    assert job.do(MetOthers(first, Met(2, Tag(2, 4), True))) == []
    assert not job.state.sessions[first].has_met
    assert not job.state.sessions[second].has_met
