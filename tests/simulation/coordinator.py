"""The coordinator: the real decisions about one job, on a simulated disk, with simulated streams.

It does what the real dispatcher does: takes events in one by one, performs effects in order, keeps one timer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulation.disk import JOB, Disk
from simulation.network import COORDINATOR, Stream

from paceline_server.effects import (
    EndSession,
    ForgetView,
    PushCatchUp,
    PushDismissed,
    PushFinished,
    PushStateLost,
    PushView,
    PushWaiting,
    StoreEnding,
    StoreFinished,
    StoreVerdict,
    StoreView,
)
from paceline_server.errors import Refused
from paceline_server.events import Event, FinishStored, Heard, Registered, Resumed, StreamEnded, Ticked, ViewStored
from paceline_server.membership import Membership
from paceline_server.model import View
from paceline_server.restore import restore
from paceline_server.settings import ServerSettings
from paceline_server.storage.base import EndingStored, FinishedStored, VerdictStored, ViewForgotten, ViewFormed

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["Coordinator"]

_SETTINGS = ServerSettings()


class Coordinator:
    """One coordinator process after the other.

    Attributes:
        up: it runs.
        membership: the decisions; of the last process if none runs.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.disk = Disk(world)
        self.up = False
        self.stalled = False
        self._streams: dict[str, Stream] = {}
        self._inbox: list[tuple[Stream | None, Any]] = []
        self._timer = float("inf")
        self._life = 0
        self.start()

    @property
    def reason(self) -> str:
        """The policy's sentence."""
        return self.membership.decision.reason

    # Its life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A process starts on what is stored."""
        self.up = True
        self._life += 1
        self._timer = float("inf")
        self.membership = Membership(restore(self._world.clock.now, self.disk.load()), _SETTINGS)
        self._world.note(COORDINATOR, "starts")
        self.handle(Ticked())

    def crash(self) -> None:
        """The process dies."""
        self.up = self.stalled = False
        self._world.note(COORDINATOR, "is killed")
        self.disk.crash()
        self._inbox.clear()
        self._streams = {}
        for stream in self._world.network.streams:
            stream.reset()

    def stall(self, seconds: float) -> None:
        """It does nothing for a while."""
        if self.up and not self.stalled:
            self.stalled = True
            self._world.note(COORDINATOR, f"stands still for {seconds:.2f} s")
            self._world.clock.after(seconds, self._wake, self._life, seconds)

    def _wake(self, life: int, slept: float) -> None:
        if life != self._life or not self.up:
            return
        self.stalled = False
        self._world.note(COORDINATOR, "goes on")
        self.handle(Ticked(slept))
        inbox, self._inbox = self._inbox, []
        for stream, event in inbox:
            self._take(stream, event)

    # What comes in ----------------------------------------------------------------------------------------------------

    def receive(self, stream: Stream | None, event: Any) -> None:
        """Something arrives: on a stream, or (None) by a call of its own."""
        if not self.up:
            return
        if self.stalled:
            self._inbox.append((stream, event))
        else:
            self._take(stream, event)

    def stream_ended(self, stream: Stream) -> None:
        """A stream has broken."""
        if stream.member_id:
            self.receive(stream, StreamEnded(stream.member_id, stream.number))

    def _take(self, stream: Stream | None, event: Any) -> None:
        if stream is None:
            self.handle(event)
            return
        if type(event) is StreamEnded:
            if self._streams.get(stream.member_id) is stream:
                del self._streams[stream.member_id]
            self.handle(event)
            return
        opening = type(event) is Registered or type(event) is Resumed
        if not opening and self._streams.get(stream.member_id) is not stream:
            return
        try:
            if opening:
                self._attach(stream, event)
            else:
                self.handle(event)
        except Refused as refused:
            if not opening:
                self._world.checks.refused(stream.member, event, refused)
                if self._streams.get(stream.member_id) is stream:
                    del self._streams[stream.member_id]
            stream.refuse(str(refused))

    def _attach(self, stream: Stream, event: Registered | Resumed) -> None:
        effects = self.membership.handle(self._world.clock.now, event)
        stream.member_id, stream.token = event.member_id, event.token_sha256
        self._streams[stream.member_id] = stream
        self._perform(effects)

    def handle(self, event: Event) -> None:
        """Gives an event to the membership and does what follows."""
        effects = self.membership.handle(self._world.clock.now, event)
        if type(event) is not Heard:
            self._perform(effects)

    # What goes out ----------------------------------------------------------------------------------------------------

    def _perform(self, effects: list[Any]) -> None:
        world = self._world
        for effect in effects:
            match effect:
                case StoreView(view):
                    world.checks.forming(self.membership.state, view)
                    world.note(COORDINATOR, f"stores {_words(view)}")
                    self._store_view(view)
                case ForgetView(generation):
                    world.note(COORDINATOR, f"forgets generation {generation}")
                    world.checks.forgot(generation)
                    self.disk.write(ViewForgotten(JOB, generation))
                case StoreVerdict(verdict):
                    world.note(COORDINATOR, f"generation {verdict.generation} is void: {verdict.text}")
                    self.disk.write(VerdictStored(JOB, verdict))
                case StoreEnding(generation, rank, ending):
                    world.note(
                        COORDINATOR, f"rank {rank} of generation {generation} {ending.how} (sure: {ending.sure})"
                    )
                    self.disk.write(EndingStored(JOB, generation, rank, ending))
                case StoreFinished(step):
                    world.note(COORDINATOR, f"stores that the line is finished: {step}")
                    told = FinishStored(step) if step is not None else None
                    self.disk.write(FinishedStored(JOB, step), lambda told=told: told and self.receive(None, told))
                case EndSession(member_id, refusal):
                    stream = self._streams.pop(member_id, None)
                    if stream is not None and refusal is not None:
                        stream.refuse(str(refusal))
                case PushWaiting():
                    pass
                case _:
                    if isinstance(effect, PushFinished):
                        world.checks.told_finished()
                    if isinstance(effect, PushStateLost):
                        world.checks.lost(self.membership.state, effect)
                    if isinstance(effect, PushDismissed):
                        world.checks.let_go(self.membership.state, effect.member_id)
                    if isinstance(effect, PushCatchUp):
                        world.checks.ordered(self.membership.state, effect)
                    if isinstance(effect, PushView):
                        world.checks.pushed(effect.view)
                        world.moment("view")
                    stream = self._streams.get(effect.member_id)
                    if stream is not None:
                        stream.down(effect)
        self._arm()

    def _store_view(self, view: View) -> None:
        self.disk.write(ViewFormed(JOB, view), lambda: self.receive(None, ViewStored(view.generation)))
        self._world.moment("store")

    def _arm(self) -> None:
        deadline = self.membership.next_deadline()
        if deadline < self._timer:
            self._timer = deadline
            self._world.clock.at(deadline, self._tick, self._life, deadline)

    def _tick(self, life: int, due: float) -> None:
        if life != self._life or due != self._timer or not self.up:
            return
        self._timer = float("inf")
        if not self.stalled:  # else it looks when it wakes
            self.handle(Ticked())


def _words(view: View) -> str:
    seats = ", ".join(
        f"{seat.process.host}{' (newcomer)' if seat.rank in view.newcomers else ''}" for seat in view.seats
    )
    base = "nothing agreed" if view.base is None else f"g{view.base.generation}s{view.base.step}"
    return f"generation {view.generation} of {seats}, base {base}"
