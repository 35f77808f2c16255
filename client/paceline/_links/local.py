"""Links between ranks of one process, for tests and teaching. They are the reference implementation of a link.

The first suspicion of any rank becomes the verdict for all ranks, because there is no coordinator.

A link is a `Pipe` each way, which passes frames by reference. The sender keeps the memory of a lent frame. A frame
counts as lent from `put` until the reader's `release`; `await_release` and `recall` give it back to the sender.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

from paceline._links.base import LEND_BYTES, Link, LinkEnded, LinkTimeout, Mesh, Peer, Purpose
from paceline._links.fault import Fault, Suspicion
from paceline._links.frame import Frame
from paceline.errors import InvalidWorldSize
from paceline_protocol import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason

VERDICT_TIMEOUT = 10.0
"""Seconds to wait for the verdict. It comes at once unless a thread is starved; all ranks must raise the same one."""


CAPACITY = 64
"""Frames that a link holds before `send` waits."""


class Pipe:
    """One direction of a link. One thread writes and one reads; deadlines are `time.monotonic()` values.

    Attributes:
        on_change: called whenever there may be something to read. Called under the pipe's lock, so it must not block.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # entered in C, so an interrupt cannot leave it locked, unlike a Condition
        self._changed = threading.Condition(self._lock)
        self._frames: deque[tuple[Frame, bool]] = deque()  # each with True if it is lent
        self._lent = 0  # lent frames, in the deque or being read
        self._reading = 0  # lent frames that are being read
        self._end: LinkEnded | None = None
        self.on_change: Callable[[], None] = _nothing

    def put(self, frame: Frame, deadline: float, fault: Fault, *, lent: bool = False) -> None:
        """Adds a frame. Waits for room until the deadline. The writer keeps the payload's memory if it is `lent`."""
        with self._lock:
            while self._end is None and len(self._frames) >= CAPACITY and not fault.failed:
                self._wait(deadline, "the other side received nothing")
            if self._end is None and not fault.failed:
                self._frames.append((frame, lent))
                self._lent += lent
                self._tell()
                return
        raise self._error(fault)

    def await_release(self, deadline: float, fault: Fault) -> None:
        """Waits until the reader has released all lent frames."""
        with self._lock:
            while self._lent and self._end is None and not fault.failed:
                self._wait(deadline, "the other side did not finish reading")
            if not self._lent:
                return
        raise self._error(fault)

    def recall(self) -> None:
        """Takes back lent frames: drops those that wait, and waits for the one that is being read."""
        with self._lock:
            self._frames = deque((frame, False) for frame, lent in self._frames if not lent)
            self._lent = self._reading
            while self._reading:  # not for long: a reader does not wait, or the failure wakes it
                self._changed.wait()

    def release(self) -> None:
        """Releases the frames that the reader has read."""
        if self._reading:
            with self._lock:
                self._lent -= self._reading
                self._reading = 0
                if not self._lent:
                    self._changed.notify_all()

    def get(self, deadline: float, fault: Fault) -> Frame:
        """Returns the next frame of the fault's generation (`Link.recv`)."""
        with self._lock:
            self._drop_before(fault.generation)
            while not self._frames and self._end is None and not fault.failed:
                self._wait(deadline, "no frame came")
                self._drop_before(fault.generation)
            if self._frames and not fault.failed:
                if len(self._frames) >= CAPACITY:
                    self._changed.notify_all()
                frame, lent = self._frames.popleft()
                self._reading += lent
                return frame
        raise self._error(fault)

    def _error(self, fault: Fault) -> LinkEnded:
        """Returns how the pipe ended. Raises the generation's error if the generation has failed."""
        fault.check()  # not under the lock: it may wait for a verdict
        assert self._end is not None
        return LinkEnded(str(self._end), orderly=self._end.orderly)

    def _drop_before(self, generation: int) -> None:
        """Drops frames of earlier generations. None of them is lent any more."""
        while self._frames and self._frames[0][0].generation < generation:
            self._frames.popleft()
            self._changed.notify_all()

    def end(self, *, orderly: bool) -> None:
        """Ends the pipe. The frames in it can still be read."""
        with self._lock:
            if self._end is None:
                how = "closed" if orderly else "broken"
                self._end = LinkEnded(f"the link was {how} by the other side", orderly=orderly)
                self._tell()

    def wake(self) -> None:
        """Makes blocked calls check the fault."""
        with self._lock:
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        self.on_change()

    def _wait(self, deadline: float, why: str) -> None:
        left = deadline - monotonic()
        if left <= 0 or not self._changed.wait(left):
            raise LinkTimeout(f"{why} before the deadline")


