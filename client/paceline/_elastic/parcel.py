"""A parcel: copies of some runs of a state for another member, sent through shared memory on the same machine.

gRPC moves 0.4 GB/s on 2 cores, which is too slow for a model while training waits. A process of the same user and pid
namespace may open another one's memory through /proc (proc(5), /proc/pid/fd), which needs no socket. The memory is
sealed, so its size cannot change while it is mapped, and a CRC detects that another memory was mapped by mistake. The
giver sends only the number of a descriptor. The taker looks that number up in the giver's process, which it knows from
the coordinator, and opens it only if it is memory of Paceline.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._links.base import Peer
from paceline._links.shm.arena import arena
from paceline._links.shm.segment import MEMORY_NAME, Attached, SegmentError, attach
from paceline._session.identity import process_identity
from paceline.errors import PacelineError
from pacelinepb.v1 import peer_pb2, session_pb2


class Parcel:
    """Copies of some runs of a state; `crc` is the CRC-32 of the request (`reshard_plan.checksum`) and their bytes."""

    def __init__(self, runs: Sequence[NDArray[Any]], asked: int = 0) -> None:
        self._memory = arena().empty(sum(run.nbytes for run in runs), np.uint8)
        start = 0
        for run in runs:
            np.copyto(self._memory[start : start + run.nbytes].view(run.dtype), run)
            start += run.nbytes
        self.data = self._memory.data
        self.crc = zlib.crc32(self.data, asked)

    def lend(self, process: session_pb2.ProcessIdentity) -> peer_pb2.LentMemory | None:
        """Returns the place of the bytes for another process; None if that process cannot map them."""
        here = process_identity()
        if not here.node or (here.node, here.pid_namespace) != (process.node, process.pid_namespace):
            return None
        found = arena().find(self._memory.ctypes.data, self._memory.nbytes)
        if found is None:
            return None
        segment, offset = found
        return peer_pb2.LentMemory(pid=here.pid, descriptor=segment.fd, size=segment.size, offset=offset)


def borrow(lent: peer_pb2.LentMemory, size: int, giver: Peer) -> Attached:
    """Maps the memory of a parcel. Keep it mapped while more parcels may come in it, since mapping takes time.

    Raises:
        OSError: this process may not open it.
        SegmentError: it is no memory of Paceline, is too small, or belongs to another process than the giver.
    """
    if lent.pid != giver.pid or not giver.start_ticks:
        raise SegmentError(f"{giver} names memory of another process, {lent.pid}")
    # O_PATH opens nothing: whatever the number refers to by now, opening it has no effect (open(2)).
    found = os.open(f"/proc/{giver.pid}/fd/{lent.descriptor}", os.O_PATH | os.O_CLOEXEC)
    try:
        if process_identity(giver.pid).start_ticks != giver.start_ticks:  # the same process now as when it was opened
            raise SegmentError(f"{giver} has ended, and another process has its pid")
        path = f"/proc/self/fd/{found}"
        if not stat.S_ISREG(os.fstat(found).st_mode) or os.readlink(path) != MEMORY_NAME:
            raise SegmentError(f"{giver} names a file that is not Paceline's shared memory")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = attach(descriptor, lent.size)
        finally:
            os.close(descriptor)
    finally:
        os.close(found)
    if lent.offset + size > memory.size:
        raise SegmentError(f"a parcel of {size} bytes from {lent.offset} does not lie in {memory.size}")
    return memory


def unpack(data: memoryview, crc: int, into: Sequence[NDArray[Any]], asked: int = 0) -> None:
    """Copies the bytes of a parcel to contiguous arrays of as many bytes; PacelineError if the checksum is wrong."""
    found, start = asked, 0
    for array in into:
        target = array.view(np.uint8)
        np.copyto(target, np.frombuffer(data, np.uint8, target.size, start))
        found = zlib.crc32(target.data, found)
        start += target.size
    if found != crc:
        raise PacelineError(
            "a parcel has a wrong checksum: its bytes have changed on the way, or are not those that were requested"
        )
