"""The data path, as far as the protocol depends on it: links between members, and collectives that need all of them.

A collective completes at a member only if every member of the generation has contributed, and if its last hop, from
the member before it in the ring, gets through. One member's collectives run one at a time, in the order of its calls.
The fault of a generation is the real one; a suspicion is passed on along the links, as aborts are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from simulation.broken import Broken
from simulation.threads import Waiters

from paceline._base.activity import FlightRecorder, MemberCounters
from paceline._base.sum_order import EVEN
from paceline._base.work import Progress
from paceline._group.group_core import Piggyback
from paceline._links.base import Peer
from paceline._links.fault import Fault, Suspicion
from paceline._links.nowhere import NoMesh
from paceline.errors import StepOrderError
from pacelinepb.v1.errors_pb2 import ErrorReason

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.world import World

__all__ = ["Group", "Mesh", "Rounds", "is_complete"]

_LOST = ErrorReason.ERROR_REASON_PEER_LOST
_MISMATCH = ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH


class Mesh:
    """One member's links in one generation (`GrpcMesh`)."""

    sent_bytes: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self,
        job: str,
        generation: int,
        version: int,
        rank: int,
        peers: Sequence[Peer],
        fault: Fault,
        thread: Any,
        patience: float,
        credentials: Any,
        kinds: Any,
    ) -> None:
        self.process: Process = kinds
        self.generation = generation
        self.version = version
        self.rank = rank
        self.peers = tuple(peers)
        self.size = len(peers)
        self.fault = fault
        self.member_id = self.peers[rank].member_id
        self.key = (generation, version, *(peer.member_id for peer in peers))
        self.left: set[int] = set()
        self._closed = self._retired = self.ended = False
        fault.on_suspicion(self._pass_on)
        self.process.meshes.append(self)
        self.process.later(self.process.world.delay(0.005, 0.1), self._dial)

    def retire(self) -> None:
        """The next generation has come."""
        self._retired = True

    async def end(self) -> None:
        """Drops every link."""
        self._end(orderly=False)

    def close(self, deadline: float) -> None:
        """Leaves in good order."""
        self._end(orderly=True)

    def link_ended(self, rank: int, *, orderly: bool = False) -> None:
        """The link to a member has ended."""
        if self._closed or self._retired or self.fault.failed:
            return
        if orderly:
            self.left.add(rank)
            self.process.world.rounds.look(self)
        else:
            self.suspect(_LOST, rank, f"the link to rank {rank} ended")

    def suspect(self, reason: ErrorReason.ValueType, rank: int | None, text: str, *, relayed: bool = False) -> None:
        """Something is wrong."""
        if not self.fault.failed:
            operation = self.process.operation_in(self)
            self.fault.suspect(Suspicion(reason, rank, operation, text, relayed))

    def hear_abort(self, reason: ErrorReason.ValueType, accused: int) -> None:
        """A peer says that the generation is over."""
        self.suspect(reason, accused, "a peer says so", relayed=True)

    def _there(self, peer: Peer) -> tuple[Process, Mesh | None]:
        process = self.process.world.by_id[peer.member_id]
        return process, next((mesh for mesh in process.meshes if mesh.key == self.key), None)

    def _others(self) -> list[tuple[Peer, Process, Mesh | None]]:
        return [(peer, *self._there(peer)) for peer in self.peers if peer.rank != self.rank]

    def _dial(self) -> None:
        """A process that is no more takes no link, nor does one that has dropped this generation's."""
        for peer, process, there in [] if self.ended else self._others():
            if self.process.world.network.reaches(self.process.name, process.name):
                gone = not process.answers_as(peer.member_id) or (there is not None and there.ended)
                gone = gone or not process.believes(self.process)
                if gone:
                    self.link_ended(peer.rank)
                elif there is not None and there.fault.failed and not there._retired:
                    self.suspect(_LOST, None, f"rank {peer.rank} has stopped", relayed=True)

    def poll(self) -> None:
        """It has waited long: is a link dead?"""
        for peer, process, _ in self._others():
            reached = self.process.world.network.reaches(self.process.name, process.name)
            if not reached or not process.answers_as(peer.member_id):
                self.link_ended(peer.rank)

    def _pass_on(self, suspicion: Suspicion) -> None:
        if suspicion.relayed:
            return
        accused = self.rank if suspicion.accused is None else suspicion.accused
        world = self.process.world
        text = f"suspects rank {accused} in generation {self.generation}: {suspicion.text}"
        world.note(self.process.name, text)
        for _, process, _ in self._others():
            patience = world.clock.now + 2 * world.settings.failure_timeout
            self.process.later(world.delay(0.001, 0.02), self._abort, process, suspicion.reason, accused, patience)

    def _abort(self, process: Process, reason: ErrorReason.ValueType, accused: int, patience: float) -> None:
        world = self.process.world
        there = next((mesh for mesh in process.meshes if mesh.key == self.key), None)
        if there is not None and world.network.gets_through(self.process.name, process.name):
            process.hear(there.hear_abort, reason, accused)
        elif process.alive and world.clock.now < patience and not self.ended:
            self.process.later(0.3, self._abort, process, reason, accused, patience)  # it is sent again

    def _end(self, *, orderly: bool) -> None:
        if self.ended:
            return
        self._closed = self.ended = True
        world = self.process.world
        for _, process, there in self._others():
            if there is not None and world.network.reaches(self.process.name, process.name):
                process.later(world.delay(0.001, 0.05), _link_ended, there, self.rank, orderly)