def _nothing() -> None:
    """The callback of a pipe whose reader has not registered one."""


class LocalLink(Link):
    """One end of a pair of pipes."""

    kind = "local"

    def __init__(self, peer: Peer, fault: Fault, outgoing: Pipe, incoming: Pipe) -> None:
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

    def lend(self, frame: Frame, deadline: float) -> None:
        """Sends a frame by reference (`Link.lend`)."""
        if len(frame.payload) < LEND_BYTES:
            self.send(frame, deadline)
            return
        self._check_open()
        self.bytes_sent += len(frame.payload)
        self._outgoing.put(frame, deadline, self._fault, lent=True)

    def await_release(self, deadline: float) -> None:
        """Waits until the other side has released all lent frames (`Link.await_release`)."""
        self._outgoing.await_release(deadline, self._fault)

    def recall(self) -> None:
        """Takes back lent frames (`Link.recall`)."""
        self._outgoing.recall()

    def release(self) -> None:
        """Releases received frames (`Link.release`)."""
        self._incoming.release()

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        """Returns the next frame (`Link.recv`)."""
        self._check_open()
        return self._incoming.get(deadline, self._fault)

    def on_readable(self, notify: Callable[[], None]) -> None:
        """Registers the function to call on arrivals (`Link.on_readable`)."""
        self._incoming.on_change = notify
        notify()

    def close(self, deadline: float) -> None:
        """Ends the link in order (`Link.close`)."""
        self._closed = True
        self._outgoing.end(orderly=True)
        self._incoming.end(orderly=True)

    def forget(self) -> None:
        """Stops listening for the generation's failure."""
        self._fault.forget(self._outgoing.wake)
        self._fault.forget(self._incoming.wake)

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

    def __init__(self, rank: int, peers: Sequence[Peer], generation: int, board: _Board) -> None:
        self.generation = generation
        self.rank = rank
        self.peers = peers
        self.fault = Fault(generation, rank, VERDICT_TIMEOUT)
        self._board = board
        self._lock = threading.Lock()
        self._links: dict[tuple[int, Purpose, str], LocalLink] = {}
        self._sent_by_closed = 0

    def link(self, peer: int, purpose: Purpose, group: str = "") -> LocalLink:
        """Returns the link to a rank for a purpose (`Mesh.link`)."""
        self.fault.check()
        with self._lock:
            link = self._links.get((peer, purpose, group))
            if link is None:
                of = self._of_now(group)
                outgoing = self._board.pipe(self.rank, peer, purpose, of)
                incoming = self._board.pipe(peer, self.rank, purpose, of)
                link = LocalLink(self.peers[peer], self.fault, outgoing, incoming)
                self._links[peer, purpose, group] = link
            return link

    def linked(self, purpose: Purpose, group: str = "") -> list[int]:
        """Returns the ranks to which a pipe exists in either direction (`Mesh.linked`)."""
        return self._board.linked(self.rank, purpose, self._of_now(group))

    @property
    def bytes_sent(self) -> int:
        """Bytes of payload sent so far (`Mesh.bytes_sent`)."""
        with self._lock:
            return self._sent_by_closed + sum(link.bytes_sent for link in self._links.values())

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes of payload sent so far (`Mesh.sent_bytes`); none in a world of one."""
        return {"local": self.bytes_sent} if self.size > 1 else {}

    def close(self, deadline: float) -> None:
        """Closes the links to all peers, including links that were never used (`Mesh.close`)."""
        self._end(orderly=True)
        for link in list(self._links.values()):
            link.close(deadline)

    def next(self) -> LocalMesh:
        """Returns this member's mesh in the next generation, over the same links."""
        return LocalMesh(self.rank, self.peers, self.generation + 1, self._board)

    def close_group(self, group: str, deadline: float) -> None:
        """Closes the links of a group (`Mesh.close_group`)."""
        with self._lock:
            keys = [key for key in self._links if key[2] == group]
            links = [self._links.pop(key) for key in keys]
            self._sent_by_closed += sum(link.bytes_sent for link in links)
        for link in links:
            link.close(deadline)
            link.forget()
        self._board.leave_group(self.rank, self._of_now(group))

    def _of_now(self, group: str) -> str:
        """Returns the group's name on the board. Links of all members outlive a generation, links of parts do not."""
        return f"{self.generation}:{group}" if group else ""

    def cut(self) -> None:
        """Breaks all links, as the death of this rank's process would."""
        self._end(orderly=False)

    def _end(self, *, orderly: bool) -> None:
        self._board.end(self.rank, orderly=orderly)


