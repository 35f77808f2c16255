"""The state machine of one member: which training state it holds, and what it may do next.

These are the rules of I1 and I2 at the member's side; the coordinator's are in `_meeting`:

- A state is identified by its tag. An applied step gives it a new tag, an undone step does not.
- After an interrupted update the member holds no usable state (`held` is None) until it has taken the base.
- A base is taken whole or not at all: until then the member holds its old state.
- A view is entered only with its base. A member that should hold the base may hold a newer state, because its
  generation went on while the coordinator was away. It meets again instead, so that no committed step can be lost.

Of a sharded state a member holds *shares*, first the one that it trains on:

- A share that is taken is added to those that the member holds. The old ones are dropped when all members of a
  generation have begun its first step, since each of them holds its own share then, and its copies of others' shares: a
  member takes those before it begins. A failure before loses nothing.
- Each step updates the copies too, also one that a prepared member finishes.
- A step's second word says that its sender has all gradients. A member that has sent it and not seen it complete is
  *prepared*: others may have applied the step. If the step becomes the base, the member finishes it; else it undoes
  it.
- Shares of a state that is lost are never brought to another line; a checkpoint is, if there is one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from paceline_protocol._values import MAX_SHARES, WHOLE, Meet, Share, Tag, share_of


class Phase(enum.Enum):
    """The phases of a member."""

    MEETING = "meeting"
    """It waits for the coordinator: for the next view, or what to do until then."""
    TAKING = "taking"
    """It is in a view, or a meeting, and takes the base."""
    READY = "ready"
    """It is in a view, holds its state, and may begin a step."""
    STEPPING = "stepping"
    """It is inside a step."""


@dataclass(frozen=True, slots=True)
class MemberView:
    """The part of a view that a member's next action depends on.

    `base` is None if its members have yet to compare what they hold. `newcomers` were not in the generation before;
    where the state is whole, they do not hold it yet.
    """

    generation: int
    rank: int
    base: Tag | None
    newcomers: frozenset[int]
    world: int = 1


@dataclass(frozen=True, slots=True)
class Take:
    """An order to take a state from the members that hold it, or to read it from a checkpoint.

    `own` says whether this member holds shares of that state, so that only the rest is taken; `finish`, whether it is
    the step that this member is prepared for, which it finishes with its own share.
    """

    base: Tag
    share: Share = WHOLE
    own: bool = False
    finish: bool = False


class MemberState:
    """The state of one member.

    It starts with the tag `held`: Tag(0, 0) for a state it has built itself, or a checkpoint's, of which it holds
    nothing yet if it is only `stored`. Later, `held` is None if no usable state is held. `node_size` members hold one
    copy of the state between them: 1 if each holds it whole, 0 for all. Of its `shares` of that state the first is the
    one that it trains on; there are none while the state is only stored.

    `generation` is the one that it is in, or has stopped in; 0 for none. `holds_base` is True if it got its
    generation's base. `closed` is True while it is in a block between two steps, where no newcomer may be admitted.
    `prepared` is the step that it can finish if others have applied it.
    """

    def __init__(
        self, held: Tag, node_size: int = 1, shares: tuple[Share, ...] = (WHOLE,), *, stored: bool = False
    ) -> None:
        self.generation = 0
        self.held: Tag | None = held
        self.node_size = node_size
        self.shares = () if stored else shares
        self._copies = 0  # the number of shares, behind the first, that are updated with it
        self.stored = stored
        self.prepared: Tag | None = None
        self.holds_base = False
        self.phase = Phase.MEETING
        self.leaving = False
        self.closed = False
        self._take: Take | None = None  # the state that it takes, or took last
        self._in_view = False  # True if it takes the base of a view that has formed, False inside a meeting

    def meet(self, *, unproven: bool = False) -> Meet:
        """Stops the member for a meeting: after a step that was undone or asked for it, or to enter its first view."""
        self.phase = Phase.MEETING
        return Meet(
            self.generation,
            self.held,
            self.holds_base,
            self.leaving,
            self.closed,
            self.node_size,
            self.shares[:MAX_SHARES],
            self.prepared,
            self.stored,
            unproven,
        )

    def formed(self, view: MemberView) -> Meet | Take | None:
        """Enters a view that has formed with this member; returns None if it may begin a step there."""
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
        self._train_on(share, self.shares)
        self.phase = Phase.READY
        return None

    def catch_up(self, generation: int, base: Tag, share: Share = WHOLE, *, own: bool = False) -> Meet | Take | None:
        """Takes a base that this member lacks in a meeting; None if that meeting is past.

        The meeting follows `generation`, 0 for a candidate. `own` says whether this member holds shares of that state.
        """
        if generation not in (0, self.generation) or self.phase is not Phase.MEETING:
            return None
        if self.node_size != 1 and base == self.held != Tag(0, 0) and self.shares[:1] == (share,):
            return self.meet()  # a repeated order that is done; (0, 0) does not identify a state
        if base == self.prepared:
            return self._begin_to_take(Take(base, self.shares[0], own=False, finish=True), in_view=False)
        self.prepared = None
        return self._begin_to_take(Take(base, share, own), in_view=False)

    def took(self) -> Meet | None:
        """Notes that the base has been taken; returns None if a step may begin."""
        assert self.phase is Phase.TAKING
        assert self._take is not None
        base, share = self._take.base, self._take.share
        if not self._take.finish:
            self._train_on(share, self.shares if self._take.own else ())
        self.held, self.holds_base, self.stored, self.prepared = base, self.generation > 0, False, None
        if not self._in_view:
            return self.meet()
        self.phase = Phase.READY
        return None

    def begin(self) -> None:
        """Begins a step."""
        assert self.phase is Phase.READY, f"a step begins while {self.phase}"
        self.phase = Phase.STEPPING

    def step_dropped(self) -> None:
        """Drops a step that began and was not entered."""
        assert self.phase is Phase.STEPPING
        self.phase = Phase.READY

    def copied(self, shares: tuple[Share, ...]) -> None:
        """Notes the shares of others of which it has copies now, and that are updated from now on."""
        assert self.phase is Phase.STEPPING
        live, *others = self.shares
        self.shares = (live, *shares, *(other for other in others if other not in shares))
        self._copies = len(shares)

    def all_began(self) -> None:
        """Drops all shares but the live one and its copies: all members have begun a step with their own."""
        self.shares = self.shares[: 1 + self._copies]

    def prepare(self, step: int) -> None:
        """Notes that others may have applied the step that failed here, and that this member can finish it."""
        assert self.phase is Phase.STEPPING
        self.prepared = Tag(self.generation, step)

    def applied(self, step: int) -> None:
        """Notes that the step has changed the state."""
        assert self.phase is Phase.STEPPING
        assert self.generation > 0
        self.held = Tag(self.generation, step)
        self.phase = Phase.READY

    def spoiled(self) -> None:
        """Discards the state, because an update was interrupted half way."""
        self.held, self.shares, self.prepared = None, (), None

    @property
    def takes_for_view(self) -> bool:
        """True if it takes the state for a view whose other members wait in their first step."""
        return self.phase is Phase.TAKING and self._in_view

    @property
    def is_needed(self) -> bool:
        """True if no other member may have what it holds: shares of a line's state, or gradients that finish a step."""
        of_line = self.holds_base or self.held not in (None, Tag(0, 0))
        return self.node_size != 1 and (self.prepared is not None or (of_line and bool(self.shares)))

    @property
    def brings_state(self) -> bool:
        """True if it holds some of a line's state or can finish it; states of newcomers and disks do not count."""
        held = self.held if not self.stored else None
        return self.prepared is not None or self.holds_base or held not in (None, Tag(0, 0))

    @property
    def may_go_on(self) -> bool:
        """True if its generation can go on without the meeting that was asked for.

        Not with a sharded state: a view may have formed meanwhile, and a member that is left out of it may leave with
        its shares of later steps.
        """
        return self.phase is Phase.MEETING and self.holds_base and self.node_size == 1

    def go_on(self) -> None:
        """Goes on in the generation without the meeting, because the coordinator is away."""
        assert self.may_go_on
        self.phase = Phase.READY

    def cast_out(self) -> Meet:
        """Becomes a newcomer with the state that it holds, because its session has ended."""
        self.generation, self.holds_base, self.leaving = 0, False, False
        return self.meet(unproven=self.node_size != 1)

    def lost(self, checkpoint: Tag) -> Meet:
        """Becomes a newcomer with the checkpoint on its disk, because parts of the state are lost."""
        self.held, self.shares, self.stored, self.prepared = checkpoint, (), True, None
        self.generation, self.holds_base = 0, False
        return self.meet()

    def found(self, checkpoint: Tag) -> None:
        """Switches to the latest checkpoint for reading; an earlier one may have been removed."""
        if self.stored:
            self.held = checkpoint

    def _train_on(self, share: Share, held: tuple[Share, ...]) -> None:
        """Makes one of the shares that it holds, or has taken, the live one; none is a copy that is updated."""
        self.shares, self._copies = (share, *(other for other in held if other != share)), 0

    def _begin_to_take(self, take: Take, *, in_view: bool) -> Take:
        self.phase, self._take, self._in_view = Phase.TAKING, take, in_view
        return take
