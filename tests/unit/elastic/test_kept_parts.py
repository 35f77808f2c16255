"""What a member keeps of an undone step: sums of which it is certain that all wrappers have them, and of this step."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import ElasticSampler
from paceline._elastic.kept_parts import KeptParts, PartProgress
from paceline._elastic.step import Step
from paceline._group.group_core import PartRecord, PartTurn
from paceline._microbatch.rank_plan import even_plan, plan_ranks
from paceline._microbatch.sum_tree import Node
from paceline.errors import StepOrderError
from paceline_protocol import Tag

BASE = Tag(7, 39)


class Wrapper:
    """It holds what the test says."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes, self.record = nodes, PartRecord()

    def recover_parts(self) -> None:
        pass

    def held_parts(self) -> tuple[PartRecord, tuple[Node, ...]]:
        return self.record, self.nodes


def attempt(
    kept: KeptParts, wrappers: Sequence[Wrapper], ended: int, begun: int = 0, progress: PartProgress | None = None
) -> PartProgress:
    """An attempt of rank 1 of 2 with the parts 4 to 7, which has ended so many of them and begun some more."""
    progress = PartProgress(even_plan(1, 2, 8)) if progress is None else progress
    for count, number in enumerate(progress.share.numbers[: ended + begun]):
        turn = PartTurn(number, progress.share, progress.record)
        progress.begin(turn)
        for wrapper in wrappers:
            wrapper.record = progress.record
            if wrapper not in progress.record.wrappers:
                progress.record.wrappers.append(wrapper)
        if count < ended:
            progress.end(turn)
            kept.part_ended(progress.record)
    return progress


def test_whole_parts_are_kept() -> None:
    kept, wrapper = KeptParts(), Wrapper((4, 6))
    kept.keep(BASE, attempt(kept, [wrapper], 2))
    kept.enter(BASE)
    assert kept.nodes() == ((4, 6),)


@pytest.mark.parametrize("opened", [True, False])
def test_sums_behind_the_gate_are_not_kept(opened: bool) -> None:
    """The update may have changed them, and a copy of the state undoes only the state."""
    kept, wrapper = KeptParts(), Wrapper((4, 6))
    progress = attempt(kept, [wrapper], 2)
    step: Any = SimpleNamespace(_progress=progress, _lacks=False, _open=opened, spoiled=False, _twice=None)
    Step.keep_parts(step, kept, BASE)
    assert kept.nodes() == (() if opened else ((4, 6),))


def test_the_part_that_an_error_has_ended_is_kept_if_its_sum_is_there() -> None:
    kept, wrapper = KeptParts(), Wrapper((4, 8))
    kept.keep(BASE, attempt(kept, [wrapper], 3, begun=1))
    assert kept.nodes() == ((4, 8),)


@pytest.mark.parametrize(
    ("first", "second"), [([(4, 6), (6, 7)], [(4, 6)]), ([(4, 6)], [(4, 6), (6, 7)]), ([(4, 6)], [])]
)
def test_wrappers_that_hold_different_parts(first: list[Node], second: list[Node]) -> None:
    kept = KeptParts()
    kept.keep(BASE, attempt(kept, [Wrapper(*first), Wrapper(*second)], 2, begun=1))
    assert kept.nodes() == ()


def test_sums_of_other_parts_than_were_computed() -> None:
    kept = KeptParts()
    kept.keep(BASE, attempt(kept, [Wrapper((4, 6), (6, 7))], 2))
    assert kept.nodes() == ()


def test_a_wrapper_that_was_in_no_whole_part() -> None:
    """In the first part of a newcomer's first step nobody knows whether more wrappers would have followed."""
    kept = KeptParts()
    kept.keep(BASE, attempt(kept, [Wrapper((4, 5))], 0, begun=1))
    assert kept.nodes() == ()


def test_sums_of_an_earlier_step() -> None:
    """The second wrapper had not begun when the first failed in the only part, and still holds the step before."""
    kept, first, second = KeptParts(), Wrapper((4, 5)), Wrapper((4, 5))
    attempt(kept, [first, second], 1)
    progress = attempt(kept, [first], 0, begun=1)
    kept.keep(BASE, progress)
    assert kept.nodes() == ()


def test_sums_of_an_earlier_step_that_look_like_those_of_this_one() -> None:
    """The only part has begun, but not its backward pass."""
    kept, wrapper = KeptParts(), Wrapper((4, 5))
    attempt(kept, [wrapper], 1)
    kept.keep(BASE, attempt(kept, [], 0, begun=1))
    assert kept.nodes() == ()


