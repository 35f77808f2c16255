"""A parcel: copies of some runs of a state, on their way to a member, through shared memory if it is on this machine.

Over gRPC 0.4 GB/s come through on 2 cores, which is too slow to move a model while training waits. A process of the
same user and pid namespace may open another one's memory through /proc (proc(5), /proc/pid/fd), which needs no socket;
what it maps is sealed, so nobody can cut it short. The CRC tells whoever mapped something else by mistake.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.links.shm.arena import arena
from paceline.links.shm.segment import Attached, SegmentError, attach
from paceline.session.identity import process_identity
from pacelinepb.v1 import peer_pb2, session_pb2

__all__ = ["Parcel", "borrow", "unpack"]


class Parcel:
    """What is given.

    Args:
        runs: arrays, copied one after the other.
        asked: checksum of what was asked for (`runs.checksum`).

    Attributes:
        crc: CRC-32 of what was asked for, and then of the bytes.
        data: the bytes.
    """

    def __init__(self, runs: Sequence[NDArray[Any]], asked: int = 0) -> None:
        self._memory = arena().empty(sum(run.nbytes for run in runs), np.uint8)
        start = 0
        for run in runs:
            np.copyto(self._memory[start : start + run.nbytes].view(run.dtype), run)
            start += run.nbytes
        self.data = self._memory.data
        self.crc = zlib.crc32(self.data, asked)

    def lend(self, process: session_pb2.ProcessIdentity) -> peer_pb2.LentMemory | None:
        """Where that process finds the bytes; None if it cannot map them."""
        here = process_identity()
        if not here.node or (here.node, here.pid_namespace) != (process.node, process.pid_namespace):
            return None
        found = arena().find(self._memory.ctypes.data, self._memory.nbytes)
        if found is None:
            return None
        segment, offset = found
        return peer_pb2.LentMemory(pid=here.pid, descriptor=segment.fd, size=segment.size, offset=offset)


def borrow(lent: peer_pb2.LentMemory, size: int) -> Attached:
    """The memory in which a parcel lies; to be kept as long as more may come in it, for mapping it takes time.

    Args:
        lent: where that is.
        size: bytes of the parcel.

    Raises:
        OSError: this process may not open it.
        SegmentError: it is no such memory, or too small.
    """
    # Whatever else the number may be by now: to open it shall neither wait nor change anything.
    descriptor = os.open(f"/proc/{lent.pid}/fd/{lent.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        memory = attach(descriptor, lent.size)
    finally:
        os.close(descriptor)
    if lent.offset + size > memory.size:
        raise SegmentError(f"a parcel of {size} bytes from {lent.offset} does not lie in {memory.size}")
    return memory


def unpack(data: memoryview, crc: int, into: Sequence[NDArray[Any]], asked: int = 0) -> None:
    """Copies the bytes of a parcel to where they belong.

    Args:
        data: the bytes.
        crc: what came with them (`Parcel.crc`).
        into: the arrays, contiguous; as many bytes in all.
        asked: checksum of what was asked for.

    Raises:
        PacelineError: they have other bytes than they should; what is written does not count.
    """
    found, start = asked, 0
    for array in into:
        target = array.view(np.uint8)
        np.copyto(target, np.frombuffer(data, np.uint8, target.size, start))
        found = zlib.crc32(target.data, found)
        start += target.size
    if found != crc:
        raise PacelineError("a parcel has other bytes than it should")
