"""A worker process: the real session and the real loop over the steps, around a tiny state.

Its training thread runs what a user's script does; its loop runs the control stream and what belongs to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np
from simulation.broken import Broken
from simulation.group import Group, Mesh
from simulation.loop import Loop, SimulatedLoopThread
from simulation.replicas import Inside, InsideBroken, Replica, SimulatedMates
from simulation.state import Spoiled, State
from simulation.threads import Thread, current
from simulation.training import Training

from paceline import errors
from paceline._base.addresses import CoordinatorAddresses, Endpoint
from paceline._base.rpc import duration
from paceline._base.work import Progress
from paceline._elastic.mates import ALONE, Alone
from paceline._elastic.session import CoordinatedSession
from paceline._links.base import Peer
from paceline._session.identity import JoinRequest
from paceline._session.joining import Joining
from paceline._session.member import MemberConnection
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR
from paceline.errors import Dismissed
from paceline_protocol import OURS, MemberState, Share, Tag
from paceline_protocol import Process as Identity
from pacelinepb.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["LAUNCH_ID", "Process", "RaisedByUser", "Spot"]


class RaisedByUser(Exception):
    """The user's code raises."""


class _Window:
    """Who lives behind a door, and what it offers."""

    def __init__(self) -> None:
        self.member_id = ""
        self.source: Any = None


class _Door:
    """`grpc_door.Door`: meshes find each other without it."""

    def __init__(self, process: Process) -> None:
        self.window = _Window()
        self.kinds = process

    def on_exhausted(self, tell: Any) -> None:
        pass

    def enter(self, mesh: Mesh) -> None:
        pass

    async def close(self) -> None:
        self.window = _Window()


class _Sockets:
    def dial(self, endpoints: Any) -> None:
        pass

    def forget(self) -> None:
        pass


class _Whereabouts:
    """`Whereabouts`: a process stays where it is."""

    def __init__(self, name: str) -> None:
        self.address = Endpoint(name, 1)

    async def open_door(self, timeout: float, say: Any) -> None:
        pass

    async def renew(self, timeout: float, leave: Any) -> bool:
        return False


