"""The coordinator: the real dispatcher, handlers, keeper and timers, on a simulated disk, with simulated streams."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulation.broken import Broken
from simulation.disk import JOB, Disk, DiskStorage
from simulation.loop import Loop
from simulation.network import COORDINATOR, Context, refusal

from paceline_protocol import Seat, View
from paceline_protocol._job_state import Sessions
from paceline_protocol.coordinator import (
    Effect,
    EndSession,
    Event,
    ForgetView,
    Membership,
    Send,
    StoreEnding,
    StoreFinished,
    StoreVerdict,
    StoreView,
    Welcome,
)
from paceline_protocol.messages import CatchUp, Dismissed, Finished, StateLost, ViewFormed
from paceline_server.dispatcher import Dispatcher
from paceline_server.errors import Refused
from paceline_server.keeper import Job
from paceline_server.services.session import SessionHandlers
from paceline_server.settings import ServerSettings
from paceline_server.storage.base import Storage, StoredJob
from paceline_server.tally import Tally
from pacelinepb.v1.errors_pb2 import ErrorReason

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["SETTINGS", "Coordinator", "SimulatedDispatcher"]

_MISMATCH = ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH

SETTINGS = ServerSettings(message_rate=1e9, message_burst=1_000_000)


class Coordinator:
    """One coordinator process after the other.

    Args:
        world: where.
        name: its host.

    Attributes:
        up: it runs.
        life: number of the process.
        dispatcher: of the last process if none runs.
    """

    def __init__(self, world: World, name: str = COORDINATOR) -> None:
        self._world = world
        self.name = name
        self.disk = Disk(world)
        self.up = self.stalled = False
        self.life = 0
        self.loops: list[Loop] = []
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.membership: Membership | None = None
        self.serves = True  # its dispatcher is not drained; a standby has none
        self.rules = True  # what it decides counts: of several, only the one does that leads in truth

    @property
    def reason(self) -> str:
        """The policy's sentence."""
        return self.membership.decision.reason if self.membership is not None else "no worker has come yet"

    # Its life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A process starts on what is stored."""
        self.up = True
        self.life += 1
        life = self.life
        self._world.note(self.name, "starts")
        self.loop = Loop(self._world.clock, lambda call, *args: self.hear(life, call, *args))
        self.loops.append(self.loop)
        storage = DiskStorage(self.disk, lambda call, *args: self.hear(life, self.loop.call_soon, call, *args))
        self._world.starting = self
        self.dispatcher = SimulatedDispatcher(self._world, self, storage)
        self._handlers = SessionHandlers(self.dispatcher)
        self.loop.call_soon(self.loop.create_task, self.dispatcher.start())

    def crash(self) -> None:
        """The process dies."""
        self.up = self.stalled = False
        self.life += 1
        self._world.note(self.name, "is killed")
        self.disk.crash()
        self._backlog.clear()
        self.reset_streams()

    def reset_streams(self) -> None:
        """All connections to it break."""
        for stream in self._world.network.streams:
            if stream.coordinator is self:
                stream.reset()

    @property
    def stored(self) -> StoredJob:
        """The job as it is stored."""
        return self.disk.load()

    def stall(self, seconds: float) -> None:
        """It does nothing for a while."""
        if self.up and not self.stalled:
            self.stalled = True
            self._world.note(self.name, f"stands still for {seconds:.2f} s")
            self._world.clock.after(seconds, self._wake, self.life)

    def _wake(self, life: int) -> None:
        if life != self.life or not self.up:
            return
        self.stalled = False
        self._world.note(self.name, "goes on")
        backlog, self._backlog = self._backlog, []
        for call, args in backlog:
            call(*args)

    def hear(self, life: int, call: Callable[..., None], *args: Any) -> None:
        """Something happens to a process of the coordinator: if it is this one, and when it is awake."""
        if life != self.life:
            return
        if self.stalled:
            self._backlog.append((call, args))
        else:
            call(*args)

    # What comes in ----------------------------------------------------------------------------------------------------

    def serve(self, context: Context) -> None:
        """A stream has come."""

        async def serve() -> None:
            try:
                await self._handlers.session(None, context)  # type: ignore[arg-type]
            except Refused as refused:
                self._world.checks.refused(context.stream, refused)
                context.stream.finish(refusal(refused))
            else:
                context.stream.finish(None)

        def begin() -> None:
            context.task = self.loop.create_task(serve())

        self.loop.call_soon(begin)

    def call(self, name: str, *args: Any) -> None:
        """A call of its own to the dispatcher, that nobody waits for; a job that is not there is told nothing."""
        if self.up and self.serves:
            self.loop.call_soon(getattr(self.dispatcher, name), *args)

    def tell(self, event: Event) -> None:
        """An operator's word to the job."""
        job = self.dispatcher.jobs.get(JOB) if self.up and self.serves else None
        if job is not None:
            self.loop.call_soon(self.dispatcher.apply, job, event)


