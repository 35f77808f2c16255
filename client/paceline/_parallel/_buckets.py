"""Buckets: flat arrays in which gradients lie side by side, so that one all_reduce carries many of them.

A bucket has N elements of gradients and P parameters. The array that travels holds

    [ gradients, N | weight, 1 | used, P | piggyback ]

One message sums all of it over the ranks: the weighted gradients, the total weight to divide them by, and for each
parameter the number of ranks that used it. The first bucket of a pass has room for a piggyback: in `session.steps` it
carries the step word. Each slice of the first part is the home of a parameter's gradient (`Parameter.grad` is a
view of it), so a gradient is written once, reduced in place, and read where it lies.

16-bit gradients lie in a separate array: they travel in float32, with the weights.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline._parallel._node_sums import NodeSums
from paceline._parallel._parameter import Parameter
from paceline.compression import Codec, Memory
from paceline.errors import StepOrderError, UnsupportedOp

FIRST_BYTES = 1 << 20
"""Bytes of gradients in the first bucket of a dtype, unless one parameter has more. A small first bucket leaves early,
so the links start early. Source: torch's DDP (`dist._DEFAULT_FIRST_BUCKET_BYTES`), for the same reason."""

_NARROW = ("float16", "bfloat16")

Empty = Callable[[int, Any], NDArray[Any]]
"""Allocates an array of a size and dtype that links can use without a copy."""


def plan_buckets(
    parameters: Mapping[str, Parameter], cap_bytes: float, first_bytes: float = math.inf, *, narrow: bool = False
) -> list[list[str]]:
    """Decides which parameters share a bucket; returns their paths, buckets in the order in which they are sent.

    Backward runs from the last layer to the first, so parameters are taken in reverse. A bucket has one dtype and at
    most `cap_bytes` of gradients; a larger parameter gets a bucket of its own. The first bucket of a dtype is full at
    `first_bytes`. Buckets are ordered by their last parameter, the one whose gradient completes them. Frozen parameters
    are in no bucket.

    Raises:
        UnsupportedOp: a parameter to train is neither float32 nor float64, and `narrow` is False. (bfloat16 loses
            updates below 2^-9 of a value; mixed precision needs master values in float32. So the caller must ask.)
    """
    closed: list[tuple[int, list[str]]] = []
    filling: dict[np.dtype[Any], tuple[int, int, list[str]]] = {}
    begun: set[np.dtype[Any]] = set()  # dtypes whose first bucket is full
    for place, (path, parameter) in enumerate(reversed(list(parameters.items()))):
        if not parameter.requires_grad:
            continue
        dtype, nbytes = parameter._layout()
        if dtype not in (np.float32, np.float64) and not (narrow and dtype.name in _NARROW):
            raise UnsupportedOp(f"parameter {path!r} is {dtype}; only {_trainable(narrow)} can be trained")
        last, size, paths = filling.pop(dtype, (0, 0, []))
        full = size >= first_bytes and dtype not in begun
        if paths and (full or size + nbytes > cap_bytes):
            begun.add(dtype)
            closed.append((last, paths))
            size, paths = 0, []
        filling[dtype] = (place, size + nbytes, [*paths, path])
    closed += [(last, paths) for last, _, paths in filling.values()]
    return [paths for _, paths in sorted(closed)]


def _trainable(narrow: bool) -> str:
    return "float16, bfloat16, float32 and float64" if narrow else "float32 and float64"


class _Memory(NamedTuple):
    """Memory of a bucket."""

    flat: NDArray[Any]
    """The array that is sent."""
    slots: Sequence[NDArray[Any]]
    """The home of each parameter's gradient."""