def _link_ended(mesh: Mesh, rank: int, orderly: bool) -> None:
    mesh.link_ended(rank, orderly=orderly)


class Operation:
    """One collective at one member; what a caller waits for (`Work`)."""

    def __init__(self, group: Group, number: int, kind: str, label: str, value: Any) -> None:
        self.group, self.mesh = group, group.mesh
        self.number, self.kind, self.label, self.value = number, kind, label, value
        self.piggyback: Piggyback | None = None
        self.done = self.begun = False
        self.result: Any = None
        self.waiters = Waiters()

    def wait(self) -> Any:
        """Its result.

        Raises:
            PacelineError: the generation has failed.
        """
        while not self.done:
            self.mesh.fault.check()
            self.waiters.wait(None)
        return self.result


class Round:
    """One collective of one generation."""

    def __init__(self, kind: str, label: str) -> None:
        self.kind, self.label = kind, label
        self.values: dict[int, Any] = {}
        self.states: dict[str, object] = {}
        self.waiting: list[Operation] = []
        self._result: Any = None

    def result(self) -> Any:
        """What all members get; values in the order of ranks."""
        if self._result is None:
            values = [self.values[rank] for rank in sorted(self.values)]
            if self.kind == "sum":
                self._result = np.sum(values, axis=0)
            elif self.kind == "max":
                self._result = np.max(values, axis=0)
            else:
                self._result = values
        return self._result


def is_complete(contributed: int, world: int) -> bool:
    """True if the last hop may set out."""
    return contributed == world


