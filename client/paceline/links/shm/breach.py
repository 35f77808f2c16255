"""What becomes of a peer whose words cannot be true."""

from __future__ import annotations

from typing import NoReturn

from paceline.links.base import LinkEnded, Peer
from paceline.links.fault import Fault, Suspicion
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["again", "breach"]


def breach(fault: Fault, peer: Peer, what: str) -> NoReturn:
    """Ends the generation: the peer broke the protocol.

    Raises:
        PacelineError: the generation's error.
    """
    text = f"{peer} broke the protocol: {what}"
    fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL, peer.rank, 0, text))
    raise fault.error()


def again(error: LinkEnded) -> LinkEnded:
    """The same end of a link, to be raised once more: an exception that is raised twice grows."""
    return LinkEnded(str(error), orderly=error.orderly)
