"""One job in a simulated world: members, a coordinator, a network, and chance, all of it drawn from one seed.

What is simulated is what lies below Paceline: clock, threads, network, disks, processes. Everything above is the real
code: on the members' side the session with its control stream, `LineClient` and `Generations`, and on the training
thread `session.steps` with `TrainingLoop`, `MeetingWait`, `StateRecovery`, `Step`, `Saver`; on the coordinator's side
the dispatcher with its handlers, memberships and keeper. An imitation of these shells, which was here before, did not
have their defects. What is an imitation still: the calls between members (`peers`), the files of checkpoints (`files`),
what processes see of each other (`proc`), and in most kinds of jobs the group (`group`) and the training state
(`state`). Jobs with microbatches have the real group with its engine and its thread over simulated links (`links`), and
the real state, sampler and wrapper (`training`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import greenlet
from simulation.checks import Checks
from simulation.clock import Clock
from simulation.coordinator import Coordinator
from simulation.failover import NAMES, FailoverProcess, SharedNode
from simulation.files import Files
from simulation.group import Rounds
from simulation.lane_checks import LaneChecks
from simulation.loop import Loop
from simulation.network import Network
from simulation.peers import Peers
from simulation.proc import Proc
from simulation.process import LAUNCH_ID, Process, Spot, settings_of
from simulation.replicas import Replica
from simulation.state import is_all

from paceline_protocol import JobSettings, Tag
from paceline_protocol import Process as Identity
from paceline_protocol.coordinator import ExitReported

__all__ = ["Shape", "World"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What kind of schedules to draw.

    Attributes:
        members: how many start; a range to draw from.
        steps: how many steps the job has; a range.
        faults: how many faults strike; a range.
        microbatches: each step has some, whose sums are kept when it fails; the group, its links' programs and the
            state are real ones.
        balanced: shares of the microbatches follow the speeds of the members. Some are slow; others leave as
            stragglers.
        loses_disk: the coordinator's disk may be lost, or put back to an older copy.
        node_size: so many members hold one copy of the state between them, 0 for all.
        redundancy: so many members hold each share, if there are as many.
        mixed: some members are of the last release, which has no copies of shares.
        hosts: so many hosts there are, which share memory and die as one; 0 if each member has its own.
        containers: so many there are on each host, whose processes see each other; 0: no process sees another.
        zombies: those that are killed stay zombies for a while, or for ever.
        away: what strikes are notices to leave, and a coordinator that is away for longer than members wait for it.
        fixed: the job is of fixed size: it needs all its members, and gets a replacement for each that ends.
        claimed: its members claim their ranks, too.
        directory: where checkpoints go: "shared", "local" to each host, or "" for nowhere.
        stuck: some of the faults are workers that hang in the user's code.
        disks: some of the faults are of disks: those of checkpoints, and the coordinator's.
        slow: each step takes so long that several faults strike in it.
        busy: what strikes are calls into C that hold workers' interpreters, often for longer than one may be silent.
        drains: some of the faults are notices to leave, to one member or to all.
        apart: the first to apply a step is cut off, and comes back with what others may have undone.
        late: answers to calls often come late, behind what was said afterwards.
        twice: every other step has two updates, with collectives between and behind them.
        step_timeout: of all members, in seconds. A long one shows who waits for it without need.
        coordinators: how many share a state in etcd; 1: the one has it for itself, on a disk.
        replica_size: so many processes are one member, which share a copy of the state; they start and end together.
        launched: one launcher starts the first members, slowly, and sees all that are killed.
        unfenced: a leader that cannot store anything never gives up by itself: nothing may rest on its clock.
    """

    members: tuple[int, int] = (3, 4)
    steps: tuple[int, int] = (4, 6)
    faults: tuple[int, int] = (1, 5)
    microbatches: bool = False
    balanced: bool = False
    launched: bool = False
    loses_disk: bool = False
    node_size: int = 1
    redundancy: int = 1
    mixed: bool = False
    hosts: int = 0
    containers: int = 0
    zombies: bool = False
    away: bool = False
    fixed: bool = False
    claimed: bool = False
    directory: str = ""
    stuck: bool = False
    disks: bool = False
    slow: bool = False
    busy: bool = False
    drains: bool = False
    apart: bool = False
    late: bool = False
    twice: bool = False
    step_timeout: float = 8.0
    coordinators: int = 1
    unfenced: bool = False
    replica_size: int = 1


