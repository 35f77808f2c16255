"""How a simulated member takes a state: from others that hold it, or shares of it, or out of a checkpoint."""

from __future__ import annotations

import abc

from simulation.session import Session
from simulation.shares import Held

from paceline.checkpoint.tag import Tag
from paceline.elastic.place import Place, Take
from paceline.elastic.share import Share
from paceline_server.model import View

__all__ = ["Taker"]


class Taker(Session):
    """One worker process, as far as it takes and gives. `Member` says what it does then.

    Attributes:
        place: the real one.
        state: what it holds.
        attempt: grows whenever what it was doing is over; what was asked for before it is void then.
        void: its generation is over, as far as it knows.
    """

    place: Place
    state: Held
    attempt: int
    void: bool
    _taking_for_view: bool
    view: View | None
    _second: int
    _prepared_in: View | None

    @abc.abstractmethod
    def _next_step(self) -> None:
        """It may begin a step."""

    @abc.abstractmethod
    def _meet(self) -> None:
        """It says what it holds."""

    @abc.abstractmethod
    def _abort_peers(self, rank: int | None) -> None:
        """It tells the members of its view that the generation is over."""

    @abc.abstractmethod
    def _let_go_of_view(self) -> None:
        """It is in no view any more."""

    @abc.abstractmethod
    def _go(self) -> None:
        """The process exits."""

    @property
    def bits(self) -> tuple[object, ...]:
        """What it holds."""
        return self.state.bits

    def _prepare(self) -> None:
        """Others may have applied the step whose second word has failed here."""
        if self._second:
            self.place.prepare(self._second)
            self._second, self._prepared_in = 0, self.view

    def _start_taking(self, take: Take, donors: list[str], *, in_view: bool) -> None:
        self._taking_for_view = in_view
        if not in_view:
            self.last_meet = None
        give_up = self.world.clock.now + self.world.settings.failure_timeout
        self.later(self.world.delay(0.01, 0.3), self._try_to_take, self.attempt, take, donors, give_up, in_view)

    def _try_to_take(self, attempt: int, take: Take, donors: list[str], give_up: float, in_view: bool) -> None:
        if attempt != self.attempt:
            return
        giving = []
        for member_id in donors:
            donor = self.world.by_id[member_id]
            if donor.gives(member_id, take.base) and self.world.network.reaches(self.name, donor.name):
                giving.append(donor)
        if self._take(take, giving):
            self.attempt += 1
            meet = self.place.took()
            self.state.keep(self.place.shares)
            if meet is not None:
                self.say_meet(meet)
            else:
                self._next_step()
            return
        if self.world.clock.now < give_up:
            self.later(self.world.delay(0.05, 0.3), self._try_to_take, attempt, take, donors, give_up, in_view)
            return
        self.world.note(self.name, f"gets {tuple(take.base)} from nobody")
        if in_view:
            self.void = True
            self._abort_peers(None)
        self.place.found(self.world.checkpoint[0])
        self._meet()

    def _take(self, take: Take, giving: list[Taker]) -> bool:
        """Takes it, if those who give have all of it between them, or a checkpoint has it."""
        what, names = f"{tuple(take.share)} of {tuple(take.base)}", " ".join(member.name for member in giving)
        held, bits = self.world.checkpoint
        if take.finish and giving:
            assert self._prepared_in is not None
            self.world.note(self.name, f"finishes step {take.base.step}, as {names} did")
            self.state.update(self._prepared_in.generation)
            self.world.checks.applied(self, self._prepared_in, take.base.step)
            return True
        if not take.finish and self.state.take(take.share, [member.state for member in giving], own=take.own):
            self.world.note(self.name, f"takes {what} from {names}")
            return True
        if not take.finish and held == take.base and held.step:
            self.world.note(self.name, f"reads {what} from its disk")
            self.state.read(take.share, bits, own=take.own)
            return True
        return False

    def could_give(self, tag: Tag) -> list[Share]:
        """The shares of a state that it holds, or would if it finished a step."""
        if self.place.held == tag:
            return list(self.state.parts)
        return list(self.place.shares[:1]) if self.place.prepared == tag else []

    def gives(self, member_id: str, base: Tag) -> bool:
        """True if it can be read from, in this session, what is exactly this state."""
        live = self.alive and not self.frozen and self.member_id == member_id
        return live and self.place.held == base

    def _start_from_checkpoint(self) -> None:
        """What it has of the state is of no use: others had the rest."""
        held, _ = self.world.checkpoint
        if held == Tag(0, 0):
            self._go()
            return
        self._let_go_of_view()
        self.state.spoil("lost", self.name)
        self.say_meet(self.place.lost(held))
