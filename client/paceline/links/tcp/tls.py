"""TLS for data sockets, by the same certificates as the gRPC side of a link: members know each other, nobody else.

TLS 1.3 only: it has no renegotiation, so a socket that only one side writes needs no answer from the other. No session
tickets either: a client that closes a socket with a ticket unread resets it, and what was on its way would be lost.
"""

from __future__ import annotations

import ssl

from paceline.credentials import Credentials
from paceline.tls import make_context

__all__ = ["client_context", "server_context"]


def server_context(credentials: Credentials) -> ssl.SSLContext | None:
    """For `TcpHost`: asks every caller for a certificate of the same authority; None where there is no TLS.

    Raises:
        ValueError: a worker's credentials lack a certificate, or it cannot be used.
    """
    files = credentials.files
    if files is None:
        return None
    if files.cert is None:
        raise ValueError("with TLS a worker needs a certificate: its data sockets would be in the clear")
    context = make_context(files, serving=True)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    return context


def client_context(credentials: Credentials) -> ssl.SSLContext | None:
    """For `connect`, with MEMBER_NAME as the name to expect; None where there is no TLS.

    Raises:
        ValueError: a certificate cannot be used.
    """
    files = credentials.files
    if files is None:
        return None
    context = make_context(files)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
