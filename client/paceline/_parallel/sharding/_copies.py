"""This rank's copies of other ranks' shards, from which training goes on if those ranks are lost.

A copy is updated as the shard itself is: its owner sends the gradients that its optimizer is about to use, and the same
optimizer then updates the copy, with the same numbers. So a step costs one more message of S gradients and one more
update of S elements for each copy; values and the optimizer's arrays never travel. S is the size of a shard.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._group import Group
from paceline._links.fault import Suspicion
from paceline._parallel._optimizer_state import CopiedPiece, OptimizerState
from paceline._parallel.sharding._flat import Flat
from paceline._parallel.sharding._holdings import Holding, ShardMemory
from paceline._parallel.sharding._placement import CopyPartners
from paceline._parallel.sharding._sharded_model import ShardedModel
from paceline.errors import StepOrderError
from pacelinepb.v1.errors_pb2 import ErrorReason

Arrays = dict[np.dtype[Any], NDArray[Any]]
"""For each dtype, the gradients of one shard in all flat arrays, one after the other, and then some of its values."""

_COMPARED = 256
"""Elements of each flat array that are compared in a step; it takes S / 256 steps to compare them all."""

_TOLERANCE = 0.01
"""Greatest difference to a copy, as a fraction of the greatest of the values that are compared. Processors of different
kinds round an update differently, so bits may differ."""


class ShardCopies:
    """All copies that a rank has, by the share that they are of: the shard's index and the number of shards.

    The models are the outermost wrappers, with all optimizers of their pieces.
    """

    def __init__(self, models: Sequence[ShardedModel], optimizers: Sequence[OptimizerState]) -> None:
        self._models = models
        self._optimizers = optimizers
        self._all: dict[tuple[int, int], _Copy] = {}
        self._partners: dict[tuple[int, int], CopyPartners] = {}
        """For each copy that is updated, the ranks with which this one exchanges gradients."""
        self._outgoing: Arrays = {}
        self._sent: list[tuple[Flat, list[bool]]] = []
        """The flat arrays whose gradients were sent for the next update, and which pieces have one."""
        self._compared = 0
        """The number of comparisons so far: each looks at the next elements."""

    def __contains__(self, share: object) -> bool:
        return share in self._all

    @property
    def updated(self) -> tuple[tuple[int, int], ...]:
        """The shares of the copies that each step updates; the others are of an earlier view."""
        return tuple(self._partners)

    def holdings(self) -> dict[tuple[int, int], Holding]:
        """Returns the arrays of all copies, by share; those that are updated come first."""
        return {share: self._all[share].memory.target for share in dict.fromkeys((*self._partners, *self._all))}

    def make(self, share: tuple[int, int]) -> ShardMemory:
        """Allocates memory for a copy, for the caller to fill and to pass to `add`."""
        return ShardMemory(self._models, self._optimizers, share, keeps_full=False)

    def add(self, share: tuple[int, int], partners: CopyPartners, memory: ShardMemory | None = None) -> None:
        """Has every step update the copy of a share from now on; without `memory`, the one that is here."""
        if memory is not None:
            self._all[share] = _Copy(memory)
        self._partners[share] = partners
        self._compared = 0  # the same on all ranks, which begin together

    def retire(self) -> None:
        """Ends all updates of copies, because the view has changed; their values stay."""
        self._partners.clear()

    def drop(self, share: tuple[int, int]) -> None:
        """Drops the copy of a share, if there is one."""
        self._all.pop(share, None)
        self._partners.pop(share, None)

    def drop_retired(self) -> None:
        """Drops all copies that are not updated."""
        self._all = {share: self._all[share] for share in self._partners}
        if not self._all:
            self._outgoing.clear()

    def send_gradients(self, group: Group) -> None:
        """Sends this rank's gradients to the ranks that have copies of its shard, and receives those for its copies.

        A collective. It also compares a few elements of each copy with its owner's.

        Raises:
            StepOrderError: a shard has other values than its copy, on all ranks.
            UnsupportedOp: an optimizer cannot update copies; see `OptimizerState.check_copying`.
            CollectiveMismatch: parameters have a gradient on one rank and not on another.
            PacelineError: the generation has failed.
        """
        if not self._partners:
            return
        for optimizer in self._optimizers:
            optimizer.check_copying()
        self._sent = []
        sizes: dict[np.dtype[Any], int] = {}
        flags = bytearray()
        for flat in _flats(self._models):
            used = [piece.grad is not None for piece in flat.pieces]
            flags += bytes(used)
            if any(used):
                self._sent.append((flat, used))
                sizes[flat.dtype] = sizes.get(flat.dtype, 0) + flat.layout.shard_size + _COMPARED
        _fit(self._outgoing, sizes, group)
        starts = dict.fromkeys(sizes, 0)
        for flat, _ in self._sent:
            start = starts[flat.dtype]
            end = starts[flat.dtype] = start + flat.layout.shard_size
            flat.pack_gradients(self._outgoing[flat.dtype][start:end])
        compared = [(flat, *self._window(flat, starts)) for flat, _ in self._sent]
        for flat, window, place in compared:
            self._outgoing[flat.dtype][place] = flat.shard[window]
        label = f"copies-{len(self._partners)}-{zlib.crc32(flags):08x}"
        works = []
        for share, partners in self._partners.items():
            into = self._all[share].gradients
            _fit(into, sizes, group)
            for dtype, array in self._outgoing.items():
                options: dict[str, Any] = {"out": into[dtype], "label": label}
                works.append(group.shift(array, partners.to, partners.source, async_op=True, **options))
        for work in works:
            work.wait()
        for share, partners in self._partners.items():
            copy = self._all[share]
            for flat, window, place in compared:
                if not _are_close(copy.values(flat)[window], copy.gradients[flat.dtype][place]):
                    self._refuse(group, partners.source)
        self._compared += 1

    def update(self) -> None:
        """Updates all copies as the optimizers are about to update this rank's shard; call it before they do so."""
        sent, self._sent = self._sent, []
        for share in self._partners:
            self._all[share].update(self._optimizers, sent)

    def _window(self, flat: Flat, starts: dict[np.dtype[Any], int]) -> tuple[slice, slice]:
        """Returns which elements of each shard of an array are compared now, and their place in the message.

        `starts` is where the next values begin, by dtype.
        """
        size, start = flat.layout.shard_size, starts[flat.dtype]
        first = self._compared % max(1, -(-size // _COMPARED)) * _COMPARED
        window = slice(first, min(first + _COMPARED, size))
        starts[flat.dtype] += _COMPARED
        return window, slice(start, start + window.stop - window.start)

    def _refuse(self, group: Group, owner: int) -> None:
        """Ends the step on all ranks, because a copy is not what it should be."""
        mesh = group._core.mesh
        text = (
            f"the copy of the shard of {mesh.peers[owner]} on {mesh.peers[mesh.rank]} differs from the shard: "
            "during session.steps only the optimizer of the training state may change the parameters of a model that "
            "FSDP shards, on all ranks alike. To change them otherwise, pass FSDP redundancy=1, which makes no copies"
        )
        mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_STEP_DIFFERS, None, 0, text))
        mesh.fault.check()
        raise StepOrderError(text)


