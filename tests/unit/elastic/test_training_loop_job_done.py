"""A member that is told that the job is done, for its own closing word has failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import paceline
from paceline._base.activity import MemberCounters
from paceline._elastic import training_loop
from paceline._elastic.mates import ALONE
from paceline._elastic.saver import Saver
from paceline._elastic.train_state import TrainState
from paceline._elastic.training_loop import TrainingLoop
from paceline.errors import Dismissed, StepOrderError
from paceline_protocol import MemberState, Tag
from paceline_protocol.messages import Finished


def member(step: int, generation: int = 3, total: int = 10, peers: int = 1) -> tuple[TrainingLoop, list[int]]:
    """A member that has applied `step`, of which it has heard that the one before is committed.

    A former member (`generation` 0) has the peers of its last view, and a worker that was in none has none.
    """
    state, place = TrainState(), MemberState(Tag(2, step - 1))
    state.step = step
    core = SimpleNamespace(mesh=SimpleNamespace(peers=[None] * peers), counters=MemberCounters())
    port: Any = SimpleNamespace(job="job", group=SimpleNamespace(_core=core), mates=ALONE)
    line = TrainingLoop(port, state._core, total, 0, b"", Saver(None, None), place)
    place.held, place.generation = Tag(generation, step), generation
    heard: list[int] = []
    line.on_commit = [heard.append]
    return line, heard


@pytest.mark.parametrize(("step", "expected"), [(10, [10]), (9, [9, 10])])
def test_a_member_reports_each_committed_step_when_the_job_is_done(step: int, expected: list[int]) -> None:
    line, heard = member(step)
    if step < 10:
        with pytest.raises(Dismissed):
            line._job_done(10)
    else:
        line._job_done(10)
        assert line.done
    assert heard == expected


def test_a_candidate_is_dismissed_and_reports_no_commits() -> None:
    line, heard = member(9, generation=0)
    with pytest.raises(paceline.Dismissed):
        line._job_done(10)
    assert heard == []


def test_the_end_of_a_shorter_job_raises_step_order_error() -> None:
    line, _ = member(10, total=20)
    with pytest.raises(StepOrderError, match="paceline restart"):
        line._job_done(10)
    assert not line.done


def test_a_worker_that_was_in_no_view_is_dismissed_when_the_job_is_done() -> None:
    line, _ = member(10, generation=0, peers=0)
    with pytest.raises(Dismissed, match="is done"):
        line._job_done(10)


def test_a_former_member_with_the_last_state_finishes_its_loop() -> None:
    line, heard = member(10, generation=0)
    line._job_done(10)
    assert line.done
    assert heard == []


@pytest.mark.parametrize("how", ["break", "stop"])
def test_a_member_that_broke_off_or_stopped_accepts_the_end_of_the_job(how: str) -> None:
    """Another member has ended the job while this one's closing word failed."""
    line, heard = member(5)
    if how == "break":
        line.broken_off = "train.py:31"
    else:
        line.stop()  # as it is again in a generation behind the one that stopped
    line._job_done(5)
    assert line.done
    assert heard == [5]


def test_dismissal_in_a_retry_block_clears_unfinished_at_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was evicted there, and the others have ended the job: the error does not pass through the loop."""
    told: list[Any] = []
    monkeypatch.setattr(training_loop, "tell_of_loop", lambda job, *, unfinished, **_: told.append(unfinished))
    line, _ = member(9)
    line._job_line.group._core.ban_collectives = lambda reason: None  # type: ignore[method-assign]
    line._job_line.group._core.ban_reason = ""
    monkeypatch.setattr(line._member, "meet", lambda: None)
    monkeypatch.setattr(line, "_send_meet", lambda meet: None)
    monkeypatch.setattr(line, "wait_until_ready", lambda: line._handle(Finished(10)))
    line.tell_launcher(unfinished=True)
    with pytest.raises(Dismissed):
        line.retry()
    assert told == [True, False]
