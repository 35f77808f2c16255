"""A member's place in its line: which state it holds, and what it may do next. Pure: no clock, no socket, no thread.

The rules of I1 and I2 at the member's side; the coordinator's are in `paceline_server.meeting`:

- What is held is known by its tag. A step that is applied gives a new one, a step that is undone none.
- An update that was interrupted leaves nothing that counts (`held` is None) until the base is taken.
- A base is taken whole or not at all: until then the member holds what it held.
- A view is entered only with its base. Who was counted on to hold it and holds something newer, because its generation
  went on while the coordinator was away, meets again instead: so no committed step can be lost.

Of a state that is spread, a member holds *shares*, the one that it trains on first:

- A share that is taken comes beside those that are there. They are dropped when all members of a generation have begun
  its first step, for each of them holds its own then; so whatever comes to nothing before, nothing is lost by it.
- A step's second word says that its sender has all gradients. Who has sent it and not seen it complete is *prepared*:
  others may have applied the step. If the base turns out to be that step, it finishes it too; else it undoes it.
- What is left of a state that is lost is never brought to another line: a checkpoint is, if there is one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from paceline.checkpoint.tag import Tag
from paceline.elastic.share import WHOLE, Share, share_of

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
        newcomers: ranks that were not in the generation before. Where the state is whole, they do not hold it yet.
        world: how many members it has.
    """

    generation: int
    rank: int
    base: Tag | None
    newcomers: frozenset[int]
    world: int = 1


@dataclass(frozen=True, slots=True)
class Meet:
    """To be said to the coordinator.

    Attributes:
        generation: the one that is over for this member, 0 for a candidate.
        tag: what it holds.
        holds_base: it got that generation's base.
        leaving: it wants to go.
        closed: no newcomer may come in now.
        node_size: so many members hold one copy of the state between them.
        shares: what it holds of it.
        prepared: the step that it can finish if others have applied it.
        stored: it holds nothing of that state yet, but can read it from a checkpoint.
        unproven: it is a candidate that has yet to show its links.
    """

    generation: int
    tag: Tag | None
    holds_base: bool
    leaving: bool = False
    closed: bool = False
    node_size: int = 1
    shares: tuple[Share, ...] = (WHOLE,)
    prepared: Tag | None = None
    stored: bool = False
    unproven: bool = False


@dataclass(frozen=True, slots=True)
class Take:
    """This state is to be taken from those who hold it, or read from a checkpoint.

    Attributes:
        base: which.
        share: what of it.
        own: what this member holds is of that state: only what it lacks is to be taken.
        finish: it is the step that this member is prepared for: it finishes that one, and keeps its share.
    """

    base: Tag
    share: Share = WHOLE
    own: bool = False
    finish: bool = False


