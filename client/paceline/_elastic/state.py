"""Everything that training changes, so that a step can be undone and newcomers can receive it."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline._elastic.device_array import DeviceArray, on_host
from paceline._elastic.foreign import placement
from paceline._elastic.offer import Content
from paceline._elastic.parts import StatePart, check_fit, part_of
from paceline._elastic.reshard_plan import ReshardPlan, fill
from paceline._elastic.sampler import ElasticSampler
from paceline._elastic.sharded_state import ShardedState
from paceline._group import Group
from paceline._microbatch.receipts import ReceiptDamaged, checked_lines
from paceline._parallel._optimizer_state import standing_for
from paceline._parallel._parameter import Parameter
from paceline._parallel.sharding._holdings import Holding
from paceline._parallel.sharding._placement import CopyPartners
from paceline._session.launcher_pipe import tell_once
from paceline.checkpoint.pieces import Shard
from paceline.checkpoint.tree import Leaf, join, split, split_shards
from paceline.errors import SizeMismatch, StepOrderError, UnsupportedOp
from paceline_protocol import WHOLE, Share

_log = logging.getLogger("paceline.elastic")

_BLOCK = 1 << 20
"""Elements that a fingerprint hashes at a time."""

_COSTLY_BYTES = 1 << 20
"""Bytes of small state above which a warning is logged: it is copied in every step."""


class Gate(Protocol):
    """Guards large state: an optimizer asks it before a change.

    `awaits_closure` says that an optimizer has been called with a closure, and has not evaluated it yet. `has_mates`
    says that this rank and others are one replica: what fails at one of them before the gate must raise at the gate.
    """

    awaits_closure: bool
    has_mates: bool

    def before_closure(self, optimizer: object, evaluations: int) -> None:
        """Raises if the optimizer must not evaluate its closure (again), after so many evaluations."""

    def open(self, optimizer: object) -> None:
        """Waits until the optimizer may change the state; raises if it must not."""

    def check(self) -> None:
        """Raises if the step will be undone: on all ranks of a replica, which make the same calls."""

    def spoil(self) -> None:
        """Notes that the change was interrupted half way."""

    def changed(self) -> None:
        """Notes that the change is complete. If neither this nor `spoil` is called, it was interrupted too."""


class StateCore:
    """The inside of a `TrainState`, which the loop over the steps uses.

    Attributes:
        step, receipts, sampler, is_whole: see `TrainState`.
    """

    def __init__(self, **parts: Any) -> None:
        self.step = 0
        self.receipts: tuple[str, ...] = ()
        self.is_whole = True
        self._things = {name: standing_for(thing) for name, thing in parts.items()}
        self._parts: dict[str, StatePart] = {name: part_of(name, thing) for name, thing in self._things.items()}
        samplers = [thing for thing in parts.values() if isinstance(thing, ElasticSampler)]
        if len(samplers) > 1:
            raise UnsupportedOp("a training state has one sampler, which gives step.indices: leave out the others")
        self.sampler: ElasticSampler | None = samplers[0] if samplers else None
        self._given = parts
        self._spread = ShardedState(self._parts, self._things)
        self._kept: dict[Share, dict[str, Shard]] = {}
        """Earlier shares that are still offered to other members, with their arrays by name."""
        self._copy: dict[str, tuple[Any, Any]] = {}
        """Copies of all parts, if a step has asked for them."""
        self._gates: list[tuple[Any, Callable[..., Any] | None]] = []
        """Guarded optimizers, each with the `step` that the object itself had; None if its class had it."""

    def state_dict(self) -> dict[str, Any]:
        """See `TrainState.state_dict`."""
        skeleton, leaves = split_shards(self.content())
        copied: dict[str, Any] = join(skeleton, {name: _copy(leaf) for name, leaf in leaves.items()})
        return copied

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """See `TrainState.load_state_dict`."""
        step, parts = int(saved["step"]), saved["parts"]
        held = self._spread.holding(to_write=True)
        try:
            receipts = checked_lines(saved.get("receipts", ()))
        except ReceiptDamaged as error:
            raise SizeMismatch(f"the state does not fit: {error}") from None
        if odd := sorted(self._parts.keys() ^ parts.keys()):
            raise SizeMismatch(f"the state does not fit: {', '.join(odd)} on one side only")
        for name, part in self._parts.items():
            try:
                check_fit(part.arrays(held), parts[name]["arrays"])
            except SizeMismatch as error:
                raise SizeMismatch(f"{name}: {error}") from None
        before: list[tuple[StatePart, Any]] = []
        was_whole, self.is_whole = self.is_whole, False
        try:
            for name, part in self._parts.items():
                before.append((part, part.rest()))
                part.load_rest(parts[name]["rest"])
        except BaseException:
            for part, rest in before:
                part.load_rest(rest)
            self.is_whole = was_whole
            raise
        for name, part in self._parts.items():
            part.write(held, parts[name]["arrays"])
        self.step, self.receipts = step, receipts
        self.is_whole = True

    def content(self) -> dict[str, Any]:
        """Returns everything as nested values: the live large arrays, and copies of the rest.

        Arrays that a strategy shards over members are `Shard`s, also in a world of one. Those on a device are copied.
        """
        return self._content(on_host, lambda part: part.rest())

    def _content(self, shown: Callable[[Any], Any], rest_of: Callable[[StatePart], Any]) -> dict[str, Any]:
        held = self._spread.holding()
        parts = {
            name: {"arrays": {path: shown(leaf) for path, leaf in part.arrays(held).items()}, "rest": rest_of(part)}
            for name, part in self._parts.items()
        }
        receipts = {"receipts": list(self.receipts)} if self.receipts else {}
        return {"step": self.step, "parts": parts, **receipts}

    def has(self, thing: object) -> bool:
        """True if this object is one of the parts."""
        return any(part is thing for part in self._given.values())

    def offered(self) -> Content:
        """Returns all that other members may fetch: everything, with copies and the earlier shares that are kept."""
        on_device: dict[int, DeviceArray] = {}
        places: list[NDArray[Any]] = []  # keeps their ids unique

        def shown(leaf: Any) -> Any:
            if not isinstance(leaf, DeviceArray):
                return leaf
            places.append(np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape))
            on_device[id(places[-1])] = leaf
            return places[-1]

        return Content.of(self._content(shown, lambda part: part.offered(shown)), self._others(), on_device)

    @property
    def given(self) -> Mapping[str, Any]:
        """Returns the objects that the user gave, by name."""
        return self._given

    @property
    def objects(self) -> dict[str, tuple[Any, StatePart]]:
        """Returns, by name, each object and the part that represents it."""
        return {name: (self._things[name], part) for name, part in self._parts.items()}

    def named(self) -> dict[str, NDArray[Any]]:
        """Returns the live unsharded arrays of large state by part and path, in the same order on every member."""
        held = self._spread.holding()
        leaves = {f"{name} {path!r}": x for name, part in self._parts.items() for path, x in part.arrays(held).items()}
        return {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, Shard)}

    def large(self) -> list[NDArray[Any]]:
        """Returns the arrays of `named`."""
        return list(self.named().values())

    @property
    def is_on_device(self) -> bool:
        """True if a part lies on a device, such as a GPU."""
        return self._spread.is_on_device or any(isinstance(array, DeviceArray) for array in self.large())

    def small(self) -> dict[str, Any]:
        """Returns a copy of the state that may change outside the gate."""
        return {name: part.small() for name, part in self._parts.items()}

    def undo(self, small: Mapping[str, Any]) -> None:
        """Undoes a step: restores small state and drops gradients."""
        self.put_back(small)
        self.clear_gradients()

    def keep_copy(self) -> None:
        """Copies everything, for `undo_updates`. The memory stays allocated, since new memory is far slower."""
        self._copy = {name: part.kept(self._copy.get(name)) for name, part in self._parts.items()}

    def undo_updates(self, small: Mapping[str, Any]) -> None:
        """Undoes a step, and all changes of large state since `keep_copy`."""
        for name, part in self._parts.items():
            part.back_to(self._copy[name])
        self.undo(small)

    def put_back(self, small: Mapping[str, Any]) -> None:
        """Restores what `small` returned; gradients stay."""
        for name, part in self._parts.items():
            part.put_back(small[name])

    def clear_gradients(self) -> None:
        """Drops all gradients."""
        for part in self._parts.values():
            part.clear_gradients()

    def prepare(self) -> None:
        """Has every wrapper agree on its model, in one order on all ranks; see `paceline.DDP.prepare`.

        Raises:
            PacelineError: see there.
        """
        for part in self._parts.values():
            part.prepare()

    def advance(self, world: int) -> None:
        """Counts an applied step, and moves the sampler on in a world of that size."""
        self.step += 1
        if self.sampler is not None:
            self.sampler.advance(world)

    @property
    def has_optimizer(self) -> bool:
        """True if a part waits for the gate: a step without its update is skipped then."""
        return any(part.gated() is not None for part in self._parts.values())

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and offset of the sampler; zeros without one."""
        return (0, 0) if self.sampler is None else (self.sampler.epoch, self.sampler.offset)

    @property
    def spread_by_torch(self) -> str:
        """Names a parameter that torch spreads over several ranks (a DTensor); empty if there is none."""
        named = ((f"{name} {path!r}", p) for name, part in self._parts.items() for path, p in part.spread().items())
        return next((name for name, p in named if placement(p) and p.device_mesh.size() > 1), "")

    def block_over(self) -> None:
        """Tells every wrapper that the block of a step is over."""
        for part in self._parts.values():
            part.block_over()

    def manifest(self, **settings: object) -> bytes:
        """Returns the parts with their shapes, and the run's settings, as canonical JSON; the same on all members."""
        held = self._spread.holding()
        described: dict[str, Any] = {}
        for name, part in self._parts.items():
            spread = {path: found for path, p in part.spread().items() if (found := placement(p))}
            leaves = part.arrays(held).items()
            arrays = [[path, *_described(leaf), *([spread[path]] if path in spread else ())] for path, leaf in leaves]
            described[name] = [part.kind, arrays]
        if self.sampler is not None:
            settings |= self.sampler.settings
        words = {name: str(value) for name, value in settings.items()}
        return json.dumps({"settings": words, "parts": described}, separators=(",", ":"), sort_keys=True).encode()

    def fingerprint(self) -> bytes:
        """See `TrainState.fingerprint`."""
        if self._spread.share == WHOLE:
            return self._digest([], lambda leaf: leaf.values)
        self.prepare()  # in a new generation the ranks of the shards are not known yet
        return self._digest([], self._spread.gathered)

    def fingerprint_of_origin(self) -> bytes:
        """Returns the SHA-256 of the whole state but its receipts; for sharded arrays, of what they were cut from.

        So members that have cut the same state have equal ones, if none has changed the state since. Communicates
        nothing.
        """
        is_cut = self._spread.share != WHOLE
        return self._digest(
            self._spread.agreed if is_cut else [], lambda leaf: leaf.values.reshape(-1)[:0] if is_cut else leaf.values
        )

    def _digest(self, origin: list[int], values_of: Callable[[Shard], NDArray[Any]]) -> bytes:
        content = self.content()
        content.pop("receipts", None)  # they say where digests were taken, which is no result of training
        skeleton, leaves = split_shards(content)
        digest = hashlib.sha256(json.dumps([skeleton, origin], sort_keys=True).encode())
        for name, leaf in sorted(leaves.items()):  # the order of a dict's keys does not matter
            digest.update(f"{name} {_described(leaf)}".encode())
            values = values_of(leaf) if isinstance(leaf, Shard) else leaf
            for start in range(0, values.size, _BLOCK):  # an array of zeros takes no memory
                block = np.ascontiguousarray(values.reshape(-1)[start : start + _BLOCK])
                digest.update(block.view(np.uint8).data)
        return digest.digest()

    def check_round_trip(self) -> None:
        """Checks that every part can be given to another member and loads again unchanged.

        Raises:
            UnsupportedOp: a value cannot be sent, or changes when it is loaded again, or is sharded in a way that
                cannot change; the text names it.
        """
        self._spread.check()
        for name, part in self._parts.items():
            before, arrays = split(part.rest())
            size = sum(array.nbytes for array in arrays.values())
            if part.gated() is None and size > _COSTLY_BYTES:
                tell_once(_log, f"{name} has no step() of its own: its {size / 1e6:.1f} MB are copied in every step")
            self.is_whole = False
            part.load_rest(join(before, arrays))
            self.is_whole = True
            after, again = split(part.rest())
            changed = [path for path in arrays if path not in again or not _same(arrays[path], again[path])]
            if before != after or changed:
                where = f" at {changed[0]}" if changed else ""
                raise UnsupportedOp(f"the state of {name} differs{where} after it was saved and loaded again")

    # Shards -----------------------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """True if the state is sharded over members; also in a world of one."""
        return self._spread.node_size != 1

    @property
    def uses_fsdp(self) -> bool:
        """True if FSDP wraps a model of the state, with whatever strategy."""
        return self._spread.has_models

    @property
    def node_size(self) -> int:
        """Number of ranks that hold one copy between them: 1 if each holds a whole copy, 0 for all ranks."""
        return self._spread.node_size

    @property
    def redundancy(self) -> int:
        """Number of members that hold each shard, if there are as many."""
        return self._spread.redundancy

    @property
    def copies(self) -> tuple[Share, ...]:
        """The shares of others of which this member has copies that each step updates."""
        return tuple(Share(*share) for share in self._spread.copies.updated)

    def shares(self) -> tuple[Share, ...]:
        """The shares that this member can give in full: the live one, the copies, and earlier ones."""
        copies = map(Share._make, self._spread.copies.holdings())
        return tuple(dict.fromkeys((self._spread.share, *copies, *self._kept)))

    def resharding(self, share: Share, *, own: bool = True) -> ReshardPlan:
        """Prepares a change to a share; allocates memory for it and changes nothing else.

        Args:
            share: the share to hold; may be the present one.
            own: False if the shares that this member holds are of another state than the wanted one.
        """
        move = self._spread.move(share)
        return self._plan(share, move.target, move.switch, own=own)

    def copying(self, share: Share, partners: CopyPartners) -> ReshardPlan:
        """Prepares a copy of another member's share, as `resharding` does; its `switch` keeps the copy."""
        copies = self._spread.copies
        if share in copies:
            return ReshardPlan(share, True, {}, [], self._spread.cut, lambda: copies.add(share, partners))
        memory = copies.make(share)
        return self._plan(share, memory.target, lambda: copies.add(share, partners, memory), own=True)

    def _plan(self, share: Share, target: Holding, switch: Callable[[], None], *, own: bool) -> ReshardPlan:
        targets = self._spread.named(target)
        wanted = fill(targets, [self._spread.named(self._spread.holding()), *self._others()] if own else [])
        return ReshardPlan(share, own, targets, wanted, self._spread.cut, switch)

    def _others(self) -> list[dict[str, Shard]]:
        """Returns the arrays of all shares but the live one, by name."""
        return [*map(self._spread.named, self._spread.copies.holdings().values()), *self._kept.values()]

    def switch(self, plan: ReshardPlan, rest: Mapping[str, Any] | None = None) -> None:
        """Makes the prepared and filled share the live one. All or nothing.

        The earlier share is kept until `keep_updated_shares` if it is of the same state.

        Args:
            plan: the latest plan of `resharding`.
            rest: everything that is not sharded, as `load_state_dict` takes it; None leaves it as it is.

        Raises:
            SizeMismatch: `rest` does not fit.
            Exception: what a part's own `load_state_dict` raised.
        """
        before, shards = self._spread.share, self._spread.named(self._spread.holding())
        if rest is not None:
            self.load_state_dict(rest)
        was_whole, self.is_whole = self.is_whole, False
        self.retire_copies()
        if not plan.own:
            self.keep_updated_shares()  # none but the live one, which is replaced
        plan.switch()
        self._spread.copies.drop(plan.share)
        if plan.own and before != plan.share:
            self._kept.pop(plan.share, None)
            self._kept[before] = shards
        self.is_whole = was_whole

    def retire_copies(self) -> None:
        """Ends all updates of copies: in a new view members have other shares."""
        self._spread.copies.retire()

    def keep_updated_shares(self) -> None:
        """Drops all shares but the live one and the copies that each step updates."""
        self._kept.clear()
        self._spread.copies.drop_retired()

    def send_gradients(self, group: Group) -> None:
        """Gives the gradients of the next update to the members that have copies of this one's share; a collective."""
        self._spread.copies.send_gradients(group)

    def update_copies(self) -> None:
        """Updates the copies with the gradients of their owners; call it right before the optimizer's own update."""
        self._spread.copies.update()

    def take_gradients(self) -> list[tuple[Parameter, NDArray[Any]]]:
        """Takes away the gradients of the next update, because the user's loop may clear those that it finds."""
        taken = self._spread.gradients()
        self.clear_gradients()
        return taken

    def update(self, gradients: Sequence[tuple[Parameter, NDArray[Any]]]) -> None:
        """Runs the update that stopped at the gate, on the gradients that `take_gradients` returned.

        The state is complete once the caller has loaded the rest from other members.
        """
        self.is_whole = False
        for parameter, gradient in gradients:
            parameter._hold(gradient)
        self.update_copies()
        for thing, own in self._gates:
            if own is None:
                type(thing).step(thing)
            else:
                own()

    # The gate ---------------------------------------------------------------------------------------------------------

    def guard(self, gate: Gate) -> None:
        """Has every optimizer ask `gate` before it changes large state."""
        self.unguard()
        for part in self._parts.values():
            part.guard(gate)
        for thing in {id(part.gated()): part.gated() for part in self._parts.values()}.values():
            if thing is not None:
                self._gates.append((thing, getattr(thing, "__dict__", {}).get("step")))
                thing.step = _guarded(thing, gate)

    def unguard(self) -> None:
        """Undoes `guard`."""
        for part in self._parts.values():
            part.guard(None)
        for thing, own in self._gates:
            if own is None:
                vars(thing).pop("step", None)  # the method of its class is there again
            else:
                thing.step = own
        self._gates.clear()


