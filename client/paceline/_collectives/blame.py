"""Builds a member's suspicion about a failure: which rank and host, which operation, what happened (I8). Pure.

`me` and `peer` are indices into `peers`, the members of a group; the texts name members by their rank in the view.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline._links.base import LinkEnded, Peer
from paceline._links.fault import Suspicion
from paceline._links.frame import Frame
from pacelinepb.v1.errors_pb2 import ErrorReason


def disagrees(peers: Sequence[Peer], me: int, peer: int, operation: int, mine: str, frame: Frame) -> Suspicion:
    """Reports that the peer is in another operation than this member, or in the same with other arguments."""
    theirs = frame.signature.decode("ascii", "replace") or f"something else (frame {frame.part} of it)"
    text = f"operation {operation}: {peers[peer]} called {theirs} where {peers[me]} called {mine}"
    if frame.operation != operation:
        text += f"; for {peers[peer]} that is operation {frame.operation}"
    return Suspicion(ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH, peers[peer].rank, operation, text)


def misfits(peers: Sequence[Peer], me: int, peer: int, operation: int, mine: str, what: str) -> Suspicion:
    """Reports that the peer's arguments do not fit this member's; `what` completes "rank 1 (host) ..."."""
    text = f"operation {operation}, {mine}: {peers[peer]} {what}, as {peers[me]} found"
    return Suspicion(ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH, peers[peer].rank, operation, text)


def broke_protocol(peers: Sequence[Peer], me: int, peer: int, operation: int, mine: str, what: str) -> Suspicion:
    """Reports that the peer sent a frame that no correct program sends."""
    text = f"{_call(operation, mine)}: {peers[peer]} sent {peers[me]} {what}"
    return Suspicion(ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL, peers[peer].rank, operation, text)


def link_ended(peers: Sequence[Peer], me: int, peer: int, operation: int, mine: str, end: LinkEnded) -> Suspicion:
    """Reports that the link to the peer is gone."""
    how = "is gone" if end.orderly else "is lost"
    text = f"{_call(operation, mine)}: {peers[peer]} {how}, as seen by {peers[me]}: {end}"
    return Suspicion(ErrorReason.ERROR_REASON_PEER_LOST, peers[peer].rank, operation, text, unopened=end.unopened)


def timed_out(
    peers: Sequence[Peer], me: int, peer: int, operation: int, mine: str, waited_for: str, seconds: float
) -> Suspicion:
    """Reports that the peer did not arrive in time, or did not receive in time what was sent to it."""
    text = f"operation {operation}, {mine}: {peers[me]} waited {seconds:.3g} s for {peers[peer]} to {waited_for}"
    return Suspicion(ErrorReason.ERROR_REASON_TIMEOUT, peers[peer].rank, operation, text)


def not_begun(peers: Sequence[Peer], me: int, operation: int) -> Suspicion:
    """Reports that the timeout passed before this member had reached the operation."""
    text = f"operation {operation}: {peers[me]} had not reached it when the timeout expired"
    return Suspicion(ErrorReason.ERROR_REASON_TIMEOUT, None, operation, text)


def raised(peers: Sequence[Peer], me: int, operation: int, mine: str, error: BaseException) -> Suspicion:
    """Reports that this member itself raised in the middle of an operation."""
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    text = f"operation {operation}, {mine}: {peers[me]} raised {words}"
    return Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, None, operation, text, cause=error)


def _call(operation: int, mine: str) -> str:
    return f"operation {operation}, {mine}" if operation else mine
