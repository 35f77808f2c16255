"""The gate of a step: what must be so at this member before the state may change (I1)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import paceline
from paceline._elastic.gate import PendingStepWord
from paceline._elastic.mates import Alone
from paceline._elastic.rounds import Point
from paceline._elastic.state import StateCore
from paceline._elastic.step import Step
from paceline._group import Group
from paceline._links.fault import Suspicion
from paceline._parallel._agreement import NewcomerDiffers
from paceline.errors import DivergenceError, PacelineError, PeerLost, PeerRaised, SettingsMismatch, StepVoid
from paceline_protocol import StepFlag, step_word
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.parts import at_once, world_of


class StepRunner:
    """Notes when the state begins to change."""

    def __init__(self, look: Callable[[], Any] = lambda: None) -> None:
        self.saw: list[Any] = []
        self._look = look

    def word_completed(self, step: int) -> None:
        pass

    def about_to_change(self) -> None:
        self.saw.append(self._look())

    def applied(self, step: int) -> None:
        pass


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    with world_of(2) as groups:
        yield groups


def step_of(group: Group, runner: StepRunner, digest: int = 5) -> Step:
    errand = PendingStepWord(group, step_word(StepFlag(0), 1, digest), 1, with_gradients=False)
    return Step(1, 1, group, StateCore(), runner, errand, digest, 0)  # type: ignore[arg-type]


def test_the_gate_opens_after_all_collectives_of_the_step_have_ended(groups: list[Group]) -> None:
    mine, other = groups
    other_may_go_on = threading.Event()
    flush = mine._core.flush

    def flush_at_last() -> None:
        other_may_go_on.set()
        flush()

    mine._core.flush = flush_at_last  # type: ignore[method-assign]

    def open_gate() -> list[bool]:
        work: Any = None
        runner = StepRunner(lambda: work.done())
        step = step_of(mine, runner)
        work = mine.all_reduce(np.ones(3), async_op=True)
        step._open_gate()
        other_may_go_on.set()
        work.wait()
        return runner.saw

    def follow() -> None:
        step_of(other, StepRunner())
        assert other_may_go_on.wait(10)
        other.all_reduce(np.ones(3))

    saw, failure = at_once([open_gate, follow])
    assert (saw, failure) == ([True], None), "the state began to change while a collective was under way"


def test_the_gate_stays_shut_if_members_hold_different_bits(groups: list[Group]) -> None:
    runners = [StepRunner(), StepRunner()]
    steps = [lambda i=i: step_of(groups[i], runners[i], digest=i)._open_gate() for i in range(2)]
    assert all(isinstance(error, DivergenceError) for error in at_once(steps))
    assert [runner.saw for runner in runners] == [[], []]


def test_a_block_hears_of_a_failure_before_the_gate_together_with_mates_and_not_behind_it(groups: list[Group]) -> None:
    class Mates(Alone):
        goes: StepFlag | None = StepFlag(0)

        def go(self, point: Point, *_: Any) -> StepFlag | None:
            held.append(point)
            return self.goes

    held: list[Point] = []
    mates = Mates()
    step = step_of(groups[0], StepRunner())
    step._gate._mates = mates
    step._gate.check()
    mates.goes = None
    with pytest.raises(StepVoid, match="another rank of this replica has stopped in step 1"):
        step._gate.check()
    groups[0]._core.mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_LOST, 1, 0, "rank 1 is lost"))
    groups[0]._core.mesh.fault.expect_no_verdict()
    with pytest.raises(PeerLost):
        step._gate.check()
    step._gate.is_open = True
    step._gate.check()
    assert held == [Point.INSIDE, Point.INSIDE]


def test_the_gate_stays_shut_after_the_generation_has_failed(groups: list[Group]) -> None:
    runners = [StepRunner(), StepRunner()]
    steps = at_once([lambda i=i: step_of(groups[i], runners[i]) for i in range(2)])
    at_once([step._gate._word.wait for step in steps])
    groups[1]._core.mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_LOST, 0, 0, "rank 0 is gone"))
    for step in steps:
        with pytest.raises(PeerLost, match="rank 0 is gone"):
            step._open_gate()
    assert [runner.saw for runner in runners] == [[], []]


@pytest.mark.parametrize("error", [SettingsMismatch("compression is bf16", ranks=(1,)), DivergenceError("it differs")])
def test_only_the_newcomer_that_differs_ends_with_an_error(error: Exception, groups: list[Group]) -> None:
    """What `agree` raises there; whoever is first ends the generation, and nobody takes another's error for its own."""
    both, heard = threading.Barrier(2), NewcomerDiffers("rank 1 came in", groups[0].members[1], ranks=(1,))

    def enter(rank: int) -> Step:
        step = step_of(groups[rank], StepRunner())
        with step:
            both.wait()
            raise error if rank == 1 else heard
        return step

    step, ended = at_once([lambda rank=rank: enter(rank) for rank in range(2)])
    assert ended is error
    assert isinstance(step, Step)
    assert not step.applied
    assert isinstance(step.cause, PeerRaised)
    assert groups[0]._core.mesh.fault.failed


