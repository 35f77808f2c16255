"""`ProcessGroup`: torch.distributed's process group over a `paceline.Group`.

torch's C++ calls its methods by name. The class derives from torch's `ProcessGroup`, not from `Backend`: before torch
2.15 `Backend` cannot be subclassed in Python, and since then C++ wraps the works of such a subclass, so that only
`wait` and `get_future` reach ours (docs/decisions/19-torch-backend.md).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed import ReduceOp

from paceline._base.arrays import Array
from paceline._base.work import Work
from paceline._group import Group
from paceline.errors import OperationTimeout, SizeMismatch, UnsupportedOp
from paceline.torch._compiling import never_traced
from paceline.torch._tensors import ResultBuffer, can_combine, elements_of, result_buffer, tensor_of
from paceline.torch.backend._messenger import MessageWork, Messenger, only_tensor
from paceline.torch.backend._operation import FutureThreads, Operation, raising_torch_errors, seconds_of

NAME = "paceline"

_Finish: TypeAlias = Callable[[], None]

_KEPT_WORKS, _KEPT_ELEMENTS = 64, 1024
"""The number of latest works that the group keeps alive, and the most elements that each of them may hold: torch's
`Join` keeps only the C++ part of a work, so the Python part would be freed."""

_BARRIER_TAG = (1 << 62) + 1
"""Tag of the messages of monitored barriers; users' tags are 32-bit numbers."""

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


class _Collective(Protocol):
    """A collective of a `paceline.Group` with its arrays."""

    def __call__(self, *, timeout: float | None, async_op: bool) -> object:
        """Runs the collective; with `async_op`, queues it and returns a `paceline.Work`."""


