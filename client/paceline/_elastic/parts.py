"""The objects of a training state behind one interface, which tells large state from small.

Each object has two kinds of state. *Large* state (parameters, moments) changes only after the gate, in
`optimizer.step`: a step that is undone has not changed it, so it needs no copy, and other members read the live arrays.
*Small* state (buffers, learning rates, anything without a known gate) may change at any time: it is copied when a step
begins, and restored when the step is undone.

Arrays of other frameworks are read and written through NumPy views of their memory (`foreign`).
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._elastic.device_array import DeviceArray, copies
from paceline._elastic.foreign import (
    copied,
    from_arrays,
    is_foreign,
    marks_of,
    place_state,
    store,
    taken,
    to_arrays,
    to_plain,
    view,
)
from paceline._parallel._optimizer_state import OptimizerState
from paceline._parallel._parameter import Parameter
from paceline._parallel._synchronizer import GradientSynchronizer
from paceline._parallel.sharding._holdings import Holding
from paceline._parallel.sharding._sharded_model import ShardedModel
from paceline.checkpoint.pieces import Shard
from paceline.checkpoint.tree import Leaf
from paceline.errors import SizeMismatch, UnsupportedOp

Tree = Any
"""Nested dicts, lists and tuples of arrays and plain values."""

_NOTHING = Holding((0, 1), {}, {})


class StatePart(abc.ABC):
    """One object of a training state; `kind` is a word for what it is, the same on every member."""

    kind: str

    def arrays(self, held: Holding = _NOTHING) -> dict[str, Leaf]:
        """Returns large state: the live arrays by path, in the same order on every member."""
        del held
        return {}

    def sharded(self) -> dict[str, Parameter]:
        """Returns the arrays that are sharded over ranks: by path, the parameter piece that defines their shards."""
        return {}

    def write(self, held: Holding, arrays: Mapping[str, Any]) -> None:
        """Copies arrays of the same shapes into the live ones."""
        write_in_place(self.arrays(held), arrays)

    @abc.abstractmethod
    def rest(self) -> Tree:
        """Returns a copy of everything that is not in `arrays`."""

    def offered(self, shown: Callable[[Any], Any]) -> Tree:
        """Returns `rest` for other members, who fetch it before anything large changes: it need not be copied.

        `shown` returns what stands for a live array.
        """
        del shown
        return self.rest()

    @abc.abstractmethod
    def load_rest(self, rest: Tree) -> None:
        """Loads what another member's `rest` returned; the caller writes the arrays in place."""

    def kept(self, before: tuple[Tree, Tree] | None) -> tuple[Tree, Tree]:
        """Returns a copy of everything, for `back_to`; reuses the memory of an earlier copy where it fits."""
        arrays = before[0] if before is not None else {}
        return {path: copied(_values(leaf), arrays.get(path)) for path, leaf in self.arrays().items()}, self.rest()

    def back_to(self, kept: tuple[Tree, Tree]) -> None:
        """Restores what `kept` returned."""
        arrays, rest = kept
        self.load_rest(rest)
        self.write(_NOTHING, arrays)

    def small(self) -> Tree:
        """Returns a copy of the state that may change outside the gate."""
        return self.rest()

    def put_back(self, small: Tree) -> None:
        """Undoes all changes since `small` was taken."""
        self.load_rest(small)

    def clear_gradients(self) -> None:
        """Drops the gradients of an undone step."""
        return

    def prepare(self) -> None:
        """Has a wrapper agree on its model with the other ranks; does nothing for other objects."""
        return

    def block_over(self) -> None:
        """Tells a wrapper that the block of a step is over."""
        return

    def guard(self, gate: Any) -> None:
        """Gives a part that trains before its update the gate (`state.Gate`), which says if the step will be undone."""
        return

    def fixed(self) -> Tree:
        """Returns a copy of the small state that only a step's block changes; no settings, which may always change."""
        return self.rest()

    def parameters(self) -> Mapping[str, Any]:
        """Returns a model's parameters by path; a tied parameter appears under one of its paths."""
        return {}

    def spread(self) -> Mapping[str, Any]:
        """Returns a model's parameters as torch has them, by the paths of `arrays`."""
        return self.parameters()

    def trained(self) -> Sequence[Any]:
        """Returns the models' parameters that `gated().step` changes."""
        return ()

    def holds(self) -> set[int] | None:
        """Returns the marks (`marks_of`) of the parameters and arrays in this part; None if they cannot be known."""
        return None

    def gated(self) -> Any:
        """Returns the object whose `step` changes large state; None if there is none."""
        return None


