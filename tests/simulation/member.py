"""A member: the real `Place`, and around it what a training loop does, with abstract steps.

What it holds is in `shares.Held`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulation.shares import Held
from simulation.taking import Taker

from paceline.checkpoint.tag import Tag
from paceline.elastic.place import Meet, Phase, Place, Take, ViewNews
from paceline.elastic.share import WHOLE, Share
from paceline_server.effects import (
    PushCatchUp,
    PushDismissed,
    PushDrain,
    PushFinished,
    PushRunning,
    PushSpare,
    PushStateLost,
    PushSummons,
    PushVerdict,
    PushView,
)
from paceline_server.model import Report, View
from pacelinepb.v1.errors_pb2 import ErrorReason

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["Member"]

_LOST = ErrorReason.ERROR_REASON_PEER_LOST
_RAISED = ErrorReason.ERROR_REASON_PEER_RAISED


class Member(Taker):
    """One worker process.

    Args:
        world: where.
        name: its host.
        pid: its process.
        held: the tag of the state that it starts with.
        bits: that state.

    Attributes:
        attempt: grows whenever what it was doing is over; what was asked for before it is void then.
        void: its generation is over, as far as it knows.
        spoil_next: its next update will be interrupted.
    """

    def __init__(self, world: World, name: str, pid: int, held: Tag, bits: tuple[object, ...]) -> None:
        spread = world.shape.node_size != 1
        self.place = Place(held, world.shape.node_size, stored=spread and held > Tag(0, 0))
        self.state = Held(bits, self.place.shares)
        self.view: View | None = None
        self.rank: int | None = None
        self.attempt = 0
        self.void = False
        self.spoil_next = False
        self._verdict = self._waiting = self._flag = self._went_on = False
        self._stopped = self._taking_for_view = False
        self._second = 0  # the step whose second word is under way
        self._prepared_in: View | None = None
        super().__init__(world, name, pid)
        self.floor = held.generation

    # Views ------------------------------------------------------------------------------------------------------------

    def generation(self) -> int:
        return self.place.generation

    def take(self, message: Any) -> None:
        match message:
            case PushView(_, view, rank):
                self._formed(view, rank)
            case PushVerdict(_, verdict):
                if verdict.generation == self.place.generation:
                    self._hear_verdict()
            case PushRunning():
                if self.place.generation == 0:
                    self.later(self.world.delay(0.01, 0.3), self._prepared, self.member_id)
            case PushSummons(_, generation):
                self._flag |= generation == self.place.generation
            case PushCatchUp(_, generation, base, donors, share, _):
                ids = [donor.member_id for donor, _ in donors]
                take = self.place.catch_up(generation, Tag(*base), Share(*(share or WHOLE)), own=self.member_id in ids)
                if isinstance(take, Meet):
                    self.say_meet(take)
                elif take is not None:
                    self.attempt += 1
                    self._start_taking(take, ids, in_view=False)
            case PushSpare():
                self._let_go_of_view()
                meet = self.place.cast_out()
                if self.place.leaving:
                    self._go()
                else:
                    self.say_meet(meet)
            case PushStateLost():
                self._start_from_checkpoint()
            case PushDrain():
                self.place.leaving = True
                if self.place.phase is Phase.MEETING and not (self.place.generation or self.place.brings_state):
                    self._go()
                elif self.place.phase is Phase.MEETING and self.last_meet is not None:
                    self.say_meet(self.place.meet())  # what it said before does not say so
            case PushDismissed(_, last):
                self.world.note(self.name, f"is dismissed (last: {last})")
                self.world.dismissed(self, last)
                self._go()
            case PushFinished():
                self._go()

    def _prepared(self, member_id: str) -> None:
        if member_id == self.member_id and self.place.generation == 0 and self.place.phase is Phase.MEETING:
            self.say_meet(self.place.meet())

    def _formed(self, view: View, rank: int) -> None:
        new = view.generation > self.place.generation
        base = None if view.base is None else Tag(*view.base)
        if new:
            self.view, self.rank = view, rank
            self.attempt += 1
            self.void = self._verdict = self._waiting = self._flag = self._went_on = self.place.closed = False
            self._stopped = False
            self.last_meet = self.unanswered = self.finish = None
            self.word = (0, 0.0)
        effect = self.place.formed(ViewNews(view.generation, rank, base, frozenset(view.newcomers), len(view.seats)))
        if isinstance(effect, Meet):
            self.void = base is not None
            self._stopped = True
            self.say_meet(effect)
            if base is not None:
                self._abort_peers(None)
        elif isinstance(effect, Take):
            donors = [seat.member_id for seat in view.seats if seat.rank not in view.newcomers]
            self._start_taking(effect, donors, in_view=True)
        elif new:
            self._next_step()
        if new and not self.void:
            self.later(self.world.delay(0.005, 0.1), self._dial, view)

    def _dial(self, view: View) -> None:
        """A process that is no more takes no link, nor does one that is another member now."""
        for seat in view.seats if self._is_in(view) else ():
            there = self.world.by_id[seat.member_id].answers_as(seat.member_id)
            if not there and self.world.network.reaches(self.name, seat.process.host):
                self._suspect(seat.rank, _LOST)
            elif self.world.by_id[seat.member_id].has_stopped_in(view):
                self.aborted(view, None)

    def has_stopped_in(self, view: View) -> bool:
        """True if it takes part in this generation no more."""
        return self.void and self.place.generation == view.generation

    # Steps ------------------------------------------------------------------------------------------------------------

    def _next_step(self) -> None:
        if self.void:
            self._fail()
            return
        assert self.place.held is not None
        closing = self.place.held.step == self.world.last_step
        if not closing:
            self.place.begin()
        compute = 0.001 if closing else self.world.compute()
        self.later(compute, self._contribute, self.attempt, self.place.held.step + 1)

    def _contribute(self, attempt: int, step: int) -> None:
        if attempt != self.attempt:
            return
        if self.void:
            self._fail()
            return
        assert self.view is not None
        self._waiting = True
        self.later(self.world.settings.failure_timeout, self._look_around, attempt)
        self.world.rounds.contribute(self, self.view, step, self._flag or self.place.leaving)

    def completed(self, step: int, flagged: bool, *, second: bool) -> None:
        """Every collective of the step has completed here, or its second word has."""
        self.attempt += 1
        self._waiting = self._went_on = False
        self._second = 0
        generation = self.place.generation
        self.word = (step, self.world.clock.now)
        if step > self.world.last_step:
            self.world.note(self.name, f"sees the closing word of generation {generation} complete")
            self.world.checks.closed(self)
            self.say_finish(generation, step - 1)
            self.later(self.world.settings.failure_timeout, self._go_unheard, self.attempt)
            return
        self.place.all_began()
        self.state.keep(self.place.shares)
        if self.place.node_size != 1 and not second:
            self._send_second_word(step, flagged)
            return
        if self.spoil_next:
            self.spoil_next = False
            self.world.note(self.name, f"is interrupted inside the update of step {step}")
            self.state.spoil("spoiled", self.name)
            self.place.spoiled()
            if self.void:
                self._fail()
            else:
                self._waiting = True
                self._suspect(None, _RAISED)
            return
        self.place.applied(step)
        self.state.update(generation)
        self.world.note(self.name, f"applies step {step} in generation {generation}{', flagged' if flagged else ''}")
        assert self.view is not None
        self.world.checks.applied(self, self.view, step)
        if flagged and not self.void:
            self._meet()
            self.world.moment("planned")
            self.later(self.world.settings.failure_timeout, self._maybe_go_on, self.attempt)
        else:
            self._next_step()

    def _send_second_word(self, step: int, flagged: bool) -> None:
        if self.void:
            self._fail()
            return
        assert self.view is not None
        self._second, self._waiting = step, True
        self.later(self.world.settings.failure_timeout, self._look_around, self.attempt)
        self.world.rounds.contribute(self, self.view, step, flagged, second=True)

    # Failures ---------------------------------------------------------------------------------------------------------

    def link_ended(self, view: View, rank: int) -> None:
        """The link to a member of a view has ended."""
        if self._is_in(view):
            self._suspect(rank, _LOST)

    def aborted(self, view: View, rank: int | None) -> None:
        """A member of a view says that the generation is over."""
        if self._is_in(view) and not self.void:
            if self.place.phase is Phase.MEETING:
                self.void = True  # it does not go on where others have stopped
                return
            if rank is not None and rank != self.rank and self.world.rng.random() < 0.5:
                self._suspect(rank, _LOST)
            else:
                self.void = True
                self._stop_if_blocked()

    def _is_in(self, view: View) -> bool:
        return self.view is not None and self.finish is None and self.view.generation == view.generation

    def _look_around(self, attempt: int) -> None:
        """It has waited long: is a link dead?"""
        if attempt != self.attempt or not self._waiting:
            return
        assert self.view is not None
        for seat in self.view.seats:
            there = self.world.by_id[seat.member_id].answers_as(seat.member_id)
            if not there or not self.world.network.reaches(self.name, seat.process.host):
                self._suspect(seat.rank, _LOST)
                return
        self.later(0.5, self._look_around, attempt)

    def _suspect(self, rank: int | None, reason: ErrorReason.ValueType) -> None:
        if self.void:
            return
        self.world.note(self.name, f"suspects rank {rank} in generation {self.place.generation}")
        self.void = True
        self.say_report(self.place.generation, Report(-1, reason, rank, 1, "it failed"))
        self._abort_peers(rank)
        self._stop_if_blocked()

    def _abort_peers(self, rank: int | None) -> None:
        assert self.view is not None
        for seat in self.view.seats:
            peer = self.world.by_id.get(seat.member_id)
            if peer is not None and peer is not self:
                self._abort(peer, self.view, rank)

    def _abort(self, peer: Member, view: View, rank: int | None) -> None:
        if self.world.network.reaches(self.name, peer.name):
            peer.later(self.world.delay(0.001, 0.02), peer.aborted, view, rank)
        elif peer.alive:
            self.later(0.3, self._abort, peer, view, rank)  # it is sent again

    def _hear_verdict(self) -> None:
        self.void = self._verdict = True
        self.unanswered = None
        if not self._stopped:
            self._stop_if_blocked()

    def _stop_if_blocked(self) -> None:
        """What it waits for wakes at once; what it computes finds out at its next call."""
        taking = self.place.phase is Phase.TAKING and self._taking_for_view
        if self._waiting or taking:
            self._fail()

    def _fail(self) -> None:
        """The step is undone; the verdict has a moment to come before the meeting."""
        self._prepare()
        self.attempt += 1
        self._waiting = False
        if self._verdict:
            self._abort_peers(None)
            self._meet()
        else:
            self.later(self.world.settings.failure_timeout / 6, self._meet_unheard, self.attempt)
            self._waiting = True  # for the verdict

    def _meet_unheard(self, attempt: int) -> None:
        if attempt == self.attempt:
            self._meet()

    def _meet(self) -> None:
        self.attempt += 1
        self._waiting = False
        self._stopped = True
        self.place.closed = self.void and self.world.rng.random() < self.world.shape.closed
        self.say_meet(self.place.meet())
        self.world.moment("meet")

    # The coordinator is away ------------------------------------------------------------------------------------------

    def _maybe_go_on(self, attempt: int) -> None:
        if attempt != self.attempt or self.void or not self.place.may_go_on:
            return
        timeout = self.world.settings.failure_timeout
        if self.lost_at is None or self.world.clock.now < self.lost_at + timeout:
            self.later(0.5, self._maybe_go_on, attempt)
            return
        self.world.note(self.name, "goes on, for the coordinator is away")
        self.place.go_on()
        self.last_meet = None
        self._stopped = False
        self._went_on = True
        self._flag = False
        self._next_step()

    def welcome(self) -> None:
        if self._went_on and not self.void:
            # The others may not have gone on: what they are told now, it must be told as well.
            self.void = True
            self._abort_peers(None)
            self._meet()

    def session_ended(self, why: str) -> None:
        if self.finish is not None or self.place.held is None:
            self._go()  # done; or there is nothing worth keeping: its launcher starts it anew
            return
        self._prepare()
        if self.view is not None:
            self._abort_peers(None)
        self._let_go_of_view()
        self.last_meet = self.place.cast_out()

    def _let_go_of_view(self) -> None:
        """It is in no view any more."""
        self.attempt += 1
        self.view = self.rank = None
        self.void = self._verdict = self._waiting = self._flag = self._went_on = self.place.closed = False
        self.unanswered = None

    # Going ------------------------------------------------------------------------------------------------------------

    def raise_error(self) -> None:
        """The user's code raises."""
        self.world.note(self.name, "raises ValueError")
        self.leave("ValueError")
        if self.view is not None and self.place.phase is not Phase.MEETING:
            self._abort_peers(self.rank)
        self._go()

    def _go_unheard(self, attempt: int) -> None:
        if attempt != self.attempt or self.finish is None:
            return
        if self.lost_at is not None and self.world.clock.now >= self.lost_at + self.world.settings.failure_timeout:
            self._go()
        else:
            self.later(0.5, self._go_unheard, attempt)

    def _go(self) -> None:
        """The process exits: what it has sent arrives before its stream ends."""
        self.world.note(self.name, "exits")
        self.leave()
        self.alive = False
        if self.stream is not None:
            self.world.clock.after(0.3, self.stream.reset)
        self.world.gone(self)
