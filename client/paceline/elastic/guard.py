"""Lets the training state change only where it may: what a step asks of its surroundings, and the gate of the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.elastic.blocks import Blocks
from paceline.elastic.place import Place
from paceline.elastic.port import Port
from paceline.elastic.rules import Watch
from paceline.elastic.saver import Saver
from paceline.elastic.state import TrainState
from paceline.elastic.step import Step
from paceline.elastic.taking import Taking
from paceline.errors import DivergenceError, StepOrderError

__all__ = ["StateGuard"]

_MOST_DIVERGENCES = 3
"""A member that differs from the others so often leaves: once is a flipped bit, three times is a cause that stays."""


class StateGuard:
    """One member's; a `step.StepRunner` and a `state.Gate`.

    Args:
        port: the session.
        state: what is trained.
        place: the member's place.
        saver: keeps checkpoints.
        taking: takes the state from others, or finishes a step.
        blocks: those between the steps.
        committed: hears that the steps up to this one are committed.

    Attributes:
        step: the attempt that runs; None between two.
    """

    def __init__(
        self,
        port: Port,
        state: TrainState,
        place: Place,
        saver: Saver,
        taking: Taking,
        blocks: Blocks,
        committed: Callable[[int], None],
    ) -> None:
        self.step: Step | None = None
        self._port = port
        self._state = state
        self._place = place
        self._saver = saver
        self._taking = taking
        self._blocks = blocks
        self._tell_committed = committed
        self._watch = Watch(state)
        self._divergences = 0

    def begin(self) -> None:
        """A step begins.

        Raises:
            StepOrderError: the state has changed since the step before.
        """
        self._heed(self._watch.begin)

    def forget(self) -> None:
        """Another generation has begun, and the state may be that of others."""
        self._watch.forget()

    # What a step asks -------------------------------------------------------------------------------------------------

    def word_completed(self, step: int) -> None:
        """Every member has entered `step`, so all have applied the one before: it is committed."""
        self._port.word_completed(step)
        self._saver.commit(step - 1)
        self._tell_committed(step - 1)
        self._place.all_began()
        self._state.keep_live_share()

    def about_to_change(self) -> None:
        """Nobody may take the state any more.

        Raises:
            StepOrderError: it has changed already.
        """
        if self.step is not None and not self.step.keeps_copy:
            self._heed(self._watch.before_update)
        self._port.shelf.withdraw()
        self._saver.settle()

    def diverged(self, text: str) -> None:
        """See `step.StepRunner`."""
        if self.step is not None:
            self.step.spoiled = True
        self.spoiled()
        self._divergences += 1
        if self._divergences >= _MOST_DIVERGENCES:
            raise DivergenceError(f"{text}, {self._divergences} times by now: its memory or its script is to blame")

    def prepared(self, step: Step, small: Mapping[str, Any]) -> None:
        """See `step.StepRunner`."""
        self._place.prepare(step.number)
        self._taking.keep_gradients(small, updated=step.updates)

    def applied(self, step: int) -> None:
        """The step counts here."""
        self._watch.applied()
        self._blocks.forget()
        self._place.applied(step)

    def _heed(self, look: Callable[[], None]) -> None:
        """Looks whether the state has changed where it must not; if so it is the state of no step."""
        try:
            look()
        except StepOrderError:
            self.spoil()
            raise

    @property
    def is_updating(self) -> bool:
        """True while an optimizer of the state runs."""
        return self.step is not None and self.step.updating

    # The gate of the training state -----------------------------------------------------------------------------------

    def open(self) -> None:
        """See `state.Gate`."""
        step = self.step
        if step is None or not step.entered or step.left:
            raise StepOrderError("optimizer.step() outside of a step: call it inside `with step:`")
        if step.updated and self._state.spreads:  # who finishes a step for others runs the optimizer once
            raise StepOrderError("a second optimizer.step() in one step, of a state that is spread over workers")
        step.updates = step.updating = True  # first: whatever interrupts this behind the gate has spoiled the state
        try:
            step.open_gate()
        except BaseException:
            step.updating = step.is_open
            raise
        step.updated = True

    def changed(self) -> None:
        """See `state.Gate`."""
        if self.step is not None:
            self.step.updating = False

    def spoil(self) -> None:
        """See `state.Gate`."""
        if self.step is not None:
            self.step.spoil()
        else:
            self.spoiled()

    def spoiled(self) -> None:
        """Marks the state that this member holds as unusable: it leads nothing until it has taken the base."""
        self._state.is_whole = False
        self._place.spoiled()
