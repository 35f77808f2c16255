"""Operations that combine the tensors of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ReduceOptions,
    ReduceScatterOptions,
)
from torch.distributed import ReduceOp

from paceline.errors import SizeMismatch, UnsupportedOp
from paceline.torch._tensors import Landing, elements_of, is_number, landing, tensor_of
from paceline.torch._torch_work import Operation, seconds_of
from paceline.torch.process_group.core import Call, Core, Finish

__all__ = ["Reducing"]

_OPS = {
    ReduceOp.RedOpType.SUM: "sum",
    ReduceOp.RedOpType.AVG: "mean",
    ReduceOp.RedOpType.PRODUCT: "prod",
    ReduceOp.RedOpType.MIN: "min",
    ReduceOp.RedOpType.MAX: "max",
    ReduceOp.RedOpType.BAND: "band",
    ReduceOp.RedOpType.BOR: "bor",
    ReduceOp.RedOpType.BXOR: "bxor",
}


class Reducing(Core):
    """all_reduce, reduce, reduce_scatter: see `torch.distributed`."""

    def allreduce(self, tensors: Sequence[Any], opts: Any = None) -> Operation:
        """In place; each tensor by itself. Sparse ones come out coalesced."""
        opts = opts or AllreduceOptions()
        if any(tensor.is_sparse for tensor in tensors):
            return self._all_reduce_sparse(tensors, opts)
        op = _op(opts, tensors)
        targets = [landing(tensor, filled=True) for tensor in tensors]
        named = [self._named(op, tensor, target) for tensor, target in zip(tensors, targets, strict=True)]
        calls = [
            partial(self._group.all_reduce, target.array, op=op, out=target.array)
            for target, (op, _) in zip(targets, named, strict=True)
        ]
        return self._run("all_reduce", opts, calls, tensors, [finish for _, finish in named])

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Operation:
        """As `allreduce`."""
        return self.allreduce(tensors, opts or AllreduceCoalescedOptions())

    def reduce(self, tensors: Sequence[Any], opts: Any = None) -> Operation:
        """The root's tensors are replaced by the result; those of others stay."""
        opts = opts or ReduceOptions()
        op, root = _op(opts, tensors), opts.rootRank
        targets = [landing(tensor, filled=True) for tensor in tensors]
        at = self.rank() == root
        named = [self._named(op, tensor, target) for tensor, target in zip(tensors, targets, strict=True)]
        calls = [
            partial(self._group.reduce, target.array, op=op, root=root, out=target.array if at else None)
            for target, (op, _) in zip(targets, named, strict=True)
        ]
        return self._run("reduce", opts, calls, tensors, [finish for _, finish in named] if at else [])

    def reduce_scatter(self, outs: Sequence[Any], ins: Sequence[Sequence[Any]], opts: Any = None) -> Operation:
        """Rank r gets the sum of everybody's r-th tensor; those of one place must be alike, others may differ."""
        opts = opts or ReduceScatterOptions()
        asked, finishes = _op(opts, outs), []
        calls: list[Call] = []
        for out, parts in zip(outs, ins, strict=True):
            if len(parts) != self.size():
                raise SizeMismatch(f"reduce_scatter: {len(parts)} tensors for {self.size()} ranks")
            target = landing(out)
            op, finish = self._named(asked, out, target)
            finishes.append(finish)
            arrays = [elements_of(part) for part in parts]
            if len({array.size for array in arrays}) == 1:
                calls.append(partial(self._group.reduce_scatter, np.concatenate(arrays), op=op, out=target.array))
            else:
                calls += [
                    partial(
                        self._group.reduce, array, op=op, root=rank, out=target.array if rank == self.rank() else None
                    )
                    for rank, array in enumerate(arrays)
                ]
        return self._run("reduce_scatter", opts, calls, outs, finishes)

    def reduce_scatter_single(self, out: Any, x: Any, opts: Any = None) -> Operation:
        """Rank r gets the sum of everybody's r-th part of one tensor; without a copy where both are contiguous."""
        return self.reduce_scatter_single_coalesced([out], [x], opts)

    def reduce_scatter_single_coalesced(self, outs: Sequence[Any], xs: Sequence[Any], opts: Any = None) -> Operation:
        """As `reduce_scatter_single`, for several tensors."""
        opts = opts or ReduceScatterOptions()
        asked, calls, finishes = _op(opts, outs), [], []
        for out, x in zip(outs, xs, strict=True):
            if x.numel() != out.numel() * self.size():
                raise SizeMismatch(f"reduce_scatter: {x.numel()} elements for {self.size()} ranks of {out.numel()}")
            target = landing(out)
            op, finish = self._named(asked, out, target)
            calls.append(partial(self._group.reduce_scatter, elements_of(x), op=op, out=target.array))
            finishes.append(finish)
        return self._run("reduce_scatter", opts, calls, outs, finishes)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _named(self, op: str, tensor: Any, target: Landing) -> tuple[str, Finish | None]:
        """The operation of a tensor, and what is left to do with its result: a mean of whole numbers is truncated.

        Their sum has the tensor's dtype, and wraps as that of SUM does: a wider one would be more bytes to send.
        """
        if op != "mean" or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            return op, target.finish

        def finish() -> None:
            if target.finish is not None:
                target.finish()
            tensor.detach().div_(self.size(), rounding_mode="trunc")

        return "sum", finish

    def _all_reduce_sparse(self, tensors: Sequence[Any], opts: Any) -> Operation:
        """Sums of sparse tensors: everybody's elements are gathered, and added up where they meet."""
        if _op(opts, ()) != "sum":
            raise UnsupportedOp("all_reduce of a sparse tensor adds up, and does nothing else")
        for tensor in tensors:
            mine = tensor.detach().coalesce()
            indices, values = (self._gathered(rows, opts) for rows in (mine.indices().t(), mine.values()))
            with torch.no_grad():  # not by way of `detach`, which does not reach a sparse tensor
                tensor.copy_(torch.sparse_coo_tensor(indices.t(), values, mine.shape).coalesce())
        return Operation([], tensors, [], self._futures)

    def _gathered(self, rows: Any, opts: Any) -> Any:
        """The rows of all ranks, who may have different numbers of them. Waits."""
        x = elements_of(rows).reshape(len(rows), math.prod(rows.shape[1:]))
        whole = self._group.all_gather(x, uneven=True, timeout=seconds_of(opts.timeout) or self._timeout)
        return tensor_of(whole).reshape(len(whole), *rows.shape[1:])


def _op(opts: Any, tensors: Sequence[Any]) -> str:
    odd = next((tensor.dtype for tensor in tensors if not is_number(tensor.dtype)), None)
    if odd is not None:
        raise UnsupportedOp(f"tensors of {odd} can be moved, and not be combined: convert them first")
    kind = getattr(opts.reduceOp, "op", opts.reduceOp)
    if kind not in _OPS:
        raise UnsupportedOp(f"there is no reduction {kind}")
    return _OPS[kind]
