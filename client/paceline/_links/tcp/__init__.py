"""TCP as a kind of link: one half for each direction, of one to sixteen connections.

`TcpHost` listens at the side that reads, `connect` dials from the side that writes (`_links.kind`).
"""

from paceline._links.kind import TICKET_BYTES
from paceline._links.tcp._tcp_incoming import TcpIncoming
from paceline._links.tcp._tcp_kind import TcpHost, TcpKind, client_context, connect, server_context
from paceline._links.tcp._tcp_outgoing import TcpOutgoing
from paceline.config import MAX_STREAMS

__all__ = [
    "MAX_STREAMS",
    "TICKET_BYTES",
    "TcpHost",
    "TcpIncoming",
    "TcpKind",
    "TcpOutgoing",
    "client_context",
    "connect",
    "server_context",
]
