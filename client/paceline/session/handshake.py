"""Why is there no TLS with the coordinator? Asked with Python's own `ssl`, which says what grpc keeps to itself.

grpc reports every failed handshake as an address that is unavailable. So after a first failed attempt the handshake is
done once more by hand, on a thread. What it finds is final: certificates do not change by waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time

from paceline._address import parse_endpoint
from paceline._lookup import look_up
from paceline.errors import TlsFailed
from paceline.tls import TlsFiles, make_context, what_is_wrong

__all__ = ["check_tls"]

_PROBE_S = 2.0
"""For each word of a handshake; a host that is slower than that is no proof of anything."""

_UNINVITED = "it wants a certificate of every caller: set PACELINE_TLS_CERT and PACELINE_TLS_KEY"

_UNWELCOME = (
    "it does not take our certificate (PACELINE_TLS_CERT): that has expired, is of another authority than its own, or "
    "is not made for callers"
)

_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_RECORD")
"""What OpenSSL makes of an HTTP/2 frame where a handshake should be."""


_ADDRESSES = 2
"""Of a name with many, as many are asked."""

_LOOKS, _PAUSE_S = 2, 0.1
"""A server that hangs up behind the handshake may be stopping; one that does so again does not want us."""


async def check_tls(target: str, files: TlsFiles | None, timeout: float) -> None:
    """Has a look at why a coordinator does not answer.

    Args:
        target: its address, "host:port"; the host is what its certificate should hold.
        files: None if it is to be talked to in the clear.
        timeout: seconds for all of it.

    Raises:
        TlsFailed: it will never answer like this. Where nobody answers, or nothing can be told, nothing is raised.
    """
    endpoint = parse_endpoint(target)
    fault: str | None = None
    # An OSError: the name does not resolve, or time is up (TimeoutError is one).
    with contextlib.suppress(OSError):
        async with asyncio.timeout(timeout):
            for _, where in (await look_up(endpoint.host))[:_ADDRESSES]:
                fault = await asyncio.to_thread(_find_fault, str(where[0]), endpoint.port, endpoint.host, files)
                if fault is not None:
                    break
    if fault is not None:
        raise TlsFailed(f"no connection with the coordinator at {target}: {fault}")


def _find_fault(ip: str, port: int, host: str, files: TlsFiles | None) -> str | None:
    fault: str | None = None
    try:
        for look in range(_LOOKS):
            time.sleep(look * _PAUSE_S)
            with socket.create_connection((ip, port), timeout=_PROBE_S) as connection:
                fault = _shakes_hands(connection) if files is None else _try_handshake(connection, host, files)
            if fault not in (_UNINVITED, _UNWELCOME):
                break
    except OSError:  # refused, silent or cut off: that is not about TLS
        return None
    return fault


def _shakes_hands(connection: socket.socket) -> str | None:
    """A server that is talked to in the clear: does it speak TLS?"""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(connection).close()
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):  # only who speaks TLS sends an alert
            return None
    return "it speaks TLS, and this process does not: set PACELINE_TLS_CA, and for workers PACELINE_TLS_CERT and _KEY"


def _try_handshake(connection: socket.socket, host: str, files: TlsFiles) -> str | None:
    context = make_context(files)
    context.set_alpn_protocols(["h2"])
    try:
        secured = context.wrap_socket(connection, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate {what_is_wrong(error, host)}"
    except ssl.SSLError as error:
        if error.reason in _NOT_TLS:
            return "it speaks no TLS, and this process does: PACELINE_TLS_CA is set"
        return _refusal(files) if "ALERT" in (error.reason or "") else None
    with secured:
        try:
            # With TLS 1.3 what it thinks of our certificate comes behind the handshake. An HTTP/2 server that takes it
            # speaks first; grpc's hangs up on whom it does not want, without the alert that others send.
            welcome = secured.recv(1)
        except (ssl.SSLError, ConnectionError):
            welcome = b""
    return None if welcome else _refusal(files)


def _refusal(files: TlsFiles) -> str:
    return _UNINVITED if files.cert is None else _UNWELCOME
