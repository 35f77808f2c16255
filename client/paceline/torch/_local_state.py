"""The state of local training: the global model, the inner optimizers, and their parts in a training state.

The large state is the global parameters and the outer momentum. They change only in the outer step, so a round that is
undone has not touched them, and a newcomer reads them while the others are in the middle of a round. The local
parameters are not state: they equal the global ones when a round begins, and again when it is undone.

Of a DTensor, as in a replica of several ranks, all this is about the local tensor.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline._elastic.foreign import local_of, placement
from paceline._elastic.parts import StatePart, part_of
from paceline._elastic.state import Gate
from paceline._parallel._data_parallel import DDP
from paceline._parallel._parameter import Parameter
from paceline._parallel.sharding._holdings import Holding
from paceline.checkpoint.tree import Leaf
from paceline.errors import SizeMismatch, UnsupportedOp
from paceline.optim import Optimizer
from paceline.torch._lane_gradients import reshard
from paceline.torch._tensors import array_of, on_host, values_of


class InnerOptimizers:
    """One or more torch optimizers that take the inner steps.

    Members share only the numbers in the settings. The optimizers' state for each parameter (AdamW's moments) comes
    from the samples that this worker has seen: it differs between members, does not travel, and a newcomer begins
    without it. Averaging the state too takes three times the bytes and was found to gain nothing. Source: Douillard et
    al., "DiLoCo", 2023.

    `after_step` is called after each step of the first optimizer.
    """

    def __init__(self, optimizers: Any, after_step: Callable[[], None]) -> None:
        self._optimizers: Sequence[Any] = tuple(optimizers) if isinstance(optimizers, Sequence) else (optimizers,)
        if not self._optimizers or not all(isinstance(one, torch.optim.Optimizer) for one in self._optimizers):
            raise TypeError(f"an inner optimizer must be a torch.optim.Optimizer, not {optimizers!r:.80}")
        self._optimizers[0].register_step_post_hook(lambda *_: after_step())

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def forget(self) -> None:
        """Drops gradients, and the state for each parameter, such as moments."""
        self.zero_grad()
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def numbers(self) -> list[float]:
        """Returns all numbers in the settings."""
        found: list[float] = []
        for group in (group for one in self._optimizers for group in one.param_groups):
            for value in filter(_is_number, group.values()):
                found += map(float, value) if isinstance(value, tuple) else [float(value)]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns the numbers in the settings of all groups (learning rates and the like), equal on all members.

        Each worker makes its own choice of an implementation (`fused`, `foreach`).
        """
        return {
            "groups": [
                [{name: value for name, value in group.items() if _is_number(value)} for group in one.param_groups]
                for one in self._optimizers
            ]
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        groups = saved["groups"]
        if [len(each) for each in groups] != [len(one.param_groups) for one in self._optimizers]:
            raise SizeMismatch("the saved inner optimizers were others: they had more groups of parameters, or fewer")
        for optimizer, theirs in zip(self._optimizers, groups, strict=True):
            for group, numbers_of in zip(optimizer.param_groups, theirs, strict=True):
                group.update(numbers_of)

    def save(self, *, state: bool) -> list[Any]:
        """Copies all settings and, with `state`, the state for each parameter; the copy stays in this process."""
        return [
            (
                [copy.deepcopy(_settings(group)) for group in optimizer.param_groups],
                {key: copy.deepcopy(kept) for key, kept in optimizer.state.items()} if state else None,
            )
            for optimizer in self._optimizers
        ]

    def put_back(self, saved: list[Any]) -> None:
        """Undoes all changes since `save`, and consumes its copies."""
        for optimizer, (settings, state) in zip(self._optimizers, saved, strict=True):
            for group, before in zip(optimizer.param_groups, settings, strict=True):
                group.update(before)
            if state is not None:
                optimizer.state.clear()
                optimizer.state.update(state)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return isinstance(value, torch.Tensor) or (isinstance(value, numbers.Real) and not isinstance(value, bool))


_GLOBAL = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""The dtype in which a parameter's global value is kept: a mean of 16-bit numbers needs more bits."""

_AS_BITS = {1: torch.uint8, 2: torch.int16}
"""Integer dtypes, by size, as which values travel if NumPy lacks their dtype."""


class OuterModel:
    """The global model: a module whose gradient is the distance of the local parameters from the global ones.

    So an outer step can use everything in data-parallel training: `paceline.DDP` synchronises pseudo-gradients
    (weights, buckets, compression, agreement), and an optimizer of `paceline.optim` takes the step. The global values
    are in host memory; tensors that are not trained stay where they are. Frozen parameters must stay frozen.

    Without `differences`, `backward` gives the local values themselves.
    """

    def __init__(self, net: Any, *, differences: bool) -> None:
        self._net = net
        self._differences = differences
        reshard(net)
        self.tensors: dict[str, Any] = dict(net.named_parameters())
        self._parameters: dict[str, Parameter] = {}
        self._staged: dict[str, NDArray[Any]] = {}
        """Host copies of frozen parameters and buffers on another device, by path."""
        for path, tensor in self.tensors.items():
            if not tensor.requires_grad:
                self._parameters[path] = Parameter(self._as_it_lies(path, tensor), requires_grad=False)
            elif tensor.dtype in _GLOBAL:
                self._parameters[path] = Parameter(_on_host(tensor).copy())
            else:
                raise UnsupportedOp(
                    f"parameter {path!r} is {tensor.dtype}: only floats of 16, 32 or 64 bits can be trained"
                )

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yields the global values, by the net's paths."""
        yield from self._parameters.items()

    def named_buffers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yields the net's buffers; for another device their host copies, which are valid from `backward` to `push`."""
        for path, tensor in self._net.named_buffers():  # looked up each time, as a module may replace them
            yield path, self._as_it_lies(path, tensor)

    def forward(self, x: Any) -> Any:
        """Returns the net's output."""
        return self._net(x)

    def backward(self, dy: NDArray[Any]) -> None:
        """Gives each parameter its pseudo-gradient times `dy`, shape [1]. Reads the net's parameters and buffers."""
        self._fetch_buffers()
        factor = float(dy[0])
        for path, parameter in reversed(self._parameters.items()):
            tensor = self.tensors[path]
            if tensor.requires_grad != parameter.requires_grad:
                raise UnsupportedOp(f"parameter {path!r} has been frozen or unfrozen since local training began")
            if parameter.requires_grad:
                parameter.grad = self._contribution(tensor, parameter, factor)

    def push(self) -> None:
        """Copies the global values to the net, rounded to its dtypes."""
        reshard(self._net)  # what FSDP2 has gathered is out of date
        with torch.no_grad():
            for path, tensor in self.tensors.items():
                if self._parameters[path].requires_grad:
                    local_of(tensor).copy_(torch.from_numpy(self._parameters[path].data))
            for path, tensor in self._elsewhere():
                _bits(tensor).copy_(torch.from_numpy(self._staged[path]))

    def _contribution(self, tensor: Any, parameter: Parameter, factor: float) -> NDArray[Any]:
        value, start = _on_host(tensor), torch.from_numpy(parameter.data)
        if tensor.dtype != start.dtype:  # the net began the round at the rounded value: rounding is not a change
            rest = start - start.to(tensor.dtype)
            value = value + rest.numpy()
        if self._differences:
            value = parameter.data - value
        return value if factor == 1 else value * factor

    def _fetch_buffers(self) -> None:
        for path, tensor in self._elsewhere():
            np.copyto(self._staged[path], values_of(_bits(tensor)))

    def _elsewhere(self) -> Iterator[tuple[str, Any]]:
        """Yields frozen parameters and buffers on another device."""
        for path, tensor in self.tensors.items():
            if path in self._staged:
                yield path, tensor.detach()
        for path, tensor in self._net.named_buffers():
            if path in self._staged:
                yield path, tensor

    def _as_it_lies(self, path: str, tensor: Any) -> NDArray[Any]:
        """Returns a view of a tensor's memory; for another device, of the copy on the host."""
        if on_host(tensor):
            return array_of(_bits(tensor))
        if path not in self._staged:
            self._staged[path] = values_of(_bits(tensor))
        return self._staged[path]


def _on_host(tensor: Any) -> NDArray[Any]:
    """Returns a tensor's values in the dtype of the global ones; a view if possible."""
    return local_of(tensor).detach().to("cpu", _GLOBAL[tensor.dtype]).numpy()  # type: ignore[no-any-return]


def _bits(tensor: Any) -> Any:
    """Returns the tensor without its graph; as integers if NumPy lacks its dtype."""
    flat = local_of(tensor).detach()
    known = flat.dtype in (torch.float16, torch.float32, torch.float64) or not flat.dtype.is_floating_point
    return flat if known else flat.view(_AS_BITS[flat.itemsize])


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

    gate: Gate | None

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The net's parameters, by path."""


class RoundPart(StatePart):
    """Local training as a part of a training state.

    The gate is the outer optimizer's `step`. Newcomers get the settings of the inner optimizers. `kind` is the name of
    the method, the same on all members.
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
        """Returns the global parameters and the outer momentum."""
        return {
            f"{name}/{path}": array for name, part in self._shared.items() for path, array in part.arrays(held).items()
        }

    def write(self, held: Holding, arrays: Mapping[str, Any]) -> None:
        """Copies arrays into the live ones, and copies the global values to the net."""
        for name, part in self._shared.items():
            prefix = f"{name}/"
            part.write(held, {key.removeprefix(prefix): a for key, a in arrays.items() if key.startswith(prefix)})
        self._worker.push()

    def rest(self) -> Any:
        """Returns buffers, and the settings of the outer and the inner optimizers."""
        rest = {"inner": self._inner.rest(), **{name: part.rest() for name, part in self._shared.items()}}
        return {**rest, "placements": placements} if (placements := self._placements()) else rest

    def load_rest(self, rest: Any) -> None:
        """Loads what `rest` returned."""
        if (theirs := rest.get("placements", {})) != self._placements():
            raise SizeMismatch(
                f"the state is of a net that was spread in another way over the ranks of a replica: {theirs}"[:500]
            )
        for name, part in {"inner": self._inner, **self._shared}.items():
            part.load_rest(rest[name])

    def prepare(self) -> None:
        """Agrees on the net with the other workers, before a block begins."""
        self._shared["model"].prepare()

    def _placements(self) -> dict[str, str]:
        return {path: found for path, tensor in self.spread().items() if (found := placement(tensor))}

    def fixed(self) -> Any:
        """Returns the buffers."""
        return {name: part.fixed() for name, part in self._shared.items()}

    def small(self) -> Any:
        """Begins a round; returns the data for undoing it. This worker's own part of the data never travels."""
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

    def guard(self, gate: Gate | None) -> None:
        """Has the worker leave a round that will be undone."""
        self._worker.gate = gate

    def spread(self) -> Mapping[str, Any]:
        """Returns the net's parameters by the paths of the global ones."""
        return {f"model/{path}": tensor for path, tensor in self._worker.tensors.items()}

    def holds(self) -> set[int] | None:
        """Returns the identities of the global parameters."""
        return self._shared["model"].holds()

    def gated(self) -> Any:
        """Returns the outer optimizer."""
        return self._outer
