"""Fuzzer's bytes as scripts: a sequence of frames, of chunks; and back, so that a real conversation makes a seed."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any
from unittest import mock

from paceline._links.base import Link, LinkEnded, LinkTimeout, Mesh, Peer, Purpose
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind

__all__ = [
    "PEERS",
    "Hang",
    "ScriptedMesh",
    "pack_chunks",
    "pack_frames",
    "unpack_chunks",
    "unpack_frames",
    "without_checksums",
]

_HEAD = struct.Struct("<BBQIHH")  # kind, generation, operation, part, bytes of signature, bytes of payload
_MAX_FRAMES = 64
_KINDS = tuple(FrameKind)

PEERS = (Peer(0, "member-0", "host-0"), Peer(1, "member-1", "host-1"))

_GRACE = 0.5
"""Seconds for which a peer repeats itself before whoever still listens counts as hung: no deadline here is so late."""


class Hang(BaseException):
    """A call went on far beyond its deadline."""


@contextmanager
def without_checksums() -> Iterator[None]:
    """Every CRC-32 is 0 meanwhile: a fuzzer would not guess one, and would get no further."""
    with mock.patch("zlib.crc32", return_value=0):
        yield


def unpack_frames(data: bytes) -> Iterator[Frame]:
    """Frames as any peer might send them; what is announced beyond the end is cut."""
    at = 0
    for _ in range(_MAX_FRAMES):
        if at + _HEAD.size > len(data):
            return
        kind, generation, operation, part, words, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        signature, payload = data[at : at + words], data[at + words : at + words + size]
        at += words + size
        yield Frame(_KINDS[kind % 3], generation, operation, part, signature, memoryview(payload))


def pack_frames(frames: Sequence[Frame]) -> bytes:
    """The script of these frames."""
    return b"".join(
        _HEAD.pack(frame.kind - 1, frame.generation, frame.operation, frame.part, len(frame.signature), len(payload))
        + frame.signature
        + payload
        for frame in frames
        for payload in [bytes(frame.payload)]
    )


def unpack_chunks(data: bytes) -> Iterator[bytes]:
    """Pieces, each with its length in two bytes before it."""
    while len(data) >= 2:
        size = int.from_bytes(data[:2], "little")
        yield data[2 : 2 + size]
        data = data[2 + size :]


def pack_chunks(chunks: Sequence[bytes]) -> bytes:
    """The script of these pieces."""
    return b"".join(len(chunk).to_bytes(2, "little") + chunk for chunk in chunks)


class ScriptedMesh(Mesh):
    """Rank 1 of a world of 2, whose peer is a script: it takes whatever is sent, and says what it likes.

    Args:
        frames: what the peer sends.
        ending: what comes then. 0: an orderly end, 1: a broken link, 2: silence, 3: the last frame for ever.
    """

    def __init__(self, frames: Sequence[Frame], ending: int) -> None:
        self.generation = 1
        self.rank = 1
        self.peers = PEERS
        self.fault = Fault(1, 1, verdict_timeout=0.0)
        self._links = {purpose: _ScriptedLink(self, list(frames), ending) for purpose in Purpose}

    def link(self, peer: int, purpose: Purpose, group: str = "") -> Link:
        self.fault.check()
        assert peer == 0, f"a link to rank {peer} in a world of 2"
        return self._links[purpose]

    def linked(self, purpose: Purpose, group: str = "") -> list[int]:
        return [0]

    def close(self, deadline: float) -> None:
        pass

    def close_group(self, group: str, deadline: float) -> None:
        pass

    @property
    def bytes_sent(self) -> int:
        return 0


class _ScriptedLink(Link):
    kind = "scripted"

    def __init__(self, mesh: ScriptedMesh, frames: list[Frame], ending: int) -> None:
        self.peer = PEERS[0]
        self._fault = mesh.fault
        self._frames = frames
        self._ending = ending
        self._at = 0
        self._since = 0.0  # when it began to repeat itself

    def send(self, frame: Frame, deadline: float) -> None:
        self._fault.check()

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        self._fault.check()
        if self._ending == 3 and self._frames and self._at == len(self._frames):
            self._at -= 1
            self._since = self._since or monotonic()
            if monotonic() > self._since + _GRACE:
                raise Hang
        if self._at < len(self._frames):
            self._at += 1
            return self._frames[self._at - 1]
        if self._ending >= 2:
            raise LinkTimeout("nothing came")
        raise LinkEnded("the script is over", orderly=self._ending == 0)

    def on_readable(self, notify: Callable[[], Any]) -> None:
        notify()

    def close(self, deadline: float) -> None:
        pass
