"""The coordinator's certificate, and whose certificates it asks for. Checked before anything listens."""

from __future__ import annotations

import contextlib
import logging
import ssl
import time
from pathlib import Path
from typing import NoReturn

from paceline_server._grpc import grpc
from paceline_server.settings import ServerSettings

__all__ = ["TlsUnusable", "server_credentials"]

_log = logging.getLogger(__name__)

_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of openssl/x509_vfy.h, which `ssl` has no name for."""

_FLIGHTS = 4
"""Of a handshake, each way; TLS 1.3 needs fewer."""


class TlsUnusable(ValueError):
    """A certificate or key cannot be used; the text names the file."""


def server_credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """What the coordinator serves TLS with; None if it is to serve in the clear. Reads files: not on a loop.

    A certificate that is out of its time is served, with a warning: it may be a clock that is wrong.

    Raises:
        TlsUnusable: a file cannot be read, is no certificate or key, or the two do not belong together.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    pair = _read(settings.tls_key), _read(settings.tls_cert)
    # grpc takes anything, and then fails at each handshake; so the standard library has a look first.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password=_no_passphrase)
    except ssl.SSLError as error:
        raise TlsUnusable(
            f"{settings.tls_cert} and {settings.tls_key} are no certificate and its key (PEM): {error.reason or error}"
        ) from None
    if (warning := _out_of_time(context, settings.tls_cert, time.time())) is not None:
        _log.warning("%s", warning)
    authority = None
    if settings.tls_ca is not None:
        authority = _read(settings.tls_ca)
        try:
            context.load_verify_locations(settings.tls_ca)
        except ssl.SSLError as error:
            raise TlsUnusable(f"{settings.tls_ca} is no certificate (PEM): {error.reason or error}") from None
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def _out_of_time(serving: ssl.SSLContext, path: Path, now: float) -> str | None:
    """What is to be said of a certificate that has expired, or is not valid yet; None of any other."""
    held = _contents(serving, path)
    since, until = (str(held.get(name, "")) for name in ("notBefore", "notAfter"))
    if until and ssl.cert_time_to_seconds(until) < now:
        return f"the certificate {path} expired on {until}: callers do not take it, and a new one is needed"
    if since and ssl.cert_time_to_seconds(since) > now:
        return f"the certificate {path} is not valid before {since}, and until then callers do not take it"
    return None


def _contents(serving: ssl.SSLContext, path: Path) -> dict[str, object]:
    """What a certificate says, as `SSLSocket.getpeercert` does; empty where that cannot be told.

    `ssl` shows the certificate of the other end only, once it is verified. So one end that has it shakes hands, in
    memory, with one that trusts it whatever the time.
    """
    calling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    calling.check_hostname = False
    calling.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        calling.load_verify_locations(path)
        caller, server = calling.wrap_bio(back, there), serving.wrap_bio(there, back, server_side=True)
        for _ in range(_FLIGHTS):
            for end in (caller, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        return {**(caller.getpeercert() or {})}
    except (OSError, ValueError):  # the file has gone, or it is not made for servers: that is not for here
        return {}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsUnusable(f"cannot read {path}: {error.strerror or error}") from None


def _no_passphrase() -> NoReturn:
    raise TlsUnusable("the key is locked with a passphrase, which a coordinator has nobody to ask for")
