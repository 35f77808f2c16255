"""Lets the training state change only inside a step's gate, and carries out what a step reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline._elastic.attempts import FinishedBlocks
from paceline._elastic.job_line import JobLine
from paceline._elastic.recovery import StateRecovery
from paceline._elastic.rules import StateWatch
from paceline._elastic.saver import Saver
from paceline._elastic.state import StateCore
from paceline._elastic.step import Step
from paceline._microbatch.receipts import ReceiptBook
from paceline.errors import DivergenceError, StepOrderError
from paceline_protocol import MemberState

_MOST_DIVERGENCES = 3
"""Divergences after which a member leaves: one may be a flipped bit, three have a lasting cause."""


class StateGuard:
    """Guards one member's training state; a `step.StepRunner` and a `state.Gate`.

    Attributes:
        step: the present attempt; None between two attempts.
        asked: the step that this member has asked all to skip, with the words for it; 0 for none.
    """

    def __init__(
        self,
        job_line: JobLine,
        state: StateCore,
        member: MemberState,
        saver: Saver,
        recovery: StateRecovery,
        blocks: FinishedBlocks,
        committed: Callable[[int], None],
    ) -> None:
        self.step: Step | None = None
        self.receipts: ReceiptBook | None = None
        self.awaits_closure = False
        self.has_mates = job_line.mates.size > 1
        self.asked = 0, ""
        self._job_line = job_line
        self._state = state
        self._member = member
        self._saver = saver
        self._recovery = recovery
        self._blocks = blocks
        self._tell_committed = committed
        self._watch = StateWatch(state)
        self._divergences = 0

    def begin(self) -> None:
        """Checks when a step begins that the state has not changed since the step before."""
        self._check_state(self._watch.begin)

    def forget(self) -> None:
        """Forgets the checksums of the state: in a new generation it may have come from another member."""
        self._watch.forget()

    # Called by a step -------------------------------------------------------------------------------------------------

    def word_completed(self, step: int) -> None:
        """Commits the step before `step`: every member has entered `step`, so all have applied the one before."""
        self._job_line.word_completed(step)
        self._saver.commit(step - 1)
        self._tell_committed(step - 1)
        group = self._job_line.group
        if self.receipts is not None and group.rank == 0:
            self.receipts.committed(self._state, group.generation)
        self._member.all_began()
        self._state.keep_updated_shares()

    def about_to_change(self) -> None:
        """Checks that the state has not changed yet, and stops offering it to others, because it is about to change."""
        if self.step is not None and not self.step.keeps_copy:
            self._check_state(self._watch.before_update)
        self._job_line.offered.withdraw()
        self._saver.wait_until_copied()

    def diverged(self, text: str) -> None:
        """See `step.StepRunner`."""
        if self.step is not None:
            self.step._spoiled = True
        self.spoiled()
        self._divergences += 1
        if self._divergences >= _MOST_DIVERGENCES:
            raise DivergenceError(
                f"{text}. This has happened {self._divergences} times: "
                "the memory or the script of this worker is at fault"
            )

    def skip_asked(self, step: int, text: str) -> None:
        """See `step.StepRunner`."""
        self.asked = step, text

    def prepared(self, step: Step, small: Mapping[str, Any]) -> None:
        """See `step.StepRunner`."""
        self._member.prepare(step.number)
        self._recovery.keep_gradients(small, updated=step._updates)

    def applied(self, step: int) -> None:
        """Records that the step was applied here."""
        if self.receipts is not None:
            self.receipts.applied(self._state)
        self._watch.applied()
        self._blocks.forget()
        self._member.applied(step)

    def _check_state(self, look: Callable[[], None]) -> None:
        """Runs a check of the state; marks the state as unusable if it has changed where it must not."""
        try:
            look()
        except StepOrderError:
            self.spoil()
            raise

    @property
    def is_updating(self) -> bool:
        """True while an optimizer of the state runs, but for its first closure."""
        return self.awaits_closure or (self.step is not None and self.step._updating)

    # The gate of the training state -----------------------------------------------------------------------------------

    def open(self, optimizer: object) -> None:
        """See `state.Gate`."""
        step = self.step
        if step is None or not step.entered or step.left:
            raise StepOrderError("optimizer.step() was called outside of a step: call it inside `with step:`")
        if step._updated and self._state.is_sharded:  # a step that is finished later runs one update
            raise StepOrderError("optimizer.step() was called twice in one step: a sharded state has one update")
        step._updates = step._updating = (
            True  # set first: an interrupt after the gate opens leaves the state half changed
        )
        try:
            step._open_gate(optimizer)
        except BaseException:
            step._updating = step._gate.is_open
            raise
        step._updated = True
        self._state.update_copies()

    def check(self) -> None:
        """See `state.Gate`."""
        if self.step is not None and self.step.entered and not self.step.left:
            self.step._gate.check()

    def before_closure(self, optimizer: object, evaluations: int) -> None:
        """See `state.Gate`."""
        repeats = evaluations or any(kind.__name__ == "LBFGS" for kind in type(optimizer).__mro__)
        if repeats and not (self.step is not None and self.step.keeps_copy):
            raise StepOrderError(
                f"{type(optimizer).__name__} evaluates its closure several times, and changes the state in between: "
                "call step.keep_copy() before optimizer.step(closure), so that all of it can be undone. The closure "
                "must return the same loss on all ranks, such as their mean, because the optimizer goes by it"
            )

    def changed(self) -> None:
        """See `state.Gate`."""
        if self.step is not None:
            self.step._updating = False

    def spoil(self) -> None:
        """See `state.Gate`."""
        if self.step is not None:
            self.step._spoil()
        else:
            self.spoiled()

    def spoiled(self) -> None:
        """Marks this member's state as unusable until it has taken the base from others."""
        self._state.is_whole = False
        self._member.spoiled()
