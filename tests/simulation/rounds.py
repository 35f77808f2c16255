"""The data path, as far as the protocol depends on it: who has contributed to which step of which generation.

A collective completes at a member only if every member of the view has contributed, and if its last hop, from the
member before it in the ring, gets through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_server.model import View

if TYPE_CHECKING:
    from simulation.member import Member
    from simulation.world import World

__all__ = ["Round", "Rounds", "is_complete"]


class Round:
    """One step, its second word, or the closing word, of one generation."""

    def __init__(self, view: View, step: int, second: bool) -> None:
        self.view = view
        self.step = step
        self.second = second
        self.states: dict[str, object] = {}
        self.flags = False
        self.waiting: list[tuple[Member, int]] = []


def is_complete(contributed: int, world: int) -> bool:
    """True if the last hop may set out."""
    return contributed == world


class Rounds:
    """All rounds of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rounds: dict[tuple[int, str, int, bool], Round] = {}

    def contribute(self, member: Member, view: View, step: int, flag: bool, *, second: bool = False) -> None:
        """A member's part is on its way: all that it will ever give to this step in this generation."""
        key = (view.generation, view.seats[0].member_id, step, second)
        round_ = self._rounds.get(key)
        if round_ is None:
            round_ = self._rounds[key] = Round(view, step, second)
        self._world.checks.contributed(round_.states, member, view, step)
        round_.states[member.member_id] = member.bits
        round_.flags |= flag
        round_.waiting.append((member, member.attempt))
        if is_complete(len(round_.states), len(view.seats)):
            self._world.moment("second word" if second else "round")
            for waiter, attempt in round_.waiting:
                waiter.later(self._world.delay(0.001, 0.03), self._last_hop, round_, waiter, attempt)
            round_.waiting = []

    def _last_hop(self, round_: Round, member: Member, attempt: int) -> None:
        if member.attempt != attempt:
            return
        seats = round_.view.seats
        assert member.rank is not None
        before = seats[member.rank - 1].process.host
        if self._world.network.reaches(before, member.name):
            self._world.checks.completed(round_.states, round_.view, member)
            member.completed(round_.step, round_.flags, second=round_.second)
        else:
            member.later(0.2, self._last_hop, round_, member, attempt)  # it is sent again