def test_a_newcomer_differs_error_fails_the_step_as_peer_raised(groups: list[Group]) -> None:
    step = step_of(groups[0], StepRunner())
    with step:
        raise NewcomerDiffers("rank 1 came in", groups[0].members[1], ranks=(1,))
    assert not step.applied
    assert isinstance(step.cause, PeerRaised)


@pytest.mark.parametrize("kind", [PeerRaised, NewcomerDiffers])
def test_an_error_of_another_session_is_raised_from_the_block(kind: Any, groups: list[Group]) -> None:
    """It is raised, and ends the loop: to run the step again would change nothing over there."""
    elsewhere = replace(groups[0].members[1], member_id="of another session")
    error = PeerRaised("raised") if kind is PeerRaised else NewcomerDiffers("came in", elsewhere, ranks=(1,))
    with pytest.raises(kind) as caught, step_of(groups[0], StepRunner()):
        raise error
    assert caught.value is error


def trained() -> StateCore:
    model = paceline.nn.Linear(2, 2, rng=np.random.default_rng(0))
    return StateCore(model=model, optimizer=paceline.optim.SGD(model, lr=0.1))


@pytest.mark.parametrize("alone", [False, True])
def test_a_step_is_skipped_only_if_all_members_skip_it(alone: bool, groups: list[Group]) -> None:
    def enter(rank: int) -> Step:
        group = groups[rank]
        word = PendingStepWord(group, step_word(StepFlag(0), 1, 5), 1, with_gradients=False)
        step = Step(1, 1, group, trained(), StepRunner(), word, 5, 0)  # type: ignore[arg-type]
        with step:
            if alone and rank == 0:
                step._updates = True
                step._open_gate()
        if alone and rank == 0:
            group._core.ban_collectives("")
            with pytest.raises(PacelineError):
                group.all_reduce(np.ones(3))  # its next step
        return step

    first, second = at_once([lambda rank=rank: enter(rank) for rank in range(2)])
    assert isinstance(first, Step), first
    assert isinstance(second, Step), second
    assert (first.applied, first.skipped) == (alone, not alone)
    assert (second._passed, second.applied, second.skipped) == (not alone, False, not alone)


@pytest.mark.parametrize("asked", [1, 2])
def test_a_skip_marks_only_the_step_that_was_asked_for(asked: int, groups: list[Group]) -> None:
    step = step_of(groups[0], StepRunner())
    with step:
        skipped = ErrorReason.ERROR_REASON_STEP_SKIPPED
        groups[1]._core.mesh.fault.suspect(
            Suspicion(skipped, None, asked, f"rank 1 called step.skip() in step {asked}")
        )
    assert (step.applied, step.skipped) == (False, asked == 1)