@never_traced
class ProcessGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch has no types here
    """A process group, made by `torch.distributed.init_process_group("paceline")` and `new_group`.

    `torch.distributed` documents the methods that have no further explanation here.

    Args:
        group: the members, including this process.
        timeout: the timeout, in seconds, of operations that have none of their own.
        on_shutdown: called once, by `shutdown`.
    """

    def __init__(self, group: Group, timeout: float, on_shutdown: Callable[[], None]) -> None:
        super().__init__(max(group.rank, 0), max(group.size, 1))
        self._timeout = timeout
        self._name = self._desc = ""
        self._use_group(group, on_shutdown)
        self._kept_works: deque[Any] = deque(maxlen=_KEPT_WORKS)
        self._backward_pass = -1
        self._in_backward: list[Operation] = []

    def _use_group(self, group: Group, on_shutdown: Callable[[], None]) -> None:
        """Runs operations over this group from now on."""
        group.hand_over(to_all=True)  # autograd's and users' threads may call; torch requires one order on all ranks
        self._group = group
        self._on_shutdown: Callable[[], None] | None = on_shutdown
        self._messenger = Messenger(group)
        self._future_threads = FutureThreads()

    @property
    def paceline_group(self) -> Group:
        """The group that carries out the operations."""
        return self._group

    def rank(self) -> int:
        """Returns this process's rank in the group."""
        return self._group.rank

    def size(self) -> int:
        """Returns the number of members."""
        return self._group.size

    def name(self) -> str:
        """Returns the backend's name."""
        return NAME

    # C++ calls these methods by name.

    def getBackendName(self) -> str:
        """Returns the backend's name."""
        return NAME

    def getRank(self) -> int:
        """See `rank`."""
        return self.rank()

    def getSize(self) -> int:
        """See `size`."""
        return self.size()

    def setGroupName(self, name: str) -> None:
        """Sets the name by which functional collectives find this group."""
        self._name = name

    def getGroupName(self) -> str:
        """See `setGroupName`."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        """Sets a description for users."""
        self._desc = desc

    def getGroupDesc(self) -> str:
        """See `setGroupDesc`."""
        return self._desc

    @property
    def _device_types(self) -> list[Any]:
        """The devices of tensors; torch's property is empty for a group without a C++ backend."""
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> Any:
        """Returns the backend for a device, which is the group itself."""
        return self if torch.device(device).type == "cpu" else super()._get_backend(device)

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later operations that have none of their own."""
        self._timeout = seconds_of(timeout) or self._timeout

    @property
    def is_over(self) -> bool:
        """True after `shutdown`."""
        return self._on_shutdown is None

    def shutdown(self) -> None:
        """Waits for the queued operations, then leaves. Idempotent."""
        leave, self._on_shutdown = self._on_shutdown, None
        if leave is not None:
            close_group(self._messenger, leave, self._future_threads)
            self._kept_works.clear()

    def abort(self) -> None:
        """Leaves as `shutdown` does, but running operations fail on all members."""
        self.shutdown()

    # Running collectives ----------------------------------------------------------------------------------------------

    def _run(
        self,
        title: str,
        opts: Any,
        collectives: Sequence[_Collective],
        results: Sequence[Any],
        finishes: Sequence[_Finish | None] = (),
    ) -> Operation:
        """Issues collectives in order: in the background if `opts` asks for it, else in the caller's thread.

        The profiler shows the title. `finishes` are called when all collectives are done.
        """
        self._messenger.start_pending()
        timeout = seconds_of(opts.timeout) or self._timeout
        async_op = bool(opts.asyncOp)
        with _profiled(title), raising_torch_errors():
            issued = [collective(timeout=timeout, async_op=async_op) for collective in collectives]
            handles = [handle for handle in issued if isinstance(handle, Work)] if async_op else []
            operation = Operation(handles, results, [finish for finish in finishes if finish], self._future_threads)
        if async_op:
            self._await_in_backward(operation)
        if async_op and sum(tensor.numel() for tensor in results) <= _KEPT_ELEMENTS:
            self._kept_works.append(operation)
        return operation

    def _await_in_backward(self, operation: Operation) -> None:
        """Makes a running backward pass wait for the operation at its end, so that `loss.backward()` raises its error.

        Otherwise DDP's C++ would wait for the future, and raise a plain RuntimeError. Callbacks at the end of a
        backward pass run in the order in which they were queued. Ours is queued with the pass's first operation, DDP's
        after its last one, so ours runs first.
        """
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass < 0:
            return
        if backward_pass != self._backward_pass:
            self._backward_pass, self._in_backward = backward_pass, []
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._in_backward.append(operation)

    def _end_backward(self) -> None:
        operations, self._in_backward = self._in_backward, []
        for operation in operations:
            operation.wait()

    # Collectives that combine tensors ---------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Any], opts: Any = None) -> Operation:
        """Reduces each tensor in place. Sparse tensors come out coalesced."""
        opts = opts or AllreduceOptions()
        if any(tensor.is_sparse for tensor in tensors):
            return self._all_reduce_sparse(tensors, opts)
        op = _op(opts, tensors)
        buffers = [result_buffer(tensor, filled=True) for tensor in tensors]
        plans = [self._plan(op, tensor, buffer) for tensor, buffer in zip(tensors, buffers, strict=True)]
        collectives = [
            partial(self._group.all_reduce, buffer.array, op=op, out=buffer.array)
            for buffer, (op, _) in zip(buffers, plans, strict=True)
        ]
        return self._run("all_reduce", opts, collectives, tensors, [finish for _, finish in plans])

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Operation:
        """See `allreduce`."""
        return self.allreduce(tensors, opts or AllreduceCoalescedOptions())

    def reduce(self, tensors: Sequence[Any], opts: Any = None) -> Operation:
        """Replaces the root's tensors by the result; leaves other ranks' as they are."""
        opts = opts or ReduceOptions()
        op, root = _op(opts, tensors), opts.rootRank
        buffers = [result_buffer(tensor, filled=True) for tensor in tensors]
        is_root = self.rank() == root
        plans = [self._plan(op, tensor, buffer) for tensor, buffer in zip(tensors, buffers, strict=True)]
        collectives = [
            partial(self._group.reduce, buffer.array, op=op, root=root, out=buffer.array if is_root else None)
            for buffer, (op, _) in zip(buffers, plans, strict=True)
        ]
        return self._run("reduce", opts, collectives, tensors, [finish for _, finish in plans] if is_root else [])

    def reduce_scatter(self, outs: Sequence[Any], ins: Sequence[Sequence[Any]], opts: Any = None) -> Operation:
        """Gives rank r the sum of all ranks' r-th tensors; their sizes may differ between values of r."""
        opts = opts or ReduceScatterOptions()
        wanted, finishes = _op(opts, outs), []
        collectives: list[_Collective] = []
        for out, parts in zip(outs, ins, strict=True):
            if len(parts) != self.size():
                raise SizeMismatch(f"reduce_scatter: {len(parts)} tensors for {self.size()} ranks")
            buffer = result_buffer(out)
            op, finish = self._plan(wanted, out, buffer)
            finishes.append(finish)
            arrays = [elements_of(part) for part in parts]
            if len({array.size for array in arrays}) == 1:
                whole = np.concatenate(arrays)
                collectives.append(partial(self._group.reduce_scatter, whole, op=op, out=buffer.array))
            else:
                collectives += [
                    partial(
                        self._group.reduce, array, op=op, root=rank, out=buffer.array if rank == self.rank() else None
                    )
                    for rank, array in enumerate(arrays)
                ]
        return self._run("reduce_scatter", opts, collectives, outs, finishes)

    def reduce_scatter_single(self, out: Any, x: Any, opts: Any = None) -> Operation:
        """Gives rank r the sum of all ranks' r-th part of one tensor; contiguous tensors are not copied."""
        return self.reduce_scatter_single_coalesced([out], [x], opts)

    def reduce_scatter_single_coalesced(self, outs: Sequence[Any], xs: Sequence[Any], opts: Any = None) -> Operation:
        """Does `reduce_scatter_single` for several tensors."""
        opts = opts or ReduceScatterOptions()
        wanted, collectives, finishes = _op(opts, outs), [], []
        for out, x in zip(outs, xs, strict=True):
            if x.numel() != out.numel() * self.size():
                raise SizeMismatch(
                    f"reduce_scatter: {x.numel()} elements for {self.size()} ranks with {out.numel()} each"
                )
            buffer = result_buffer(out)
            op, finish = self._plan(wanted, out, buffer)
            collectives.append(partial(self._group.reduce_scatter, elements_of(x), op=op, out=buffer.array))
            finishes.append(finish)
        return self._run("reduce_scatter", opts, collectives, outs, finishes)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _plan(self, op: str, tensor: Any, buffer: ResultBuffer) -> tuple[str, _Finish | None]:
        """Returns the reduction to run for a tensor, and what to do with its result.

        The mean of integers is their sum, divided and truncated. The sum has the tensor's dtype and wraps around as
        with SUM; a wider dtype would mean more bytes to send.
        """
        if op != "mean" or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            return op, buffer.copy_back

        def finish() -> None:
            if buffer.copy_back is not None:
                buffer.copy_back()
            tensor.detach().div_(self.size(), rounding_mode="trunc")

        return "sum", finish

    def _all_reduce_sparse(self, tensors: Sequence[Any], opts: Any) -> Operation:
        """Sums sparse tensors in place: gathers the elements of all ranks, and adds up elements of the same index."""
        if _op(opts, ()) != "sum":
            raise UnsupportedOp("all_reduce of a sparse tensor can only sum: use ReduceOp.SUM, or a dense tensor")
        for tensor in tensors:
            mine = tensor.detach().coalesce()
            indices, values = (self._gather_rows(rows, opts) for rows in (mine.indices().t(), mine.values()))
            with torch.no_grad():  # instead of `detach`, which does not work on a sparse tensor
                tensor.copy_(torch.sparse_coo_tensor(indices.t(), values, mine.shape).coalesce())
        return Operation([], tensors, [], self._future_threads)

    def _gather_rows(self, rows: Any, opts: Any) -> Any:
        """Gathers the rows of all ranks, whose numbers of rows may differ; blocks."""
        x = elements_of(rows).reshape(len(rows), math.prod(rows.shape[1:]))
        whole = self._group.all_gather(x, uneven=True, timeout=seconds_of(opts.timeout) or self._timeout)
        return tensor_of(whole).reshape(len(whole), *rows.shape[1:])

    # Collectives that move tensors ------------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Any], opts: Any = None) -> Operation:
        """Replaces the tensors of all ranks by the root's."""
        opts = opts or BroadcastOptions()
        root = opts.rootRank
        buffers = [result_buffer(tensor, filled=self.rank() == root) for tensor in tensors]
        collectives = [partial(self._group.broadcast, buffer.array, root=root, out=buffer.array) for buffer in buffers]
        return self._run("broadcast", opts, collectives, tensors, [buffer.copy_back for buffer in buffers])

    def allgather(self, outs: Sequence[Sequence[Any]], ins: Sequence[Any], opts: Any = None) -> Operation:
        """Gathers all ranks' tensors, each into its own output; sizes may differ if the outputs' do."""
        opts = opts or AllgatherOptions()
        collectives, finishes = [], []
        for parts, x in zip(outs, ins, strict=True):
            whole, spread = self._joint_buffer(parts, elements_of(x))
            uneven = len({part.numel() for part in parts}) > 1
            collectives.append(partial(self._group.all_gather, elements_of(x), uneven=uneven, out=whole))
            finishes.append(spread)
        return self._run("all_gather", opts, collectives, [part for parts in outs for part in parts], finishes)

    def allgather_coalesced(self, outs: Sequence[Sequence[Any]], ins: Sequence[Any], opts: Any = None) -> Operation:
        """Does `allgather` with the lists of outputs transposed: `outs[rank][i]`."""
        return self.allgather(list(zip(*outs, strict=True)), ins, opts)

    def all_gather_single(self, out: Any, x: Any, opts: Any = None) -> Operation:
        """Gathers all ranks' tensors one after the other; contiguous tensors are not copied."""
        return self.all_gather_single_coalesced([out], [x], opts)

    def all_gather_single_coalesced(self, outs: Sequence[Any], xs: Sequence[Any], opts: Any = None) -> Operation:
        """Does `all_gather_single` for several tensors."""
        opts = opts or AllgatherOptions()
        collectives, finishes = [], []
        for out, x in zip(outs, xs, strict=True):
            if out.numel() != x.numel() * self.size():
                raise SizeMismatch(f"all_gather: {out.numel()} elements for {self.size()} ranks with {x.numel()} each")
            buffer = result_buffer(out)
            collectives.append(partial(self._group.all_gather, elements_of(x), out=buffer.array))
            finishes.append(buffer.copy_back)
        return self._run("all_gather", opts, collectives, outs, finishes)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outs: Sequence[Sequence[Any]], ins: Sequence[Any], opts: Any = None) -> Operation:
        """Does `allgather` on the root alone; other ranks give no outputs."""
        opts = opts or GatherOptions()
        (x,) = ins
        array, results, finish, whole = elements_of(x), [], None, None
        if self.rank() == opts.rootRank:
            (parts,) = outs
            results = list(parts)
            whole, finish = self._joint_buffer(parts, array)
        collective = partial(self._group.gather, array, root=opts.rootRank, out=whole)
        return self._run("gather", opts, [collective], results, [finish])

    def scatter(self, outs: Sequence[Any], ins: Sequence[Sequence[Any]], opts: Any = None) -> Operation:
        """Gives rank r the root's r-th tensor; other ranks give no inputs."""
        opts = opts or ScatterOptions()
        (out,) = outs
        buffer, arrays = result_buffer(out), None
        if self.rank() == opts.rootRank:
            (parts,) = ins
            if len(parts) != self.size():
                raise SizeMismatch(f"scatter: {len(parts)} tensors for {self.size()} ranks")
            arrays = [elements_of(part) for part in parts]
        collective = partial(self._group.scatter, arrays, root=opts.rootRank, out=buffer.array)
        return self._run("scatter", opts, [collective], outs, [buffer.copy_back])

    def all_to_all_single(
        self, out: Any, x: Any, out_splits: Sequence[int], in_splits: Sequence[int], opts: Any = None
    ) -> Operation:
        """Sends part r of axis 0 to rank r; the splits give the rows of each part, or are empty if all are equal."""
        opts = opts or AllToAllOptions()
        buffer = result_buffer(out)
        collective = partial(
            self._group.all_to_all,
            elements_of(x),
            send_counts=_element_counts(x, in_splits, self.size()),
            recv_counts=_element_counts(out, out_splits, self.size()),
            out=buffer.array,
        )
        return self._run("all_to_all", opts, [collective], [out], [buffer.copy_back])

    alltoall_base = all_to_all_single

    def alltoall(self, outs: Sequence[Any], ins: Sequence[Any], opts: Any = None) -> Operation:
        """Sends tensor r to rank r; sizes may differ."""
        opts = opts or AllToAllOptions()
        arrays = [elements_of(x) for x in ins]
        if len(arrays) != self.size() or len(outs) != self.size():
            raise SizeMismatch(f"all_to_all: {len(arrays)} and {len(outs)} tensors for {self.size()} ranks")
        whole, finish = self._joint_buffer(outs, arrays[0])
        collective = partial(
            self._group.all_to_all,
            np.concatenate(arrays),
            send_counts=[array.size for array in arrays],
            recv_counts=[elements_of(out).size for out in outs],
            out=whole,
        )
        return self._run("all_to_all", opts, [collective], outs, [finish])

    def barrier(self, opts: Any = None) -> Operation:
        """Ends when all ranks have called it."""
        return self._run("barrier", opts or BarrierOptions(), [partial(self._group.barrier)], [])

    def _joint_buffer(self, parts: Sequence[Any], like: Array) -> tuple[Array, _Finish]:
        """Returns one array for the results of several tensors, and a function that copies its parts to them."""
        if len(parts) != self.size():
            raise SizeMismatch(f"{len(parts)} tensors for {self.size()} ranks")
        buffers = [result_buffer(part) for part in parts]
        ends = np.cumsum([buffer.array.size for buffer in buffers])
        whole: Array = np.empty(int(ends[-1]), like.dtype)

        def spread() -> None:
            for buffer, part in zip(buffers, np.split(whole, ends[:-1]), strict=True):
                buffer.array[...] = part
                if buffer.copy_back is not None:
                    buffer.copy_back()

        return whole, spread

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Any], to: int, tag: int = 0) -> MessageWork:
        """Sends a tensor to a rank; messages arrive in order by sender and tag."""
        self._messenger.start_pending()
        return self._messenger.send(only_tensor(tensors), to, tag, self._timeout)

    def recv(self, tensors: Sequence[Any], source: int, tag: int = 0) -> MessageWork:
        """Receives a tensor from a rank."""
        self._messenger.start_pending()
        return self._messenger.recv(only_tensor(tensors), source, tag, self._timeout)

    def recv_anysource(self, tensors: Sequence[Any], tag: int = 0) -> MessageWork:
        """Receives a tensor from any rank; the work's `source_rank()` returns which."""
        self._messenger.start_pending()
        return self._messenger.recv(only_tensor(tensors), None, tag, self._timeout)

    @raising_torch_errors()
    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Waits for all ranks; if some are missing, fails on rank 0 with their names.

        The barrier consists of messages, so that a timeout makes nothing else fail.

        Args:
            timeout: how long rank 0 waits for all others; None for the group's timeout.
            wait_all_ranks: whether to name all missing ranks, not only the first.

        Raises:
            OperationTimeout: on rank 0, because ranks are missing; on others, because rank 0 did not answer.
        """
        within = self._timeout
        if timeout is not None:
            within = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if self.rank():
            self._report_to_rank_0(within)
        else:
            self._await_reports(within, wait_all_ranks)

    def _report_to_rank_0(self, within: float) -> None:
        """Tells rank 0 that this rank has reached the barrier, and waits for its answer."""
        self._group.send(np.zeros(1, np.uint8), 0, tag=_BARRIER_TAG, timeout=within)
        try:
            self._group.recv(0, tag=_BARRIER_TAG, timeout=within)
        except OperationTimeout as error:
            raise OperationTimeout(
                f"Rank {self.rank()} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0. Please check rank 0 logs for faulty rank. ({error})"
            ) from error

    def _await_reports(self, within: float, wait_all_ranks: bool) -> None:
        """Waits until all other ranks have reached the barrier, and answers them."""
        late: list[int] = []
        deadline = time.monotonic() + within
        for rank in range(1, self.size()):
            left = deadline - time.monotonic()
            if left <= 0 and not late:
                peer = self._group.members[rank]
                raise OperationTimeout(
                    f"Rank 0 timed out in monitoredBarrier after {within * 1000:.0f} ms, before it heard from {peer}",
                    ranks=(rank,),
                )
            try:
                self._group.recv(rank, tag=_BARRIER_TAG, timeout=max(0.0, left))
            except OperationTimeout:
                late.append(rank)
                if not wait_all_ranks:
                    break
        if late:
            names = ", ".join(str(self._group.members[rank]) for rank in late)
            missing = ", ".join(map(str, late))
            raise OperationTimeout(
                f"Rank{'s' if len(late) > 1 else ''} {missing} failed to pass monitoredBarrier in "
                f"{within * 1000:.0f} ms ({names})",
                ranks=tuple(late),
            )
        for rank in range(1, self.size()):
            self._group.send(np.zeros(1, np.uint8), rank, tag=_BARRIER_TAG, timeout=within)


def close_group(messenger: Messenger, leave: Callable[[], None], threads: FutureThreads) -> None:
    """Leaves a group, and ends the threads of its operations."""
    messenger.close()
    leave()
    messenger.join()
    threads.close()


@contextmanager
def _profiled(title: str) -> Iterator[None]:
    """Shows the block in torch's profiler, if one is running."""
    if not torch.autograd.profiler._is_profiler_enabled:
        yield
        return
    with torch.profiler.record_function(f"{NAME}:{title}"):
        yield


