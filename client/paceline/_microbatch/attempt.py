"""The machine of one attempt at a step with microbatches, on one rank. Pure: it calls no collective.

`StepMicrobatches` reports which microbatch begins and ends, and wrappers report their passes, through the
`MicrobatchTurn` that the group holds. `AttemptPhase` says what may happen next (docs/decisions/28).
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from paceline._base.sum_order import Node, SumOrder, SumsHolder
from paceline._microbatch.rank_plan import RankPlan, sums_at_once
from paceline._microbatch.sum_tree import joined
from paceline.errors import StepOrderError


class AttemptPhase(enum.Enum):
    """The phases of an attempt."""

    ASKING = "the ranks have not told each other what they have kept"
    BETWEEN = "no microbatch runs"
    ENTERED = "a microbatch runs, and wrappers may still agree on their models"
    COMPUTING = "a wrapper has begun to compute, so ranks may be at different microbatches"
    FAILED = "a wrapper's pass has raised, and a microbatch runs"
    VOID = "a wrapper's pass has raised, and no microbatch runs"


class AttemptEvent(enum.Enum):
    """The events that lead from one phase to another."""

    DIVIDE = "the microbatches are divided"
    BEGIN = "this rank's first microbatch begins, or a check"
    GO_ON = "a later microbatch begins"
    COMPUTE = "a wrapper computes"
    RAISE = "a wrapper's pass raises"
    END = "a microbatch ends"


_NEXT = {
    (AttemptPhase.ASKING, AttemptEvent.DIVIDE): AttemptPhase.BETWEEN,
    (AttemptPhase.BETWEEN, AttemptEvent.BEGIN): AttemptPhase.ENTERED,
    (AttemptPhase.BETWEEN, AttemptEvent.GO_ON): AttemptPhase.COMPUTING,
    (AttemptPhase.BETWEEN, AttemptEvent.RAISE): AttemptPhase.VOID,  # a pass of torch that is closed late
    (AttemptPhase.ENTERED, AttemptEvent.COMPUTE): AttemptPhase.COMPUTING,
    (AttemptPhase.ENTERED, AttemptEvent.RAISE): AttemptPhase.FAILED,
    (AttemptPhase.ENTERED, AttemptEvent.END): AttemptPhase.BETWEEN,
    (AttemptPhase.COMPUTING, AttemptEvent.COMPUTE): AttemptPhase.COMPUTING,
    (AttemptPhase.COMPUTING, AttemptEvent.RAISE): AttemptPhase.FAILED,
    (AttemptPhase.COMPUTING, AttemptEvent.END): AttemptPhase.BETWEEN,
    # The script may catch the error. Sums may have this microbatch already, so none counts as whole from here on.
    (AttemptPhase.FAILED, AttemptEvent.COMPUTE): AttemptPhase.FAILED,
    (AttemptPhase.FAILED, AttemptEvent.RAISE): AttemptPhase.FAILED,
    (AttemptPhase.FAILED, AttemptEvent.END): AttemptPhase.VOID,
    (AttemptPhase.VOID, AttemptEvent.BEGIN): AttemptPhase.FAILED,
    (AttemptPhase.VOID, AttemptEvent.GO_ON): AttemptPhase.FAILED,
    (AttemptPhase.VOID, AttemptEvent.RAISE): AttemptPhase.VOID,
}
"""All events that a phase allows, and where they lead."""


class StepAttempt:
    """One rank's way through the microbatches in one attempt at a step.

    Args:
        plan: what it does with them, unless the step is repaired.
        asks: True if the ranks have yet to tell each other what they have kept.
        digested: the microbatch whose gradients are digested, because other ranks compute it too.

    Attributes:
        plan: what this rank does in the present loop over its microbatches.
        usual: the microbatches that it computes in an undisturbed step.
        turn: the turn that runs; None between turns.
        between: the order that the group holds between turns.
        label: an object without contents that stands for the attempt.
        kept_label: the label of the attempt in which wrappers got or kept the sums that this one begins with.
        kept: the nodes whose sums this rank has kept from an undone attempt.
        digests: SHA-256 of the gradients of the digested microbatch, of each wrapper in turn; True: of the check.
        wrappers: those that have begun a backward pass, in this order.
        checked: whether this rank has computed the microbatch that it checks for another.
    """

    def __init__(self, plan: RankPlan, *, asks: bool = False, digested: int | None = None) -> None:
        self.phase = AttemptPhase.ASKING if asks else AttemptPhase.BETWEEN
        self.plan = self._usual = plan
        self.usual = plan.numbers
        self.turn: MicrobatchTurn | None = None
        self.between = _BetweenTurns(plan.leaves)
        self.label = object()
        self.kept_label: object | None = None
        self.kept: tuple[Node, ...] = ()
        self.digested = digested
        self.digests = {True: hashlib.sha256(), False: hashlib.sha256()}
        self.wrappers: list[SumsHolder] = []
        self.checked = False
        self._next = plan.numbers[0]
        """The microbatch whose turn it is."""
        self._loops = 0
        self._ended: set[MicrobatchTurn] = set()
        self._whole: list[Node] = []
        """Nodes that are in the sums of each wrapper, if all is well."""
        self._begun: Node | None = None
        """The leaf that has begun and not ended: its gradients may be in the sums."""
        self._calling = 0
        """Wrappers that call collectives now. Passes may overlap: torch ends that which began first before others."""
        self._waiting: set[int] = set()
        """Ids of the wrappers that have set gradients aside, and not summed them yet."""
        self._updated: set[int] | None = None
        """Ids of the optimizers that have run since a wrapper has summed; None until one has."""

    # Reported by `StepMicrobatches` -----------------------------------------------------------------------------------

    def divide(self, plan: RankPlan, kept_label: object) -> None:
        """Takes what this rank does in its first loop, now that all know what each has kept."""
        self._take(AttemptEvent.DIVIDE)
        self.plan = self._usual if plan == self._usual else plan
        self.kept_label = kept_label
        self.kept, self._whole = plan.kept, list(plan.kept)
        self._next = plan.numbers[0]

    def turns(self, check: int | None = None) -> tuple[MicrobatchTurn, ...]:
        """Returns the turns of the next loop over this rank's microbatches, with a check of another rank's before."""
        assert self.phase is not AttemptPhase.ASKING
        checks = () if check is None else (MicrobatchTurn(self, check, is_check=True),)
        return (*checks, *(MicrobatchTurn(self, number) for number in self.plan.numbers))

    def enter(self, turn: MicrobatchTurn) -> None:
        """Begins a turn, if it is its turn and no other runs."""
        if self.turn is not None:  # the phase would refuse it too, but not say what to do
            raise StepOrderError("`with micro:` belongs inside `with step:`, one microbatch after the other")
        if turn.plan is not self.plan or turn in self._ended:
            raise StepOrderError(
                f"{turn.name} is of an earlier loop: read step.microbatches again for each loop over the microbatches, "
                "because after a failure the first loop of a step may have fewer"
            )
        if (self.plan.numbers[0] if turn.is_check else turn.number) != self._next:
            raise StepOrderError(f"{turn.name} begins, but it is the turn of microbatch {self._next}")
        self._take(AttemptEvent.BEGIN if turn.is_first or turn.is_check else AttemptEvent.GO_ON)
        self.turn = turn
        self._loops += turn.is_first
        self._begun = None if turn.is_check else turn.leaf

    def leave(self, turn: MicrobatchTurn, *, whole: bool) -> bool:
        """Ends a turn; `whole` is False if its block raised. Returns True if this rank's microbatch counts."""
        self._take(AttemptEvent.END)
        self.turn = None
        if not whole or self.phase is AttemptPhase.VOID:
            return False
        self._ended.add(turn)
        if self._begun is not None:
            self._whole.append(self._begun)
            self._begun = None
        if turn.is_check:
            self.checked = True
            return False
        if turn.is_last:
            self.plan = self._usual
            self._next = self.plan.numbers[0]
        else:
            self._next = next(after for number, after in pairwise(self.plan.numbers) if number == turn.number)
        return True

    def check_update(self, optimizer: object, *, updates: bool) -> None:
        """Checks, before `optimizer` changes the state (None at the end of the step), that gradients are whole sums."""
        if self.turn is not None:
            raise StepOrderError(
                f"optimizer.step() in {self.turn.name}: the gradients are complete after the last microbatch, so call "
                "it after the loop over step.microbatches"
            )
        first, last = self.plan.numbers[0], self.plan.numbers[-1]
        if self._next != first:
            ended = next(number for number, after in pairwise(self.plan.numbers) if after == self._next)
            raise StepOrderError(
                f"the step ends after microbatch {ended}, but this rank has microbatch {first} to microbatch {last}: "
                "go through all of step.microbatches"
            )
        if self._waiting:
            raise StepOrderError(f"microbatch {last} had no backward pass, but those before it had one")
        if updates and self._updated is None:
            raise StepOrderError(
                "no wrapper has summed the microbatches of this step, so its gradients would depend on the number of "
                "workers: compute with DDP in `for micro in step.microbatches: with micro: ...`, or in rounds with "
                "replica_batches()"
            )
        if optimizer is None:
            return
        assert self._updated is not None
        if id(optimizer) in self._updated:
            raise StepOrderError(
                f"a second update by this {type(optimizer).__name__}, but no wrapper has summed the microbatches again "
                "since the first: go through step.microbatches once for each update"
            )
        self._updated.add(id(optimizer))

    @property
    def has_summed(self) -> bool:
        """True once a wrapper has summed the microbatches of all ranks."""
        return self._updated is not None

    def whole(self) -> tuple[tuple[Node, ...], ...]:
        """Returns the nodes that a wrapper may hold: of whole microbatches, and with the one that an error has ended.

        Empty if the loop was begun a second time: then sums may be of either time. Also before a microbatch is whole:
        then it is not known which wrappers are in one.
        """
        if self._loops > 1 or not self._whole:
            return ()
        leaves = self.plan.leaves
        begun = () if self._begun is None else (self._begun,)
        return joined(self._whole, leaves), joined((*self._whole, *begun), leaves)

    # Reported by wrappers, through their turn -------------------------------------------------------------------------

    def _pass_begins(self, wrapper: SumsHolder) -> None:
        self._take(AttemptEvent.COMPUTE)
        if not any(wrapper is other for other in self.wrappers):
            self.wrappers.append(wrapper)

    def _set_aside(self, wrapper: SumsHolder) -> None:
        self._waiting.add(id(wrapper))

    def _summed(self, wrapper: SumsHolder) -> None:
        self._waiting.discard(id(wrapper))
        self._updated = set()

    @contextmanager
    def _collectives(self) -> Iterator[None]:
        self._calling += 1
        try:
            yield
        except BaseException:
            self._take(AttemptEvent.RAISE)
            raise
        finally:
            self._calling -= 1

    def _take(self, event: AttemptEvent) -> None:
        after = _NEXT.get((self.phase, event))
        if after is None:
            raise StepOrderError(f"{event.value}, but {self.phase.value}")
        self.phase = after


