"""Replicas of a world: processes that start and end together, what they say to each other, and who starts them again.

`Mates` is the real one, over an imitation of torch's groups. The model's own collectives inside a replica are an
imitation, too: each completes when all ranks have called it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from simulation.broken import Broken
from simulation.threads import Waiters

from paceline._elastic.mates import Mates
from paceline._elastic.rounds import Rounds

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.world import World

__all__ = ["InsideBroken", "Replica", "SimulatedMates"]

_LONGEST = 30.0
"""Seconds in which a mate that runs comes to what the others wait in, once all faults are over."""

_LAUNCHER_S = 40.0
"""Seconds that a rank may outlive its mate where no launcher ends it, once all faults are over."""


class InsideBroken(RuntimeError):
    """A collective inside the replica has failed, as torch says it: without a type of its own."""


class Replica:
    """The processes of one replica, from their start to the last one's end.

    Attributes:
        ranks: by position.
        broken_at: when the first of them ended otherwise than in good order; None for never.
    """

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.id = f"{number:032x}"
        self.size = world.shape.replica_size
        self.ranks: list[Process] = []
        self.broken_at: float | None = None
        self.starts = [0.0] * self.size
        """Seconds after which each joins, when all have found each other."""
        if world.delay(0.0, 1.0) < 0.15:  # it comes half
            self.starts[world.rng.randrange(self.size)] = world.delay(0.5, 9.0)
        chance = world.delay(0.0, 1.0)
        self.launcher_s = world.delay(0.1, 3.0) if chance < 0.8 else world.delay(5.0, 12.0) if chance < 0.9 else 1e6
        self._exchanges: dict[tuple[str, int], _Exchange] = {}
        self._ended = 0
        self._met: dict[tuple[int, int], int] = {}
        """By generation and position: the last step of that generation, or 0, that a rank held when it stopped."""
        self._applied: dict[tuple[int, int], int] = {}

    @property
    def is_there(self) -> bool:
        """True if all ranks run."""
        return len(self.ranks) == self.size and all(rank.alive for rank in self.ranks)

    def exchange(self, kind: str, number: int, label: str) -> _Exchange:
        """The so-manyth exchange of a kind; all ranks call the same."""
        found = self._exchanges.setdefault((kind, number), _Exchange(self, kind, label))
        if found.label != label:
            raise Broken(f"mates: a rank of {self} calls {label} where its mates call {found.label}")
        return found

    def ended(self, process: Process) -> None:
        """A rank has ended: connections to it break, and a launcher ends the others if it did not end in good order."""
        world = self.world
        self._ended += 1
        for exchange in list(self._exchanges.values()):
            if process.position not in exchange.works or not exchange.works[process.position].done:
                exchange.broken()  # else it has given to its mates all that they need
        if (process.killed or process.error is not None) and self.broken_at is None:
            self.broken_at = world.clock.now
            world.clock.after(self.launcher_s, self._end_all)
            world.clock.after(_LAUNCHER_S, self._check_ended)
        if self._ended == self.size and world.checks.finished is None:
            world.clock.after(world.delay(0.1, 3.0), world.replace_replica)

    def _end_all(self) -> None:
        for rank in self.ranks:
            self.world.kill(rank, seen=self.world.delay(0.0, 1.0) < 0.8)

    def _check_ended(self) -> None:
        """A rank whose mate has ended comes to its end without a launcher, too."""
        world = self.world
        assert self.broken_at is not None
        if not any(rank.alive for rank in self.ranks):
            return
        if world.clock.now < world.restless_until + _LAUNCHER_S / 2:
            world.clock.after(5.0, self._check_ended)
            return
        living = [rank for rank in self.ranks if rank.alive]
        if any(not rank.ids for rank in self.ranks) and all(rank.session is None for rank in living):
            self._give_up_joining(living)
            return
        raise Broken(f"mates: ranks of {self} live on, {world.clock.now - self.broken_at:.0f} s after one has ended")

    def _give_up_joining(self, ranks: Sequence[Process]) -> None:
        """The timeout of `join` ends ranks whose mate ended before the coordinator knew it, so nobody told them.

        It is endless here, so that no other join of a schedule fails.
        """
        world = self.world
        for rank in ranks:
            world.note(rank.name, "gives up its join")
            world.kill(rank, seen=True)
        world.restless_until = max(world.restless_until, world.clock.now)

    # What its ranks did -----------------------------------------------------------------------------------------------

    def stopped(self, rank: Process, generation: int) -> None:
        """A rank meets after a generation: its mates apply no step of it that this one does not hold."""
        held = rank.held
        if generation and held is not None:
            self._met[generation, rank.position] = held.step if held.generation == generation else 0
            self._compare(generation)

    def applied(self, rank: Process, generation: int, step: int) -> None:
        """A rank has applied a step."""
        self._applied[generation, rank.position] = step
        self._compare(generation)

    def _compare(self, generation: int) -> None:
        last = max((step for (of, _), step in self._applied.items() if of == generation), default=0)
        for rank in self.ranks:
            if self._met.get((generation, rank.position), last) < last:
                raise Broken(
                    f"mates: {rank.name} has left generation {generation}, and a mate of it applies its step {last}"
                )

    def __str__(self) -> str:
        return "/".join(rank.name for rank in self.ranks)


class _Exchange:
    """One collective of the ranks of a replica."""

    def __init__(self, replica: Replica, kind: str, label: str) -> None:
        self.replica, self.kind, self.label = replica, kind, label
        self.works: dict[int, Work] = {}
        self.result: list[int] = []

    def join(self, process: Process, values: Sequence[int], found: Any) -> Work:
        """A rank's part; all have it when all have come."""
        world, works = self.replica.world, self.works
        work = works[process.position] = Work(process, self, list(values), found)
        world.moment(self.kind, process)
        if not all(rank.alive for rank in self.replica.ranks):
            self.broken()
        if len(works) == self.replica.size:
            if len({len(each.values) for each in works.values()}) > 1:
                raise Broken(f"mates: ranks of {self.replica} exchange {[each.values for each in works.values()]}")
            self.result = [max(column) for column in zip(*(each.values for each in works.values()), strict=True)]
            for each in works.values():
                each.process.later(world.delay(0.0002, 0.01), each.complete)
        else:
            world.clock.after(_LONGEST, self._look)
        return work

    def broken(self) -> None:
        """A rank has ended: what others wait for will not come, if it is not there already."""
        for work in self.works.values():
            work.process.later(self.replica.world.delay(0.0005, 0.05), work.fail, f"{self.label}: connection closed")

    def _look(self) -> None:
        """Nobody waits for long for a mate that runs."""
        world = self.replica.world
        waiting = [work.process for work in self.works.values() if work.waited_for and not work.done]
        if world.over or len(self.works) == self.replica.size or not waiting or not self.replica.is_there:
            return
        if world.clock.now < world.restless_until + _LONGEST:
            world.clock.after(5.0, self._look)
            return
        names = ", ".join(each.name for each in waiting)
        raise Broken(f"mates: {names} of {self.replica} waits in {self.kind} {self.label} for a mate that is elsewhere")


