"""Local training as a part of a training state: what is alike on all members, and what is undone with a round.

Large state is the global parameters and the outer momentum: they change in the outer step only, so a round that is
undone has not touched them, and a newcomer reads them while the others are in the middle of a round. The local
parameters are no state at all: they are the global ones when a round begins, and again when it is undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from paceline.checkpoint.tree import Leaf
from paceline.elastic.parts import StatePart, part_of
from paceline.optim import Optimizer
from paceline.parallel.ddp import DDP
from paceline.parallel.sharding.resharding import Holding
from paceline.torch.inner import InnerOptimizers

__all__ = ["Round", "RoundPart"]

_WHOLE = Holding((0, 1), {}, {})


class Round(Protocol):
    """One worker's round of local training; see `LocalTraining`."""

    def begin_round(self) -> Any:
        """Sets the net to the global parameters; returns what `undo_round` takes."""

    def undo_round(self, saved: Any) -> None:
        """Restores the net and the inner optimizers as they were when the round began."""

    def drop_gradients(self) -> None:
        """Drops the local gradients."""

    def push(self) -> None:
        """Copies global parameters, which another worker has sent, to the net."""


class RoundPart(StatePart):
    """Represents local training in a training state.

    Args:
        kind: how it trains; the same on all members.
        wrapper: wrapper of the global model.
        outer: optimizer of the global model; its `step` is the gate.
        inner: the inner optimizers, whose settings are given to others.
        worker: this worker's round.
    """

    def __init__(self, kind: str, wrapper: DDP, outer: Optimizer, inner: InnerOptimizers, worker: Round) -> None:
        self.kind = kind
        self._shared = {
            "model": part_of("the global model", wrapper),
            "outer": part_of("the outer optimizer", outer),
        }
        self._inner = part_of("the inner settings", inner)
        self._outer = outer
        self._worker = worker

    def arrays(self, held: Holding = _WHOLE) -> dict[str, Leaf]:
        """The global parameters and the outer momentum."""
        return {
            f"{name}/{path}": array for name, part in self._shared.items() for path, array in part.arrays(held).items()
        }

    def write(self, held: Holding, arrays: Mapping[str, Any]) -> None:
        """Copies arrays into those that are here, and gives the net its own."""
        for name, part in self._shared.items():
            prefix = f"{name}/"
            part.write(held, {key.removeprefix(prefix): a for key, a in arrays.items() if key.startswith(prefix)})
        self._worker.push()

    def rest(self) -> Any:
        """Buffers, and the settings of the outer and the inner optimizers."""
        return {"inner": self._inner.rest(), **{name: part.rest() for name, part in self._shared.items()}}

    def load_rest(self, rest: Any) -> None:
        """Takes them over."""
        for name, part in {"inner": self._inner, **self._shared}.items():
            part.load_rest(rest[name])

    def fixed(self) -> Any:
        """Buffers."""
        return {name: part.fixed() for name, part in self._shared.items()}

    def small(self) -> Any:
        """A round begins: what is undone with it, of which this worker's own part never travels."""
        return {"worker": self._worker.begin_round(), **{name: part.small() for name, part in self._shared.items()}}

    def put_back(self, small: Any) -> None:
        """Undoes the round."""
        for name, part in self._shared.items():
            part.put_back(small[name])
        self._worker.undo_round(small["worker"])

    def clear_gradients(self) -> None:
        """Drops the local gradients, and the pseudo-gradients."""
        for part in self._shared.values():
            part.clear_gradients()
        self._worker.drop_gradients()

    def holds(self) -> set[int] | None:
        """The global parameters."""
        return self._shared["model"].holds()

    def gated(self) -> Any:
        """The outer optimizer."""
        return self._outer
