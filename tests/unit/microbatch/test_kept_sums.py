"""What a member keeps of an undone step: sums of which it is certain that all wrappers have them, and of this step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import ElasticSampler
from paceline._base.sum_order import Node
from paceline._elastic.step import Step
from paceline._microbatch.attempt import StepAttempt
from paceline._microbatch.kept_sums import KeptSums
from paceline._microbatch.rank_plan import plan_ranks, usual_plan
from paceline._microbatch.step_microbatches import StepMicrobatches
from paceline._microbatch.twice import computed_twice
from paceline_protocol import Tag

BASE = Tag(7, 39)


class Wrapper:
    """It holds what the test says."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes, self.label = nodes, object()

    def recover_sums(self) -> None:
        pass

    def held_sums(self) -> tuple[object, tuple[Node, ...]]:
        return self.label, self.nodes


def attempt(
    kept: KeptSums, wrappers: Sequence[Wrapper], ended: int, begun: int = 0, of: StepAttempt | None = None
) -> StepAttempt:
    """An attempt of rank 1 of 2 with the microbatches 4 to 7, which has ended so many of them and begun some more."""
    of = StepAttempt(usual_plan(1, 2, 8)) if of is None else of
    for count, turn in enumerate(of.turns()[: ended + begun]):
        of.enter(turn)
        for wrapper in wrappers:
            wrapper.label = of.label
            turn.begin_pass(wrapper, reduces=True)
        if count < ended and of.leave(turn, whole=True):
            kept.microbatch_ended(of)
    return of


def test_sums_of_completed_microbatches_are_kept() -> None:
    kept, wrapper = KeptSums(), Wrapper((4, 6))
    kept.keep(BASE, attempt(kept, [wrapper], 2))
    kept.enter(BASE)
    assert kept.nodes() == ((4, 6),)


@pytest.mark.parametrize("opened", [True, False])
def test_sums_are_not_kept_after_the_gate_has_opened(opened: bool) -> None:
    """The update may have changed them, and a copy of the state undoes only the state."""
    kept, wrapper = KeptSums(), Wrapper((4, 6))
    micro: Any = SimpleNamespace(_attempt=attempt(kept, [wrapper], 2), _kept_sums=kept, _twice=None)
    micro.keep = partial(StepMicrobatches.keep, micro)
    step: Any = SimpleNamespace(_gate=SimpleNamespace(is_open=opened), _spoiled=False, _lacks_sums=False, _micro=micro)
    Step._keep_sums(step, BASE)
    assert kept.nodes() == (() if opened else ((4, 6),))


def test_sums_are_refused_if_a_wrapper_lacks_some() -> None:
    kept, wrapper = KeptSums(), Wrapper((4, 6))
    micro: Any = SimpleNamespace(_attempt=attempt(kept, [wrapper], 2), _kept_sums=kept, _twice=None)
    StepMicrobatches.keep(micro, BASE, usable=True, lacks=True)
    assert kept.nodes() is None


def test_sums_are_not_kept_if_a_microbatch_is_computed_twice() -> None:
    """Its digest is that of whole gradients, so all of them are computed again."""
    kept, wrapper = KeptSums(), Wrapper((4, 6))
    twice = computed_twice(0, 3, 2, 8, 3)
    micro: Any = SimpleNamespace(_attempt=attempt(kept, [wrapper], 2), _kept_sums=kept, _twice=twice)
    StepMicrobatches.keep(micro, BASE, usable=True, lacks=False)
    assert kept.nodes() == ()


def test_sums_discarded_by_recover_sums_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, wrapper = KeptSums(), Wrapper((4, 6))
    kept.keep(BASE, attempt(kept, [wrapper], 2))
    kept.enter(BASE)
    monkeypatch.setattr(wrapper, "recover_sums", lambda: setattr(wrapper, "nodes", ()))
    assert kept.nodes() == ()


def test_a_failed_microbatch_is_kept_if_its_sum_is_complete() -> None:
    kept, wrapper = KeptSums(), Wrapper((4, 8))
    kept.keep(BASE, attempt(kept, [wrapper], 3, begun=1))
    assert kept.nodes() == ((4, 8),)


@pytest.mark.parametrize(
    ("first", "second"), [([(4, 6), (6, 7)], [(4, 6)]), ([(4, 6)], [(4, 6), (6, 7)]), ([(4, 6)], [])]
)
def test_no_sums_are_kept_if_wrappers_hold_different_microbatches(first: list[Node], second: list[Node]) -> None:
    kept = KeptSums()
    kept.keep(BASE, attempt(kept, [Wrapper(*first), Wrapper(*second)], 2, begun=1))
    assert kept.nodes() == ()


def test_sums_of_microbatches_that_were_not_computed_are_not_kept() -> None:
    kept = KeptSums()
    kept.keep(BASE, attempt(kept, [Wrapper((4, 6), (6, 7))], 2))
    assert kept.nodes() == ()


def test_no_sums_are_kept_without_a_completed_microbatch() -> None:
    """In the first microbatch of a newcomer's first step nobody knows whether more wrappers would have followed."""
    kept = KeptSums()
    kept.keep(BASE, attempt(kept, [Wrapper((4, 5))], 0, begun=1))
    assert kept.nodes() == ()


