"""Messages between two ranks: matched by tag in the order of arrival, from one rank or from any.

It has no thread of its own: whoever waits for a message takes in what has arrived, one thread at a time (the pump), and
the others wait for it. Links ring a doorbell, so that waiting for any rank needs no polling. Messages that nobody has
asked for stay here up to a limit; beyond it they stay in the link, and the sender waits.

What ends the generation is a lost peer or a broken protocol; a timeout of `send` or `recv` ends that call alone.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import NoReturn

from paceline._wait import SLICE
from paceline.arrays import Array, check_out, deliver, landing
from paceline.collectives import blame
from paceline.collectives.messages import Assembler, Message, to_frames
from paceline.errors import OperationTimeout
from paceline.links.base import Link, LinkEnded, LinkTimeout, Mesh, Purpose
from paceline.links.frame import Frame

__all__ = ["MAX_WAITING_BYTES", "Mailbox"]

MAX_WAITING_BYTES = 64 << 20
"""Weight of the messages from one rank that may wait here (`Message.weight`)."""

_SLICE = 0.02
"""Seconds after which a blocked sender takes in what has arrived, so that two ranks may both send first."""

_ALL = -1
"""On the doorbell: look again, whomever you wait for."""


class Mailbox:
    """Messages to and from the members of one generation. Thread-safe."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._lock = threading.RLock()  # entered in C: an interrupt cannot leave it taken, as it can a Condition
        self._changed = threading.Condition(
            self._lock
        )  # guards these, and tells of messages that came and of a free pump:
        self._messages: deque[Message] = deque()
        self._weight: Counter[int] = Counter()  # of the messages, by source
        self._links: dict[int, Link] = {}
        self._pumping = False
        self._doorbell: queue.SimpleQueue[int] = queue.SimpleQueue()  # ranks whose links may have something
        self._assemblers = [Assembler(rank) for rank in range(mesh.size)]  # the pump's, like `_ended`
        self._ended: dict[int, LinkEnded] = {}
        self._sent = [0] * mesh.size  # by destination: number of the last message; guarded by the lock of that rank
        self._sending = [threading.Lock() for _ in range(mesh.size)]
        self._wake = partial(self._doorbell.put, _ALL)
        mesh.fault.on_failure(self._wake)

    def close(self) -> None:
        """Hears of no failure any more; its links are the mesh's to close."""
        self._mesh.fault.forget(self._wake)

    def send(self, x: Array, dst: int, tag: int, deadline: float) -> None:
        """Sends a message; returns when `x` may be changed. See `Group.send`."""
        mesh, started = self._mesh, monotonic()
        if not self._sending[dst].acquire(timeout=max(0.0, deadline - started)):
            self._send_late(dst, tag, started)
        try:
            number = self._sent[dst] + 1
            frames = to_frames(x, tag, mesh.generation, number)
            if dst == mesh.rank:
                self._send_to_self(frames)
                self._sent[dst] = number
                return
            link = self._link(dst)
            for frame in frames:
                self._push(link, frame, deadline)
                self._sent[dst] = number  # not before part 0 is out: a call that sent nothing takes no number
        except LinkTimeout:
            self._send_late(dst, tag, started)
        except LinkEnded as end:
            self._lost(dst, f"send tag={tag}", end)
        finally:
            self._sending[dst].release()

    def recv(self, src: int | None, tag: int, out: Array | None, deadline: float) -> tuple[Array, int]:
        """The next message with this tag, and its source. See `Group.recv`."""
        started = monotonic()
        sources = [rank for rank in range(self._mesh.size) if rank == src or src is None]
        peers = [rank for rank in sources if rank != self._mesh.rank]
        for peer in peers:
            self._link(peer)
        while True:
            with self._lock:
                message = self._take(sources, tag, out)
                if message is None and self._pumping:
                    left = max(0.0, deadline - monotonic())
                    if not self._changed.wait(min(SLICE, left)) and left <= SLICE:
                        self._recv_late(src, tag, started)
                    continue
                self._pumping = self._pumping or message is None
            if message is not None:
                result = landing(out, None, message.dtype, message.shape)
                message.unpack(result)
                return deliver(result, out), message.source
            left = max(0.0, deadline - monotonic())
            try:
                self._check_sources(peers, tag)
                self._drain(self._doorbell.get(timeout=min(SLICE, left)))
            except queue.Empty:
                if left <= SLICE:
                    self._recv_late(src, tag, started)
            finally:
                self._free_pump()

    def _link(self, peer: int) -> Link:
        with self._lock:
            link = self._links.get(peer)
            if link is None:
                link = self._mesh.link(peer, Purpose.POINT_TO_POINT)
                link.on_readable(partial(self._doorbell.put, peer))
                self._links[peer] = link
                self._doorbell.put(peer)  # what it rang for before this was known
            return link

    def _send_to_self(self, frames: Iterator[Frame]) -> None:
        """Through the same frames as to others, copied: the sender may change its array."""
        with self._lock:
            for frame in frames:
                message = self._assemblers[self._mesh.rank].add(replace(frame, payload=bytes(frame.payload)))
                if message is not None:
                    self._keep(message)
        self._doorbell.put(_ALL)

    def _push(self, link: Link, frame: Frame, deadline: float) -> None:
        while True:
            try:
                link.send(frame, min(deadline, monotonic() + _SLICE))
            except LinkTimeout:
                if monotonic() >= deadline:
                    raise
                self._take_in()
            else:
                return

    def _take_in(self) -> None:
        """Takes in what has arrived, unless another thread does."""
        for peer in self._mesh.linked(Purpose.POINT_TO_POINT):
            self._link(peer)  # its messages were not asked for yet, but it may be blocked until somebody takes them in
        with self._lock:
            if self._pumping:
                return
            self._pumping = True
        try:
            while True:
                self._drain(self._doorbell.get_nowait())
        except queue.Empty:
            pass
        finally:
            self._free_pump()

    def _free_pump(self) -> None:
        with self._lock:
            self._pumping = False
            self._changed.notify_all()

    def _drain(self, rank: int) -> None:
        """Takes in what has arrived from a rank. The pump's."""
        link = self._links.get(rank)
        if link is None or rank in self._ended:
            return
        while self._weight[rank] < MAX_WAITING_BYTES:
            try:
                frame = link.recv(0.0)
            except LinkTimeout:
                return
            except LinkEnded as end:
                self._ended[rank] = end
                return
            try:
                if frame.generation != self._mesh.generation:
                    raise ValueError(f"a frame of generation {frame.generation} in {self._mesh.generation}")
                message = self._assemblers[rank].add(frame)
            except ValueError as error:
                peers, me = self._mesh.peers, self._mesh.rank
                self._mesh.fault.suspect(blame.broke_protocol(peers, me, rank, 0, "messages", str(error)))
                raise self._mesh.fault.error() from None
            if message is not None:
                with self._lock:
                    self._keep(message)

    def _keep(self, message: Message) -> None:
        self._messages.append(message)
        self._weight[message.source] += message.weight
        self._changed.notify_all()

    def _take(self, sources: list[int], tag: int, out: Array | None) -> Message | None:
        """Takes the first message that matches; one that does not fit `out` stays."""
        for message in self._messages:
            if message.tag == tag and message.source in sources:
                if out is not None:
                    check_out(out, message.dtype, message.shape)
                self._messages.remove(message)
                self._weight[message.source] -= message.weight
                self._doorbell.put(message.source)  # there is room again for what waits in the link
                return message
        return None

    def _check_sources(self, peers: list[int], tag: int) -> None:
        """Raises if no message can come any more: the generation has failed, or all peers asked for have gone."""
        self._mesh.fault.check()
        for peer in peers:
            end = self._ended.get(peer)
            if end is not None and (not end.orderly or all(other in self._ended for other in peers)):
                self._lost(peer, f"recv tag={tag}", end)

    def _lost(self, peer: int, mine: str, end: LinkEnded) -> NoReturn:
        mesh = self._mesh
        mesh.fault.suspect(blame.link_ended(mesh.peers, mesh.rank, peer, 0, mine, end))
        raise mesh.fault.error() from None

    def _send_late(self, dst: int, tag: int, started: float) -> NoReturn:
        mesh, seconds = self._mesh, monotonic() - started
        me = mesh.peers[mesh.rank]
        text = f"send tag={tag}: {mesh.peers[dst]} did not take the message of {me} in {seconds:.3g} s"
        raise OperationTimeout(text, ranks=(mesh.peers[dst].rank,), generation=mesh.generation) from None

    def _recv_late(self, src: int | None, tag: int, started: float) -> NoReturn:
        mesh, seconds = self._mesh, monotonic() - started
        source = "any rank" if src is None else str(mesh.peers[src])
        with self._lock:
            others = sum(src is None or message.source == src for message in self._messages)
        text = f"recv tag={tag}: nothing from {source} to {mesh.peers[mesh.rank]} in {seconds:.3g} s"
        text += f"; {others} messages with other tags wait" if others else ""
        raise OperationTimeout(
            text, ranks=() if src is None else (mesh.peers[src].rank,), generation=mesh.generation
        ) from None
