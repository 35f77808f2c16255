"""The machine of an attempt: an event leads where the table says, or is refused and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paceline._base.sum_order import EVEN, Node
from paceline._microbatch.attempt import AttemptPhase, MicrobatchTurn, StepAttempt
from paceline._microbatch.rank_plan import plan_ranks, usual_plan
from paceline.errors import StepOrderError

ASKING, BETWEEN, ENTERED, COMPUTING, FAILED, VOID = AttemptPhase
PLAN = usual_plan(1, 2, 8)


class Wrapper:
    """It holds nothing."""

    def held_sums(self) -> tuple[object, tuple[Node, ...]] | None:
        return None

    def recover_sums(self) -> None:
        pass


def fail(turn: MicrobatchTurn) -> None:
    """A wrapper's pass raises."""
    with pytest.raises(ZeroDivisionError), turn.collectives():
        raise ZeroDivisionError


def in_phase(phase: AttemptPhase) -> tuple[StepAttempt, tuple[MicrobatchTurn, ...]]:
    """An attempt of rank 1 of 2 in that phase, at its first microbatch if one runs, and the turns of its loop."""
    attempt = StepAttempt(PLAN, asks=True)
    if phase is ASKING:
        return attempt, tuple(MicrobatchTurn(attempt, number) for number in PLAN.numbers)
    attempt.divide(PLAN, object())
    turns = attempt.turns()
    if phase is not BETWEEN:
        attempt.enter(turns[0])
    if phase in (COMPUTING, FAILED, VOID):
        turns[0].begin_forward()
    if phase in (FAILED, VOID):
        fail(turns[0])
    if phase is VOID:
        attempt.leave(turns[0], whole=True)
    assert attempt.phase is phase
    return attempt, turns


Event = Callable[[StepAttempt, tuple[MicrobatchTurn, ...]], object]

EVENTS: dict[str, tuple[Event, dict[AttemptPhase, AttemptPhase]]] = {
    "divide": (lambda attempt, turns: attempt.divide(PLAN, object()), {ASKING: BETWEEN}),
    "enter first": (lambda attempt, turns: attempt.enter(turns[0]), {BETWEEN: ENTERED, VOID: FAILED}),
    "enter check": (
        lambda attempt, turns: attempt.enter(MicrobatchTurn(attempt, 0, is_check=True)),
        {BETWEEN: ENTERED, VOID: FAILED},
    ),
    "forward": (
        lambda attempt, turns: turns[0].begin_forward(),
        {ENTERED: COMPUTING, COMPUTING: COMPUTING, FAILED: FAILED},
    ),
    "backward": (
        lambda attempt, turns: turns[0].begin_pass(Wrapper(), reduces=True),
        {ENTERED: COMPUTING, COMPUTING: COMPUTING, FAILED: FAILED},
    ),
    "backward by hand": (lambda attempt, turns: turns[0].begin_pass(Wrapper(), reduces=False), {}),
    "leave": (
        lambda attempt, turns: attempt.leave(turns[0], whole=True),
        {ENTERED: BETWEEN, COMPUTING: BETWEEN, FAILED: VOID},
    ),
    "leave by an error": (
        lambda attempt, turns: attempt.leave(turns[0], whole=False),
        {ENTERED: BETWEEN, COMPUTING: BETWEEN, FAILED: VOID},
    ),
    "raise": (
        lambda attempt, turns: fail(turns[0]),
        {BETWEEN: VOID, ENTERED: FAILED, COMPUTING: FAILED, FAILED: FAILED, VOID: VOID},
    ),
    "agree": (lambda attempt, turns: turns[0].check_may_agree(), {ENTERED: ENTERED}),
    "pass in no turn": (lambda attempt, turns: attempt.between.begin_pass(Wrapper(), reduces=True), {}),
    "reduce by hand": (lambda attempt, turns: turns[0].check_by_hand(), {}),
    "reduce by hand in no turn": (lambda attempt, turns: attempt.between.check_by_hand(), {}),
    "skip the update": (
        lambda attempt, turns: attempt.check_update(None, updates=False),
        {ASKING: ASKING, BETWEEN: BETWEEN, VOID: VOID},
    ),
    "update without a sum": (lambda attempt, turns: attempt.check_update(object(), updates=True), {}),
    "update with a sum": (
        lambda attempt, turns: (turns[0].summed(Wrapper()), attempt.check_update(object(), updates=True)),
        {ASKING: ASKING, BETWEEN: BETWEEN, VOID: VOID},
    ),
}
"""Each event, and the phase to which it leads from those that allow it."""


def shown(attempt: StepAttempt) -> dict[str, Any]:
    """All that an attempt has noted, but for sums."""
    hidden = ("digests", "_updated")
    kept = {name: value for name, value in vars(attempt).items() if name not in hidden}
    return {name: copy.copy(value) if isinstance(value, list | set) else value for name, value in kept.items()}


