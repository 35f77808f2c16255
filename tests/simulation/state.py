"""What a member holds, bit by bit, in place of `TrainState`: for each of its shares, which state its elements are of.

Bits are the generations in which steps were applied: equal tuples are equal bits. The state has as many elements as all
cuts into up to 7 parts need, so that each share is a run of whole ones: what is taken comes together from members that
have the elements, not from members that say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulation.broken import Broken
from simulation.threads import current

from paceline.errors import CheckpointDamaged
from paceline_protocol import WHOLE, Share

if TYPE_CHECKING:
    from simulation.process import Process

__all__ = ["Content", "Plan", "State", "is_all"]

_ELEMENTS = 420
"""Divisible by 1 to 7."""

Bits = tuple[object, ...]


class Content:
    """What is offered to others: the state as it lies there (`offer.Content`)."""

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def parts(self) -> Mapping[Share, Bits]:
        """Of each share, the bits."""
        return self._state.parts

    def tree(self) -> dict[str, Any]:
        """A copy of all that is not spread."""
        return self._state.state_dict()

    def finish(self) -> None:
        """Nothing of it is on a device."""


class Copy:
    """What was taken of a state, all but what is spread."""

    def __init__(self, rest: dict[str, Any]) -> None:
        self._rest = rest

    def tree(self) -> dict[str, Any]:
        return self._rest

    def finish(self) -> None:
        """See `Content.finish`."""


class Plan:
    """A change to another share (`reshard_plan.ReshardPlan`)."""

    def __init__(self, state: State, share: Share, own: bool) -> None:
        self.state, self.share, self.own = state, share, own
        self.bits: Bits | None = state.parts.get(share) if own else None
        self.wanted = self.bits is None
        self.is_copy = False

    def switch(self) -> None:
        """Keeps the copy that it was made for."""
        assert self.is_copy
        self.state.add_copy(self)

    def fill(self, given: Sequence[Mapping[Share, Bits]]) -> bool:
        """Takes the share from others; False if they do not have all of it between them.

        Raises:
            Broken: they do not hold the same state.
        """
        own = [self.state.parts] if self.own else []
        found = [item for parts in [*own, *given] for item in parts.items()]
        wanted = _elements(self.share)
        if not wanted <= set().union(*(_elements(there) for there, _ in found)):
            return False
        states = {bits for there, bits in found if _elements(there) & wanted}
        if len(states) > 1:
            raise Broken(f"I5: a share is to be taken of {' and '.join(map(str, states))}")
        self.bits = states.pop()
        return True

    def load(self, folder: Path) -> dict[str, Any]:
        """Fills it out of a checkpoint; returns the rest."""
        saved = self.state.process.world.files.get(folder)
        if saved is None:
            raise CheckpointDamaged(f"{folder} was removed")
        self.state.process.world.note(self.state.process.name, f"reads {tuple(self.share)} from {folder}")
        self.bits = saved["bits"]
        return dict(saved)


class State:
    """The state of one process: the interface of `StateCore` that the steps use, and one optimizer.

    Args:
        process: whose.
        node_size: so many members hold one copy of it between them.

    Attributes:
        bits: what it holds.
        parts: for each share the bits that its elements are of.
        spoil_next: the next update will be interrupted.
    """

    sampler = None
    has_optimizer = True

    @property
    def _core(self) -> State:
        return self  # its inside is no object of its own

    uses_fsdp = False
    objects: Mapping[str, Any] = {}

    def __init__(self, process: Process, node_size: int) -> None:
        self.process = process
        self.node_size = node_size
        self.step = 0
        self.is_whole = True
        self.bits: Bits = ()
        self._live = WHOLE
        self.copies: tuple[Share, ...] = ()
        self.redundancy = process.world.shape.redundancy
        self._incoming: dict[Share, object] = {}
        """The gradients of the owners of the copies."""
        self.parts: dict[Share, Bits] = {WHOLE: ()}
        self.spoil_next = False
        self._copy: Bits = ()
        self._gate: Any = None
        self._ran_in = 0

    # The optimizer ----------------------------------------------------------------------------------------------------

    def run_optimizer(self, generation: int, *, half: bool = False) -> None:
        """`optimizer.step()` of the user's code; the first of two, or the only or last one."""
        self._ran_in = generation  # its gradients are of that generation
        self._gate.open(self)
        if self.spoil_next:
            self.spoil_next = False
            self.bits, self.parts = ("spoiled", self.process.name), {}
            current().park(self.process.world.delay(0.0, 1.0))  # the generation may fail meanwhile
            self._gate.spoil()
            raise Spoiled("the update was interrupted")
        if half:
            self.bits = (*self.bits, "half")
            self.parts = {WHOLE: self.bits}
        else:
            if self.bits[-1:] == ("half",):
                self.bits = self.bits[:-1]
                self.parts = {WHOLE: self.bits}
            self._update(generation)
        self._gate.changed()

    def _update(self, generation: int) -> None:
        self.bits = (*self.bits, generation)
        incoming, self._incoming = self._incoming, {}
        self.parts = {
            share: (*bits, generation if share == self._live else incoming.get(share, "no gradient"))
            for share, bits in self.parts.items()
        }

    # As TrainState ----------------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        return self.node_size != 1

    spread_by_torch = ""
    is_on_device = False

    def block_over(self) -> None:
        """See `TrainState`."""

    def prepare(self) -> None:
        pass

    def check_round_trip(self) -> None:
        pass

    def guard(self, gate: Any) -> None:
        self._gate = gate

    def unguard(self) -> None:
        self._gate = None

    def manifest(self, **settings: object) -> bytes:
        return b"{}"

    def fingerprint_of_origin(self) -> bytes:
        return b"alike"

    def large(self) -> list[Any]:
        return []

    def named(self) -> dict[str, Any]:
        return {}

    def small(self) -> dict[str, Any]:
        return {}

    def put_back(self, small: Mapping[str, Any]) -> None:
        pass

    def undo(self, small: Mapping[str, Any]) -> None:
        pass

    def keep_copy(self) -> None:
        self._copy = self.bits

    def undo_updates(self, small: Mapping[str, Any]) -> None:
        self.bits = self._copy
        self.parts = {WHOLE: self.bits}

    def clear_gradients(self) -> None:
        pass

    def advance(self, world: int) -> None:
        self.step += 1
        self.process.applied(self._ran_in, self.step)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "bits": self.bits}

    content = state_dict

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.step, self.bits = saved["step"], saved["bits"]
        self.is_whole = True
        if not self.is_sharded:
            self.parts = {WHOLE: self.bits}

    def offered(self) -> Content:
        return Content(self)

    def shares(self) -> tuple[Share, ...]:
        return tuple(dict.fromkeys((self._live, *self.copies, *self.parts)))

    def resharding(self, share: Share, *, own: bool = True) -> Plan:
        return Plan(self, share, own)

    def copying(self, share: Share, partners: Any) -> Plan:
        plan = Plan(self, share, own=True)
        plan.is_copy = True
        return plan

    def switch(self, plan: Plan, rest: Mapping[str, Any] | None = None) -> None:
        if rest is not None:
            self.load_state_dict(rest)
        assert plan.bits is not None, "a share that was not filled"
        if not plan.own:
            self.parts = {}
        self.copies = ()
        self.parts = {plan.share: plan.bits, **{s: bits for s, bits in self.parts.items() if s != plan.share}}
        self._live = plan.share

    def add_copy(self, plan: Plan) -> None:
        """Keeps a copy from now on."""
        assert plan.bits is not None, "a copy that was not filled"
        self.parts[plan.share] = plan.bits
        self.copies = (*self.copies, plan.share)

    def retire_copies(self) -> None:
        self.copies = ()

    def keep_updated_shares(self) -> None:
        self.parts = {share: self.parts[share] for share in (self._live, *self.copies)}

    def send_gradients(self, group: Any) -> None:
        if self.copies:
            told = group.hear_all(f"copies-{self.step + 1}", (self._live, self._ran_in))
            self._incoming = {share: gradient for share, gradient in told if share in self.copies}

    def update_copies(self) -> None:
        """See `_update`, which does it all."""

    def take_gradients(self) -> int:
        return self._ran_in

    def update(self, generation: int) -> None:
        """A step is finished that others have applied."""
        self._update(generation)
        self.process.applied(generation, len(self.bits))


class Spoiled(Exception):
    """The user's optimizer was interrupted."""


def is_all(shares: Iterable[Share]) -> bool:
    """True if all shares of some cut are among these."""
    there = set(shares)
    return any(all(Share(part, parts) in there for part in range(parts)) for parts in {share.parts for share in there})


def _elements(share: Share) -> set[int]:
    assert _ELEMENTS % share.parts == 0, "no share of that size"
    size = _ELEMENTS // share.parts
    return set(range(share.part * size, (share.part + 1) * size))