class Bucket(NodeSums[_Memory]):
    """The gradients of some parameters of one dtype, in NumPy arrays that are reused in each step.

    Args:
        parameters: the parameters by path, in the order in which they lie in the bucket.
        room: number of elements reserved for a piggyback.
        feedback: see `Memory`.
        weight_at: number of elements in front of the weight; N if left out.
        apart: True if gradients are stored in a separate array; those in 16 bits always are.

    Attributes:
        flat: the array that `all_reduce` reduces in place.
        exact: number of elements at the end of `flat` that are not gradients and must not be compressed.
        memory: rounding errors of the bucket's compressed reductions.
    """

    codec: Codec | None = None

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        room: int = 0,
        empty: Empty = np.empty,
        feedback: bool = False,
        *,
        weight_at: int | None = None,
        apart: bool = False,
    ) -> None:
        super().__init__()
        self.exact = 1 + len(parameters) + room
        self.memory = Memory(feedback=feedback)
        self._empty = empty
        self._parameters = tuple(parameters.values())
        self.dtype = self._parameters[0].data.dtype
        self._count = sum(p.data.size for p in self._parameters)
        self._weight_at = self._count if weight_at is None else weight_at
        self._has_homes = apart or self.dtype.itemsize == 2
        self._allocate()

    @property
    def divisible(self) -> bool:
        """True if the sums may be divided by the total weight while they are reduced."""
        return self.codec is None

    @property
    def nbytes(self) -> int:
        """Size of the message, in bytes."""
        return self.flat.nbytes

    def renew(self) -> None:
        """Allocates new memory, because an abandoned collective may still read and write the old, sums of nodes too."""
        self._forget_sums()
        self._allocate()
        self.memory = self.memory.successor()

    def reclaim(self) -> None:
        """Makes this bucket the home of the gradients again after an abandoned attempt, and removes its traces."""
        self._take_home()
        self.memory.undo()

    def commit(self) -> None:
        """Makes the rounding errors of the last reduction final."""
        self.memory.commit()

    def new_generation(self) -> None:
        """Resets whatever must be the same on all ranks; this class has nothing of the kind."""

    def _allocate(self) -> None:
        self._apart = np.empty(self._count, self.dtype) if self._has_homes else None
        self._use(self._new_memory())
        self._take_home()

    def _new_memory(self) -> _Memory:
        wire = np.dtype(np.float32) if self.dtype.itemsize == 2 else self.dtype
        flat: NDArray[Any] = self._empty(self._weight_at + self.exact, wire)
        homes = flat if self._apart is None else self._apart
        slots = [
            homes[end - p.data.size : end].reshape(p.data.shape)
            for p, end in zip(self._parameters, np.cumsum([p.data.size for p in self._parameters]), strict=True)
        ]
        return _Memory(flat, slots)

    def _use(self, memory: _Memory) -> None:
        self._in_use = memory
        self.flat, self._slots = memory

    def vacate(self) -> None:
        """Sends gradients to other memory until `reclaim` or `renew`, because an abandoned collective may still run."""
        for parameter in self._parameters:
            parameter._home = None

    def _take_home(self) -> None:
        """Makes this bucket the home of the gradients, and moves existing ones here."""
        gradients = [parameter.grad for parameter in self._parameters]
        self._offer_home()
        for parameter, gradient, slot in zip(self._parameters, gradients, self._slots, strict=True):
            if gradient is not None and gradient is not slot:
                np.copyto(slot, gradient)
                parameter._hold(slot)

    def _offer_home(self) -> None:
        """Makes this bucket the home of gradients that come from now on."""
        for parameter, slot in zip(self._parameters, self._slots, strict=True):
            slot.flags.writeable = True
            parameter._home = slot

    def pack(self, weight: float, *, alone: bool = False) -> None:
        """Completes the flat array with this rank's weight; from here to `unpack` its gradients are read-only.

        The gradients are already multiplied by the weight. A rank without a sample has weight 0 and no gradients, and
        sends zeros, because 0 times the NaN of an empty mean would be NaN. A rank that is `alone` sends nothing.
        """
        self.flat[self._weight_at] = weight
        for i, (parameter, slot) in enumerate(zip(self._parameters, self._slots, strict=True)):
            self._used[i] = parameter._pack(slot, weight)
            slot.flags.writeable = False  # makes `p.grad += g` an error, where it would give a wrong sum unnoticed
        self._encode(alone=alone)

    def _add_up(self, left: _Memory, right: _Memory, into: _Memory) -> None:
        with np.errstate(all="ignore"):  # infinities are valid here
            np.add(left.flat, right.flat, out=into.flat)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter._hold(None)

    def _clear_piggyback(self, memory: _Memory) -> None:
        memory.flat[self._weight_at + 1 + len(self._parameters) :] = 0

    def unpack(self, total: float, *, divided: bool = False) -> None:
        """Divides the reduced sums, unless they are `divided`, and gives used parameters their mean gradients.

        Every rank evaluates the same expression on the same bits (I5). A parameter that no rank used gets no gradient.
        If the weights of all ranks add up to 0, all see that total, so all raise StepOrderError.
        """
        for slot in self._slots:
            slot.flags.writeable = True
        if not total > 0:
            raise StepOrderError("the weights of all ranks add up to 0, so there are no samples to average")
        self._decode(total, divided=divided)
        for used, parameter, slot in zip(self._used, self._parameters, self._slots, strict=True):
            parameter._hold(slot if used > 0 else None)

    @property
    def total(self) -> NDArray[Any]:
        """The weight, shape [1]: before the reduction this rank's, after it the sum over all ranks."""
        return self.flat[self._weight_at : self._weight_at + 1]

    @property
    def _used(self) -> NDArray[Any]:
        """Use counts, shape [P]: before the reduction 1 if this rank used a parameter; after it above 0 if any did."""
        return self.flat[self._weight_at + 1 : self._weight_at + 1 + len(self._parameters)]

    @property
    def piggyback(self) -> NDArray[Any]:
        """The elements reserved for a piggyback."""
        return self.flat[self._weight_at + 1 + len(self._parameters) :]

    def _encode(self, *, alone: bool) -> None:
        """Fills the elements in front of the weight from the complete gradients."""
        del alone
        if self._apart is not None:
            self.flat[: self._weight_at] = self._apart

    def _decode(self, total: float, *, divided: bool) -> None:
        """Writes the means to the homes of the gradients."""
        sums = self.flat[: self._weight_at]
        if total != 1 and not divided:  # a division by 1 changes no bit
            np.divide(sums, total, out=sums)
        if self._apart is not None:
            self._apart[...] = sums
