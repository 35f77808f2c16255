"""Streams of frames that come in: each by its ticket, checked frame by frame, and what its end means."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from paceline._exhausted import is_exhausted
from paceline._grpc import EOF, grpc
from paceline.links.base import LinkEnded, Peer, Purpose
from paceline.links.fault import Fault, Suspicion
from paceline.links.frame import Frame, FrameDamaged, FrameError, FrameKind, decode
from paceline.links.grpc_queues import Inbox
from paceline.links.grpc_refusal import refuse
from paceline.links.negotiation import TICKET_LIFETIME, Kind, Ways
from pacelinepb.v1 import peer_pb2
from pacelinepb.v1.errors_pb2 import ErrorReason
from pacelinepb.v1.session_pb2 import Verdict

__all__ = ["Household", "Intake"]

_log = logging.getLogger("paceline.links")

MAX_TEXT = 2000
"""Characters of a peer's sentence that are believed."""

MAX_TICKETS = 4096
"""Unused tickets that a door remembers; one more and the oldest are forgotten."""

_GRPC = peer_pb2.LINK_KIND_GRPC


class Household(Protocol):
    """What the door asks of those inside: one member's view of one generation."""

    generation: int
    member_id: str
    node: str
    fault: Fault

    @property
    def size(self) -> int:
        """Number of members."""

    @property
    def neighbours(self) -> int:
        """See `Mesh.neighbours`."""

    def peer_by_id(self, member_id: str) -> Peer | None:
        """The member with this id, None if it is not of this generation."""

    def inbox(self, rank: int, purpose: Purpose, group: str) -> Inbox | None:
        """Where frames from that rank go; None if there are too many groups."""

    def peer_leaves(self, rank: int) -> None:
        """That rank has said that it leaves in good order."""

    def peer_ended(self, rank: int, error: LinkEnded) -> None:
        """A stream from that rank ended out of order."""


class Intake:
    """Takes in the streams of those to whom the door has given tickets. On the loop.

    Args:
        ways: the halves that this worker has.
    """

    def __init__(self, ways: Ways) -> None:
        self._ways = ways
        self._tickets: dict[bytes, tuple[Household, Peer, Inbox, Kind, float]] = {}
        self._streams: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Ends every stream with the word that all of it was taken in, and takes in no more."""
        self._closing.set()
        for stream in list(self._streams):
            stream.cancel()

    def expect(self, ticket: bytes, inside: Household, peer: Peer, inbox: Inbox, kind: Kind) -> None:
        """A stream with this ticket carries a peer's frames into the inbox, or tells how the half of that kind ends."""
        now = time.monotonic()
        if len(self._tickets) >= MAX_TICKETS:
            self._tickets = {key: entry for key, entry in self._tickets.items() if entry[4] > now}
            while len(self._tickets) >= MAX_TICKETS:
                self._tickets.pop(next(iter(self._tickets)))
        self._tickets[ticket] = (inside, peer, inbox, kind, now + TICKET_LIFETIME)

    async def serve(self, _: Any, context: Any) -> None:
        """A call of Frames, from its ticket to its end."""
        ticket = dict(context.invocation_metadata()).get("paceline-ticket-bin", b"")
        inside, peer, inbox, kind, expires = self._tickets.pop(ticket, (None, None, None, _GRPC, 0.0))
        half = self._ways.take(ticket)
        if (
            inside is None
            or peer is None
            or inbox is None
            or (half is None and kind != _GRPC)
            or expires < time.monotonic()
            or self._closing.is_set()
        ):
            if half is not None:
                half.close()
            text = "frames need a fresh ticket from Hello, and what it was given for"
            await refuse(context, grpc.StatusCode.UNAUTHENTICATED, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        if not inbox.claim():  # frames of two streams would come in any order, and a second half would hide the first
            if half is not None:
                half.close()
            _accuse(inside.fault, peer, f"{peer} broke the protocol: it opened a link twice")
            text = "a link has one stream for good"
            await refuse(context, grpc.StatusCode.ALREADY_EXISTS, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        if half is not None:
            inbox.turn_to(half)
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        frames, sent, whole = 0, 0, False
        try:
            await context.write(peer_pb2.FramesResponse(accepted=peer_pb2.Accepted()))
            while (data := await context.read()) is not EOF:
                frame = decode(data)
                if frame.generation != inside.generation:
                    text = f"a frame of generation {frame.generation} came to generation {inside.generation}"
                    _accuse(inside.fault, peer, f"{peer} broke the protocol: {text}")
                    reason = ErrorReason.ERROR_REASON_STALE_GENERATION
                    await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, reason, text)
                if whole and frame.kind is not FrameKind.ABORT:  # its generation may fail while it leaves
                    text = f"a frame of kind {frame.kind.name} came after the last"
                    _accuse(inside.fault, peer, f"{peer} broke the protocol: {text}")
                    reason = ErrorReason.ERROR_REASON_BAD_REQUEST
                    await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, reason, text)
                frames += 1
                if frame.kind in (FrameKind.CLOSE, FrameKind.LEAVE):
                    whole, sent = True, frame.operation
                    if frame.kind is FrameKind.LEAVE:
                        inside.peer_leaves(peer.rank)
                elif frame.kind is FrameKind.ABORT:
                    _relay(inside, peer, frame)
                else:
                    await inbox.put(frame)
            if not whole:
                inside.peer_ended(peer.rank, LinkEnded(f"the link from {peer} ended"))
                return
            inbox.end(LinkEnded(f"{peer} left", orderly=True), sent)
            # Last of all: whoever reads this word may hang up at once, and that cancels what still runs here.
            await context.write(peer_pb2.FramesResponse(drained=peer_pb2.Drained(frames=frames)))
        except asyncio.CancelledError:
            if whole:
                raise
            if not self._closing.is_set():  # the connection broke under the stream
                inside.peer_ended(peer.rank, LinkEnded(f"the link from {peer} ended"))
                raise
            await context.write(peer_pb2.FramesResponse(drained=peer_pb2.Drained(frames=frames)))
        except FrameDamaged as error:
            text = f"bytes from {peer} have changed on the way: {error}"
            _log.warning("%s; the link is closed", text)
            inside.peer_ended(peer.rank, LinkEnded(text))
            await refuse(context, grpc.StatusCode.DATA_LOSS, ErrorReason.ERROR_REASON_PEER_LOST, text)
        except FrameError as error:
            _accuse(inside.fault, peer, f"{peer} broke the protocol: it sent what is no frame: {error}")
            text = f"no frame: {error}"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, ErrorReason.ERROR_REASON_BAD_REQUEST, text)
        except Exception as error:
            if is_exhausted(error):
                inside.fault.broke(error)
            raise
        finally:
            self._streams.discard(task)


def _relay(inside: Household, peer: Peer, frame: Frame) -> None:
    """Takes over what a peer suspects, if it makes sense."""
    try:
        word = Verdict.FromString(bytes(frame.payload))
    except (DecodeError, ValueError):
        _accuse(inside.fault, peer, f"{peer} broke the protocol: it sent an abort that cannot be read")
        return
    accused = word.culprits[0] if word.culprits else peer.rank
    if accused >= inside.size or word.generation != inside.generation:
        _accuse(inside.fault, peer, f"{peer} broke the protocol: it sent an abort that makes no sense")
        return
    text = word.text[:MAX_TEXT]
    inside.fault.suspect(Suspicion(word.reason, accused, word.operation, text, relayed=True))


def _accuse(fault: Fault, peer: Peer, text: str) -> None:
    fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL, peer.rank, 0, text))
