"""What a peer lends lies in segments of its arena: which of them it has handed over, mapped here to be read."""

from __future__ import annotations

import array
import os
import socket

from paceline.errors import LimitExceeded
from paceline.links.base import Peer
from paceline.links.fault import Fault
from paceline.links.shm.breach import breach
from paceline.links.shm.outgoing import ANNOUNCEMENT
from paceline.links.shm.segment import Attached, SegmentError, attach

__all__ = ["LentSegments", "receive_descriptors"]

MAX_SEGMENTS = 4096
"""Segments of one peer that are mapped at a time."""


class LentSegments:
    """The segments of one peer. For the thread that reads.

    Args:
        fault: how the generation ends.
        peer: who hands them over.
        sock: from there, not blocking. Owned from here on.
    """

    def __init__(self, fault: Fault, peer: Peer, sock: socket.socket) -> None:
        self._fault = fault
        self._peer = peer
        self._sock = sock
        self._segments: dict[int, Attached] = {}

    def fileno(self) -> int:
        """Of the socket: readable when there is something to learn."""
        return self._sock.fileno()

    def find(self, number: int) -> Attached:
        """A segment; one that was not handed over is the peer's breach."""
        segment = self._segments.get(number)
        if segment is None:
            self.learn()
            segment = self._segments.get(number)
            if segment is None:
                breach(self._fault, self._peer, f"a payload in segment {number}, which it has not handed over")
        return segment

    def close(self) -> None:
        """What is still referred to stays mapped."""
        self._sock.close()
        self._segments.clear()

    def learn(self) -> None:
        """Takes in which segments the peer has handed over, and which are gone."""
        for _ in range(MAX_SEGMENTS):  # an endless flood of words must not hold up whoever has a deadline
            try:
                word, descriptors = receive_descriptors(self._sock, ANNOUNCEMENT.size, 1)
            except (BlockingIOError, ConnectionError):  # no more; or it hung up, of which the control channel tells
                return
            if not word:
                return
            try:
                self._announced(word, descriptors)
            finally:
                for fd in descriptors:
                    os.close(fd)

    def _announced(self, word: bytes, descriptors: list[int]) -> None:
        if len(word) != ANNOUNCEMENT.size:
            breach(self._fault, self._peer, f"an announcement of {len(word)} bytes")
        number, size = ANNOUNCEMENT.unpack(word)
        if not size:
            self._segments.pop(number, None)
            return
        if not descriptors:  # the kernel drops what a full table of descriptors cannot take in
            raise LimitExceeded(f"no descriptor was left in this process for the memory of {self._peer}")
        if len(self._segments) >= MAX_SEGMENTS or number in self._segments:
            breach(self._fault, self._peer, f"segment {number} twice, or more than {MAX_SEGMENTS} segments")
        try:
            self._segments[number] = attach(descriptors[0], size)
        except SegmentError as error:
            breach(self._fault, self._peer, f"segment {number}: {error}")
        except OSError as error:
            raise LimitExceeded(f"cannot map the memory of {self._peer}: {error}") from error


def receive_descriptors(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """One message of at most `size` bytes, and the descriptors that came with it; too long a message gets longer still.

    Args:
        sock: of a kind that keeps messages apart, not blocking.
        size: bytes that are due.
        most: descriptors that are due; any others are closed.

    Raises:
        OSError: as `recvmsg`.
    """
    data, ancillary, _, _ = sock.recvmsg(size + 1, socket.CMSG_SPACE(4 * most), socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, words in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(words[: len(words) // 4 * 4])
    for fd in descriptors[most:]:  # room for one is room for two: lengths are rounded up
        os.close(fd)
    return data, list(descriptors[:most])
