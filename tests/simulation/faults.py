"""What goes wrong, and when: drawn from the seed before the run, so that it is the same in each replay."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.failover import ETCD, NAMES, FailoverProcess
from simulation.network import COORDINATOR

from paceline_protocol.coordinator import DrainAsked

if TYPE_CHECKING:
    from simulation.coordinator import Coordinator
    from simulation.process import Process
    from simulation.world import World

__all__ = ["plan"]

_MOMENTS = ("view", "store", "round", "round", "meet", "planned", "take", "take", "applied")
_MORE_MOMENTS = (*_MOMENTS, "second word", "second word", "take")
_RARE = ("store", "take", "planned")


class _Faults:
    """The faults of one world; each is a method that says for how long it lasts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.kinds: list[tuple[int, Callable[[], float]]] = [
            (5, self.kill),
            (3, self.freeze),
            (3, self.reset_streams),
            (4, self.restart_coordinator),
            (2, self.stall_coordinator),
            (3, self.cut_members),
            (4, self.cut_coordinator),
            (2, self.cut_old_from_coordinator),
            (2, self.cut_one),
            (2, self.cut_one_way),
            (2, self.drain),
            (1, self.raise_error),
            (1, self.spoil),
            (3, self.join),
        ]
        if world.shape.coordinators > 1:
            self.kinds += [
                (12, self.stall_coordinator),
                (5, self.restart_coordinator),
                (4, self.resign),
                (60 if world.shape.unfenced else 5, self.overlap),
                (6, self.cut_from_etcd),
                (3, self.cut_coordinators),
                (8, self.cut_coordinator),
                (6, self.reset_streams),
            ]
        if world.shape.loses_disk:
            self.kinds += [(2, self.lose_disk), (4, self.put_back_older_copy)]
        if world.shape.loses_disk and world.shape.directory:
            self.kinds.append((10, self.lose_all_but_checkpoints))
        if world.shape.late:  # who is cut off when a view forms gets its member list when it is another member
            self.kinds += [(10, self.cut_one), (5, self.cut_coordinator)]
        if world.shape.slow:
            self.kinds.append((6, self.reclaim))
        if world.shape.stuck:
            self.kinds.append((10, self.hang))
        if world.shape.drains:
            self.kinds.append((15, self.drain))
        if world.shape.replica_size > 1:
            self.kinds += [(8, self.kill), (6, self.break_two), (4, self.freeze), (4, self.fail_take)]
        if world.shape.redundancy > 1:
            self.kinds += [(8, self.kill), (6, self.fail_take)]
        if world.shape.disks:
            self.kinds += [(6, self.refuse_coordinator), (6, self.refuse_checkpoints), (6, self.restart_all)]

    def one(self) -> Process | None:
        """One of them; often the one at which the moment came."""
        living, near = self.world.living(), self.world.near
        if near is not None and near.alive and self.rng.random() < 0.5:
            return near
        return self.rng.choice(living) if living else None

    def some(self) -> list[Process]:
        """Any of them; or those that have the state of the line, as against newcomers."""
        living = self.world.living()
        if self.rng.random() < 0.3:
            return self.holders()
        return self.rng.sample(living, self.rng.randint(1, len(living))) if living else []

    def holders(self) -> list[Process]:
        """Those that have the state of the line."""
        return [member for member in self.world.living() if member.place is not None and member.place.holds_base]

    def short_or_long(self) -> float:
        return self.world.delay(0.05, 2.5) if self.rng.random() < 0.5 else self.world.delay(3.1, 7.0)

    def kill(self) -> float:
        seen = self.rng.random() < 0.6
        victims = self.some() if self.rng.random() < 0.25 else [self.one()]
        if self.world.shape.hosts and self.rng.random() < 0.3:  # whole hosts die
            nodes = {member.process.node for member in victims if member is not None}
            victims = [member for member in self.world.living() if member.process.node in nodes]
        for member in victims:
            if member is not None:
                self.world.kill(member, seen=seen)
        return 3.0

    def freeze(self) -> float:
        seconds = self.short_or_long()
        for member in self.some() if self.rng.random() < 0.3 else [self.one()]:
            if member is not None:
                member.freeze(seconds)
        return seconds

    def keep_busy(self) -> float:
        """A call into C keeps the interpreters of some workers: nothing of them runs but gRPC's own threads."""
        seconds = self.short_or_long()
        for member in self.some():
            member.freeze(seconds, busy=True)
        return seconds

    def reset_streams(self) -> float:
        for member in self.some():
            self.world.note(member.name, "loses its stream")
            member.reset_stream()
        return 1.0

    @property
    def hosts(self) -> list[str]:
        """The hosts of all coordinators."""
        return [each.name for each in self.world.coordinators]

    def one_coordinator(self) -> Coordinator:
        """The coordinator; of several mostly the one that leads."""
        several = self.world.coordinators
        return self.world.coordinator if len(several) == 1 or self.rng.random() < 0.7 else self.rng.choice(several)

    def resign(self) -> float:
        """The leader is stopped in good order, and started again."""
        coordinator = self.world.coordinator
        if isinstance(coordinator, FailoverProcess) and coordinator.up and not coordinator.stalled:
            coordinator.resign()
            self.world.clock.after(self.world.delay(1.0, 4.0), self._start_again, coordinator)
        return 4.0

    def _start_again(self, coordinator: Coordinator) -> None:
        if coordinator.up:  # it was frozen, and has not ended
            coordinator.crash()
        coordinator.start()

    def overlap(self) -> float:
        """The leader stands still until another one leads, and goes on without etcd; some members come back to it."""
        old, seconds = self.world.coordinator, self.world.delay(1.3, 5.0)
        if old.up and not old.stalled:
            old.stall(seconds)
            self.world.clock.after(seconds - 0.001, self._send_back, old)
        return seconds + 3.0

    def _send_back(self, old: Coordinator) -> None:
        unaware = self.world.delay(1.0, 5.0)
        self.world.restless_until = max(self.world.restless_until, self.world.clock.now + unaware + 3.0)
        self.cut([(old.name, ETCD)], unaware)
        members = self.some() if self.rng.random() < 0.4 else self.world.living()
        away = [(member.name, host) for member in members for host in self.hosts if host != old.name]
        if away:
            self.world.network.cut(away, self.world.delay(0.3, unaware))
            for name, host in away:
                self.world.note("net", f"{name} is sent back from {host} to {old.name}")
                self._lose_stream(name, host)

    def cut_from_etcd(self) -> float:
        return self.cut([(self.one_coordinator().name, ETCD)])

    def cut_coordinators(self) -> float:
        return self.cut(list(itertools.combinations(self.hosts, 2)))

    def restart_coordinator(self) -> float:
        coordinator = self.one_coordinator()
        if not coordinator.up:
            return 0.0
        seconds = self.world.delay(0.01, 1.0) if self.rng.random() < 0.6 else self.world.delay(1.0, 6.0)
        coordinator.crash()
        self.world.clock.after(seconds, coordinator.start)
        return seconds

    def lose_disk(self) -> float:
        if self.world.coordinator.up:
            self.world.note(COORDINATOR, "loses its disk")
            self.world.coordinator.disk.lose()
        return self.restart_coordinator()

    def lose_all_but_checkpoints(self) -> float:
        """The job is started again, with a coordinator that knows nothing of it."""
        self.restart_all()
        return self.lose_disk() + 3.0

    def put_back_older_copy(self) -> float:
        """The coordinator is started again on a backup of its state."""
        if self.world.coordinator.up:
            changes = self.rng.randint(1, 8)
            self.world.note(COORDINATOR, f"finds its disk {changes} changes older")
            self.world.coordinator.disk.go_back(changes)
        return self.restart_coordinator()

    def refuse_coordinator(self) -> float:
        """The coordinator's disk is full for a while."""
        seconds = self.world.delay(0.1, 2.5)
        self.world.note(COORDINATOR, f"has a disk that is full for {seconds:.2f} s")
        disk = self.world.coordinator.disk
        disk.refuses_until = max(disk.refuses_until, self.world.clock.now + seconds)
        return seconds + 1.0

    def refuse_checkpoints(self) -> float:
        """The disks for checkpoints are full for a while."""
        seconds = self.world.delay(0.1, 2.5)
        self.world.note("disk", f"takes nothing for {seconds:.2f} s")
        self.world.files.refuse_until = max(self.world.files.refuse_until, self.world.clock.now + seconds)
        return seconds

    def restart_all(self) -> float:
        """All workers die, and their launchers see it: checkpoints are what is left."""
        for member in self.world.living():
            self.world.kill(member, seen=True)
        return 3.0

    def reclaim(self) -> float:
        """One machine after the other is taken away, so often that no step ends meanwhile."""
        after = 0.0
        for _ in range(self.rng.randint(6, 10)):
            self.world.clock.after(after, self._reclaim_one)
            after += self.world.delay(1.0, 2.4)
        return after + 3.0

    def _reclaim_one(self) -> None:
        member = self.one()
        if member is not None and len(self.world.living()) > 1:
            self.world.kill(member, seen=True)

    def hang(self) -> float:
        """A worker's next step hangs in the user's code, for a while or for ever; its session lives on."""
        member = self.one()
        if member is None:
            return 0.0
        seconds = self.world.delay(0.5, 20.0) if self.rng.random() < 0.5 else 1e6
        member.stuck_next = seconds
        return 14.0 + min(seconds, 20.0)

    def stall_coordinator(self) -> float:
        seconds = self.short_or_long()
        self.one_coordinator().stall(seconds)
        return seconds

    def cut_members(self) -> float:
        """A partition among members: the coordinator is on one side, or on none."""
        side = {member.name for member in self.some()}
        others = [member.name for member in self.world.living() if member.name not in side]
        return self.cut(list(itertools.product(sorted(side), others)))

    def cut_coordinator(self) -> float:
        name = self.one_coordinator().name
        return self.cut([(member.name, name) for member in self.some()])

    def cut_old_from_coordinator(self) -> float:
        """Only newcomers reach the coordinator."""
        return self.cut(
            [
                (m.name, host)
                for m in self.world.living()
                if m.place is not None and m.place.generation
                for host in self.hosts
            ]
        )

    def cut_one(self) -> float:
        member = self.one()
        if member is None:
            return 0.0
        others = [other.name for other in self.world.living() if other is not member]
        return self.cut([(member.name, other) for other in [*others, *self.hosts]])

    def cut_one_way(self) -> float:
        """What some send to others does not arrive; the other way is open."""
        side = self.some()
        pairs = [(one.name, other.name) for one in side for other in self.world.living() if other not in side]
        return self.cut(pairs, one_way=True)

    def cut(self, pairs: list[tuple[str, str]], seconds: float = 0.0, *, one_way: bool = False) -> float:
        if not pairs:
            return 0.0
        seconds = seconds or self.short_or_long()
        self.world.note("net", f"{' '.join('-'.join(pair) for pair in pairs)} cut for {seconds:.2f} s")
        self.world.network.cut(pairs, seconds, one_way=one_way)
        for name, other in pairs:
            if other in NAMES and self.rng.random() < 0.8:
                self.world.clock.after(self.world.delay(0.0, min(1.0, seconds)), self._lose_stream, name, other)
        return seconds

    def _lose_stream(self, name: str, coordinator: str) -> None:
        for member in self.world.living():
            if member.name == name and member.stream is not None and member.stream.coordinator.name == coordinator:
                member.reset_stream()

    def break_two(self) -> float:
        """Two replicas lose a rank each, at once."""
        there = [replica for replica in self.world.replicas if replica.is_there]
        for replica in self.rng.sample(there, min(2, len(there))):
            self.world.kill(self.rng.choice(replica.ranks), seen=self.rng.random() < 0.6)
        return 3.0

    def fail_take(self) -> float:
        """The next take of a state fails at a rank."""
        member = self.one()
        if member is not None:
            member.take_fails = True
        return 2.0

    def drain(self) -> float:
        members = [member.member_id for member in self.some() if member.member_id]
        if self.world.shape.drains and self.rng.random() < 0.5:
            members = [member.member_id for member in self.world.living() if member.member_id]
        elif self.rng.random() < 0.8:
            members = members[:1]
        if members and self.world.coordinator.up:
            self.world.note(
                self.world.coordinator.name, f"drains {', '.join(self.world.by_id[each].name for each in members)}"
            )
            self.world.coordinator.tell(DrainAsked(tuple(members), "scale down"))
            for _ in members:
                self.world.clock.after(self.world.delay(0.1, 3.0), self.world.spawn)
        return 3.0

    def raise_error(self) -> float:
        member = self.one()
        if member is not None:
            member.raises_next = True
        return 3.0

    def spoil(self) -> float:
        member = self.one()
        if member is not None:
            member.state.spoil_next = True
        return 1.0

    def cut_off(self) -> float:
        """A member that has just applied a step reaches nobody for a while."""
        member = self.world.near
        if member is None:
            return 0.0
        others = [other.name for other in self.world.living() if other is not member]
        return self.cut([(member.name, other) for other in [*others, *self.hosts]], self.world.delay(3.1, 7.0))

    def leave_alone(self) -> float:
        """The coordinator is away for longer than members wait for it."""
        if self.rng.random() < 0.5:
            away = self.holders() if self.rng.random() < 0.5 else self.world.living()
            return self.cut([(member.name, host) for member in away for host in self.hosts], self.world.delay(3.1, 7.0))
        coordinator = self.world.coordinator
        if coordinator.up:
            coordinator.crash()
            self.world.clock.after(self.world.delay(3.5, 6.0), coordinator.start)
        return 6.0

    def join(self) -> float:
        if self.world.checks.finished is None:
            self.world.spawn()
        return 1.0

    def strike(self, fault: Callable[[], float]) -> None:
        if self.world.checks.finished is None:
            self.world.restless_until = max(self.world.restless_until, self.world.clock.now + fault())