def _guarded(optimizer: Any, gate: Gate) -> Callable[..., Any]:
    step = optimizer.step

    @functools.wraps(step)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if args and callable(args[0]):
            return with_closure(args[0], lambda evaluate: step(evaluate, *args[1:], **kwargs))
        if callable(kwargs.get("closure")):
            return with_closure(kwargs["closure"], lambda evaluate: step(*args, **{**kwargs, "closure": evaluate}))
        gate.open(optimizer)
        try:
            result = step(*args, **kwargs)
        except BaseException:
            gate.spoil()
            raise
        gate.changed()
        return result

    def with_closure(closure: Callable[[], Any], call: Callable[[Callable[[], Any]], Any]) -> Any:
        """Calls the optimizer, and opens the gate after each evaluation, because the closure computes the gradients."""
        evaluations = 0

        def evaluate() -> Any:
            nonlocal evaluations
            gate.awaits_closure = False
            gate.before_closure(optimizer, evaluations)
            loss = closure()
            gate.open(optimizer)
            evaluations += 1
            return loss

        gate.before_closure(optimizer, 0)
        gate.awaits_closure = True
        try:
            result = call(evaluate)
            if not evaluations:
                evaluations = 1  # the state may have changed
                raise StepOrderError(f"{type(optimizer).__name__} was given a closure, and did not evaluate it")
        except BaseException:
            if evaluations:
                gate.spoil()
            raise
        finally:
            gate.awaits_closure = False
        gate.changed()
        return result

    return guarded


def _described(leaf: Leaf) -> tuple[str, list[int]]:
    """Returns the dtype and shape of the whole array."""
    return str((leaf.values if isinstance(leaf, Shard) else leaf).dtype), list(leaf.shape)


def _copy(leaf: Leaf) -> Leaf:
    """Copies a whole array as a plain array, and a shard as a shard."""
    if not isinstance(leaf, Shard):
        return leaf.copy()
    if leaf.values.size == prod(leaf.shape):
        return leaf.values.reshape(leaf.shape).copy()
    return replace(leaf, values=leaf.values.copy())


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