def _op(opts: Any, tensors: Sequence[Any]) -> str:
    """Returns Paceline's name of the reduction that torch's options ask for."""
    unfit = next((tensor.dtype for tensor in tensors if not can_combine(tensor.dtype)), None)
    if unfit is not None:
        raise UnsupportedOp(f"tensors of {unfit} can be moved, but not reduced: convert them first")
    kind = getattr(opts.reduceOp, "op", opts.reduceOp)
    if kind not in _OPS:
        raise UnsupportedOp(f"there is no reduction {kind}: use {', '.join(each.name for each in _OPS)}")
    return _OPS[kind]


def _element_counts(tensor: Any, splits: Sequence[int], world: int) -> list[int]:
    """Returns the number of elements in each part of axis 0, as elements of the array that NumPy sees.

    Equal parts are counted too, because another rank's parts may be unequal.
    """
    array = elements_of(tensor)
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % world:
            raise SizeMismatch(f"all_to_all: {rows} rows cannot be split into {world} equal parts")
        splits = [rows // world] * world
    if sum(splits) != rows or len(splits) != world:
        raise SizeMismatch(f"all_to_all: parts of {list(splits)} rows do not add up to {rows} rows for {world} ranks")
    elements_per_row = array.size // rows if rows else 0
    return [count * elements_per_row for count in splits]