@pytest.mark.parametrize("phase", AttemptPhase, ids=lambda phase: phase.name)
@pytest.mark.parametrize("event", EVENTS)
def test_each_event_leads_to_its_phase_or_is_refused(event: str, phase: AttemptPhase) -> None:
    happen, leads_to = EVENTS[event]
    attempt, turns = in_phase(phase)
    before = shown(attempt)
    if phase in leads_to:
        happen(attempt, turns)
        assert attempt.phase is leads_to[phase]
        return
    with pytest.raises(StepOrderError):
        happen(attempt, turns)
    assert shown(attempt) == before


def test_model_agreement_is_refused_in_a_later_microbatch() -> None:
    attempt, turns = in_phase(BETWEEN)
    for turn in turns[:2]:
        attempt.enter(turn)
        attempt.leave(turn, whole=True)
    attempt.enter(turns[2])
    assert attempt.phase is COMPUTING
    with pytest.raises(StepOrderError, match="agree on its model with the other ranks in microbatch 6"):
        turns[2].check_may_agree()


def test_an_incomplete_microbatch_can_be_entered_again() -> None:
    attempt, turns = in_phase(ENTERED)
    assert not attempt.leave(turns[0], whole=False)
    attempt.enter(turns[0])
    assert attempt.leave(turns[0], whole=True)
    with pytest.raises(StepOrderError, match=r"read step\.microbatches again"):
        attempt.enter(turns[0])


def test_no_microbatch_counts_as_complete_after_a_wrapper_error() -> None:
    """The script may have caught it: the sums may have the gradients of both tries."""
    attempt, turns = in_phase(VOID)
    assert attempt.whole() == ()
    attempt.enter(turns[0])
    assert not attempt.leave(turns[0], whole=True)
    assert attempt.whole() == ()


def test_an_update_is_refused_until_set_aside_gradients_are_summed() -> None:
    attempt, wrapper = StepAttempt(usual_plan(0, 1, 2)), Wrapper()
    for turn in attempt.turns():
        attempt.enter(turn)
        turn.begin_pass(wrapper, reduces=True)
        if turn.is_first:
            turn.set_aside(wrapper)
        attempt.leave(turn, whole=True)
    with pytest.raises(StepOrderError, match="microbatch 1 had no backward pass, but those before it had one"):
        attempt.check_update(object(), updates=True)
    turn.summed(wrapper)
    attempt.check_update(wrapper, updates=True)
    with pytest.raises(StepOrderError, match="a second update by this Wrapper"):
        attempt.check_update(wrapper, updates=True)
    turn.summed(wrapper)
    attempt.check_update(wrapper, updates=True)


def test_an_update_before_the_last_microbatch_is_refused() -> None:
    attempt, turns = in_phase(BETWEEN)
    attempt.enter(turns[0])
    attempt.leave(turns[0], whole=True)
    with pytest.raises(StepOrderError, match="ends after microbatch 4, but this rank has microbatch 4 to microbatch 7"):
        attempt.check_update(object(), updates=True)


@pytest.mark.parametrize("held", [(), ((4, 8),)], ids=["quiet", "repaired"])
def test_turns_of_an_earlier_loop_are_refused(held: tuple[Node, ...]) -> None:
    """In a quiet step too: otherwise a script would learn of this rule only after a death."""
    attempt = StepAttempt(usual_plan(0, 1, 8), asks=True)
    attempt.divide(plan_ranks((held,), 8)[0], object())
    turns = attempt.turns()
    for turn in turns:
        attempt.enter(turn)
        attempt.leave(turn, whole=True)
    assert attempt.plan == usual_plan(0, 1, 8)
    with pytest.raises(StepOrderError, match=r"read step\.microbatches again for each loop"):
        attempt.enter(turns[0])


def test_collectives_are_allowed_only_while_a_wrapper_calls_them() -> None:
    _, (turn, *_) = in_phase(ENTERED)
    assert "a barrier in microbatch 4 of a step: ranks have different numbers" in turn.refusal("a barrier")
    with turn.collectives():
        with turn.collectives():  # passes of two wrappers overlap
            assert turn.refusal("a collective", of_wrappers=True) == ""
        assert turn.refusal("a collective", of_wrappers=True) == ""
        assert "a barrier in microbatch 4" in turn.refusal("a barrier"), "no wrapper calls it"
    assert turn.refusal("a collective")


def test_backward_passes_must_follow_the_order_of_microbatches() -> None:
    attempt, turns = in_phase(BETWEEN)
    _, others = in_phase(BETWEEN)
    turns[1].check_follows(turns[0], ())
    for before in (EVEN, attempt.between, others[0], turns[2]):
        with pytest.raises(StepOrderError, match="microbatch 4 had no backward pass, but microbatch 5 has one"):
            turns[1].check_follows(before, ())
        turns[0].check_follows(before, ())
    with pytest.raises(StepOrderError, match="a second backward pass in microbatch 5"):
        turns[1].check_follows(turns[1], ())
    with pytest.raises(StepOrderError, match="parameter 'w' has a gradient when microbatch 4 begins"):
        turns[0].check_follows(EVEN, [("v", SimpleNamespace(grad=None)), ("w", SimpleNamespace(grad=1.0))])
