"""The payer of a call: the jobs that its token is good for, on all connections; or else its address. Pure.

So all calls of one job count together, and opening more connections does not help. A token for all jobs does not tell
the job, so callers that show one are told apart by their addresses. So are strangers, callers without a valid token;
they are separate payers even at an address that others share.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote

from paceline_server.errors import Unauthenticated
from paceline_server.security.tokens import Tokens

__all__ = ["payer"]

_IPV6_HOST_BITS = 64
"""A host with one IPv6 address mostly has all addresses that differ only in these bits (RFC 6177)."""


def payer(tokens: Tokens | None, authorization: str | None, peer: str) -> str:
    """The payer, in words.

    Args:
        tokens: the valid ones; None if callers need none.
        authorization: as for `Tokens.grant`.
        peer: where the call comes from, as grpc says it: "ipv4:10.0.0.5:4711", "ipv6:%5B::1%5D:4711", "unix:".
    """
    address = _address(peer)
    if tokens is None:
        return address
    try:
        jobs = tokens.grant(authorization).jobs
    except Unauthenticated:
        return f"strangers at {address}"
    return address if jobs is None else f"job{'s'[: len(jobs) - 1]} {', '.join(map(repr, sorted(jobs)))}"


def _address(peer: str) -> str:
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return kind
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 128 - _IPV6_HOST_BITS), strict=False))
    return str(address)