class Work:
    """A rank's part of an exchange (`torch.distributed.Work`)."""

    def __init__(self, process: Process, exchange: _Exchange, values: list[int], found: Any) -> None:
        self.process, self.exchange, self.values = process, exchange, values
        self.done, self.error, self.waited_for = False, "", False
        self._found = found
        self._waiters = Waiters()

    def is_completed(self) -> bool:
        """True if it is over, in one way or the other."""
        return self.done

    def wait(self, timeout: timedelta | None = None) -> None:
        """Waits for it.

        Raises:
            InsideBroken: a rank has ended; or it took too long.
        """
        self.waited_for = True
        seconds = None if timeout is None else timeout.total_seconds()
        if not self.done and not self._waiters.wait(seconds):
            raise InsideBroken("timed out")
        if self.error:
            raise InsideBroken(self.error)

    def complete(self) -> None:
        """It has come to its end here."""
        if not self.done:
            self.done, self._found.values = True, list(self.exchange.result)
            if self.exchange.kind == "mates":
                self.process.world.moment("agreed", self.process)
            self._waiters.wake()

    def fail(self, text: str) -> None:
        """It will not come to its end here."""
        if not self.done:
            self.done, self.error = True, text
            self._waiters.wake()


class _Tensor:
    """As much of a tensor as a word needs."""

    def __init__(self, values: Sequence[int], dtype: Any = None, device: str = "") -> None:
        self.values = list(values)

    def tolist(self) -> list[int]:
        return self.values


class _Distributed:
    """`torch.distributed`, as a rank sees it."""

    ReduceOp = SimpleNamespace(MAX="max")

    def __init__(self, process: Process) -> None:
        self._process = process
        self._words = 0
        inside = [SimpleNamespace(abort=process.abort_inside)]
        self.distributed_c10d = SimpleNamespace(_world=SimpleNamespace(pg_map=inside))

    def all_reduce(self, tensor: _Tensor, op: str, group: Any, *, async_op: bool) -> Work:
        self._words += 1
        exchange = self._process.replica.exchange("mates", self._words, "a word")
        return exchange.join(self._process, tensor.values, tensor)


class SimulatedMates(Mates):
    """The ranks of a replica, with a torch that is simulated."""

    def __init__(self, process: Process) -> None:
        replica = process.replica
        self._torch = SimpleNamespace(tensor=_Tensor, int64=None)
        self._dist = _Distributed(process)
        self._group = None
        self.position, self.size = process.position, replica.size
        self._grace = 5.0
        self._ends = False
        self._pending = []
        self._rounds = Rounds(self.position, self.size)
        self._process = process
        self.id = self.gather(bytes.fromhex(replica.id) if self.position == 0 else bytes(16))[0].hex()

    def _exit(self, text: str) -> None:
        self._process.world.note(self._process.name, f"still runs, and ends itself: {text}")
        self._process.world.kill(self._process, seen=False)


class Inside:
    """The collectives of a rank's model inside its replica."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._called = 0
        self._work: Work | None = None

    def all_reduce(self, label: str) -> None:
        """Waits for all mates.

        Raises:
            InsideBroken: one has ended, or the group was aborted.
        """
        self._called += 1
        exchange = self._process.replica.exchange("inside", self._called, label)
        self._work = exchange.join(self._process, [0], _Tensor([0]))
        self._work.wait()

    def abort(self) -> None:
        """Makes the exchange that it waits in fail."""
        if self._work is not None:
            self._work.fail("aborted")


class Timer:
    """`threading.Timer` of a simulated process."""

    daemon = False

    def __init__(self, process: Process, seconds: float, call: Callable[..., None], args: Sequence[Any]) -> None:
        self._of = process, seconds, call, args

    def start(self) -> None:
        process, seconds, call, args = self._of
        process.later(seconds, call, *args)