class SimulatedDispatcher(Dispatcher):
    """Has the checks look at what it does."""

    def __init__(self, world: World, owner: Coordinator, storage: Storage, epoch: int = 0) -> None:
        super().__init__(SETTINGS, storage, epoch=epoch)
        self._world = world
        self._owner = owner
        self._counted: dict[Tally, list[float]] = {}

    def _make_job(self, *of: Any) -> Job:
        job = super()._make_job(*of)
        self._owner.membership = job.membership
        return job

    def _fail(self, job: Job) -> None:
        """A bug ends the schedule, not the job."""
        error = sys.exception()
        assert error is not None
        raise error

    def _handle(self, job: Job, event: Event) -> list[Effect]:
        """No counter falls, counting goes on, and what is kept beside the sessions is what they are."""
        effects = super()._handle(job, event)
        now, sessions = self._loop.time(), job.membership.state.sessions
        assert not self.observatory.miscounted
        again = Sessions()
        for member_id, session in sessions.items():
            again[member_id] = session
        assert sessions._counts == again._counts, (sessions._counts, again._counts, event)
        assert sessions._by_process == again._by_process, (sessions._by_process, again._by_process, event)
        if (tally := self.observatory.tally(now, job.membership.state.name)) is not None:
            here = {member_id for member_id, session in sessions.items() if session.stream is not None}
            assert tally._here.keys() == here, (list(tally._here), here, event)
            counters = [
                tally.committed,
                tally.undone,
                tally.samples,
                tally.checkpoint_failures,
                *tally.seconds(now).values(),
            ]
            before = self._counted.get(tally, counters)
            assert all(new >= old for new, old in zip(counters, before, strict=True)), (counters, before, event)
            self._counted[tally] = counters
        return effects

    def _act(self, job: Job, effects: list[Effect]) -> None:
        """Each session holds a place, and nothing else does."""
        super()._act(job, effects)
        if self._world.over:
            return
        assert len(self._places) == sum(len(each.membership.state.sessions) for each in self.jobs.values()), effects

    def _perform(self, job: Job, effect: Effect) -> None:
        world, state, owner = self._world, job.membership.state, self._owner
        if world.over:
            return
        match effect:
            case Welcome(member_id):
                world.registered(member_id, state.sessions[member_id].process)
            case StoreView(view):
                if view.generation == 1:
                    world.checks.first(view)
                if owner.rules:
                    world.checks.forming(state, view)
                world.note(owner.name, f"stores {_words(view)}")
                world.moment("store")
            case ForgetView(generation):
                world.note(owner.name, f"forgets generation {generation}")
                if owner.rules:
                    world.checks.forgot(generation)
            case StoreVerdict(verdict):
                if world.shape.microbatches and verdict.reason == _MISMATCH and "kept" not in verdict.text:
                    raise Broken(f"mismatch: {verdict.text}")
                world.note(owner.name, f"generation {verdict.generation} is void: {verdict.text}")
            case StoreEnding(generation, rank, ending):
                world.note(owner.name, f"rank {rank} of generation {generation} {ending.how} (sure: {ending.sure})")
            case EndSession(member_id, refusal) if world.shape.busy and "silent" in str(refusal):
                raise Broken(f"{world.by_id[member_id].name} was busy, and is evicted: {refusal}")
            case StoreFinished(step):
                world.note(owner.name, f"stores that the line is finished: {step}")
            case Send(_, Finished()):
                world.checks.told_finished()
            case Send(member_id, StateLost() as message) if owner.rules:
                world.checks.lost(state, member_id, message)
            case Send(member_id, Dismissed(last)):
                world.checks.let_go(state, member_id, last=last)
            case Send(member_id, CatchUp() as message) if owner.rules:
                world.checks.ordered(state, member_id, message)
            case Send(_, ViewFormed(View() as view)):
                world.checks.pushed(view)
                world.moment("view")
        super()._perform(job, effect)


def _words(view: View) -> str:
    def name(seat: Seat) -> str:
        return f"{seat.address.partition(':')[0]}{' (newcomer)' if seat.rank in view.newcomers else ''}"

    base = "nothing agreed" if view.base is None else f"g{view.base.generation}s{view.base.step}"
    return f"generation {view.generation} of {', '.join(map(name, view.seats))}, base {base}"