class World:
    """Everything.

    Args:
        seed: of all chance.
        shape: what to draw.

    Attributes:
        members: every process that ever was.
        replicas: every replica, if processes are ranks of some.
        by_id: who has, or had, a session.
        restless_until: the last fault has ended by then.
        over: the schedule has ended.
        tells: what the real code logs is shown.
        words: who has sent which step's word, and what it held, if real groups send them.
        repairs: how often a member kept sums of a step that had failed.
        unequal: how many steps members began with unequal shares.
        near: the process at which the moment came that a fault has waited for, while that fault strikes.
    """

    def __init__(self, seed: int, shape: Shape) -> None:
        self.seed, self.shape = seed, shape
        self.over = self.tells = False
        self.near: Process | None = None
        self.hub = greenlet.getcurrent()
        self.rng = random.Random(seed)
        self._chance = self.rng.random
        self.clock = Clock()
        self.trace: list[tuple[float, str, str]] = []
        self.network = Network(self)
        self.rounds = Rounds(self)
        self.words: dict[tuple[Any, str], dict[str, object]] = {}
        self.files = Files(self)
        self.peers = Peers(self)
        self.checks = Checks(self, strict=not shape.loses_disk)
        if shape.replica_size > 1:
            self.checks = LaneChecks(self, strict=not shape.loses_disk)
        self.members: list[Process] = []
        self.replicas: list[Replica] = []
        self.by_id: dict[str, Process] = {}
        self.by_identity: dict[Identity, Process] = {}
        self.proc = Proc(self)
        self.restless_until = 0.0
        self._numbers = self.repairs = self.unequal = 0
        self._waiting_for: dict[str, list[list[object]]] = {}
        self._pace = 2.5 if shape.slow else self.rng.choice((0.03, 0.1, 0.4, 1.5))
        if shape.balanced:  # the slowest member still finishes in bounded time
            self._pace = min(self._pace, 0.03)
        self.last_step = self.rng.randint(*shape.steps)
        self.most = self.rng.randint(*shape.members)
        self.checkpoint_every = self.rng.randint(1, 3) if shape.directory else None
        least, most = self.rng.randint(1, 2), self.most + 1
        if shape.fixed:
            least = most = self.most
        self.settings = JobSettings(least, most, 3.0, replica_size=shape.replica_size)
        self.config = settings_of(3.0, shape.step_timeout, drain_stragglers=shape.balanced)
        self.coordinators: list[Coordinator] = [Coordinator(self)]
        self.node = SharedNode(self)
        if shape.coordinators > 1:
            self.coordinators = [FailoverProcess(self, name) for name in NAMES[: shape.coordinators]]
        self.starting = self.coordinators[0]

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator; of several the one that leads, or has led last."""
        if self.shape.coordinators == 1:
            return self.coordinators[0]
        return self.node.leader() or self.coordinators[0]

    def coordinator_at(self, name: str) -> Coordinator:
        """The coordinator on that host."""
        return next(each for each in self.coordinators if each.name == name)

    def begin(self) -> None:
        """The coordinator and the first workers start."""
        for coordinator in self.coordinators:
            coordinator.start()
        for _ in range(self.most):
            self.clock.after(self.delay(0.0, 4.0 if self.shape.launched else 0.2), self.spawn)

    def end(self) -> None:
        """Takes down what still runs."""
        self.over = True
        loops: list[Loop] = [
            *(loop for each in self.coordinators for loop in each.loops),
            *(process.loop for process in self.members),
        ]
        for process in self.members:
            process.alive = process.frozen = False
            for thread in process.threads:
                thread.take_down()
        for loop in loops:
            loop.close()

    # Chance -----------------------------------------------------------------------------------------------------------

    def delay(self, least: float, most: float) -> float:
        """Some seconds."""
        return least + (most - least) * self._chance()

    def latency(self) -> float:
        """What a message takes: a millisecond or so, now and then far more."""
        chance = self._chance()
        return 0.0005 + 0.004 * chance if chance < 0.9 else 4.0 * (chance - 0.9)

    def compute(self) -> float:
        """What a member computes between two words."""
        return self._pace * (1.0 if self.shape.slow else self._chance())

    def number(self) -> int:
        """One that nothing else has."""
        self._numbers += 1
        return self._numbers

    def note(self, who: str, what: str) -> None:
        """A line of the trace."""
        self.trace.append((self.clock.now, who, what))

    # Moments that faults wait for -------------------------------------------------------------------------------------

    def when(self, moment: str, count: int, action: Callable[[], None]) -> None:
        """Has something done at the so-manyth moment of a kind."""
        self._waiting_for.setdefault(moment, []).append([count, action])

    def moment(self, kind: str, process: Process | None = None) -> None:
        """A moment that faults may wait for has come, at a process if it is one's own."""
        waiting = self._waiting_for.get(kind)
        if not waiting:
            return
        for entry in list(waiting):
            entry[0] -= 1  # type: ignore[operator]
            if entry[0] == 0:
                waiting.remove(entry)
                self.clock.after(self.delay(0.0, 0.01), self._strike, entry[1], process)

    def _strike(self, action: Callable[[], None], process: Process | None) -> None:
        self.near = process
        action()
        self.near = None

    # Processes --------------------------------------------------------------------------------------------------------

    def spawn(self, rank: int | None = None) -> None:
        """A worker process starts."""
        if self.checks.finished is not None and not self.living():
            return
        if self.shape.claimed:  # each has a place of its own
            free = [place for place in range(self.most) if all(each.rank != place for each in self.living())]
            if not free:
                return
            rank = rank if rank in free else free[0]
        if self.shape.replica_size > 1:
            self.replicas.append(replica := Replica(self, len(self.replicas) + 1))
            for _ in range(self.shape.replica_size):
                self._start(rank, replica)
            return
        self._start(rank)

    def _start(self, rank: int | None, replica: Replica | None = None) -> None:
        number = len(self.members)
        name = "ABCDEFGHIJLMNOPQRSTUVWXYZ"[number % 25] + str(number // 25 or "")
        self.note(name, "starts")
        process = Process(self, name, self._spot(name, number), rank, replica)
        self.members.append(process)
        self.by_identity[process.process] = process

    def first(self) -> list[Process]:
        """The processes that were started at the beginning, as far as they have been."""
        return self.members[: self.most * self.shape.replica_size]

    def _spot(self, name: str, number: int) -> Spot:
        """Where a new process runs: on a host of its own, or in one of the containers of a few hosts."""
        hosts, containers, pid = self.shape.hosts, self.shape.containers, 1000 + number
        if not containers:
            return Spot(name, "boot", 1, f"node-{pid % hosts}" if hosts else "", pid, pid)
        host = f"host-{number % hosts}"
        boot, namespace = f"boot-of-{host}", 1 + number // hosts % containers
        return Spot(host, boot, namespace, f"net-{namespace}", self.proc.free_pid(boot, namespace), pid)

    def registered(self, member_id: str, identity: Identity) -> None:
        """A process has a session."""
        if member_id not in self.by_id:
            self.by_id[member_id] = self.by_identity[identity]
            self.by_id[member_id].ids.append(member_id)

    def living(self) -> list[Process]:
        """The processes that run, or are frozen."""
        return [process for process in self.members if process.alive]

    def directory_of(self, process: Process) -> str | None:
        """Where a process keeps its checkpoints: workers that come later find what others have left on their host."""
        kind = self.shape.directory
        return None if not kind else "shared" if kind == "shared" else f"disk-{process.ticks % 2}"

    def has_all(self, tag: Tag, members: list[Process]) -> bool:
        """True if members hold all of a state between them."""
        return is_all([share for member in members for share in member.could_give(tag)])

    def kill(self, process: Process, *, seen: bool) -> None:
        """A process dies; a launcher may have seen it."""
        if not process.alive:
            return
        self.note(process.name, f"is killed{', its launcher sees it' if seen else ''}")
        process.killed = True
        process.end("was killed")
        if self.shape.zombies:
            process.reaped = False
            self.clock.after(self.delay(0.0, 16.0) if self._chance() < 0.7 else 1e6, self._reap, process)
        self.gone(process)
        if seen or self.shape.launched:
            self.clock.after(self.delay(0.001, 0.05), self._report_exit, process)

    def _reap(self, process: Process) -> None:
        self.note(process.name, "is reaped")
        process.reaped = True

    def _report_exit(self, process: Process) -> None:
        if self.coordinator.up and self.network.reaches(process.name, self.coordinator.name):
            launch_id = LAUNCH_ID if self.shape.launched else ""
            self.coordinator.call("report_exit", "job", ExitReported(process.process, -9, launch_id=launch_id))
        else:
            self.clock.after(0.5, self._report_exit, process)

    def gone(self, process: Process) -> None:
        """A process has ended: members with a link to it see that end, and something starts another in its place."""
        for mesh in process.meshes:
            for peer in self.living():
                there = next((other for other in peer.meshes if other.key == mesh.key), None)
                if there is not None and not there.ended and self.network.reaches(process.name, peer.name):
                    peer.later(self.delay(0.001, 0.05), there.link_ended, mesh.rank)
        if self.shape.replica_size > 1:
            process.replica.ended(process)
        elif self.checks.finished is None:
            self.clock.after(self.delay(0.1, 3.0), self._replace, process.rank)

    def replace_replica(self) -> None:
        """A replica has ended, and its launcher starts another one in its place."""
        whole = sum(replica.is_there for replica in self.replicas)
        if self.checks.finished is None and whole < max(self.most, self.settings.min_workers):
            self.spawn()

    def _replace(self, rank: int | None) -> None:
        if self.checks.finished is None and len(self.living()) < max(self.most, self.settings.min_workers):
            self.spawn(rank)
