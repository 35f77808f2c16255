"""Links between ranks of one process: for tests, for teaching, and the reference for what a link does.

A switchboard stands in for the coordinator: the first suspicion of any rank is the verdict for all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from paceline.config import Config
from paceline.errors import InvalidWorldSize
from paceline.links.base import Link, LinkEnded, LinkTimeout, Mesh, Peer, Purpose
from paceline.links.fault import Fault, Suspicion, Verdict
from paceline.links.frame import Frame
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["LocalLink", "LocalMesh", "local_meshes"]

CAPACITY = 64
"""Frames that a link holds before `send` waits."""


class LocalLink(Link):
    """One end of a pair of pipes."""

    kind = "local"

    def __init__(self, peer: Peer, fault: Fault, outgoing: _Pipe, incoming: _Pipe) -> None:
        self.peer = peer
        self._fault = fault
        self._outgoing = outgoing
        self._incoming = incoming
        self._closed = False
        self.bytes_sent = 0
        fault.on_failure(outgoing.wake)
        fault.on_failure(incoming.wake)

    def send(self, frame: Frame, deadline: float) -> None:
        """Sends a copy of the frame (`Link.send`)."""
        self._check_open()
        self.bytes_sent += len(frame.payload)
        self._outgoing.put(replace(frame, payload=bytes(frame.payload)), deadline, self._fault)

    def recv(self, deadline: float) -> Frame:
        """The next frame (`Link.recv`)."""
        self._check_open()
        return self._incoming.get(deadline, self._fault)

    def on_readable(self, notify: Callable[[], None]) -> None:
        """Has a reader told of arrivals (`Link.on_readable`)."""
        self._incoming.on_change = notify
        notify()

    def close(self, deadline: float) -> None:
        """Ends the link in order (`Link.close`)."""
        self._closed = True
        self._outgoing.end(orderly=True)
        self._incoming.end(orderly=True)

    def cut(self) -> None:
        """Breaks the link as the death of a process would."""
        self._outgoing.end(orderly=False)
        self._incoming.end(orderly=False)

    def _check_open(self) -> None:
        self._fault.check()
        if self._closed:
            raise LinkEnded(f"the link to {self.peer} was closed here", orderly=True)


class LocalMesh(Mesh):
    """One rank's links to the others of its process."""

    def __init__(self, rank: int, peers: list[Peer], generation: int, verdict_timeout: float, board: _Board) -> None:
        self.generation = generation
        self.rank = rank
        self.peers = peers
        self.fault = Fault(generation, rank, verdict_timeout)
        self._board = board
        self._lock = threading.Lock()
        self._links: dict[tuple[int, Purpose], LocalLink] = {}

    def link(self, peer: int, purpose: Purpose) -> LocalLink:
        """The link to a rank for a purpose (`Mesh.link`)."""
        self.fault.check()
        with self._lock:
            link = self._links.get((peer, purpose))
            if link is None:
                outgoing = self._board.pipe(self.rank, peer, purpose)
                incoming = self._board.pipe(peer, self.rank, purpose)
                link = LocalLink(self.peers[peer], self.fault, outgoing, incoming)
                self._links[peer, purpose] = link
            return link

    def linked(self, purpose: Purpose) -> list[int]:
        """Ranks that have sent, or been sent to (`Mesh.linked`)."""
        return self._board.linked(self.rank, purpose)

    @property
    def bytes_sent(self) -> int:
        """Bytes of payload so far (`Mesh.bytes_sent`)."""
        with self._lock:
            return sum(link.bytes_sent for link in self._links.values())

    def close(self, deadline: float) -> None:
        """Closes the links to all peers, those that were never used too (`Mesh.close`)."""
        self._end(orderly=True)
        for link in list(self._links.values()):
            link.close(deadline)

    def cut(self) -> None:
        """Breaks all links, as the death of this rank's process would."""
        self._end(orderly=False)

    def _end(self, *, orderly: bool) -> None:
        for peer in range(self.size):
            for purpose in Purpose:
                self._board.pipe(self.rank, peer, purpose).end(orderly=orderly)
                self._board.pipe(peer, self.rank, purpose).end(orderly=orderly)


