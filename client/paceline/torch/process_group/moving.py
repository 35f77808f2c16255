"""Operations that move tensors between ranks as they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

from paceline.arrays import Array
from paceline.errors import SizeMismatch
from paceline.torch._tensors import elements_of, landing
from paceline.torch._torch_work import Operation
from paceline.torch.process_group.core import Core, Finish

__all__ = ["Moving"]


class Moving(Core):
    """broadcast, all_gather, gather, scatter, all_to_all, barrier: see `torch.distributed`."""

    def broadcast(self, tensors: Sequence[Any], opts: Any = None) -> Operation:
        """In place."""
        opts = opts or BroadcastOptions()
        root = opts.rootRank
        targets = [landing(tensor, filled=self.rank() == root) for tensor in tensors]
        calls = [partial(self._group.broadcast, target.array, root=root, out=target.array) for target in targets]
        return self._run("broadcast", opts, calls, tensors, [target.finish for target in targets])

    def allgather(self, outs: Sequence[Sequence[Any]], ins: Sequence[Any], opts: Any = None) -> Operation:
        """Everybody's tensor, each in one of its own; sizes may differ, where outputs say so."""
        opts = opts or AllgatherOptions()
        calls, finishes = [], []
        for parts, x in zip(outs, ins, strict=True):
            whole, spread = self._parts_of(parts, elements_of(x))
            uneven = len({part.numel() for part in parts}) > 1
            calls.append(partial(self._group.all_gather, elements_of(x), uneven=uneven, out=whole))
            finishes.append(spread)
        return self._run("all_gather", opts, calls, [part for parts in outs for part in parts], finishes)

    def allgather_coalesced(self, outs: Sequence[Sequence[Any]], ins: Sequence[Any], opts: Any = None) -> Operation:
        """As `allgather`, with the lists the other way round: `outs[rank][i]`."""
        return self.allgather(list(zip(*outs, strict=True)), ins, opts)

    def all_gather_single(self, out: Any, x: Any, opts: Any = None) -> Operation:
        """Everybody's tensor, one behind the other; without a copy where both are contiguous."""
        return self.all_gather_single_coalesced([out], [x], opts)

    def all_gather_single_coalesced(self, outs: Sequence[Any], xs: Sequence[Any], opts: Any = None) -> Operation:
        """As `all_gather_single`, for several tensors."""
        opts = opts or AllgatherOptions()
        calls, finishes = [], []
        for out, x in zip(outs, xs, strict=True):
            if out.numel() != x.numel() * self.size():
                raise SizeMismatch(f"all_gather: {out.numel()} elements for {x.numel()} of each of {self.size()} ranks")
            target = landing(out)
            calls.append(partial(self._group.all_gather, elements_of(x), out=target.array))
            finishes.append(target.finish)
        return self._run("all_gather", opts, calls, outs, finishes)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outs: Sequence[Sequence[Any]], ins: Sequence[Any], opts: Any = None) -> Operation:
        """As `allgather`, to the root alone; others give no outputs."""
        opts = opts or GatherOptions()
        (x,) = ins
        array, results, finish, whole = elements_of(x), [], None, None
        if self.rank() == opts.rootRank:
            (parts,) = outs
            results = list(parts)
            whole, finish = self._parts_of(parts, array)
        call = partial(self._group.gather, array, root=opts.rootRank, out=whole)
        return self._run("gather", opts, [call], results, [finish])

    def scatter(self, outs: Sequence[Any], ins: Sequence[Sequence[Any]], opts: Any = None) -> Operation:
        """Rank r gets the root's r-th tensor; others give no inputs."""
        opts = opts or ScatterOptions()
        (out,) = outs
        target, arrays = landing(out), None
        if self.rank() == opts.rootRank:
            (parts,) = ins
            if len(parts) != self.size():
                raise SizeMismatch(f"scatter: {len(parts)} tensors for {self.size()} ranks")
            arrays = [elements_of(part) for part in parts]
        call = partial(self._group.scatter, arrays, root=opts.rootRank, out=target.array)
        return self._run("scatter", opts, [call], outs, [target.finish])

    def all_to_all_single(
        self, out: Any, x: Any, out_splits: Sequence[int], in_splits: Sequence[int], opts: Any = None
    ) -> Operation:
        """Part r of axis 0 goes to rank r; parts are equal, or of so many rows."""
        opts = opts or AllToAllOptions()
        target = landing(out)
        call = partial(
            self._group.all_to_all,
            elements_of(x),
            send_counts=_elements(x, in_splits, self.size()),
            recv_counts=_elements(out, out_splits, self.size()),
            out=target.array,
        )
        return self._run("all_to_all", opts, [call], [out], [target.finish])

    alltoall_base = all_to_all_single

    def alltoall(self, outs: Sequence[Any], ins: Sequence[Any], opts: Any = None) -> Operation:
        """Tensor r goes to rank r; sizes may differ."""
        opts = opts or AllToAllOptions()
        arrays = [elements_of(x) for x in ins]
        if len(arrays) != self.size() or len(outs) != self.size():
            raise SizeMismatch(f"all_to_all: {len(arrays)} and {len(outs)} tensors for {self.size()} ranks")
        whole, finish = self._parts_of(outs, arrays[0])
        call = partial(
            self._group.all_to_all,
            np.concatenate(arrays),
            send_counts=[array.size for array in arrays],
            recv_counts=[elements_of(out).size for out in outs],
            out=whole,
        )
        return self._run("all_to_all", opts, [call], outs, [finish])

    def barrier(self, opts: Any = None) -> Operation:
        """Over when all ranks have called it."""
        return self._run("barrier", opts or BarrierOptions(), [partial(self._group.barrier)], [])

    def _parts_of(self, parts: Sequence[Any], like: Array) -> tuple[Array, Finish]:
        """One array for tensors side by side, and what brings its parts to them."""
        if len(parts) != self.size():
            raise SizeMismatch(f"{len(parts)} tensors for {self.size()} ranks")
        targets = [landing(part) for part in parts]
        ends = np.cumsum([target.array.size for target in targets])
        whole: Array = np.empty(int(ends[-1]), like.dtype)

        def spread() -> None:
            for target, part in zip(targets, np.split(whole, ends[:-1]), strict=True):
                target.array[...] = part
                if target.finish is not None:
                    target.finish()

        return whole, spread


def _elements(tensor: Any, splits: Sequence[int], world: int) -> list[int] | None:
    """How many elements of the tensor, as NumPy sees it, each part of axis 0 has.

    Counts are always given: a rank whose parts are equal may meet one whose parts are not.
    """
    array = elements_of(tensor)
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % world:
            raise SizeMismatch(f"all_to_all: {rows} rows have no {world} equal parts")
        splits = [rows // world] * world
    if sum(splits) != rows or len(splits) != world:
        raise SizeMismatch(f"all_to_all: parts of {list(splits)} rows do not make {rows} rows for {world} ranks")
    of_a_row = array.size // rows if rows else 0
    return [count * of_a_row for count in splits]