class _Model(StatePart):
    """A module of this or another framework, wrapped or not."""

    kind = "model"

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[str, Any] = {}
        """The parameters at the last call of `arrays`; kept because listing a module's takes a millisecond."""

    def arrays(self, held: Holding = _NOTHING) -> dict[str, Leaf]:
        self._known = self.parameters()
        return {path: held.values.get(id(p)) or view(p) for path, p in self._known.items()}

    def sharded(self) -> dict[str, Parameter]:
        return {path: p for path, p in self.parameters().items() if _is_spread(p)}

    def write(self, held: Holding, arrays: Mapping[str, Any]) -> None:
        if isinstance(self._model, ShardedModel):
            self._model.will_load(values=any(array is not None for array in arrays.values()))
        super().write(held, arrays)

    def parameters(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        seen: set[int] = set()
        for path, parameter in self._model.named_parameters():
            if id(parameter) not in seen:  # a tied one has several paths
                seen.add(id(parameter))
                found[path] = parameter
        return found

    def holds(self) -> set[int] | None:
        return {mark for parameter in self.parameters().values() for mark in marks_of(as_trained(parameter))}

    def _buffers(self) -> dict[str, NDArray[Any]]:
        named = getattr(self._model, "named_buffers", None)
        return {} if named is None else {path: view(buffer) for path, buffer in named()}

    def rest(self) -> Tree:
        return self._rest(self.parameters())

    def _rest(self, parameters: Mapping[str, Any]) -> Tree:
        return {"buffers": self.fixed(), "frozen": [path for path, p in parameters.items() if not trains(p)]}

    def load_rest(self, rest: Tree) -> None:
        old = not isinstance(rest.get("frozen"), list)  # an earlier release wrote buffers alone
        buffers = self._buffers()
        write_in_place(buffers, rest if old else rest["buffers"])
        if isinstance(self._model, ShardedModel):
            self._model.buffers_given(buffers)
        for path, parameter in {} if old else self.parameters().items():
            if trains(parameter) == (path in rest["frozen"]):
                parameter.requires_grad = not trains(parameter)

    def fixed(self) -> Tree:
        return copies(self._buffers())

    def small(self) -> Tree:
        begin = getattr(self._model, "begin_step", None)
        if begin is not None:
            begin()  # `drop_gradients` will return to this point
        return self._rest(self._known or self.parameters())

    def prepare(self) -> None:
        if isinstance(self._model, ShardedModel):
            self._model.prepare()
        synchronizer = getattr(self._model, "_synchronizer", None)
        if isinstance(synchronizer, GradientSynchronizer):
            synchronizer.prepare()

    def block_over(self) -> None:
        end = getattr(self._model, "end_step", None)
        if end is not None:
            end()

    def clear_gradients(self) -> None:
        drop = getattr(self._model, "drop_gradients", None)  # a wrapper may keep gradients of its own
        if drop is not None:
            drop()
            return
        for _, parameter in self._model.named_parameters():
            parameter.grad = None


class _Optimizer(StatePart):
    """An optimizer of `paceline.optim`, or the stand-in for one of another framework."""

    kind = "optimizer"

    def __init__(self, optimizer: OptimizerState) -> None:
        self._optimizer = optimizer

    def arrays(self, held: Holding = _NOTHING) -> dict[str, Leaf]:
        return {**self._optimizer.live_arrays(), **held.states.get(id(self._optimizer), {})}

    def sharded(self) -> dict[str, Parameter]:
        pieces = {key: self._optimizer.parameters[key.rpartition("/")[0]] for key in self._optimizer.live_arrays()}
        return {key: p for key, p in pieces.items() if _is_spread(p)}

    def write(self, held: Holding, arrays: Mapping[str, Any]) -> None:
        super().write(held, arrays)
        if any(array is not None for array in arrays.values()):
            self._optimizer.is_new = False

    def rest(self) -> Tree:
        return {"settings": self.small(), "numbers": self._optimizer.numbers()}

    def load_rest(self, rest: Tree) -> None:
        mine = self.rest()
        if _names(mine) != _names(rest):
            raise SizeMismatch(f"the state does not fit this {type(self._optimizer).__name__}: it has other names")
        self.put_back(rest["settings"])
        self._optimizer.load_numbers(rest["numbers"])

    def small(self) -> Tree:
        return dict(self._optimizer.settings)

    def put_back(self, small: Tree) -> None:
        self._optimizer.load_settings(small)

    def clear_gradients(self) -> None:
        self._optimizer.zero_grad()

    def fixed(self) -> Tree:
        return None

    def trained(self) -> Sequence[Any]:
        return [as_trained(parameter) for parameter in self._optimizer.parameters.values()]

    def holds(self) -> set[int] | None:
        return set()

    def gated(self) -> Any:
        return self._optimizer.stepper


class _Values(StatePart):
    """A nested dict of arrays (also of frameworks) and plain values, which the user may change at any time."""

    kind = "values"

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def rest(self) -> Tree:
        return {key: to_plain(value) for key, value in self._values.items()}

    def load_rest(self, rest: Tree) -> None:
        for key in self._values.keys() - rest.keys():
            del self._values[key]
        for key, value in rest.items():
            self._values[key] = taken(value, self._values.get(key))

    def holds(self) -> set[int] | None:
        return set(_marks(self._values))


class _Opaque(StatePart):
    """Anything else with `state_dict` and `load_state_dict`: copied whole at every step unless it has a gate.

    An object with a gate is an optimizer of another framework. Outside of the gate only its settings, the items of
    `param_groups`, may change.
    """

    def __init__(self, thing: Any, kind: str = "") -> None:
        self._thing = thing
        self.kind = kind or type(thing).__name__
        self._gate = callable(getattr(thing, "step", None)) and callable(getattr(thing, "zero_grad", None))

    def rest(self) -> Tree:
        frameworks: list[str] = []
        tree = to_arrays(self._thing.state_dict(), frameworks)
        return {"state": tree, "frameworks": frameworks}

    def offered(self, shown: Callable[[Any], Any]) -> Tree:
        state = self._thing.state_dict() if self._gate else None
        if not isinstance(state, Mapping):
            return self.rest()
        frameworks: list[str] = []

        def of(key: str) -> Tree:
            settings = key == "param_groups"  # which may change outside of the gate
            return to_arrays(state[key], frameworks, take=None if settings else lambda array, into: shown(array))

        return {"state": {key: of(key) for key in state}, "frameworks": frameworks}

    def kept(self, before: tuple[Tree, Tree] | None) -> tuple[Tree, Tree]:
        frameworks: list[str] = []
        tree = to_arrays(self._thing.state_dict(), frameworks, before[1]["state"] if before is not None else None)
        return {}, {"state": tree, "frameworks": frameworks}

    def load_rest(self, rest: Tree) -> None:
        self._thing.load_state_dict(from_arrays(rest["state"], iter(rest["frameworks"])))
        if self._gate:
            place_state(self._thing)

    def small(self) -> Tree:
        return [to_arrays(settings, []) for settings in self._settings()] if self._gate else self.rest()

    def put_back(self, small: Tree) -> None:
        if not self._gate:
            self.load_rest(small)
            return
        for group, kept, here in zip(self._groups(), small, self._settings(), strict=True):
            for key, value in kept.items():
                if is_foreign(here.get(key)):
                    store(view(here[key]), value)
                else:
                    group[key] = copy.deepcopy(value)

    def _groups(self) -> list[dict[str, Any]]:
        return list(getattr(self._thing, "param_groups", ()))

    def _settings(self) -> list[dict[str, Any]]:
        """Returns the settings of each group of parameters."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self._groups()]

    def fixed(self) -> Tree:
        return None if self._gate else self.rest()

    def trained(self) -> Sequence[Any]:
        return [parameter for group in self._groups() for parameter in group.get("params", ())] if self._gate else ()

    def holds(self) -> set[int] | None:
        return set() if self._gate or not self.rest()["frameworks"] else None

    def clear_gradients(self) -> None:
        if self._gate:
            self._thing.zero_grad()

    def gated(self) -> Any:
        return self._thing if self._gate else None


def opaque(thing: Any, kind: str) -> StatePart:
    """Makes a part of an object with `state_dict` and `load_state_dict`; `kind` must be the same on all members."""
    return _Opaque(thing, kind)


def part_of(name: str, thing: Any) -> StatePart:
    """Makes a part of an object, by its own method `as_part` if it has one."""
    own = getattr(thing, "as_part", None)
    part = own() if callable(own) else None
    if isinstance(part, StatePart):
        return part
    if isinstance(thing, OptimizerState):
        return _Optimizer(thing)
    if callable(getattr(thing, "named_parameters", None)):
        return _Model(thing)
    if callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
        return _Opaque(thing)
    if isinstance(thing, dict):
        return _Values(thing)
    raise UnsupportedOp(
        f"{name} is a {type(thing).__name__}: a training state takes modules, optimizers, dicts of arrays, and "
        "objects with state_dict() and load_state_dict()"
    )


def _is_spread(parameter: Any) -> bool:
    """True if the parameter, or the piece that is trained in its place, belongs to a wrapper that shards."""
    owner = getattr(parameter, "_owner", None)
    return isinstance(owner, ShardedModel) and owner.is_sharded


def _values(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, Shard) else leaf


def as_trained(parameter: Any) -> Any:
    """Returns an optimizer's object for a parameter: for a sharded torch model, a tensor over this member's piece."""
    return getattr(parameter, "tensor", parameter)


def trains(parameter: Any) -> bool:
    """False if the parameter is frozen."""
    return bool(getattr(parameter, "requires_grad", True))


def _marks(tree: Tree) -> Iterator[int]:
    """Yields the marks of all values in a tree."""
    if isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _marks(value)
    else:
        yield from marks_of(tree)


def _names(rest: Tree) -> Tree:
    """Returns the names in an optimizer's small state."""
    return rest["settings"].keys(), {path: numbers.keys() for path, numbers in rest["numbers"].items()}


def write_in_place(here: Mapping[str, Leaf], there: Mapping[str, Any]) -> None:
    """Copies arrays in place into those of the same path, all or none; a shard takes its elements from a whole array.

    None in `there` leaves a sharded array as it is.
    """
    check_fit(here, there)
    for path, array in here.items():
        other = there[path]
        if not isinstance(array, Shard):
            store(array, other)
        elif other is not None:
            values = array.values.reshape(-1)
            whole = not isinstance(other, Shard)
            flat = np.asarray(other if whole else other.values).reshape(-1)
            np.copyto(values, flat[array.start : array.start + values.size] if whole else flat)


def check_fit(here: Mapping[str, Leaf], there: Mapping[str, Any]) -> None:
    """Checks that `write_in_place` would succeed."""
    odd = [f"{path} is on one side only" for path in sorted(here.keys() ^ there.keys())]
    for path in sorted(here.keys() & there.keys()):
        mine, other = here[path], there[path]
        if isinstance(mine, Shard) and other is None:
            continue
        if isinstance(other, Shard) and not (
            isinstance(mine, Shard) and (mine.start, mine.values.size) == (other.start, other.values.size)
        ):
            odd.append(f"{path} has {other.values.size} elements from {other.start}, which are not those held here")
            continue
        (kind, shape), (their_kind, their_shape) = _kind(mine), _kind(other)
        if shape != their_shape or not np.can_cast(their_kind, kind, "same_kind"):
            odd.append(f"{path} is {their_kind}{list(their_shape)}, not {kind}{list(shape)}")
    if odd:
        raise SizeMismatch(f"the state does not fit: {'; '.join(odd[:8])}")


def _kind(leaf: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns the dtype and shape of the whole array."""
    if isinstance(leaf, Shard):
        return leaf.values.dtype, leaf.shape
    array = leaf if isinstance(leaf, DeviceArray) else np.asarray(leaf)
    return array.dtype, array.shape