class Rounds:
    """All collectives of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rounds: dict[tuple[Any, ...], Round] = {}

    def contribute(self, operation: Operation) -> None:
        """A member's part is on its way: all that it will ever give to this collective."""
        mesh, world = operation.mesh, self._world
        key = (mesh.key, operation.number)
        round_ = self._rounds.get(key)
        if round_ is None:
            round_ = self._rounds[key] = Round(operation.kind, operation.label)
        elif (round_.kind, round_.label) != (operation.kind, operation.label):
            me = mesh.process.name
            if "kept" in (round_.label, operation.label):
                # The last members leave, and one that is cut off went on: it takes its step back, they write alone.
                mesh.suspect(_MISMATCH, None, f"{me} calls {operation.label} where others call {round_.label}")
                return
            raise Broken(f"mismatch: {me} calls {operation.label} where others call {round_.label}, in {mesh.key}")
        if operation.label.startswith("step-"):
            world.checks.contributed(round_.states, mesh, int(operation.label[5:]))
            round_.states[mesh.member_id] = mesh.process.state.bits
        round_.values[mesh.rank] = operation.value
        round_.waiting.append(operation)
        if is_complete(len(round_.values), mesh.size):
            world.moment("second word" if operation.label.startswith("gate-") else "round", mesh.process)
            for waiter in round_.waiting:
                waiter.mesh.process.later(world.delay(0.001, 0.03), self._last_hop, round_, waiter)
            round_.waiting = []
        else:
            mesh.process.later(0.0, self.look, mesh)

    def look(self, mesh: Mesh) -> None:
        """Whoever has left gives nothing more."""
        operation = mesh.process.core_in(mesh).running if mesh.left else None
        if operation is not None and (round_ := self._rounds.get((mesh.key, operation.number))) is not None:
            for rank in sorted(mesh.left - round_.values.keys()):
                mesh.suspect(_LOST, rank, f"rank {rank} left")

    def late(self, operation: Operation) -> int | None:
        """A member that an operation waits for, as a ring finds it; None if the last hop alone is missing."""
        round_ = self._rounds[operation.mesh.key, operation.number]
        size, rank = operation.mesh.size, operation.mesh.rank
        return None if len(round_.values) == size else (rank - 1) % size

    def _last_hop(self, round_: Round, operation: Operation) -> None:
        mesh = operation.mesh
        if mesh.fault.failed or mesh.ended:
            return
        before = self._world.by_id[mesh.peers[mesh.rank - 1].member_id].name
        if self._world.network.gets_through(before, mesh.process.name):
            if round_.states:
                self._world.checks.completed(round_.states, mesh)
            operation.group.completed(operation, round_.result())
        else:
            mesh.process.later(0.2, self._last_hop, round_, operation)  # it is sent again