class _Copy:
    """One copy of a shard, and memory for the gradients of its owner."""

    def __init__(self, memory: ShardMemory) -> None:
        self.memory = memory
        self.gradients: Arrays = {}
        self._values = {id(flat): room.shard for flat, room in memory.pairs()}

    def values(self, flat: Flat) -> NDArray[Any]:
        """Returns the copied shard of a flat array, shape [S]."""
        return self._values[id(flat)]

    def update(self, optimizers: Sequence[OptimizerState], sent: Sequence[tuple[Flat, list[bool]]]) -> None:
        """Has each optimizer update the copy with the gradients that have come."""
        held, gradients = self.memory.target, dict[int, NDArray[Any]]()
        starts = dict.fromkeys(self.gradients, 0)
        for flat, used in sent:
            start = starts[flat.dtype]
            starts[flat.dtype] += flat.layout.shard_size
            for piece, place, is_used in zip(flat.pieces, flat.layout.pieces(held.share[0]), used, strict=True):
                if is_used:
                    gradients[id(piece)] = self.gradients[flat.dtype][start + place.start : start + place.stop]
        for optimizer in optimizers:
            pieces = {
                path: CopiedPiece(held.values[id(piece)].values, gradients.get(id(piece)))
                for path, piece in optimizer.parameters.items()
                if id(piece) in held.values
            }
            optimizer.update_copy(pieces, self.memory.arrays(optimizer))


def _flats(models: Sequence[ShardedModel]) -> Iterator[Flat]:
    """Yields the flat arrays that are cut into shards, in the same order on every rank."""
    for model in models:
        for part in model.parts():
            if part.is_sharded:
                yield from part.unit.flats


def _fit(memory: Arrays, sizes: Mapping[np.dtype[Any], int], group: Group) -> None:
    """Makes arrays of these sizes, unless they exist: they stay the same from step to step."""
    if {dtype: array.size for dtype, array in memory.items()} != sizes:
        memory.clear()
        memory.update({dtype: group.empty(size, dtype) for dtype, size in sizes.items()})


def _are_close(here: NDArray[Any], there: NDArray[Any]) -> bool:
    """True if a copy's values equal its owner's, but for rounding."""
    most = float(np.abs(there).max(initial=0.0, where=np.isfinite(there)))
    return bool(np.allclose(here, there, rtol=0.0, atol=_TOLERANCE * most, equal_nan=True))
