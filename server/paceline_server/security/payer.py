"""Who pays for a call: the jobs that its token is good for, whatever connections it comes by; else its address. Pure.

One job's calls count together, then, and no more connections get round that. A token for all jobs says nothing of the
job, so that those who show one are told apart by their addresses. So are strangers, who show none that holds; and they
pay for nobody but strangers.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote

from paceline_server.errors import Unauthenticated
from paceline_server.security.tokens import Tokens

__all__ = ["payer"]

_IPV6_HOST_BITS = 64
"""Whoever has one address of IPv6 mostly has all that differ in these (RFC 6177)."""


def payer(tokens: Tokens | None, authorization: str | None, peer: str) -> str:
    """Who pays, in words.

    Args:
        tokens: those in force; None: nobody needs one.
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
