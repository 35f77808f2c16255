"""The memory of one unit's parameters of one dtype: this rank's shard, the whole array while needed, and gradients.

There are two sorts of `Parameter` objects. The module's *parameters* are views of the whole array, and have no values
while it does not exist. The *pieces* are views of this rank's shard, shape [elements here]: optimizers train them, and
reduced gradients arrive in them. Where one rank has everything, pieces have the parameters' shapes and memory.

The callers decide when arrays are gathered and dropped. Only `fetch`, `gather` and `summon` communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._group import Group
from paceline._parallel._buckets import Empty
from paceline._parallel._parameter import Parameter
from paceline._parallel.sharding._flat_transport import FlatTransport, Gathering
from paceline._parallel.sharding._placement import FlatLayout, Placement
from paceline.errors import PacelineError


class Gradients:
    """The gradients of one flat array before the reduction: this rank's own, whole, laid out like the values.

    Each gradient gets its place in one array, so that the module's write is the only copy. The memory exists from the
    unit's backward pass until its gradients are sent; under `no_sync` that is in a later pass. It is a tensor on a
    device if a `FlatTransport` sums gradients there.
    """

    def __init__(self, parameters: Sequence[Parameter], layout: FlatLayout, empty: Callable[[int, Any], Any]) -> None:
        self._parameters = parameters
        self._layout = layout
        self._empty = empty
        self._array: Any = None
        self._spare: list[NDArray[Any]] = []

    @property
    def are_wanted(self) -> bool:
        """True if any parameter takes a gradient."""
        return any(p.requires_grad for p in self._parameters)

    def open(self) -> None:
        """Allocates the array if there is none, and moves existing gradients into it."""
        if self._array is None and self.are_wanted:
            new = self._spare.pop() if self._spare else self._empty(self._layout.padded, self._parameters[0].dtype)
            self._array = new
            for parameter, slot in self._slots(self._array):
                if not parameter.requires_grad:
                    continue
                if parameter.grad is not None:
                    parameter._pack(slot, 1)
                parameter._home = slot

    def used_flags(self) -> list[bool]:
        """Returns for each parameter whether it takes a gradient and has one here."""
        return [p.requires_grad and p.grad is not None for p in self._parameters]

    def take(self) -> Any:
        """Takes all gradients from the parameters: shape [W * S], zeros where there is none."""
        self.open()
        array = self._array
        for parameter, slot in self._slots(array):
            if parameter.requires_grad:
                parameter._pack(slot if parameter._home is None else parameter._home, 1)
            else:
                slot[...] = 0
        array[self._layout.size :] = 0
        self.drop()
        return array

    def reuse(self, arrays: Iterable[NDArray[Any]]) -> None:
        """Takes back arrays that `take` has returned, as memory for later gradients."""
        self._spare.extend(arrays)

    def free(self) -> None:
        """Frees the memory that was taken back."""
        self._spare.clear()

    def drop(self) -> None:
        """Drops the gradients."""
        self._array = None
        for parameter in self._parameters:
            parameter._hold(None)
            parameter._home = None

    def _slots(self, array: Any) -> Iterator[tuple[Parameter, Any]]:
        for parameter, place in zip(self._parameters, self._layout.places, strict=True):
            yield parameter, array[place].reshape(parameter.shape)


@dataclass(frozen=True)
class Room:
    """The memory of a flat array under one placement.

    Attributes:
        shard: this rank's shard, shape [S]; in new memory only the padding is filled.
        full: the whole array, of which `shard` is a view; None if it is not kept.
        is_whole: True if all values in `full` are valid.
    """

    placement: Placement
    layout: FlatLayout
    shard: NDArray[Any]
    full: NDArray[Any] | None
    is_whole: bool

    def runs(self) -> Iterator[tuple[NDArray[Any], int]]:
        """Yields for each parameter its elements in this shard, shape [n], and the index of the first."""
        part = self.placement.shard
        for place, start in zip(self.layout.pieces(part), self.layout.starts(part), strict=True):
            yield self.shard[place], start


class Flat:
    """The parameters of a unit that have one dtype, in one flat array. S, W: see `FlatLayout`.

    Args:
        parameters: the module's parameters by path. Their values move into this object's memory.
        wire: dtype of values and gradients on the wire; None for their own. Shards keep their precision.
        empty: allocates memory that links can send without a copy.
        computes: whether the module computes with values in the dtype `wire`.

    Attributes:
        pieces: this rank's pieces of the parameters.
        shard: this rank's shard, shape [S], in full precision.
        gradients: gradients of this rank alone, before the reduction.
        is_whole: True if the parameters have values that can be used.
        is_spread: True if other ranks hold other shards.
        on_device: True if the module has copies of the values on a device.
        transport: gathers values and sums gradients on the device; None if links do it on the host.
        given: True if the shard was set on purpose before the ranks agreed on initial values.
    """

    label = ""
    """Label of the array's collectives, the same on all ranks, so that arrays of equal size are not confused."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        placement: Placement,
        wire: np.dtype[Any] | None,
        empty: Empty,
        *,
        computes: bool = False,
    ) -> None:
        self._named = parameters
        self.parameters = tuple(parameters.values())
        self.dtype = self.parameters[0].dtype
        narrower = wire is not None and self.dtype.kind == "f" and wire.itemsize < self.dtype.itemsize
        self.wire = wire if narrower else None
        self._shown = self.wire if computes and self.wire is not None else self.dtype
        """The dtype of the module's parameters while it runs."""
        self.on_device = any(p.is_on_device for p in self.parameters)
        self.given = False
        self.transport: FlatTransport | None = None
        self._empty = empty
        self._stand(placement, self.laid_out(len(placement.shards)))
        self._incoming: Gathering | None = None
        self._pinned: NDArray[Any] | None = None
        """A copy of this rank's shard from before `summon`; None if not summoned."""

        # An array that is freed after first use need not lie in memory that links can send from.
        self._full: NDArray[Any] | None = (empty if self._in_place else np.empty)(self.layout.padded, self.dtype)
        self._full[self.layout.size :] = 0
        for parameter, view in zip(self.parameters, self.views(self._full), strict=True):
            view[...] = parameter.data
            parameter._place(view)
            parameter._pieced = True
        self.is_whole = True
        self.shard: NDArray[Any] = self._full[self._own]
        self.pieces = tuple(
            p._cut(self.shard[place] if self.is_spread else p.data)
            for p, place in zip(self.parameters, self._places, strict=True)
        )

    def laid_out(self, shards: int) -> FlatLayout:
        """Returns the layout of the parameters if they are cut into `shards` shards."""
        return FlatLayout([p.shape for p in self.parameters], shards)

    def room(self, placement: Placement) -> Room:
        """Allocates memory for another placement; changes nothing."""
        layout = self.laid_out(len(placement.shards))
        own = layout.own(placement.shard)
        full: NDArray[Any] | None = None
        if (placement.keeps_full and self.wire is None and not self.on_device) or layout.world == 1 or not layout.size:
            full = self._empty(layout.padded, self.dtype)
            full[layout.size :] = 0
            if self._full is not None and layout.world > 1:  # other shards have old values until they are gathered
                full[: layout.size] = self._full[: layout.size]
            shard = full[own]
        else:
            shard = np.empty(layout.shard_size, self.dtype)
            shard[max(layout.size - own.start, 0) :] = 0
        return Room(placement, layout, shard, full, layout.world == 1 or not layout.size)

    def move(self, room: Room) -> None:
        """Makes the filled memory of a room this rank's shard; leaves the old memory as it is."""
        self.drop()
        self.gradients.drop()
        self._stand(room.placement, room.layout)
        self.shard, self._full, self._pinned = room.shard, room.full, None
        self.is_whole = room.is_whole
        self.given = False
        for parameter, place in zip(self.parameters, self.layout.places, strict=True):
            parameter._place(None if room.full is None else room.full[place].reshape(parameter.shape))
        for parameter, piece, place in zip(self.parameters, self.pieces, self._places, strict=True):
            piece._move(self.shard[place] if self.is_spread else parameter.data)
        if self._is_apart:
            self._forget()

    def initial(self) -> Iterator[NDArray[Any]]:
        """Yields each parameter's whole values, writable, while the ranks agree on initial values."""
        full = self._full if self.is_spread else self.shard
        assert full is not None
        return self.views(full)

    def keep_shard(self) -> None:
        """Keeps only this rank's shard, once the ranks have agreed on initial values."""
        if not self.is_spread:
            if self._is_apart:
                self._forget()
            return
        if not self._in_place:
            self.shard = self.shard.copy()
            for piece, place in zip(self.pieces, self._places, strict=True):
                piece._place(self.shard[place])
        if self._is_apart:
            self._forget()
        self.release()
        self.is_whole = False

    def fetch(self, ranks: Group) -> None:
        """Starts to gather the whole array, unless it is here already or being gathered."""
        if self.is_whole or self._incoming is not None or not self.is_spread:
            return
        if self.transport is not None:
            self._incoming = self.transport.gather(self.shard, self.travels_in, self.label)
            return
        if self._in_place:
            assert self._full is not None
            whole, sent = self._full, self.shard
        else:
            # Copy this rank's shard now, so that no later change is partly sent.
            whole = ranks.empty(self.layout.padded, self.travels_in)
            sent = whole[self._own]
            sent[...] = self.shard
        work = ranks.all_gather(sent, out=whole, label=self.label, async_op=True)
        self._incoming = Gathering(whole, sent, work)

    def wait(self) -> None:
        """Waits for the gather that `fetch` started; then the parameters have values."""
        if self._incoming is not None:
            incoming, self._incoming = self._incoming, None
            incoming.work.wait()
            if self.transport is None:
                self._install(incoming.whole, self._shown)
            else:
                self._show(incoming.whole)
        elif not self.is_whole and not self.is_spread:
            self._install(self.shard, self._shown)

    def was_changed(self) -> bool:
        """True if this rank's shard has changed since `fetch` sent it."""
        if self._incoming is None or self._in_place:
            return False
        sent = self._incoming.sent
        now = self.shard.astype(sent.dtype, copy=False)
        return not np.array_equal(sent.view(np.uint8), now.view(np.uint8))

    def release(self) -> None:
        """Frees the whole array when it is no longer needed; does nothing if the placement keeps it."""
        if self.is_whole and not self._keeps and self._pinned is None:
            self._forget()

    def expire(self) -> None:
        """Frees the whole array and drops a running gather: they are out of date, because shards have changed."""
        if self._pinned is None:
            self.drop()
            self.is_whole = not (self.is_spread or self._is_apart)

    def drop(self) -> None:
        """Drops a running gather, and frees the whole array unless the placement keeps it."""
        incoming, self._incoming = self._incoming, None
        if incoming is not None and self._in_place:
            # The gather writes into the kept array, so wait for its end. All ranks have started it, so it does end.
            with suppress(PacelineError):  # the caller has this error already, or gets it next
                incoming.work.wait()
        self.release()

    def gather(self, ranks: Group | None) -> NDArray[Any]:
        """Returns the whole array in full precision, with padding, shape [W * S]; gathers it unless it is here."""
        if self._pinned is not None:
            assert self._full is not None
            self._take_back()
            return self._full
        if ranks is None or not self.is_spread:
            return self.shard
        fresh: NDArray[Any] = ranks.empty(self.layout.padded, self.dtype)
        fresh[self._own] = self.shard
        ranks.all_gather(fresh[self._own], out=fresh, label=self.label)
        return fresh

    def summon(self, ranks: Group | None) -> None:
        """Gathers the whole array in full precision, and keeps it until `dismiss`."""
        self.drop()
        fresh = self.gather(ranks)
        self._pinned = self.shard.copy() if self.is_spread or self.on_device else self.shard
        if self._is_apart:
            self._full = None  # its dtype is too narrow, or values come back to it from a device
        self._install(fresh.copy() if self.on_device else fresh, self.dtype)

    def dismiss(self) -> None:
        """Copies changes in the whole array to this rank's shard, and frees the whole array."""
        if self._pinned is None:
            return
        before, self._pinned = self._pinned, None
        assert self._full is not None
        self._take_back()
        if (self.is_spread and not self._in_place) or self.on_device:
            now = self._full[self._own]
            bits, bits_before = (a.view(np.uint8).reshape(a.size, a.itemsize) for a in (now, before))
            changed = (bits != bits_before).any(axis=1)
            np.copyto(self.shard, now, where=changed)  # not the others: an optimizer may have changed them in the shard
        if self._is_apart:
            self._forget()
        self.expire()

    @property
    def travels_in(self) -> np.dtype[Any]:
        """The dtype on the wire."""
        return self.dtype if self.wire is None else self.wire

    @property
    def rounds_on_the_way(self) -> bool:
        """True if values are rounded only where they travel."""
        return self.wire is not None and self._shown == self.dtype

    def gathered_gradients(self, ranks: Group | None) -> list[NDArray[Any]] | None:
        """Gathers the reduced gradients of whole parameters, zeros for those without; None if none has one."""
        gradients = [piece.grad for piece in self.pieces]
        if all(gradient is None for gradient in gradients):
            return None
        if ranks is None or not self.is_spread:
            return [np.zeros(0, self.dtype) if gradient is None else gradient for gradient in gradients]
        fresh: NDArray[Any] = ranks.empty(self.layout.padded, self.dtype)
        self.pack_gradients(fresh[self._own])
        ranks.all_gather(fresh[self._own], out=fresh, label=self.label)
        return list(self.views(fresh))

    def pack_gradients(self, into: NDArray[Any]) -> None:
        """Copies the reduced gradients of this rank's shard, shape [S]; zeros where there is none."""
        into.fill(0)
        for piece, place in zip(self.pieces, self._places, strict=True):
            if (gradient := piece.grad) is not None:
                into[place] = gradient.reshape(-1)

    @property
    def is_summoned(self) -> bool:
        """True between `summon` and `dismiss`."""
        return self._pinned is not None

    def path_with_gradient(self) -> str | None:
        """Returns the path of the first parameter whose gradient is not reduced; None if there is none."""
        return next((path for path, p in self._named.items() if p.grad is not None), None)

    def put_gradients(self, shard: NDArray[Any], used: NDArray[np.bool_]) -> None:
        """Adds this rank's shard of the gradients, shape [S], to the gradients of the pieces that any rank used."""
        for piece, place, any_use in zip(self.pieces, self._places, used, strict=True):
            if any_use:
                gradient = shard[place].reshape(piece.shape)
                if piece.grad is not None:
                    np.add(gradient, piece.grad, out=gradient)
                piece._hold(gradient)

    def set_whole(self, values: Sequence[NDArray[Any]]) -> None:
        """Sets all elements that this rank holds from arrays of the parameters' shapes."""
        for parameter, piece, start, whole in zip(self.parameters, self.pieces, self.starts, values, strict=True):
            if parameter._data is not None:
                parameter.data = whole
            if self.is_spread or self._is_apart:
                piece.data = whole.reshape(-1)[start : start + piece.data.size].reshape(piece.shape)

    def views(self, full: Any) -> Iterator[Any]:
        """Yields a view of each parameter in a whole array or tensor, in the parameter's shape."""
        for parameter, place in zip(self.parameters, self.layout.places, strict=True):
            yield full[place].reshape(parameter.shape)

    def _stand(self, placement: Placement, layout: FlatLayout) -> None:
        """Sets this rank's placement, and everything that depends on it."""
        self.layout = layout
        self.is_spread = layout.world > 1 and layout.size > 0
        self.gradients = Gradients(self.parameters, layout, self._empty_gradients)
        self._own = layout.own(placement.shard)
        self._places = layout.pieces(placement.shard)
        self.starts = layout.starts(placement.shard)
        self._keeps = placement.keeps_full or not (self.is_spread or self._is_apart)
        self._in_place = placement.keeps_full and self.wire is None and not self.on_device
        """True if the shard is a view of the whole array, so that this is gathered in place."""

    @property
    def _is_apart(self) -> bool:
        """True if the module computes in a narrower dtype or on a device, and so never uses the shard itself."""
        return self._shown != self.dtype or self.on_device

    def _forget(self) -> None:
        """Frees the whole array."""
        self._full = None
        self.is_whole = False
        for parameter in self.parameters:
            parameter._place(None)

    def _take_back(self) -> None:
        """Copies the values that a module has on a device to the whole array, which may have changed there."""
        for parameter in self.parameters if self.on_device else ():
            parameter._take_back()

    def _empty_gradients(self, count: int, dtype: np.dtype[Any]) -> Any:
        return (self._empty if self.transport is None else self.transport.empty)(count, dtype)

    def _show(self, whole: Any) -> None:
        """Gives the parameters their values in a tensor on the device."""
        assert self.transport is not None
        self.transport.keep(whole)
        self._full = None
        for parameter, view in zip(self.parameters, self.views(whole), strict=True):
            parameter._place(view)
        self.is_whole = True

    def _install(self, fresh: NDArray[Any], dtype: np.dtype[Any]) -> None:
        if self._keeps and self._full is not None:
            if fresh is not self._full:
                np.copyto(self._full, fresh, casting="same_kind")
            for parameter in self.parameters if self.on_device else ():
                parameter._place(parameter._data)
        else:
            self._full = fresh.astype(dtype, copy=False)
            for parameter, view in zip(self.parameters, self.views(self._full), strict=True):
                parameter._place(view)
        self.is_whole = True
