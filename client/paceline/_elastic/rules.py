"""Checks rules of the loop whose breach would show only later, after a restart or when a newcomer joins.

The checks look at what the script does, which is the same on every worker and in every run: at the training state once,
before the loop, and at the first steps of the job. Later steps are not checked and cost nothing.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from paceline._elastic.device_array import DeviceArray
from paceline._elastic.differences import crc_of
from paceline._elastic.foreign import marks_of, view
from paceline._elastic.parts import as_trained
from paceline._elastic.state import StateCore
from paceline.errors import StepOrderError, UnsupportedOp

_STEPS = 3
"""Number of steps of a job that are checked: a script that breaks a rule mostly does so in every step."""

_SAMPLE = 4096
"""Elements of an array that are sampled, since an update changes all of them. 500 MB in 60 arrays take 16 ms."""

_DEPTH = 3
"""Levels of a part in which its optimizer is searched: a wrapper of schedulers may have a dict of lists of them."""


def check_complete(state: StateCore) -> None:
    """Checks that the state has the models that its optimizers change, and the schedulers that change those."""
    held: set[int] = set()
    for _, part in state.objects.values():
        if (marks := part.holds()) is None:
            break  # this part cannot say what it holds
        held |= marks
    else:
        for name, (_, part) in state.objects.items():
            trained = part.trained()
            odd = [parameter for parameter in trained if not held & marks_of(parameter)]
            if odd:
                raise ValueError(
                    f"{name} ({_kind(part.gated())}) trains {len(odd)} parameters (of {len(trained)}) that are in no "
                    f"part of the training state, the first of shape {list(view(odd[0]).shape)}: give their model "
                    "too, TrainState(model=model, ...)"
                )
    for name, (_, part) in state.objects.items():
        optimizer = part.gated()
        # From 2.11 to 2.15, torch's schedulers mark the `step` of their optimizer like this.
        if getattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched", False) and not any(
            _knows(thing, optimizer, _DEPTH)
            for thing, other in state.objects.values()
            if other.gated() is not optimizer
        ):
            raise ValueError(
                f"the learning rate of {name} ({_kind(optimizer)}) has a scheduler that is no part of the training "
                "state: it would start from the beginning on every worker that joins later. Give it too, "
                "TrainState(..., scheduler=scheduler), and call scheduler.step() in the block, after optimizer.step()"
            )


@contextlib.contextmanager
def no_other_optimizer(state: StateCore, updating: Callable[[], bool]) -> Iterator[None]:
    """Inside the block, refuses updates of the state's models by torch optimizers that are no part of the state.

    The other optimizer's `step` raises before it changes anything. `updating` returns True while an optimizer of the
    state runs, which may call others.
    """
    torch_has = sys.modules.get("torch.optim.optimizer")
    own = {id(part.gated()) for _, part in state.objects.values()}
    models = {  # keeps the parameters alive, so that no other object can get the id of one
        id(as_trained(parameter)): (f"{name} {path!r}", parameter)
        for name, (_, part) in state.objects.items()
        for path, parameter in part.parameters().items()
    }
    strangers: weakref.WeakSet[Any] = weakref.WeakSet()

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) in own or optimizer in strangers or updating():
            return
        changed = next((models[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in models), None)
        if changed is not None:
            raise StepOrderError(
                f"an optimizer ({_kind(optimizer)}) that is no part of the training state is about to change "
                f"{changed[0]}: give it too, TrainState(..., optimizer=optimizer)"
            )
        strangers.add(optimizer)

    handle = torch_has.register_optimizer_step_pre_hook(before_step) if torch_has is not None else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


class StateWatch:
    """Checks that the training state changes only inside a step, after the gate."""

    def __init__(self, state: StateCore) -> None:
        self._state = state
        self._after: dict[str, int] | None = None
        """Checksums of the state after the last step."""
        self._before: dict[str, int] | None = None
        """Checksums of the state at the beginning of this step, until its update."""

    def begin(self) -> None:
        """Checks at the beginning of a step that nothing has changed since the last one."""
        after, self._after, self._before = self._after, None, None
        is_watched = self._state.step < _STEPS
        if not is_watched and after is None:
            return
        arrays = _arrays_of(self._state)
        if after is not None and (odd := _differ(after, {**arrays, **_rest_of(self._state)})):
            raise StepOrderError(
                f"{odd} changed between step {self._state.step} and the next one, where the change could not be "
                "undone, or would be made twice: change the training state only inside `with step:`, after "
                "optimizer.step()"
            )
        if is_watched:
            self._before = arrays

    def before_update(self) -> None:
        """Checks before the first update of a step without a copy, or at its end, that it could undo all changes."""
        before, self._before = self._before, None
        if before is not None and (odd := _differ(before, _arrays_of(self._state))):
            raise StepOrderError(
                f"{odd} changed in step {self._state.step + 1} before optimizer.step() of an optimizer in the training "
                "state, and could not be restored if the step failed: change it after that call, give the optimizer "
                "that changed it to the TrainState, or call step.keep_copy() first"
            )

    def applied(self) -> None:
        """Remembers the state after an applied step."""
        if self._state.step <= _STEPS:
            self._after = {**_arrays_of(self._state), **_rest_of(self._state)}

    def forget(self) -> None:
        """Forgets the checksums: in a new generation the state may have come from another member."""
        self._after = self._before = None


def _arrays_of(state: StateCore) -> dict[str, int]:
    """Returns a checksum of a sample of each array, by name."""
    return {name: _sampled(array) for name, array in state.named().items()}


def _rest_of(state: StateCore) -> dict[str, int]:
    """Returns a checksum of each part's small state that only a block changes; skips parts that cannot be saved."""
    found = {}
    for name, (_, part) in state.objects.items():
        with contextlib.suppress(UnsupportedOp):
            found[name] = crc_of(part.fixed())
    return found


def _sampled(array: Any) -> int:
    stride = array.size // _SAMPLE | 1  # odd, so that the sample reaches all columns
    if isinstance(array, DeviceArray):
        return zlib.crc32(array.parcel(0, array.size, stride).view(np.uint8).data)
    return zlib.crc32(np.ascontiguousarray(array.reshape(-1)[::stride]).view(np.uint8).data)


def _differ(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """Returns the first name whose value has changed; empty if none has."""
    return next((name for name, value in before.items() if now.get(name) != value), "")


def _knows(thing: Any, optimizer: Any, depth: int) -> bool:
    """True if an object refers to the optimizer, directly or within `depth` levels."""
    if isinstance(thing, Mapping):
        values = list(thing.values())
    elif isinstance(thing, list | tuple):
        values = list(thing)
    else:
        slots = [getattr(thing, name, None) for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        values = [*getattr(thing, "__dict__", {}).values(), *slots]
    return any(one is optimizer for one in values) or any(
        depth and not isinstance(one, str | bytes | int | float | np.ndarray) and _knows(one, optimizer, depth - 1)
        for one in values
    )


def _kind(thing: Any) -> str:
    return type(thing).__name__
