"""What all operations of the backend have in common: how a call becomes a call on a `paceline.Group`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from paceline import Group
from paceline.torch._torch_work import Futures, Operation, seconds_of, told_to_torch
from paceline.torch.compiling import never_traced
from paceline.torch.process_group.messenger import Messenger
from paceline.work import Work

__all__ = ["NAME", "Call", "Core", "Finish", "end"]

NAME = "paceline"

Finish: TypeAlias = Callable[[], None]

_KEPT, _SMALL = 64, 1024
"""Works that stay referenced, and the most elements that they hold: torch's `Join` leaves one to C++ alone, where its
Python half would die."""


class Call(Protocol):
    """A collective with its arrays."""

    def __call__(self, *, timeout: float | None, async_op: bool) -> object:
        """Carries it out, or puts it in line and returns a `Work`."""


@never_traced
class Core(dist.ProcessGroup):  # type: ignore[misc]  # torch has no types here
    """Members, names and timeouts.

    Args:
        group: whose members these are; this process is among them.
        timeout: seconds for operations that name none.
        on_shutdown: called once, at the end.
    """

    def __init__(self, group: Group, timeout: float, on_shutdown: Callable[[], None]) -> None:
        super().__init__(max(group.rank, 0), max(group.size, 1))
        self._timeout = timeout
        self._name = self._desc = ""
        self._take(group, on_shutdown)
        self._kept: deque[Any] = deque(maxlen=_KEPT)
        self._task = -1
        self._in_backward: list[Operation] = []

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        never_traced(cls)

    def _take(self, group: Group, on_shutdown: Callable[[], None]) -> None:
        """From now on operations go over this group."""
        group.hand_over(to_all=True)  # autograd and users' threads may call; torch's rule is one order on all ranks
        self._group = group
        self._on_shutdown: Callable[[], None] | None = on_shutdown
        self._messenger = Messenger(group)
        self._futures = Futures()

    @property
    def paceline_group(self) -> Group:
        """The group that carries it all."""
        return self._group

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._group.rank

    def size(self) -> int:
        """Number of the group's members."""
        return self._group.size

    def name(self) -> str:
        """The backend's name."""
        return NAME

    # C++ asks by these names.

    def getBackendName(self) -> str:
        """The backend's name."""
        return NAME

    def getRank(self) -> int:
        """See `rank`."""
        return self.rank()

    def getSize(self) -> int:
        """See `size`."""
        return self.size()

    def setGroupName(self, name: str) -> None:
        """Under which functional collectives find it."""
        self._name = name

    def getGroupName(self) -> str:
        """See `setGroupName`."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        """For those who look."""
        self._desc = desc

    def getGroupDesc(self) -> str:
        """See `setGroupDesc`."""
        return self._desc

    @property
    def _device_types(self) -> list[Any]:
        """Where its tensors lie; torch's own property knows only of groups that consist of C++ backends."""
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> Any:
        """What serves a device: there is nothing below the group."""
        return self if torch.device(device).type == "cpu" else super()._get_backend(device)

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def set_timeout(self, timeout: timedelta) -> None:
        """For operations that name none, from now on."""
        self._timeout = seconds_of(timeout) or self._timeout

    @property
    def is_over(self) -> bool:
        """True once it was shut down."""
        return self._on_shutdown is None

    def shutdown(self) -> None:
        """Ends what is in line, then leaves. Idempotent."""
        leave, self._on_shutdown = self._on_shutdown, None
        if leave is not None:
            end(self._messenger, leave, self._futures)
            self._kept.clear()

    def abort(self) -> None:
        """As `shutdown`: what is under way fails on all members."""
        self.shutdown()

    # How operations run -----------------------------------------------------------------------------------------------

    def _run(
        self,
        title: str,
        opts: Any,
        calls: Sequence[Call],
        results: Sequence[Any],
        finishes: Sequence[Finish | None] = (),
    ) -> Operation:
        """Issues calls in order: behind the caller if it asks for that, else in its thread, where nothing is handed on.

        Args:
            title: for the profiler.
            opts: torch's, of the operation.
            calls: what to do.
            results: tensors that are filled.
            finishes: what is left to do then.
        """
        self._messenger.go_on()
        timeout = seconds_of(opts.timeout) or self._timeout
        behind = bool(opts.asyncOp)
        with _range(title), told_to_torch():
            issued = [call(timeout=timeout, async_op=behind) for call in calls]
            handles = [handle for handle in issued if isinstance(handle, Work)] if behind else []
            operation = Operation(handles, results, [finish for finish in finishes if finish], self._futures)
        if behind:
            self._mind_backward(operation)
        if behind and sum(tensor.numel() for tensor in results) <= _SMALL:
            self._kept.append(operation)
        return operation

    def _mind_backward(self, operation: Operation) -> None:
        """Within a backward pass, DDP's C++ awaits futures, and what fails there is a RuntimeError without a type.

        Callbacks at the end of the pass run in the order in which they were queued, and DDP queues its own behind its
        last operation: so whoever waits here, before it, raises the error as it is out of `loss.backward()`.
        """
        task = torch._C._current_graph_task_id()
        if task < 0:
            return
        if task != self._task:
            self._task, self._in_backward = task, []
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._in_backward.append(operation)

    def _end_backward(self) -> None:
        operations, self._in_backward = self._in_backward, []
        for operation in operations:
            operation.wait()


def end(messenger: Messenger, leave: Callable[[], None], futures: Futures) -> None:
    """Ends a group that operations went over, and the threads that served it."""
    messenger.close()
    leave()
    messenger.end()
    futures.close()


@contextmanager
def _range(title: str) -> Iterator[None]:
    """Shows an operation in torch's profiler, if one runs."""
    if not torch.autograd.profiler._is_profiler_enabled:
        yield
        return
    with torch.profiler.record_function(f"{NAME}:{title}"):
        yield
