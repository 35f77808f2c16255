"""The state of an optimizer by path and name, for any sort of optimizer."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline._parallel._parameter import Parameter
from paceline.errors import SizeMismatch


class CopiedPiece(NamedTuple):
    """A copy of what another rank has of a parameter."""

    values: NDArray[Any]
    """Shape [elements there]."""
    gradient: NDArray[Any] | None
    """As for the values; None if the parameter has none."""


class OptimizerState(abc.ABC):
    """An optimizer's settings, and for each trained parameter its arrays (of the parameter's shape) and other values.

    `is_new` is True until a step is taken or state is loaded.
    """

    is_new: bool

    @property
    @abc.abstractmethod
    def parameters(self) -> Mapping[str, Parameter]:
        """The parameters that it trains, by path."""

    @property
    @abc.abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """The values of its formula, by name."""

    @property
    def stepper(self) -> Any:
        """The object whose `step` users call."""
        return self

    @abc.abstractmethod
    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Loads settings that `settings` returned."""

    @abc.abstractmethod
    def live_arrays(self) -> dict[str, NDArray[Any]]:
        """Returns the live arrays of the state, by "path/name": only `step` changes them."""

    @abc.abstractmethod
    def numbers(self) -> dict[str, dict[str, Any]]:
        """Returns a copy of everything in the state that is not an array, by path."""

    @abc.abstractmethod
    def load_numbers(self, numbers: Mapping[str, Mapping[str, Any]]) -> None:
        """Loads values that `numbers` returned."""

    @abc.abstractmethod
    def move(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Replaces the live arrays, because the parameters have other shapes now."""

    def check_copying(self) -> None:
        """Raises `UnsupportedOp` if `update_copy` could make another update than `step`."""
        return

    @abc.abstractmethod
    def update_copy(self, pieces: Mapping[str, CopiedPiece], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Updates, in place, copies of what another rank has as that rank's next `step` will.

        That needs a `step` which follows from gradients, state and settings alone, and draws no random numbers.

        Args:
            pieces: by path, the pieces of the parameters that are copied.
            arrays: the copies of its state, by the keys of `live_arrays`. Numbers are the same on all ranks.
        """

    @abc.abstractmethod
    def zero_grad(self) -> None:
        """Sets every gradient to None."""

    @property
    def is_blank(self) -> bool:
        """True while `is_new` and all arrays of the state are zero, as on every other rank, whatever their shape."""
        return self.is_new and not any(array.any() for array in self.live_arrays().values())

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Loads settings (the learning rate too) and state, into the arrays that are there.

        `saved` is {"settings": {name: value}, "state": {path: {name: array or value}}}.

        Raises:
            SizeMismatch: paths or names are missing or unexpected, or shapes differ; the error lists them all, and
                nothing was changed.
        """
        here: dict[str, dict[str, Any]] = {path: dict(numbers) for path, numbers in self.numbers().items()}
        for key, array in self.live_arrays().items():
            path, _, name = key.rpartition("/")
            here[path][name] = array
        there = saved.get("state", {})
        problems = _names("setting", self.settings, saved.get("settings", {})) + _names("state of", here, there)
        for path in here.keys() & there.keys():
            problems += _names(f"{path}:", here[path], there[path])
            for name in sorted(here[path].keys() & there[path].keys()):
                mine, theirs = np.shape(here[path][name]), np.shape(there[path][name])
                if mine != theirs:
                    problems.append(f"{path}: {name!r} has shape {list(theirs)}, not {list(mine)}")
        if problems:
            raise SizeMismatch(f"the state does not fit this {type(self.stepper).__name__}: " + "; ".join(problems))
        self.is_new = False
        self.load_settings(saved["settings"])
        numbers: dict[str, dict[str, Any]] = {path: {} for path in here}
        for path, state in here.items():
            for name, value in state.items():
                if isinstance(value, np.ndarray):
                    value[...] = there[path][name]
                else:  # a number loaded from a file may be an array
                    numbers[path][name] = None if value is None else type(value)(there[path][name])
        self.load_numbers(numbers)


_finders: list[Callable[[Any], Any]] = []


def stands_in(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Registers `find` with `standing_for`: it returns what stands for a model or an optimizer, else None."""
    _finders.append(find)
    return find


def standing_for(thing: Any) -> Any:
    """Returns what stands for a model or an optimizer in this package; the object itself if nothing does."""
    return next((found for find in _finders if (found := find(thing)) is not None), thing)


def _names(what: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Returns sentences on names that only one side has."""
    missing = [f"{what} {name!r} is missing" for name in sorted(here.keys() - there.keys())]
    return missing + [f"{what} {name!r} is unexpected" for name in sorted(there.keys() - here.keys())]
