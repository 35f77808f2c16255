"""Messages between two ranks: as frames and back, and matched by tag and source (or any) in the order of arrival.

A message is all frames with one number: part 0 says "send tag=T dtype[shape]", and all parts carry segments. If a
sender gives up half-way, the receiver drops the message when the next one begins. Memory is allocated as bytes arrive,
never because a signature announces them (I9).

A mailbox has no thread of its own: one of the threads that wait for messages (the pump) receives what has arrived, and
the others wait for it. Links ring a doorbell, so that waiting for any rank needs no polling. Messages that no call has
asked for stay here up to a limit; beyond it they stay in the link, and the sender waits.

A lost peer or a broken protocol ends the generation; a timeout of `send` or `recv` ends only that call.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from time import monotonic
from typing import Any, NoReturn

import numpy as np

from paceline._base.arrays import Array, Signature, as_bytes, as_flat, check_out, deliver, landing, native
from paceline._base.waits import SLICE
from paceline._collectives import blame
from paceline._collectives.program import SEGMENT_BYTES
from paceline._links.base import Link, LinkEnded, LinkTimeout, Mesh, Purpose
from paceline._links.frame import Frame, FrameKind
from paceline.errors import OperationTimeout


@dataclass(slots=True, eq=False)
class ArrayMessage:
    """A message, complete or still arriving: `missing` bytes are to come, the others are in `payloads`, in order."""

    source: int
    tag: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    missing: int
    payloads: list[bytes | memoryview] = field(default_factory=list)

    @property
    def weight(self) -> int:
        """Bytes that the message occupies, plus 1 KiB, so that empty messages count too."""
        return sum(map(len, self.payloads)) + 1024

    def unpack(self, result: Array) -> None:
        """Copies a complete message into a contiguous array of its dtype and shape."""
        target, at = as_bytes(result.reshape(-1)), 0
        for payload in self.payloads:
            target[at : at + len(payload)] = payload
            at += len(payload)


def to_frames(
    x: Array, tag: int, generation: int, number: int, *, segment_bytes: int = SEGMENT_BYTES
) -> Iterator[Frame]:
    """Yields the frames of a message; payloads are views of `x` if its layout allows (errors: `Signature.encode`)."""
    signature = Signature("send", f"tag={tag}", native(x.dtype), x.shape).encode()
    data = as_bytes(as_flat(x))
    for part, at in enumerate(range(0, max(1, len(data)), segment_bytes)):
        yield Frame(FrameKind.DATA, generation, number, part, signature, data[at : at + segment_bytes])
        signature = b""


class Assembler:
    """Puts messages together from the frames of one source, in the order of arrival."""

    def __init__(self, source: int, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._source = source
        self._segment_bytes = segment_bytes
        self._number = 0
        self._part = 0
        self._message: ArrayMessage | None = None

    def add(self, frame: Frame) -> ArrayMessage | None:
        """Takes the next frame; returns the message if the frame completes one, else None.

        A ValueError says why no correct sender sends this frame now.
        """
        if frame.part == 0:
            if frame.operation != self._number + 1:
                raise ValueError(f"message {frame.operation} where message {self._number + 1} was due")
            self._message = self._open(frame.signature)
            self._number, self._part = frame.operation, 0
        message = self._message
        if message is None or frame.operation != self._number or frame.part != self._part:
            raise ValueError(f"frame {frame.part} of message {frame.operation} out of order")
        due = min(self._segment_bytes, message.missing)
        if len(frame.payload) != due:
            raise ValueError(f"{len(frame.payload)} bytes in frame {frame.part} where {due} were due")
        message.payloads.append(frame.payload)
        message.missing -= due
        self._part += 1
        if message.missing:
            return None
        self._message = None
        return message

    def _open(self, data: bytes) -> ArrayMessage:
        signature = Signature.decode(data)
        name, _, tag = signature.detail.partition("=")
        if signature.kind != "send" or name != "tag" or not tag.isdecimal():
            raise ValueError(f"a frame that does not begin a message: {data[:80]!r}")
        if signature.dtype is None or signature.shape is None:
            raise ValueError(f"a message without an array: {data[:80]!r}")
        nbytes = prod(signature.shape) * signature.dtype.itemsize
        return ArrayMessage(self._source, int(tag), signature.dtype, signature.shape, nbytes)


MAX_WAITING_BYTES = 64 << 20
"""Most weight of messages from one rank that may wait here (`ArrayMessage.weight`)."""

_SLICE = 0.02
"""Seconds after which a blocked sender receives what has arrived, so that two ranks may both send first."""

_ALL = -1
"""Put on the doorbell to make every waiting thread look again."""


class Mailbox:
    """Messages to and from the members of one generation. Thread-safe.

    It reads no more frames of a member of whom `max_waiting_bytes` wait. All members have the same `segment_bytes`, the
    longest payload of a frame.
    """

    def __init__(
        self, mesh: Mesh, *, max_waiting_bytes: int = MAX_WAITING_BYTES, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._mesh = mesh
        self._max_waiting_bytes = max_waiting_bytes
        self._segment_bytes = segment_bytes
        # `with` enters an RLock in C: an interrupt cannot leave it locked, as it can a Condition.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # signals new messages and a free pump
        # The lock guards these:
        self._messages: deque[ArrayMessage] = deque()
        self._weight: Counter[int] = Counter()  # of waiting messages, by source
        self._links: dict[int, Link] = {}
        self._pumping = False
        self._doorbell: queue.SimpleQueue[int] = queue.SimpleQueue()  # ranks whose links may have something
        self._assemblers = [Assembler(rank, segment_bytes=segment_bytes) for rank in range(mesh.size)]
        self._ended: dict[int, LinkEnded] = {}  # only the pump uses this and `_assemblers`
        self._sent = [0] * mesh.size  # by destination: number of the last message, guarded by that rank's lock
        self._sending = [threading.Lock() for _ in range(mesh.size)]
        self._wake = partial(self._doorbell.put, _ALL)
        mesh.fault.on_failure(self._wake)

    def close(self) -> None:
        """Stops listening for failures; the mesh closes the links."""
        self._mesh.fault.forget(self._wake)

    def send(self, x: Array, dst: int, tag: int, deadline: float) -> None:
        """Sends a message; returns when `x` may be changed. See `Group.send`."""
        mesh, started = self._mesh, monotonic()
        if not self._sending[dst].acquire(timeout=max(0.0, deadline - started)):
            self._send_late(dst, tag, started)
        try:
            number = self._sent[dst] + 1
            frames = to_frames(x, tag, mesh.generation, number, segment_bytes=self._segment_bytes)
            if dst == mesh.rank:
                self._send_to_self(frames)
                self._sent[dst] = number
                return
            link = self._link(dst)
            for frame in frames:
                self._push(link, frame, deadline)
                self._sent[dst] = number  # only after part 0 is sent: a call that sent nothing uses no number
        except LinkTimeout:
            self._send_late(dst, tag, started)
        except LinkEnded as end:
            self._lost(dst, f"send tag={tag}", end)
        finally:
            self._sending[dst].release()

    def recv(self, src: int | None, tag: int, out: Array | None, deadline: float) -> tuple[Array, int]:
        """Returns the next message with this tag, and its source. See `Group.recv`."""
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
                self._doorbell.put(peer)  # frames may have arrived before the callback was set
            return link

    def _send_to_self(self, frames: Iterator[Frame]) -> None:
        """Sends a message to this rank through the same frames, copied, because the sender may change its array."""
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
        """Receives all frames that have arrived, unless another thread is doing so."""
        for peer in self._mesh.linked(Purpose.POINT_TO_POINT):
            self._link(peer)  # not asked for yet, but the peer may be blocked until this side receives
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
        """Receives all frames that have arrived from a rank. Only the pump calls this."""
        link = self._links.get(rank)
        if link is None or rank in self._ended:
            return
        while self._weight[rank] < self._max_waiting_bytes:
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

    def _keep(self, message: ArrayMessage) -> None:
        self._messages.append(message)
        self._weight[message.source] += message.weight
        self._changed.notify_all()

    def _take(self, sources: list[int], tag: int, out: Array | None) -> ArrayMessage | None:
        """Takes the first message that matches; one that does not fit `out` stays."""
        for message in self._messages:
            if message.tag == tag and message.source in sources:
                if out is not None:
                    check_out(out, message.dtype, message.shape)
                self._messages.remove(message)
                self._weight[message.source] -= message.weight
                self._doorbell.put(message.source)  # there is room again for messages that wait in the link
                return message
        return None

    def _check_sources(self, peers: list[int], tag: int) -> None:
        """Raises if no message can come any more: the generation has failed, or all the peers have left."""
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
        text += f"; {others} messages with other tags are waiting" if others else ""
        raise OperationTimeout(
            text, ranks=() if src is None else (mesh.peers[src].rank,), generation=mesh.generation
        ) from None