def local_meshes(world: int, config: Config | None = None, *, generation: int = 1) -> list[LocalMesh]:
    """The meshes of a generation whose ranks are threads of this process, by rank.

    Args:
        world: number of ranks, at least 1.
        config: timeouts; the defaults if None.
        generation: its number.

    Raises:
        InvalidWorldSize: `world` is below 1.
    """
    if world < 1:
        raise InvalidWorldSize(f"a world needs at least 1 rank, not {world}")
    peers = [Peer(rank, f"local-{rank}", "local") for rank in range(world)]
    board, verdict_timeout = _Board(), (config or Config()).verdict_timeout
    meshes = [LocalMesh(rank, peers, generation, verdict_timeout, board) for rank in range(world)]
    for mesh in meshes:
        mesh.fault.on_suspicion(_judge(mesh.rank, meshes))
    return meshes


def _judge(reporter: int, meshes: list[LocalMesh]) -> Callable[[Suspicion], None]:
    def report(suspicion: Suspicion) -> None:
        accused = reporter if suspicion.accused is None else suspicion.accused
        culprits = {accused}
        if suspicion.reason == ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH:
            culprits.add(reporter)
        verdict = Verdict(
            meshes[reporter].generation,
            suspicion.reason,
            tuple(sorted(culprits)),
            suspicion.operation,
            suspicion.text,
        )
        with meshes[0]._board.lock:  # two ranks may suspect at once: all must be told one verdict, the first
            for mesh in meshes:
                mesh.fault.settle(verdict)

    return report


class _Pipe:
    """Frames in one direction between two ranks for one purpose."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: deque[Frame] = deque()
        self._end: LinkEnded | None = None
        self.on_change: Callable[[], None] = _nothing

    def put(self, frame: Frame, deadline: float, fault: Fault) -> None:
        with self._changed:
            while self._end is None and len(self._frames) >= CAPACITY and not fault.failed:
                self._wait(deadline, "the other side takes nothing in")
            if self._end is None and not fault.failed:
                self._frames.append(frame)
                self._tell()
                return
        fault.check()
        assert self._end is not None
        raise LinkEnded(str(self._end), orderly=self._end.orderly)

    def get(self, deadline: float, fault: Fault) -> Frame:
        with self._changed:
            while not self._frames and self._end is None and not fault.failed:
                self._wait(deadline, "no frame came")
            if self._frames and not fault.failed:
                if len(self._frames) >= CAPACITY:
                    self._changed.notify_all()
                return self._frames.popleft()
        fault.check()
        assert self._end is not None
        raise LinkEnded(str(self._end), orderly=self._end.orderly)

    def end(self, *, orderly: bool) -> None:
        with self._changed:
            if self._end is None:
                how = "closed" if orderly else "broken"
                self._end = LinkEnded(f"the link was {how} by the other side", orderly=orderly)
                self._tell()

    def wake(self) -> None:
        with self._changed:
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        self.on_change()

    def _wait(self, deadline: float, why: str) -> None:
        left = deadline - monotonic()
        if left <= 0 or not self._changed.wait(left):
            raise LinkTimeout(f"{why} before the deadline")


class _Board:
    """The pipes of one generation, made when first asked for."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._pipes: dict[tuple[int, int, Purpose], _Pipe] = {}

    def pipe(self, source: int, target: int, purpose: Purpose) -> _Pipe:
        with self.lock:
            return self._pipes.setdefault((source, target, purpose), _Pipe())

    def linked(self, rank: int, purpose: Purpose) -> list[int]:
        with self.lock:
            return sorted(source for source, target, kind in self._pipes if target == rank and kind is purpose)


def _nothing() -> None:
    """Stands where no reader asked to be told of arrivals."""