class Place:
    """One member.

    Args:
        held: what it holds to begin with: Tag(0, 0) for a state it has built itself, or that of a checkpoint.
        node_size: so many members hold one copy of the state between them: 1 where each holds it whole, 0 for all.
        shares: what it holds of it.
        stored: it holds nothing of it yet, for it is to be read from a checkpoint.

    Attributes:
        generation: the one that it is in, or has stopped in; 0 for none.
        held: the state that it holds; None for none that counts.
        holds_base: it has got its generation's base.
        phase: what it is about.
        leaving: it wants to go.
        closed: it is between two steps, where no newcomer may come in.
        shares: what it holds of that state, the one that it trains on first; none where it is stored.
        prepared: the step that it can finish if others have applied it; None if it need not.
    """

    def __init__(
        self, held: Tag, node_size: int = 1, shares: tuple[Share, ...] = (WHOLE,), *, stored: bool = False
    ) -> None:
        self.generation = 0
        self.held: Tag | None = held
        self.node_size = node_size
        self.shares = () if stored else shares
        self.stored = stored
        self.prepared: Tag | None = None
        self.holds_base = False
        self.phase = Phase.MEETING
        self.leaving = False
        self.closed = False
        self._take: Take | None = None  # what is being taken, or was last
        self._in_view = False  # what is taken is the view's, not the meeting's

    def meet(self, *, unproven: bool = False) -> Meet:
        """It stops here: after a step that was undone or asked for it, or to be taken into its first view."""
        self.phase = Phase.MEETING
        return Meet(
            self.generation,
            self.held,
            self.holds_base,
            self.leaving,
            self.closed,
            self.node_size,
            self.shares,
            self.prepared,
            self.stored,
            unproven,
        )

    def formed(self, view: ViewNews) -> Meet | Take | None:
        """A view has formed with this member; None if it may begin a step there."""
        if view.generation <= self.generation:
            return None if self.phase in (Phase.READY, Phase.STEPPING) else self.meet()
        self.generation, self.holds_base = view.generation, False
        share = share_of(view.rank, view.world, self.node_size)
        if view.base is None:
            return self.meet()
        if view.rank in view.newcomers and self.node_size == 1:
            return self._begin_to_take(Take(view.base), in_view=True)
        self.holds_base = view.rank not in view.newcomers or self.held == view.base
        if self.held != view.base or share not in self.shares:
            return self.meet()
        self.prepared = None
        self.shares = (share, *(other for other in self.shares if other != share))
        self.phase = Phase.READY
        return None

    def catch_up(self, generation: int, base: Tag, share: Share = WHOLE, *, own: bool = False) -> Meet | Take | None:
        """It lags behind in a meeting; None if that meeting is past. A candidate is in generation 0 for the others.

        Args:
            generation: that the meeting is after.
            base: what to take.
            share: of it.
            own: this member is one of those who hold shares of it.
        """
        if generation not in (0, self.generation) or self.phase is not Phase.MEETING:
            return None
        if self.node_size != 1 and base == self.held != Tag(0, 0) and self.shares[:1] == (share,):
            return self.meet()  # it was told twice, and has done it; (0, 0) does not tell states apart
        if base == self.prepared:
            return self._begin_to_take(Take(base, self.shares[0], own=False, finish=True), in_view=False)
        self.prepared = None
        return self._begin_to_take(Take(base, share, own), in_view=False)

    def took(self) -> Meet | None:
        """The base is taken; None if a step may begin."""
        assert self.phase is Phase.TAKING
        assert self._take is not None
        base, share = self._take.base, self._take.share
        self.shares = (share, *(other for other in self.shares if self._take.own and other != share))
        self.held, self.holds_base, self.stored, self.prepared = base, self.generation > 0, False, None
        if not self._in_view:
            return self.meet()
        self.phase = Phase.READY
        return None

    def begin(self) -> None:
        """A step begins."""
        assert self.phase is Phase.READY, f"a step begins while {self.phase}"
        self.phase = Phase.STEPPING

    def all_began(self) -> None:
        """All members of the generation have begun this step: each of them holds its share."""
        self.shares = self.shares[:1]

    def prepare(self, step: int) -> None:
        """Others may have applied the step that has failed here; what it takes to apply it is at hand."""
        assert self.phase is Phase.STEPPING
        self.prepared = Tag(self.generation, step)

    def applied(self, step: int) -> None:
        """The step has changed the state."""
        assert self.phase is Phase.STEPPING
        assert self.generation > 0
        self.held = Tag(self.generation, step)
        self.phase = Phase.READY

    def spoiled(self) -> None:
        """An update of the state was interrupted half way."""
        self.held, self.shares, self.prepared = None, (), None

    @property
    def takes_for_view(self) -> bool:
        """True if it takes the state of a view that runs: the others have begun the first step, and wait there."""
        return self.phase is Phase.TAKING and self._in_view

    @property
    def is_needed(self) -> bool:
        """True if nobody else may have what it holds: its shares of a line's state, or what finishes a step."""
        of_line = self.holds_base or self.held not in (None, Tag(0, 0))
        return self.node_size != 1 and (self.prepared is not None or (of_line and bool(self.shares)))

    @property
    def brings_state(self) -> bool:
        """True if it holds something of a line's state, or can finish it: not what every newcomer has, or its disk."""
        held = self.held if not self.stored else None
        return self.prepared is not None or self.holds_base or held not in (None, Tag(0, 0))

    @property
    def may_go_on(self) -> bool:
        """True if its generation can go on without the meeting that was asked for.

        Not where the state is spread: whoever has no seat in a view that has formed meanwhile may go, and with it its
        part of what came after.
        """
        return self.phase is Phase.MEETING and self.holds_base and self.node_size == 1

    def go_on(self) -> None:
        """The meeting that was asked for does not come about, for the coordinator is away: the generation goes on."""
        assert self.may_go_on
        self.phase = Phase.READY

    def cast_out(self) -> Meet:
        """The session has ended: what this member holds it brings as a newcomer."""
        self.generation, self.holds_base, self.leaving = 0, False, False
        return self.meet(unproven=self.node_size != 1)

    def lost(self, checkpoint: Tag) -> Meet:
        """Nobody has all of the state: this member is a newcomer with what it finds on its disk."""
        self.held, self.shares, self.stored, self.prepared = checkpoint, (), True, None
        self.generation, self.holds_base = 0, False
        return self.meet()

    def found(self, checkpoint: Tag) -> None:
        """This is the latest checkpoint now: what was to be read from one may have been removed meanwhile."""
        if self.stored:
            self.held = checkpoint

    def _begin_to_take(self, take: Take, *, in_view: bool) -> Take:
        self.phase, self._take, self._in_view = Phase.TAKING, take, in_view
        return take
