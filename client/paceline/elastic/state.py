"""`TrainState`: all that training changes, so that a step can be undone and a newcomer can be given it."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.tree import join, split
from paceline.elastic.parts import Part, part_of, write
from paceline.elastic.sampler import ElasticSampler
from paceline.errors import SizeMismatch, UnsupportedOp

__all__ = ["Gate", "TrainState"]

_log = logging.getLogger("paceline.elastic")

_COSTLY_BYTES = 1 << 20
"""Small state above this is worth a word: it is copied in every step."""


class Gate(Protocol):
    """Who is asked before large state changes."""

    def open(self) -> None:
        """Returns when it may change; raises if it must not."""

    def spoil(self) -> None:
        """The change was interrupted half way."""


class TrainState:
    """What training changes: model, optimizer, sampler, and whatever else goes with them.

        sampler = paceline.ElasticSampler(n, global_batch=256)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        for step in session.steps(state, total=1000): ...

    Takes modules (wrapped or not), optimizers, samplers, plain dicts of arrays and values, and anything that has
    `state_dict()` and `load_state_dict()`; of any framework whose arrays show NumPy their memory.

    What only `optimizer.step` changes is never copied: `session.steps` lets that call through when it is sure that the
    step counts. All the rest is copied when a step begins. So give every object that `optimizer.step` changes, and
    change them nowhere else; gradients need not be given.

    Args:
        parts: the objects, by names that are the same on every member.

    Attributes:
        step: how many steps it has been through.
        sampler: the `ElasticSampler` among the parts, None if there is none.

    Raises:
        UnsupportedOp: a part is nothing that could be given to another member, or there are two samplers.
    """

    def __init__(self, **parts: Any) -> None:
        self.step = 0
        self._parts: dict[str, Part] = {name: part_of(name, thing) for name, thing in parts.items()}
        samplers = [thing for thing in parts.values() if isinstance(thing, ElasticSampler)]
        if len(samplers) > 1:
            raise UnsupportedOp("a training state has one sampler: which of them would step.indices be of?")
        self.sampler: ElasticSampler | None = samplers[0] if samplers else None
        self._gates: list[tuple[Any, Callable[..., Any] | None]] = []
        """What is guarded, and the `step` that the object itself had, None for that of its class."""

    # For users --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything: what a checkpoint keeps."""
        skeleton, arrays = split(self.content())
        copied: dict[str, Any] = join(skeleton, {name: array.copy() for name, array in arrays.items()})
        return copied

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes everything over, in place, or nothing at all.

        Raises:
            SizeMismatch: it is of other parts, or of other shapes; the text names them.
            Exception: what a part's own `load_state_dict` raised.
        """
        step, parts = int(saved["step"]), saved["parts"]
        if odd := sorted(self._parts.keys() ^ parts.keys()):
            raise SizeMismatch(f"the state does not fit: {', '.join(odd)} on one side only")
        for name, part in self._parts.items():
            try:
                part.check(parts[name]["arrays"])
            except SizeMismatch as error:
                raise SizeMismatch(f"{name}: {error}") from None
        before: list[tuple[Part, Any]] = []
        try:
            for name, part in self._parts.items():
                before.append((part, part.rest()))
                part.load_rest(parts[name]["rest"])
        except BaseException:
            for part, rest in before:
                part.load_rest(rest)
            raise
        for name, part in self._parts.items():
            write(part.arrays(), parts[name]["arrays"])
        self.step = step

    # For whoever runs the steps ---------------------------------------------------------------------------------------

    def content(self) -> dict[str, Any]:
        """Everything, as nested values: large arrays as they lie, the rest copied."""
        parts = {name: {"arrays": part.arrays(), "rest": part.rest()} for name, part in self._parts.items()}
        return {"step": self.step, "parts": parts}

    def large(self) -> list[NDArray[Any]]:
        """The live arrays of large state, in the same order on every member."""
        return [array for part in self._parts.values() for array in part.arrays().values()]

    def small(self) -> dict[str, Any]:
        """A copy of what may change outside the gate."""
        return {name: part.small() for name, part in self._parts.items()}

    def undo(self, small: Mapping[str, Any]) -> None:
        """A step counts for nothing: puts small state back and drops gradients."""
        for name, part in self._parts.items():
            part.put_back(small[name])
            part.clear_gradients()

    def advance(self, world: int) -> None:
        """A step is applied, in a world of that size."""
        self.step += 1
        if self.sampler is not None:
            self.sampler.advance(world)

    def manifest(self, **settings: object) -> bytes:
        """What it consists of and how the run is set up, as canonical JSON: alike on all members of a line."""
        described = {
            name: [part.kind, [[path, str(array.dtype), list(array.shape)] for path, array in part.arrays().items()]]
            for name, part in self._parts.items()
        }
        if self.sampler is not None:
            settings |= self.sampler.settings
        words = {name: str(value) for name, value in settings.items()}
        return json.dumps({"settings": words, "parts": described}, separators=(",", ":"), sort_keys=True).encode()

    def fingerprint(self) -> bytes:
        """SHA-256 of everything."""
        skeleton, arrays = split(self.content())
        digest = hashlib.sha256(json.dumps(skeleton, sort_keys=True).encode())
        for name, array in sorted(arrays.items()):  # the order of a dict's keys is no part of its value
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.digest()

    def check_round_trip(self) -> None:
        """Makes sure that what is given to another member is what it will hold.

        Raises:
            UnsupportedOp: some value cannot travel, or comes back as another, or this member has a part of it only; the
                text names it.
        """
        for name, part in self._parts.items():
            part.check_whole()
            before, arrays = split(part.rest())
            size = sum(array.nbytes for array in arrays.values())
            if part.gated() is None and size > _COSTLY_BYTES:
                _log.warning("%s has no step() of its own: its %.1f MB are copied in every step", name, size / 1e6)
            part.load_rest(join(before, arrays))
            after, again = split(part.rest())
            changed = [path for path in arrays if path not in again or not _same(arrays[path], again[path])]
            if before != after or changed:
                where = f" at {changed[0]}" if changed else ""
                raise UnsupportedOp(f"the state of {name} does not come back as it was given{where}")

    def guard(self, gate: Gate) -> None:
        """From now on `gate` is asked before any optimizer changes large state."""
        self.unguard()
        for thing in {id(part.gated()): part.gated() for part in self._parts.values()}.values():
            if thing is not None:
                self._gates.append((thing, getattr(thing, "__dict__", {}).get("step")))
                thing.step = _guarded(thing.step, gate)

    def unguard(self) -> None:
        """Undoes `guard`."""
        for thing, own in self._gates:
            if own is None:
                del thing.step  # the method of its class is there again
            else:
                thing.step = own
        self._gates.clear()

    @property
    def has_gate(self) -> bool:
        """True if some part changes in a step of its own."""
        return any(part.gated() is not None for part in self._parts.values())


def _guarded(step: Callable[..., Any], gate: Gate) -> Callable[..., Any]:
    @functools.wraps(step)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        gate.open()
        try:
            return step(*args, **kwargs)
        except BaseException:
            gate.spoil()
            raise

    return guarded


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