class _Flight:
    def on_abort(self, error: BaseException) -> None:
        pass

    def watch_signal(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Store:
    def close(self) -> None:
        pass


class Connection(MemberConnection):
    """The real connection of a member, with what touches sockets left out."""

    process: Process

    def _tell_first_commit(self) -> None:
        """Tells nothing, for it says what a heartbeat will say soon, to those who watch and not to the protocol. Its
        message would have all seeds tell other stories."""


LAUNCH_ID = "launch"
"""Of the launcher that starts the first members (`Shape.launched`)."""


class Spot(NamedTuple):
    """Where a process runs: host, its boot id, pid namespace, what shares memory, pid, and when it began."""

    host: str
    boot: str
    namespace: int
    space: str
    pid: int
    ticks: int


class _Request(JoinRequest):
    """The request to join of a worker of this release or of the last one."""

    newest = OURS.newest

    def register(self, address: str, failure_timeout: float) -> pb.Register:
        request = super().register(address, failure_timeout)
        request.newest_protocol_version = self.newest
        return request


class Process:
    """One worker process.

    Args:
        world: where.
        name: where it is reached.
        spot: where it runs.
        rank: that it claims, if any.
        replica: which it belongs to, if any; it takes the next position there.

    Attributes:
        process: as it introduces itself.
        ids: what the coordinator has known it by, one after the other.
        alive: it runs, or is frozen.
        killed: it was killed, and what it held is gone.
        frozen: it stands still.
        busy: it stands still because a call into C keeps its interpreter busy: its door answers.
        stuck_next: its next step will hang for so many seconds in the user's code.
        raises_next: the user's code will raise.
        take_fails: its next take of a state will fail.
        went_on: the user's code has caught the error that interrupted an update, and gone on.
        hangs: it hangs there for ever.
        ended: how it ended, in words; empty while it has not.
    """

    group: Group
    connection: Connection
    replica: Replica
    empty = staticmethod(np.empty)  # see `NoMesh.empty`

    def __init__(self, world: World, name: str, spot: Spot, rank: int | None, replica: Replica | None = None) -> None:
        self.world = world
        self.name = name
        self.host, self.boot, self.namespace, self.space, self.pid, self.ticks = spot
        self.node = f"{self.boot}/{self.space}/0" if self.space else ""
        self.rank = rank
        self.position = 0
        if replica is not None:
            self.replica, self.position = replica, len(replica.ranks)
            replica.ranks.append(self)
        self._inside = Inside(self)
        # Half of the programs are of the last release. That is no matter of chance, so that old seeds do what they did.
        self.newest = OURS.newest - crc32(f"{world.seed} {name}".encode()) % 2
        if replica is not None or (world.shape.redundancy > 1 and not world.shape.mixed):  # the last release has none
            self.newest = OURS.newest
        self.process = Identity(self.host, self.pid, self.boot, self.ticks, self.namespace, self.node)
        self.alive = True
        self.reaped = True
        """False while its parent has yet to take note of its death: it is a zombie then."""
        self.killed = False
        self.frozen = self.busy = False
        self.threads: list[Thread] = []
        self.meshes: list[Mesh] = []
        self.ids: list[str] = []
        self.state = State(self, world.shape.node_size)
        self.session: CoordinatedSession | None = None
        self.stream: Any = None
        self.stuck_next = 0.0
        self.slowness = world.rng.choice((1.0, 1.0, 4.0, 20.0)) if world.shape.balanced else 1.0
        self.raises_next = self.went_on = self.take_fails = False
        self.ended = ""
        self.hangs = False
        self.error: BaseException | None = None
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.loop = Loop(world.clock, self.hear)
        self.loop.process = self  # type: ignore[attr-defined]
        self.thread(self._main).start()

    # Time -------------------------------------------------------------------------------------------------------------

    def hear(self, action: Callable[..., None], *args: Any) -> None:
        """Something happens to the process; a frozen one takes it in when it wakes."""
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append((action, args))
        else:
            action(*args)

    def later(self, delay: float, action: Callable[..., object], *args: Any) -> None:
        """The process does something after a delay."""
        self.world.clock.after(delay, self.hear, action, *args)

    def thread(self, target: Callable[..., object], *args: Any) -> Thread:
        """A new thread of it."""
        return Thread(self, target, args)

    def freeze(self, seconds: float, *, busy: bool = False) -> None:
        """The process stands still for a while."""
        if self.alive and not self.frozen:
            self.frozen, self.busy = True, busy
            self.world.note(self.name, f"{'is busy' if busy else 'freezes'} for {seconds:.2f} s")
            self.world.clock.after(seconds, self._thaw)

    def _thaw(self) -> None:
        self.frozen = self.busy = False
        self.world.note(self.name, "wakes")
        backlog, self._backlog = self._backlog, []
        for action, args in backlog:
            self.hear(action, *args)

    def reset_stream(self) -> None:
        """Its stream to the coordinator breaks."""
        if self.stream is not None:
            self.stream.reset()

    def end(self, how: str) -> None:
        """The process is no more."""
        self.alive = False
        self.ended = how
        self.reset_stream()
        for mesh in self.meshes:
            mesh.ended = True

    # What others see of it --------------------------------------------------------------------------------------------

    @property
    def window(self) -> _Window:
        """Who it is, at its door."""
        return self.connection.door.window  # type: ignore[return-value]

    @property
    def offered(self) -> Any:
        """What it offers."""
        return self.window.source

    @property
    def member_id(self) -> str:
        """Its id in the session that it has now; empty for none."""
        return self.window.member_id if hasattr(self, "connection") else ""

    @property
    def leaves(self) -> bool:
        """It is on its way out: what it holds goes with it."""
        return self.session is not None and self.session._left

    def answers_as(self, member_id: str) -> bool:
        """True if a link to this member finds the process, and finds it to be this member."""
        if (
            self.world.shape.coordinators > 1
        ):  # one that is deposed may have made it a member, and it never heard of that
            return self.alive and self.member_id == member_id
        return self.alive and bool(self.ids) and self.ids[-1] == member_id

    def believes(self, other: Process) -> bool:
        """True if it takes the other for a member of its job: proofs and their numbers are for the tests of the key."""
        own, shown = self.connection.door_key, other.connection.door_key
        return bool(own._secret) and own._secret == shown._secret

    def peer(self, rank: int = -1) -> Peer:
        """As others see it."""
        return Peer(rank, self.member_id, self.host, f"{self.name}:1", self.pid, self.node)

    @property
    def has_entry(self) -> bool:
        """True if `/proc` has an entry of it."""
        return self.alive or not self.reaped

    # What it holds ----------------------------------------------------------------------------------------------------

    @property
    def place(self) -> MemberState | None:
        """Its place in the line; None before its steps begin."""
        line = self.session._line if self.session is not None else None
        return line._member if line is not None else None

    @property
    def held(self) -> Tag | None:
        """The state that it holds."""
        return self.place.held if self.place is not None else Tag(0, 0)

    @property
    def bits(self) -> tuple[object, ...]:
        """What it holds."""
        return self.state.bits

    @property
    def void(self) -> bool:
        """True if the generation that it is in has failed, as far as it knows."""
        return self.group._core.mesh.fault.failed if hasattr(self, "group") else True

    def could_give(self, tag: Tag) -> list[Share]:
        """The shares of a state that it holds, or would if it finished a step."""
        place = self.place
        if place is None:
            return list(self.state.parts) if tag == Tag(0, 0) else []
        if place.held == tag and not place.stored:
            return list(self.state.parts)
        return list(place.shares) if place.prepared == tag else []

    def operation_in(self, mesh: Mesh) -> int:
        """Number of the collective that it is in, 0 for none."""
        return self.core_in(mesh).progress().operation  # type: ignore[no-any-return]

    def core_in(self, mesh: Mesh) -> Any:
        """The inside of the group, if it is in the generation of that mesh."""
        group = getattr(self, "group", None)
        return group._core if group is not None and group._core.mesh is mesh else _IN_NONE

    # What it does -----------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        world = self.world
        try:
            self._train()
        except Dismissed as dismissed:
            how = f"goes: {dismissed}"
        except (errors.PacelineError, RaisedByUser, Spoiled, InsideBroken, OSError) as error:
            how, self.error = f"ends with {type(error).__name__}: {error}", error
        else:
            how = "is done"
        self.end(how)
        world.note(self.name, how)
        world.checks.ended(self)
        world.gone(self)

    def _train(self) -> None:
        world = self.world
        wanted = _Request("job", world.settings.min_workers, world.settings.max_workers, self.rank)
        wanted.newest = self.newest
        if world.shape.launched and self in world.first():
            workers, patience = world.most * world.shape.replica_size, duration(0.75 * world.config.join_timeout)
            wanted.launch = pb.Launch(id=LAUNCH_ID, workers=workers, patience=patience)
        mates: Alone = ALONE
        if self.is_rank:
            current().park(world.delay(0.0, 0.3))
            wanted.mates = mates = SimulatedMates(self)
            current().park(self.replica.starts[self.position])
        self.connection = Connection(
            CoordinatorAddresses([Endpoint(each.name, 1) for each in world.coordinators]),
            wanted,
            None,
            world.config,
            SimulatedLoopThread(self.loop),
            IN_THE_CLEAR,
        )
        current().park(world.delay(0.01, 0.3))  # imports
        Joining(self.connection).join(1e6)
        directory = world.directory_of(self)
        with CoordinatedSession(self.connection, world.config, mates) as session:
            self.session = session
            current().park(world.delay(0.0, 0.2))  # a model is built
            if world.shape.microbatches:
                self.state = Training(self)  # type: ignore[assignment]
            steps = session.steps(
                self.state,  # type: ignore[arg-type]
                total=world.last_step,
                checkpoint_dir=directory,
                checkpoint_every=world.checkpoint_every if directory else None,
                balance=world.shape.balanced,
            )
            with contextlib.closing(steps):  # type: ignore[type-var]
                for step in steps:
                    if world.shape.microbatches:
                        world.unequal += step.shares is not None
                        with step:
                            self.state.train(step, self._update)  # type: ignore[attr-defined]
                        continue
                    with step:
                        if world.shape.twice and step.number % 2:
                            step.keep_copy()
                        if self.is_rank:
                            self._step_as_rank(step)
                            continue
                        self.compute()
                        gradients = self.group.reduce_gradients(step.number)
                        if step.number % 3 == 2:  # a metric that nobody waits for but the gate
                            self.group.all_reduce(0.0, label="metric", async_op=True)
                        gradients.wait()
                        if step.keeps_copy:
                            self._update(step.generation, half=True)
                            self.group.all_reduce(0.0, label="between")
                        self._update(step.generation)
                        if step.keeps_copy:
                            self.group.all_reduce(0.0, label="behind")
        world.checks.done(self)

    def compute(self, fraction: int = 1) -> None:
        """The computation of the user's code between two collectives, or a fraction of it."""
        world = self.world
        current().park(self.slowness * world.compute() / fraction)
        if self.stuck_next:
            seconds, self.stuck_next = self.stuck_next, 0.0
            world.note(self.name, f"hangs in the user's code for {seconds:.1f} s")
            self.hangs = seconds > 100
            world.restless_until = max(world.restless_until, world.clock.now + 14.0 + min(seconds, 20.0))
            current().park(seconds)
        if self.raises_next:
            self.raises_next = False
            raise RaisedByUser("it was told to")

    @property
    def is_rank(self) -> bool:
        """True for a rank of a replica."""
        return self.world.shape.replica_size > 1

    @property
    def is_lost(self) -> bool:
        """True if it was killed, or a mate of it: what it held is gone."""
        return any(each.killed for each in (self.replica.ranks if self.is_rank else [self]))

    def _step_as_rank(self, step: Any) -> None:
        """A step of a rank of a replica: a reduction between replicas that fails raises at the gate, not before."""
        self.compute()
        self.call_inside(step, "forward")
        gradients = None
        with contextlib.suppress(errors.PacelineError):
            gradients = self.group.reduce_gradients(step.number)
        self.call_inside(step, "backward")
        if gradients is not None:
            with contextlib.suppress(errors.PacelineError):
                gradients.wait()
        self._update(step.generation)
        self.call_inside(step, "behind the gate")

    def call_inside(self, step: Any, where: str) -> None:
        """A collective of the model inside the replica: in each step the first, in some of them others."""
        if self.is_rank and (where == "forward" or step.number % 3 == len(where) % 3):
            self._inside.all_reduce(f"{where} of step {step.number} of generation {step.generation}")

    def abort_inside(self) -> None:
        """Its groups inside the replica are aborted."""
        self._inside.abort()

    def met(self, meet: pb.Meet) -> None:
        """It tells the coordinator that it has stopped."""
        self.world.note(self.name, f"meets after generation {meet.generation} with {self.held and tuple(self.held)}")
        self.world.moment("meet", self)
        if self.is_rank:
            self.replica.stopped(self, meet.generation)
        line = self.session._line if self.session is not None else None
        if line is not None and line._meeting_wait.planned:
            self.world.moment("planned", self)

    def _update(self, generation: int, *, half: bool = False) -> None:
        """Some users' code goes on with the next batch if an update fails."""
        try:
            self.state.run_optimizer(generation, half=half)
        except Spoiled:
            self.world.note(self.name, "is interrupted inside an update")
            if self.world.delay(0.0, 1.0) < 0.5:
                raise
            self.went_on = True

    def applied(self, generation: int, step: int) -> None:
        """A step counts here."""
        self.world.moment("applied", self)
        mesh = next((mesh for mesh in reversed(self.meshes) if mesh.generation == generation), None)
        if mesh is None:
            raise Broken(f"I1: {self.name} applies a step of generation {generation}, which it was not in")
        self.world.note(self.name, f"applies step {step} in generation {generation}")
        self.world.checks.applied(self, mesh, step)
        if self.is_rank:
            self.replica.applied(self, generation, step)


class _InNone:
    running = None

    def progress(self) -> Progress:
        return Progress(0, 0.0, False)


_IN_NONE: Any = _InNone()


def settings_of(failure_timeout: float, step_timeout: float, *, drain_stragglers: bool = False) -> Config:
    """The settings of all members."""
    return Config(
        failure_timeout=failure_timeout,
        step_timeout=step_timeout,
        join_timeout=1e6,
        rejoin_timeout=120.0,
        drain_stragglers=drain_stragglers,
    )
