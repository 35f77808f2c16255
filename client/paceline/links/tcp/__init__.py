"""Frames past gRPC over plain tcp sockets: one half of a link for each direction, of one to sixteen connections.

`TcpHost` listens at the side that reads, `connect` dials from the side that writes; see `links.halves` for what comes
of it. Tickets, addresses and how a link ends are the business of the link's gRPC side.
"""

from paceline.links.tcp.dial import connect
from paceline.links.tcp.incoming import TcpIncoming
from paceline.links.tcp.listener import TcpHost
from paceline.links.tcp.outgoing import TcpOutgoing
from paceline.links.tcp.tls import client_context, server_context
from paceline.links.tcp.wire import MAX_STREAMS, TICKET_BYTES

__all__ = [
    "MAX_STREAMS",
    "TICKET_BYTES",
    "TcpHost",
    "TcpIncoming",
    "TcpOutgoing",
    "client_context",
    "connect",
    "server_context",
]
