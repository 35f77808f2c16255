"""The contract of an engine: another library (Gloo, MPI, NCCL, ...) that carries gradients between the members.

An engine serves one group in one generation, and is thrown away with it. Links carry everything else: the step word,
weights, errors, state. So an engine has little to do, but it must let go of the arrays when it is told to.

Write a `DataEngine`, and name it in an entry point of your package in the group "paceline.engines". Then it is found by
its name: `paceline run --engine star`, or `Config(engine="star")`.

    [project.entry-points."paceline.engines"]
    star = "star_engine:StarEngine"

What it names is called without arguments, and returns an engine that is not open. It is imported when a worker joins;
an ImportError should say what to install. docs/engines.md has a whole engine.

Rules that every engine keeps, and that `paceline.testing.check_engine` checks:

1. `open` and `connect` return at once; `contact` and `await_ready` wait for what they have begun.
2. `all_reduce` sums in place, over all ranks, and returns a ticket at once. Ranks start their sums in the same order; a
   second one may be started before the first is over. An engine with `same_bits` gives all ranks the same bits. With
   `shards`, `all_gather` and `reduce_scatter` work in place too, and keep the rules for sums.
3. A ticket's `wait` returns when the sum is there. If its deadline passes first it raises `EngineTimeout`, and the sum
   goes on.
4. `abort`, from any thread, ends every wait within 100 ms: it raises `EngineFailed`. So does every later call.
5. When `wait` has raised `EngineFailed`, or `drained` has returned True, nothing touches the array any more (I7).
   `drained` knows of a sum from the moment at which it may touch the array, even if `all_reduce` was interrupted.
6. `close` ends the engine when its sums are over, without an error at the other ranks, and leaves no thread behind. If
   its deadline passes first, because it is over already or a rank is dead, it returns all the same, and what is left
   ends soon afterwards. `abort` and `close` may be called any number of times.

All deadlines are values of `time.monotonic()`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline._base.waits import Outcome
from paceline._links.base import Peer

__all__ = [
    "MAX_CONTACT_BYTES",
    "DataEngine",
    "EngineFailed",
    "EngineTimeout",
    "EngineTraits",
    "OnDevice",
    "Outcome",
    "Peer",
    "Ticket",
]

MAX_CONTACT_BYTES = 1 << 20
"""Longest contact of one rank. Gloo's grows by 40 bytes with each rank."""


class EngineFailed(ConnectionError):
    """The engine was aborted or closed, or has lost a peer; it is of no use any more. No array is touched any more."""


class EngineTimeout(TimeoutError):
    """The deadline passed before the engine was ready, or had the sum."""


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """The capabilities of an engine.

    Attributes:
        dtypes: names of the dtypes that it sums.
        same_bits: True if all ranks get the same bits, which training needs (I5).
        devices: where arrays may lie; "cpu" is ordinary memory.
        tensors: True if it also takes torch tensors, as `OnDevice`.
        shards: True if it has `all_gather` and `reduce_scatter` too, which FSDP needs on a device.
    """

    dtypes: frozenset[str]
    same_bits: bool
    devices: frozenset[str] = frozenset({"cpu"})
    tensors: bool = False
    shards: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class OnDevice:
    """A torch tensor, shape [N], contiguous.

    Attributes:
        tensor: the tensor.
        written: the point behind everything that writes it on its device: an engine's stream has to wait for
            `written.event`, a `torch.cuda.Event` or that of another device. None on the CPU.
    """

    tensor: Any
    written: Any = None

    @property
    def dtype(self) -> Any:
        """The tensor's dtype."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self.tensor.shape)


class Ticket(abc.ABC):
    """An operation under way."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Returns True once the sum is there, or has failed: nothing touches the array any more."""

    @abc.abstractmethod
    def wait(self, deadline: float) -> None:
        """Waits for the sum. An interrupt (Ctrl-C) ends the wait, not the sum.

        Args:
            deadline: a `time.monotonic()` value.

        Raises:
            EngineTimeout: the deadline passed first; the sum goes on.
            EngineFailed: there will be no sum.
        """


class DataEngine(abc.ABC):
    """An engine of one group in one generation. See the module's rules.

    Attributes:
        name: "gloo", ...; all members of a job must have the same.
        traits: what it can do.
        device: the one device whose arrays it sums; None if all of the types in `traits.devices` will do.
    """

    name: str
    traits: EngineTraits
    device: Any = None

    @abc.abstractmethod
    def open(self, rank: int, peers: Sequence[Peer], patience: float) -> None:
        """Begins to open the engine; called once.

        Args:
            rank: this member's place among `peers`.
            peers: the group's members, in the order of their ranks in the group.
            patience: seconds after which an engine may fail a sum that makes no progress. Engines whose `abort` ends
                every sum ignore it.
        """

    @abc.abstractmethod
    def contact(self, deadline: float) -> bytes:
        """Returns what the other ranks need to reach this one, at most `MAX_CONTACT_BYTES`.

        Raises:
            EngineTimeout, EngineFailed: the engine could not begin; the text says why.
        """

    @abc.abstractmethod
    def connect(self, contacts: Sequence[bytes]) -> None:
        """Begins to connect to the others.

        Args:
            contacts: the contacts of all ranks, in the order of ranks.
        """

    @abc.abstractmethod
    def await_ready(self, deadline: float) -> None:
        """Waits until sums may be started.

        Raises:
            EngineTimeout, EngineFailed: some rank cannot be reached; the text says why.
        """

    @abc.abstractmethod
    def all_reduce(self, x: Any) -> Ticket:
        """Starts to sum an array over all ranks, in place.

        Args:
            x: an array, shape [N], contiguous, of a dtype in `traits.dtypes`; or an `OnDevice`, with
                `traits.tensors`. It must stay as it is until the ticket is done.

        Raises:
            EngineFailed: the engine was aborted or closed, or could not start the sum. After this and any other error
                `drained` tells when the array is touched no more.
        """

    def all_gather(self, x: Any) -> Ticket:
        """Starts to gather the parts of all ranks, in place; only with `traits.shards`.

        Args:
            x: as for `all_reduce`, also of dtype uint8, shape [W S]. Elements r S to (r + 1) S - 1 belong to rank r.

        Raises:
            EngineFailed: as `all_reduce`.
        """
        raise NotImplementedError(f"the engine {self.name!r} has no all_gather")

    def reduce_scatter(self, x: Any) -> Ticket:
        """Starts to sum an array over all ranks; each gets its part of the sums. Only with `traits.shards`.

        Args:
            x: as for `all_reduce`, shape [W S]. At rank r, elements r S to (r + 1) S - 1 get the sums; the others are
                undefined afterwards.

        Raises:
            EngineFailed: as `all_reduce`.
        """
        raise NotImplementedError(f"the engine {self.name!r} has no reduce_scatter")

    @abc.abstractmethod
    def abort(self) -> None:
        """Ends all waits and sums with `EngineFailed`, soon. Returns at once; from any thread."""

    @abc.abstractmethod
    def drained(self, deadline: float) -> bool:
        """Waits until no array is touched any more; returns False if the deadline passes first."""

    @abc.abstractmethod
    def close(self, deadline: float) -> None:
        """Waits until the deadline for sums under way, aborts the rest, and gives back sockets, threads and memory."""

    def reopens(self) -> bool:
        """Returns whether the next generation may open an engine after this one has failed; if not, the job ends."""
        return True