def plan(world: World) -> None:
    """Draws the faults of a run."""
    faults = _Faults(world)
    weights = [weight for weight, _ in faults.kinds]
    rng = world.rng
    if world.shape.away:
        for _ in range(3):
            world.clock.after(world.delay(0.5, 3.0), faults.strike, faults.drain)
        for _ in range(4):
            moment = rng.choice(("planned", "planned", "store", "view", "meet", "take"))
            world.when(moment, rng.randint(1, 6), lambda: faults.strike(faults.leave_alone))
        return
    if world.shape.busy:
        for _ in range(rng.randint(2, 6)):
            world.clock.after(world.delay(0.0, 8.0), faults.strike, faults.keep_busy)
        return
    if world.shape.apart:
        for count in (1, 3, 5):
            world.when("applied", count + 2 * rng.randint(0, 1), lambda: faults.strike(faults.cut_off))
    moments = _MOMENTS if world.shape.node_size == 1 else _MORE_MOMENTS
    if world.shape.coordinators > 1:
        moments = (*moments, "leads", "leads", "meet", "meet", "store")
    if world.shape.directory:
        moments = (*moments, "write", "write", "write")
    if world.shape.replica_size > 1:  # a word of mates, one that has come, a collective of the model
        moments = (*moments, *["mates"] * 4, *["agreed"] * 4, "inside", "inside", "applied", "applied", "view")
    if world.shape.redundancy > 1:
        moments = (*moments, *["copies"] * 4, "second word", "second word")
    if world.shape.late:
        moments = (*moments, "view", "view", "view", "view")
    if world.shape.microbatches:
        moments = (*moments, *["microbatch"] * 12)
    span = 10.0 if world.shape.slow else 4.0
    for _ in range(rng.randint(*world.shape.faults)):
        _, fault = rng.choices(faults.kinds, weights)[0]
        if rng.random() < 0.5:
            world.clock.after(world.delay(0.0, span), faults.strike, fault)
        else:
            moment = rng.choice(moments)
            count = rng.randint(1, 4 if moment in _RARE else 9)
            world.when(moment, count, lambda fault=fault: faults.strike(fault))  # type: ignore[misc]
