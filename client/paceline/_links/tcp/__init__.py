"""TCP as a kind of link: each direction is a half that consists of one to sixteen connections.

The side that reads listens with `TcpHost`, and the side that writes dials with `connect` (`_links.kind`).
"""

from paceline._links.kind import TICKET_BYTES
from paceline._links.tcp._tcp_incoming import TcpIncoming
from paceline._links.tcp._tcp_kind import TcpHost, TcpKind, TcpLimits, client_context, connect, server_context
from paceline._links.tcp._tcp_outgoing import TcpOutgoing
from paceline.config import MAX_STREAMS

__all__ = [
    "MAX_STREAMS",
    "TICKET_BYTES",
    "TcpHost",
    "TcpIncoming",
    "TcpKind",
    "TcpLimits",
    "TcpOutgoing",
    "client_context",
    "connect",
    "server_context",
]
