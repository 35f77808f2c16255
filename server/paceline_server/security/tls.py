"""The coordinator's certificate, and whose certificates it asks for.

They are checked before grpc gets them: it takes anything, and then fails at each handshake.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from paceline_server._grpc import grpc
from paceline_server.settings import ServerSettings
from pacelinepb.private_files import FileTooOpen, read_private

__all__ = ["Certificates", "TlsPaths", "TlsUnusable"]

_log = logging.getLogger(__name__)

_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of openssl/x509_vfy.h, which `ssl` has no name for."""

_FLIGHTS = 4
"""Of a handshake, each way; TLS 1.3 needs fewer."""


class TlsUnusable(ValueError):
    """A certificate or key cannot be used; the text names the file."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """What TLS is served with, in PEM.

    Attributes:
        cert: the coordinator's certificate.
        key: the key of it.
        ca: the authority of those that callers must have; None if they need none.
    """

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes | None = None

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """For grpc, which takes each once."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca)


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """The files of certificates."""

    cert: Path
    key: Path
    ca: Path | None = None

    @classmethod
    def of(cls, settings: ServerSettings) -> TlsPaths | None:
        """Those that the settings name; None if the coordinator is to serve in the clear."""
        if settings.tls_cert is None or settings.tls_key is None:
            return None
        return cls(settings.tls_cert, settings.tls_key, settings.tls_ca)

    def read(self, known: Certificates | None = None) -> Certificates:
        """What is in them now: `known` itself if that has not changed, else checked. Not on a loop.

        A certificate that is out of its time is taken, with a warning: it may be a clock that is wrong.

        Raises:
            TlsUnusable: a file cannot be read, is no certificate or key, others may read the key, or the two do not
                belong together.
        """
        found = Certificates(_read(self.cert), _read_key(self.key), None if self.ca is None else _read(self.ca))
        if found == known:
            return known
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            with _as_file(found.cert.rstrip() + b"\n" + found.key) as path:
                context.load_cert_chain(path, password=_no_passphrase)
        except ssl.SSLError as error:
            why = error.reason or error
            raise TlsUnusable(f"{self.cert} and {self.key} are no certificate and its key (PEM): {why}") from None
        if found.ca is not None:
            try:
                with _as_file(found.ca) as path:
                    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
            except ssl.SSLError as error:
                raise TlsUnusable(f"{self.ca} is no certificate (PEM): {error.reason or error}") from None
        if (warning := _out_of_time(context, found.cert, time.time())) is not None:
            _log.warning("the certificate %s %s", self.cert, warning)
        return found

    def __str__(self) -> str:
        return ", ".join(str(path) for path in (self.cert, self.key, self.ca) if path is not None)


def _out_of_time(serving: ssl.SSLContext, cert: bytes, now: float) -> str | None:
    """What is to be said of a certificate that has expired, or is not valid yet; None of any other."""
    held = _contents(serving, cert)
    since, until = (str(held.get(name, "")) for name in ("notBefore", "notAfter"))
    if until and ssl.cert_time_to_seconds(until) < now:
        return f"expired on {until}: callers do not take it, and a new one is needed"
    if since and ssl.cert_time_to_seconds(since) > now:
        return f"is not valid before {since}, and until then callers do not take it"
    return None


def _contents(serving: ssl.SSLContext, cert: bytes) -> dict[str, object]:
    """What a certificate says, as `SSLSocket.getpeercert` does; empty where that cannot be told.

    `ssl` shows the certificate of the other end only, once it is verified. So one end that has it shakes hands, in
    memory, with one that trusts it whatever the time.
    """
    calling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    calling.check_hostname = False
    calling.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        with _as_file(cert) as path:
            calling.load_verify_locations(path)
        caller, server = calling.wrap_bio(back, there), serving.wrap_bio(there, back, server_side=True)
        for _ in range(_FLIGHTS):
            for end in (caller, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        return {**(caller.getpeercert() or {})}
    except (OSError, ValueError):  # it is not made for servers: that is not for here
        return {}


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """`ssl` loads from files, which may be others by now than those that were read; this one is in memory."""
    fd = os.memfd_create("paceline-tls")
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsUnusable(f"cannot read {path}: {error.strerror or error}") from None


def _read_key(path: Path) -> bytes:
    try:
        return read_private(path)
    except FileTooOpen as error:
        raise TlsUnusable(f"the key {error}") from None
    except OSError as error:
        raise TlsUnusable(f"cannot read {path}: {error.strerror or error}") from None


def _no_passphrase() -> NoReturn:
    raise TlsUnusable("the key is locked with a passphrase, which a coordinator has nobody to ask for")
