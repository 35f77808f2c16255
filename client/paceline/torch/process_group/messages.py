"""send, recv, and the barrier that says who is missing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from paceline.errors import OperationTimeout
from paceline.torch._tensors import landing
from paceline.torch._torch_work import told_to_torch
from paceline.torch.process_group.core import Core
from paceline.torch.process_group.messenger import Message, check_alone

__all__ = ["Messages"]

_BARRIER_TAG = (1 << 62) + 1
"""Of the messages of monitored barriers; users' tags are 32-bit numbers."""


class Messages(Core):
    """Messages between two ranks, in order by sender and tag: see `torch.distributed`."""

    def send(self, tensors: Sequence[Any], to: int, tag: int = 0) -> Message:
        """Sends a tensor to a rank of the group."""
        self._messenger.go_on()
        return self._messenger.send(check_alone(list(tensors)), to, tag, self._timeout)

    def recv(self, tensors: Sequence[Any], source: int, tag: int = 0) -> Message:
        """Receives a tensor from a rank of the group."""
        self._messenger.go_on()
        tensor = check_alone(list(tensors))
        return self._messenger.recv(tensor, landing(tensor), source, tag, self._timeout)

    def recv_anysource(self, tensors: Sequence[Any], tag: int = 0) -> Message:
        """Receives a tensor from any rank; `source_rank()` tells from which."""
        self._messenger.go_on()
        tensor = check_alone(list(tensors))
        return self._messenger.recv(tensor, landing(tensor), None, tag, self._timeout)

    @told_to_torch()
    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that fails on rank 0 with the names of those who did not come, and ends nothing but itself.

        Args:
            timeout: as long as rank 0 waits for all; the group's if None.
            wait_all_ranks: name all that are missing, not the first.

        Raises:
            OperationTimeout: on rank 0, of ranks that did not come; on others, that rank 0 did not answer.
        """
        within = self._timeout
        if timeout is not None:
            within = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        me, word = self.rank(), np.zeros(1, np.uint8)
        if me:
            self._group.send(word, 0, tag=_BARRIER_TAG, timeout=within)
            try:
                self._group.recv(0, tag=_BARRIER_TAG, timeout=within)
            except OperationTimeout as error:
                raise OperationTimeout(
                    f"Rank {me} successfully reached monitoredBarrier, but received errors while waiting for "
                    f"send/recv from rank 0. Please check rank 0 logs for faulty rank. ({error})"
                ) from error
            return
        late: list[int] = []
        deadline = time.monotonic() + within
        for rank in range(1, self.size()):
            left = deadline - time.monotonic()
            if left <= 0 and not late:
                peer = self._group.members[rank]
                raise OperationTimeout(
                    f"Rank 0 timed out in monitoredBarrier after {within * 1000:.0f} ms, before it heard of {peer}",
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
            self._group.send(word, rank, tag=_BARRIER_TAG, timeout=within)