class Group:
    """A member's group: as much of `paceline.Group` as the steps use."""

    def __init__(self, mesh: Any, config: Any) -> None:
        self.process: Process = mesh._kinds if isinstance(mesh, NoMesh) else mesh.process
        self.process.group = self
        self.mesh = mesh
        self.recorder = FlightRecorder(1)
        self.counters = MemberCounters()
        self.on_abort = None
        self._config = config
        self.ban_reason = ""
        self._vouched = self._boarded = 0
        self._piggyback: Piggyback | None = None
        self._begin_in(mesh)

    @property
    def rank(self) -> int:
        return self.mesh.rank  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        return self.mesh.size  # type: ignore[no-any-return]

    @property
    def most_members(self) -> int:
        return self.process.world.settings.max_workers

    @property
    def generation(self) -> int:
        return self.mesh.generation  # type: ignore[no-any-return]

    @property
    def is_busy(self) -> bool:
        """True while a collective runs or waits."""
        return self.running is not None or bool(self._queue)

    order = EVEN

    @property
    def _core(self) -> Group:
        return self  # its inside is no object of its own

    def check_renewable(self) -> None:
        """Links carry its gradients."""

    @property
    def members(self) -> Sequence[Peer]:
        return self.mesh.peers  # type: ignore[no-any-return]

    # What the owner of a group says.

    @property
    def has_same_state(self) -> bool:
        return self._vouched == self.generation

    def confirm_same_state(self) -> None:
        self._vouched = self.generation

    @property
    def takes_piggybacks(self) -> bool:
        return self._boarded == self.generation

    def add_piggyback(self, piggyback: Piggyback) -> None:
        self._piggyback = piggyback

    def cancel_piggyback(self, piggyback: Piggyback) -> bool:
        waits = self._piggyback is piggyback
        self._piggyback = None
        return waits

    def make_elastic(self, most: int) -> None:
        pass

    def set_gradient_weight(self, weight: float) -> None:
        pass

    def ban_collectives(self, reason: str) -> None:
        self.ban_reason = reason

    def move(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._begin_in(mesh)

    def close(self, timeout: float = 5.0, *, drain: float | None = None) -> None:
        self.mesh.close(0.0)

    def flush(self) -> None:
        while self.running is not None and not self.mesh.fault.failed:
            self.running.waiters.wait(None)

    def progress(self) -> Progress:
        return Progress(self._number, self._since, self.running is not None)

    def doing(self, operation: int) -> str:
        return "operation"

    def waits_in_part(self) -> str:
        return ""

    # Collectives.

    def all_reduce(
        self, x: Any, *, op: str = "sum", label: str = "", async_op: bool = False, timeout: float = 0.0
    ) -> Any:
        return self._issue(op, label, np.asarray(x), async_op)

    def all_gather(self, x: Any) -> Any:
        return np.concatenate(self._issue("gather", "", np.asarray(x), False))

    def barrier(self) -> None:
        self._issue("gather", "barrier", None, False)

    def reduce_gradients(self, step: int) -> Operation:
        """What DDP does in a backward pass: a bucket of gradients, which takes a step's word along."""
        self._boarded = self.generation
        piggyback, self._piggyback = self._piggyback, None
        if piggyback is None:
            return self._issue("sum", f"gradients-{step}", np.zeros(1), True)  # type: ignore[no-any-return]
        operation = self._issue("sum", f"step-{step}", piggyback.values, True)
        operation.piggyback = piggyback
        return operation  # type: ignore[no-any-return]

    def tell_all(self, label: str, value: Any) -> Any:
        """`broadcast_object` from rank 0."""
        return self._issue("gather", label, value, False)[0]

    def hear_all(self, label: str, value: Any) -> list[Any]:
        """`all_gather` of objects."""
        return self._issue("gather", label, value, False)  # type: ignore[no-any-return]

    # Below.

    def _begin_in(self, mesh: Any) -> None:
        self._queue: deque[Operation] = deque()
        self.running: Operation | None = None
        self._issued = self._number = 0
        self._since = self.process.world.clock.now
        if not isinstance(mesh, NoMesh):
            mesh.fault.on_failure(self._waker(mesh))

    def _waker(self, mesh: Mesh) -> Callable[[], None]:
        def wake() -> None:
            if self.mesh is mesh:
                for operation in [self.running, *self._queue]:
                    if operation is not None:
                        operation.waiters.wake()

        return wake

    def _issue(self, kind: str, label: str, value: Any, async_op: bool) -> Any:
        if self.ban_reason:
            raise StepOrderError(self.ban_reason)
        self.mesh.fault.check()
        self._issued += 1
        operation = Operation(self, self._issued, kind, label, value)
        self._queue.append(operation)
        if self.running is None:
            self._next()
        return operation if async_op else operation.wait()

    def _next(self) -> None:
        self.running = self._queue.popleft() if self._queue else None
        if self.running is not None:
            operation, process = self.running, self.process
            self._number, self._since = operation.number, process.world.clock.now
            process.later(self._config.failure_timeout, self._look_around, operation)
            if operation.label != "kept":  # that is waited for as long as the members live
                process.later(self._config.step_timeout, self._time_out, operation)
            process.world.rounds.contribute(operation)

    def completed(self, operation: Operation, result: Any) -> None:
        """The running operation has come to its end here."""
        if operation.done or self.mesh is not operation.mesh:
            return
        operation.done, operation.result = True, result
        self._since = self.process.world.clock.now
        if operation.piggyback is not None:
            operation.piggyback.arrive(result)
        if operation.label.startswith("closing-"):
            self.process.world.checks.closed(self.process)
        self._next()
        operation.waiters.wake()

    def _look_around(self, operation: Operation) -> None:
        if self.running is operation and not operation.mesh.fault.failed:
            operation.mesh.poll()
            self.process.later(0.5, self._look_around, operation)

    def _time_out(self, operation: Operation) -> None:
        if self.running is operation and not operation.mesh.fault.failed:
            rank = self.process.world.rounds.late(operation)
            text = f"{operation.label} took too long"
            operation.mesh.suspect(ErrorReason.ERROR_REASON_TIMEOUT, rank, text)