def local_meshes(world: int, *, generation: int = 1) -> list[LocalMesh]:
    """Returns the meshes of a generation whose ranks are threads of this process, by rank.

    Args:
        world: number of ranks, at least 1.
        generation: its number.

    Raises:
        InvalidWorldSize: `world` is below 1.
    """
    if world < 1:
        raise InvalidWorldSize(f"a world needs at least 1 rank, not {world}")
    peers = [Peer(rank, f"local-{rank}", "local") for rank in range(world)]
    board = _Board()
    return _judged([LocalMesh(rank, peers, generation, board) for rank in range(world)])


def next_meshes(meshes: Sequence[LocalMesh]) -> list[LocalMesh]:
    """Returns the meshes of the next generation: the same members, over the same links."""
    meshes[0]._board.forget_groups()
    return _judged([mesh.next() for mesh in meshes])


def _judged(meshes: list[LocalMesh]) -> list[LocalMesh]:
    """Makes the first suspicion of any mesh the verdict for all, and returns the meshes."""
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
        with meshes[0]._board.lock:  # two ranks may suspect at once: all must get the same verdict, the first
            for mesh in meshes:
                mesh.fault.settle(verdict)

    return report


class _Board:
    """The pipes between the ranks, each made when it is first asked for."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._pipes: dict[tuple[int, int, Purpose, str], Pipe] = {}
        self._gone: dict[int, bool] = {}  # ranks that have ended, and whether in order
        self._left: set[tuple[int, int, Purpose, str]] = set()  # pipes whose one side has left the group

    def pipe(self, source: int, target: int, purpose: Purpose, group: str) -> Pipe:
        key = (source, target, purpose, group)
        with self.lock:
            pipe = self._pipes.get(key)
            if pipe is None:
                pipe = self._pipes[key] = Pipe()
                for rank in {source, target} & self._gone.keys():
                    pipe.end(orderly=self._gone[rank])
            return pipe

    def linked(self, rank: int, purpose: Purpose, group: str) -> list[int]:
        with self.lock:
            return sorted(source for source, target, *of in self._pipes if target == rank and of == [purpose, group])

    def end(self, rank: int, *, orderly: bool) -> None:
        """Ends all pipes from and to a rank that is gone, including pipes that are made later."""
        with self.lock:
            self._gone.setdefault(rank, orderly)
            pipes = [pipe for (source, target, *_), pipe in self._pipes.items() if rank in (source, target)]
        for pipe in pipes:
            pipe.end(orderly=orderly)

    def forget_groups(self) -> None:
        """Forgets the pipes of all subgroups, because the generation is over."""
        with self.lock:
            self._pipes = {key: pipe for key, pipe in self._pipes.items() if not key[3]}
            self._left.clear()

    def leave_group(self, rank: int, group: str) -> None:
        """Records that a rank has left a group. Forgets the pipes that both sides have left."""
        with self.lock:
            for key in [key for key in self._pipes if key[3] == group and rank in key[:2]]:
                if key in self._left:
                    self._left.remove(key)
                    del self._pipes[key]
                else:
                    self._left.add(key)