def test_no_sums_are_kept_if_a_wrapper_began_in_the_failed_microbatch() -> None:
    """The sums of the other one look whole, but this one lacks those of the microbatch before."""
    kept, first, second = KeptSums(), Wrapper((4, 6)), Wrapper((5, 6))
    of = attempt(kept, [first], 1)
    turn = of.turns()[1]
    of.enter(turn)
    for wrapper in (first, second):
        wrapper.label = of.label
        turn.begin_pass(wrapper, reduces=True)
    kept.keep(BASE, of)
    assert kept.nodes() == ()


def test_sums_of_an_earlier_step_are_not_kept() -> None:
    """The second wrapper had not begun when the first failed in the only one, and still holds the step before."""
    kept, first, second = KeptSums(), Wrapper((4, 5)), Wrapper((4, 5))
    attempt(kept, [first, second], 1)
    tried = attempt(kept, [first], 0, begun=1)
    kept.keep(BASE, tried)
    assert kept.nodes() == ()


def test_sums_of_an_earlier_step_with_equal_nodes_are_not_kept() -> None:
    """The only microbatch has begun, but not its backward pass."""
    kept, wrapper = KeptSums(), Wrapper((4, 5))
    attempt(kept, [wrapper], 1)
    kept.keep(BASE, attempt(kept, [], 0, begun=1))
    assert kept.nodes() == ()


@pytest.mark.parametrize("base", [Tag(7, 40), Tag(8, 39), None])
def test_sums_are_dropped_on_another_base_state(base: Tag | None) -> None:
    """The next step, a state of the same number from another line, and a newcomer, which may hold anything."""
    kept, wrapper = KeptSums(), Wrapper((4, 6))
    kept.keep(BASE, attempt(kept, [wrapper], 2))
    kept.enter(base)
    assert kept.nodes() == ()


def test_sums_overwritten_in_the_wrapper_are_no_longer_kept() -> None:
    """A wrapper has got new buckets, or a pass between the steps has overwritten the sums."""
    kept, wrapper = KeptSums(), Wrapper((4, 6))
    kept.keep(BASE, attempt(kept, [wrapper], 2))
    kept.enter(BASE)
    wrapper.nodes = ()
    assert kept.nodes() == ()


@pytest.mark.parametrize(("nodes", "ended"), [(((4, 6),), 2), (((4, 8),), 0)])
def test_no_sums_are_kept_in_a_second_loop_over_the_microbatches(nodes: tuple[Node, ...], ended: int) -> None:
    """The sums may be those of either loop."""
    kept, wrapper = KeptSums(), Wrapper(*nodes)
    tried = attempt(kept, [wrapper], 4)
    kept.keep(BASE, attempt(kept, [wrapper], ended, begun=1, of=tried))
    assert kept.nodes() == ()


def test_kept_sums_survive_further_failed_attempts() -> None:
    kept, wrapper = KeptSums(), Wrapper((4, 6))
    kept.keep(BASE, attempt(kept, [wrapper], 2))
    kept.enter(BASE)
    tried = StepAttempt(usual_plan(0, 1, 8), asks=True)
    kept.keep(BASE, tried)  # the exchange failed
    assert kept.nodes() == ((4, 6),)
    tried.divide(plan_ranks((((4, 6),),), 8)[0], kept.label)
    kept.keep(BASE, tried)  # it died before a microbatch began
    assert kept.nodes() == ((4, 6),)
    wrapper.nodes = ((0, 1), (4, 6))
    kept.keep(BASE, attempt(kept, [wrapper], 1, of=tried))
    assert kept.nodes() == ((0, 1), (4, 6))


def test_no_sum_is_kept_before_a_microbatch_completes() -> None:
    kept, wrapper = KeptSums(), Wrapper((4, 5))
    attempt(kept, [wrapper], 2)
    kept.keep(BASE, attempt(kept, [wrapper], 0, begun=1))
    kept.enter(BASE)
    assert kept.nodes() == ()


def test_a_refusal_of_sums_lasts_until_the_step_is_retried() -> None:
    kept, wrapper = KeptSums(), Wrapper((4, 6))
    kept.keep(BASE, attempt(kept, [wrapper], 2))
    kept.refuse()
    kept.enter(BASE)
    assert kept.nodes() is None
    kept.keep(BASE, attempt(kept, [wrapper], 2))
    assert kept.nodes() == ((4, 6),)
    kept.refuse()
    kept.step_over()
    assert kept.nodes() == ()


def test_a_loader_gets_the_repaired_step_and_then_full_ranges() -> None:
    sampler = ElasticSampler(80, global_batch=16, microbatches=8)
    share = plan_ranks((((0, 2), (3, 4)), ((4, 7),)), 8)[0]
    assert share.numbers == (2,)
    ahead = sampler.microbatches_ahead(share.numbers, range(0, 4))
    seen = [next(ahead).indices.tolist() for _ in range(5)]
    now = [sampler.current_microbatch(2)[0].tolist()]
    sampler.advance(2)
    assert seen == now + [sampler.current_microbatch(number)[0].tolist() for number in range(4)]