class MicrobatchTurn(SumOrder):
    """One turn of a rank at one microbatch; each turn is an object of its own.

    With `is_check` the microbatch is another rank's, and only computed to compare its gradients. `plan` is the plan
    of the loop to which the turn belongs.
    """

    is_leaf = True

    def __init__(self, attempt: StepAttempt, number: int, *, is_check: bool = False) -> None:
        plan = attempt.plan
        self._attempt = attempt
        self.number, self.plan, self.is_check = number, plan, is_check
        self.name = f"microbatch {number}"
        self.leaves, self.nodes, self.root = plan.leaves, plan.nodes, plan.root
        self.usual = attempt.usual
        self.is_root = self.root == plan.rank
        self.leaf = None if plan.repeats else (number, number + 1)
        self.is_first = number == plan.numbers[0] and not is_check
        self.is_last = number == plan.numbers[-1] and not is_check
        self.is_digested = is_check or number == attempt.digested
        self.label, self.kept, self.kept_label = attempt.label, plan.kept, attempt.kept_label
        self.spare = sums_at_once(plan) if self.is_first else 0

    def refusal(self, what: str, *, of_wrappers: bool = False) -> str:
        if of_wrappers and self._attempt._calling:
            return ""
        return (
            f"{what} in {self.name} of a step: ranks have different numbers of microbatches, so they would not call it "
            "equally often. Call it after the loop over step.microbatches"
        )

    def collectives(self) -> AbstractContextManager[None]:
        return self._attempt._collectives()

    def check_may_agree(self) -> None:
        if self._attempt.phase is AttemptPhase.ENTERED:
            return
        raise StepOrderError(
            f"a wrapper has to agree on its model with the other ranks in {self.name}, when one has begun already: "
            "ranks have different numbers of microbatches, so they would not do so at the same time. Give each wrapper "
            "itself to TrainState(...), or call its prepare() before `for micro in step.microbatches`; and freeze no "
            "parameters in that loop"
        )

    def check_by_hand(self) -> None:
        _refuse_outside()

    def begin_forward(self) -> None:
        self._attempt._take(AttemptEvent.COMPUTE)

    def begin_pass(self, wrapper: SumsHolder, *, reduces: bool) -> None:
        if not reduces:
            raise StepOrderError("no_sync() in a microbatch of a step: they are accumulated anyway, so leave it out")
        self._attempt._pass_begins(wrapper)

    def check_follows(self, before: SumOrder, gradients: Iterable[tuple[str, Any]]) -> None:
        if self is before:
            raise StepOrderError(
                f"a second backward pass in {self.name}: each microbatch of a step has one. Add up the losses first"
            )
        if not (self.is_first or self.is_check or self._follows(before)):
            left_out = next(n for n, after in pairwise(self.plan.numbers) if after == self.number)
            raise StepOrderError(f"microbatch {left_out} had no backward pass, but {self.name} has one")
        self.check_without_gradients(gradients)

    def check_without_gradients(self, gradients: Iterable[tuple[str, Any]]) -> None:
        if (written := next((path for path, p in gradients if p.grad is not None), None)) is not None:
            raise StepOrderError(
                f"parameter {written!r} has a gradient when {self.name} begins: set gradients to None before the first "
                "microbatch of the step (zero_grad() without set_to_none=False), and leave them alone until the last"
            )

    def _follows(self, before: SumOrder) -> bool:
        """True if it is the turn after `before` in the same attempt."""
        return (
            isinstance(before, MicrobatchTurn)
            and before._attempt is self._attempt
            and (before.number, self.number) in pairwise(self.plan.numbers)
        )

    def digest(self, gradients: Iterable[tuple[str, Any]]) -> None:
        digest = self._attempt.digests[self.is_check]
        for path, source in gradients:
            digest.update(f"{path} {source.grad is not None} ".encode())
            if source.grad is not None:
                digest.update(np.ascontiguousarray(source._gradient_values()).reshape(-1).view(np.uint8).data)

    def set_aside(self, wrapper: SumsHolder) -> None:
        self._attempt._set_aside(wrapper)

    def summed(self, wrapper: SumsHolder) -> None:
        self._attempt._summed(wrapper)


class _BetweenTurns(SumOrder):
    """The order between two turns: a backward pass belongs to no leaf."""

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves

    def check_by_hand(self) -> None:
        _refuse_outside()

    def begin_pass(self, wrapper: SumsHolder, *, reduces: bool) -> None:
        _refuse_outside()


def _refuse_outside() -> NoReturn:
    raise StepOrderError(
        "the sampler has microbatches, but these gradients belong to none of them, so their sum would depend on the "
        "number of workers: write `for micro in step.microbatches: with micro: ...` around forward and backward"
    )
