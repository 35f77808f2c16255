"""Rules of the loop that a script can break while nothing fails: only a restart or a newcomer would show it.

What is looked at is the script's doing, alike on every worker and in every run: the training state once, before the
loop, and the first steps of the job. Later steps cost nothing, and a worker that comes in later finds no fault in them.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.elastic.digests import crc_of
from paceline.elastic.foreign import marks_of, view
from paceline.elastic.parts import as_trained
from paceline.elastic.state import TrainState
from paceline.errors import StepOrderError, UnsupportedOp

__all__ = ["Watch", "check_complete", "no_other_optimizer"]

_STEPS = 3
"""So many steps of a job are looked at: what a script does wrong it does in each, as a rule."""

_SAMPLE = 4096
"""Elements of an array that are looked at: an update changes all of them. 500 MB in 60 arrays take 16 ms."""

_DEPTH = 3
"""So deep in a part its optimizer is looked for: what wraps schedulers may have a dict of lists of them."""


def check_complete(state: TrainState) -> None:
    """Makes sure that the state has what its optimizers change, and what changes its optimizers.

    Raises:
        ValueError: a model or a scheduler is missing; the text names the optimizer and says what to write.
    """
    held: set[int] = set()
    for _, part in state.objects.values():
        if (marks := part.holds()) is None:
            break  # nobody knows what is in that one
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
        # torch's schedulers mark the `step` of their optimizer, from 2.11 to 2.15 like this.
        if getattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched", False) and not any(
            _knows(thing, optimizer, _DEPTH)
            for thing, other in state.objects.values()
            if other.gated() is not optimizer
        ):
            raise ValueError(
                f"the learning rate of {name} ({_kind(optimizer)}) has a scheduler that is no part of the training "
                "state: it would begin anew at each worker that comes in later. Give it too, "
                "TrainState(..., scheduler=scheduler), and call scheduler.step() in the block, behind optimizer.step()"
            )


@contextlib.contextmanager
def no_other_optimizer(state: TrainState, updating: Callable[[], bool]) -> Iterator[None]:
    """Inside the block no optimizer of torch changes a model of the state unless it is a part of it.

    Args:
        state: what is trained.
        updating: True while an optimizer of the state runs, which may have others inside.

    Raises:
        StepOrderError: out of the other optimizer's `step`, before it changes anything.
    """
    torch_has = sys.modules.get("torch.optim.optimizer")
    own = {id(part.gated()) for _, part in state.objects.values()}
    models = {  # with the parameters, so that no stranger gets the id of one that is replaced meanwhile
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


class Watch:
    """Whether the state of a loop changes only where it may.

    Args:
        state: what is trained.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._after: dict[str, int] | None = None
        """What the last step has left."""
        self._before: dict[str, int] | None = None
        """What this step has found, while it must not change."""

    def begin(self) -> None:
        """A step begins.

        Raises:
            StepOrderError: something has changed since the last one.
        """
        after, self._after, self._before = self._after, None, None
        is_watched = self._state.step < _STEPS
        if not is_watched and after is None:
            return
        arrays = _arrays_of(self._state)
        if after is not None and (odd := _differ(after, {**arrays, **_rest_of(self._state)})):
            raise StepOrderError(
                f"{odd} changed between step {self._state.step} and the next one, where it could not be undone or "
                "would be done again: what changes the training state belongs inside `with step:`, behind "
                "optimizer.step()"
            )
        if is_watched:
            self._before = arrays

    def before_update(self) -> None:
        """The first optimizer of a step is about to run, or the step ends without one. Not for steps with a copy.

        Raises:
            StepOrderError: something has changed that the step could not put back.
        """
        before, self._before = self._before, None
        if before is not None and (odd := _differ(before, _arrays_of(self._state))):
            raise StepOrderError(
                f"{odd} changed in step {self._state.step + 1} before optimizer.step() of an optimizer in the training "
                "state, and could not be put back if the step failed: change it behind that, give whichever optimizer "
                "did it to the TrainState, or call step.keep_copy() first"
            )

    def applied(self) -> None:
        """A step counts here."""
        if self._state.step <= _STEPS:
            self._after = {**_arrays_of(self._state), **_rest_of(self._state)}

    def forget(self) -> None:
        """Another generation has begun, and the state may be that of others."""
        self._after = self._before = None


def _arrays_of(state: TrainState) -> dict[str, int]:
    """A checksum of a sample of each array, by name."""
    return {name: _sampled(array) for name, array in state.named().items()}


def _rest_of(state: TrainState) -> dict[str, int]:
    """A checksum of all else that only a block changes, by part; of none that has what cannot be kept."""
    found = {}
    for name, (_, part) in state.objects.items():
        with contextlib.suppress(UnsupportedOp):
            found[name] = crc_of(part.fixed())
    return found


def _sampled(array: NDArray[Any]) -> int:
    stride = array.size // _SAMPLE | 1  # odd: it meets all columns
    return zlib.crc32(np.ascontiguousarray(array.reshape(-1)[::stride]).view(np.uint8).data)


def _differ(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """The first name whose value is another one, in words; empty if none is."""
    return next((name for name, value in before.items() if now.get(name) != value), "")


def _knows(thing: Any, optimizer: Any, depth: int) -> bool:
    """True if an object has the optimizer as an attribute, or something that has."""
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
