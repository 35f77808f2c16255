"""A member's place in its line: which state it holds, and what it may do next. Pure: no clock, no socket, no thread.

The rules of I1 and I2 at the member's side; the coordinator's are in `paceline_server.meeting`:

- What is held is known by its tag. A step that is applied gives a new one, a step that is undone none.
- An update that was interrupted leaves nothing that counts (`held` is None) until the base is taken.
- A base is taken whole or not at all: until then the member holds what it held.
- A view is entered only with its base. Who was counted on to hold it and holds something newer, because its generation
  went on while the coordinator was away, meets again instead: so no committed step can be lost.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from paceline.checkpoint.tag import Tag

__all__ = ["Meet", "Phase", "Place", "Take", "ViewNews"]


class Phase(enum.Enum):
    """What a member is about."""

    MEETING = "meeting"
    """It waits for the coordinator: for the next view, or what to do until then."""
    TAKING = "taking"
    """It is in a view, or a meeting, and takes the base."""
    READY = "ready"
    """It is in a view, holds its state, and may begin a step."""
    STEPPING = "stepping"
    """It is inside a step."""


@dataclass(frozen=True, slots=True)
class ViewNews:
    """A view, as far as a member's place depends on it.

    Attributes:
        generation: its number.
        rank: this member's.
        base: the state it starts from, None if its members have yet to compare what they hold.
        newcomers: ranks that do not hold it.
    """

    generation: int
    rank: int
    base: Tag | None
    newcomers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Meet:
    """To be said to the coordinator.

    Attributes:
        generation: the one that is over for this member, 0 for a candidate.
        tag: what it holds.
        holds_base: it got that generation's base.
        leaving: it wants to go.
        closed: no newcomer may come in now.
    """

    generation: int
    tag: Tag | None
    holds_base: bool
    leaving: bool = False
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Take:
    """This state is to be taken from those who hold it."""

    base: Tag


class Place:
    """One member.

    Args:
        held: what it holds to begin with: Tag(0, 0) for a state it has built itself, or that of a checkpoint.

    Attributes:
        generation: the one that it is in, or has stopped in; 0 for none.
        held: the state that it holds; None for none that counts.
        holds_base: it has got its generation's base.
        phase: what it is about.
        leaving: it wants to go.
        closed: it is between two steps, where no newcomer may come in.
    """

    def __init__(self, held: Tag) -> None:
        self.generation = 0
        self.held: Tag | None = held
        self.holds_base = False
        self.phase = Phase.MEETING
        self.leaving = False
        self.closed = False
        self._base: Tag | None = None  # what is being taken
        self._in_view = False  # what is taken is the view's, not the meeting's

    def meet(self) -> Meet:
        """It stops here: after a step that was undone or asked for it, or to be taken into its first view."""
        self.phase = Phase.MEETING
        return Meet(self.generation, self.held, self.holds_base, self.leaving, self.closed)

    def formed(self, view: ViewNews) -> Meet | Take | None:
        """A view has formed with this member; None if it may begin a step there."""
        if view.generation <= self.generation:
            return None if self.phase in (Phase.READY, Phase.STEPPING) else self.meet()
        self.generation, self.holds_base = view.generation, False
        if view.base is None:
            return self.meet()
        if view.rank in view.newcomers:
            return self._take(view.base, in_view=True)
        self.holds_base = True
        if self.held != view.base:
            return self.meet()
        self.phase = Phase.READY
        return None

    def catch_up(self, generation: int, base: Tag) -> Take | None:
        """It lags behind in a meeting; None if that meeting is past."""
        if generation != self.generation or self.phase is not Phase.MEETING:
            return None
        return self._take(base, in_view=False)

    def took(self) -> Meet | None:
        """The base is taken; None if a step may begin."""
        assert self.phase is Phase.TAKING
        self.held, self.holds_base = self._base, True
        if not self._in_view:
            return self.meet()
        self.phase = Phase.READY
        return None

    def begin(self) -> None:
        """A step begins."""
        assert self.phase is Phase.READY, f"a step begins while {self.phase}"
        self.phase = Phase.STEPPING

    def applied(self, step: int) -> None:
        """The step has changed the state."""
        assert self.phase is Phase.STEPPING
        assert self.generation > 0
        self.held = Tag(self.generation, step)
        self.phase = Phase.READY

    def spoiled(self) -> None:
        """An update of the state was interrupted half way."""
        self.held = None

    def go_on(self) -> None:
        """The meeting that was asked for does not come about, for the coordinator is away: the generation goes on."""
        assert self.phase is Phase.MEETING
        assert self.holds_base
        self.phase = Phase.READY

    def cast_out(self) -> Meet:
        """The session has ended: what this member holds it brings as a newcomer."""
        self.generation, self.holds_base = 0, False
        return self.meet()

    def _take(self, base: Tag, *, in_view: bool) -> Take:
        self.phase, self._base, self._in_view = Phase.TAKING, base, in_view
        return Take(base)