@pytest.mark.parametrize("base", [Tag(7, 40), Tag(8, 39), None])
def test_another_base(base: Tag | None) -> None:
    """The next step, a state of the same number from another line, and a newcomer, which may hold anything."""
    kept, wrapper = KeptParts(), Wrapper((4, 6))
    kept.keep(BASE, attempt(kept, [wrapper], 2))
    kept.enter(base)
    assert kept.nodes() == ()


def test_sums_that_are_gone_when_they_are_wanted() -> None:
    """A wrapper has got new buckets, or a pass between the steps has overwritten the sums."""
    kept, wrapper = KeptParts(), Wrapper((4, 6))
    kept.keep(BASE, attempt(kept, [wrapper], 2))
    kept.enter(BASE)
    wrapper.nodes = ()
    assert kept.nodes() == ()


@pytest.mark.parametrize(("nodes", "ended"), [(((4, 6),), 2), (((4, 8),), 0)])
def test_a_second_loop_over_the_parts(nodes: tuple[Node, ...], ended: int) -> None:
    """The sums may be those of either loop."""
    kept, wrapper = KeptParts(), Wrapper(*nodes)
    progress = attempt(kept, [wrapper], 4)
    kept.keep(BASE, attempt(kept, [wrapper], ended, begun=1, progress=progress))
    assert kept.nodes() == ()


def test_what_was_kept_before_is_kept_again() -> None:
    kept, wrapper = KeptParts(), Wrapper((4, 6))
    kept.keep(BASE, attempt(kept, [wrapper], 2))
    kept.enter(BASE)
    progress = PartProgress(even_plan(0, 1, 8))
    progress.divided = False
    kept.keep(BASE, progress)  # the exchange failed
    assert kept.nodes() == ((4, 6),)
    progress.repair(plan_ranks((((4, 6),),), 8)[0], kept.record)
    kept.keep(BASE, progress)  # it died before a part began
    assert kept.nodes() == ((4, 6),)
    wrapper.nodes = ((0, 1), (4, 6))
    kept.keep(BASE, attempt(kept, [wrapper], 1, progress=progress))
    assert kept.nodes() == ((0, 1), (4, 6))


def test_parts_of_an_earlier_loop_are_refused_after_a_repair() -> None:
    progress = PartProgress(even_plan(0, 1, 8))
    progress.repair(plan_ranks((((4, 8),),), 8)[0], PartRecord())
    turns = [PartTurn(number, progress.share, progress.record) for number in progress.share.numbers]
    for turn in turns:
        progress.begin(turn)
        progress.end(turn)
    assert progress.share == even_plan(0, 1, 8)
    with pytest.raises(StepOrderError, match=r"read step\.parts again for each loop"):
        progress.begin(turns[0])


def test_parts_of_an_earlier_loop_are_refused_in_a_quiet_step_too() -> None:
    """Otherwise a script would learn of this rule only after a death."""
    progress = PartProgress(even_plan(0, 1, 2))
    turns = [PartTurn(number, progress.share, progress.record) for number in progress.share.numbers]
    for turn in turns:
        progress.begin(turn)
        progress.end(turn)
    with pytest.raises(StepOrderError, match=r"read step\.parts again for each loop"):
        progress.begin(turns[0])


def test_before_a_part_is_whole_nothing_is_kept() -> None:
    kept, wrapper = KeptParts(), Wrapper((4, 5))
    attempt(kept, [wrapper], 2)
    kept.keep(BASE, attempt(kept, [wrapper], 0, begun=1))
    kept.enter(BASE)
    assert kept.nodes() == ()


def test_a_refusal_lasts_until_the_step_was_tried_again() -> None:
    kept, wrapper = KeptParts(), Wrapper((4, 6))
    kept.keep(BASE, attempt(kept, [wrapper], 2))
    kept.refuse()
    kept.enter(BASE)
    assert kept.nodes() is None
    kept.keep(BASE, attempt(kept, [wrapper], 2))
    assert kept.nodes() == ((4, 6),)
    kept.refuse()
    kept.step_over()
    assert kept.nodes() == ()


def test_a_loader_sees_the_rest_of_the_repaired_step_and_then_whole_ranges() -> None:
    sampler = ElasticSampler(80, global_batch=16, parts=8)
    share = plan_ranks((((0, 2), (3, 4)), ((4, 7),)), 8)[0]
    assert share.numbers == (2,)
    ahead = sampler.parts_ahead(share.numbers, range(0, 4))
    seen = [next(ahead).indices.tolist() for _ in range(5)]
    now = [sampler.current_part(2)[0].tolist()]
    sampler.advance(2)
    assert seen == now + [sampler.current_part(number)[0].tolist() for number in range(4)]
