"""The coordinator's certificate, and the authority whose certificates callers need.

We check the files before grpc gets them, because grpc takes anything and then fails at each handshake. The files may
change while the coordinator serves: new connections get the new certificate, existing ones stay. grpc asks for the
certificate before each handshake, on a thread of its own, and must not wait there. So a daemon thread reads the files
every `LOOK_S` seconds and keeps a changed certificate ready. A look that hangs, because a network is away, delays only
the next look.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from paceline_server._grpc import grpc
from paceline_server.blocking_calls import call_apart
from paceline_server.settings import ServerSettings
from pacelinepb.private_files import FileTooOpen, read_private

_log = logging.getLogger(__name__)

_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of openssl/x509_vfy.h, which `ssl` has no name for."""

_FLIGHTS = 4
"""The flights of a handshake in each direction; TLS 1.3 needs fewer."""


class TlsUnusable(ValueError):
    """A certificate or key cannot be used; the text names the file."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """The certificates that the coordinator serves TLS with, in PEM.

    `ca` is None if callers need no certificate. `until` is when the coordinator's expires, in seconds since 1970; None
    if that cannot be found.
    """

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes | None = None
    until: float | None = field(default=None, compare=False)

    def context(self) -> ssl.SSLContext:
        """Makes the settings of Python's TLS, for the coordinator's HTTP server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with _as_file(self.cert.rstrip() + b"\n" + self.key) as path:
            context.load_cert_chain(path, password=_no_passphrase)
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            with _as_file(self.ca) as path:
                context.load_verify_locations(path)
        return context

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Makes the configuration for grpc, which may use each object only once."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca)


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """The paths of the coordinator's certificate, of its key, and of the callers' authority (all PEM)."""

    cert: Path
    key: Path
    ca: Path | None = None

    @classmethod
    def of(cls, settings: ServerSettings) -> TlsPaths | None:
        """Returns the files that the settings name; None if the coordinator serves without TLS."""
        if settings.tls_cert is None or settings.tls_key is None:
            return None
        return cls(settings.tls_cert, settings.tls_key, settings.tls_ca)

    def read(self, known: Certificates | None = None) -> Certificates:
        """Reads and checks the files; returns `known` itself if nothing has changed. Blocks: do not call it on a loop.

        A certificate that has expired, or is not valid yet, is accepted with a warning: a clock may be wrong. Others
        must not be able to read the key.
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
            raise TlsUnusable(f"{self.cert} and {self.key} are not a certificate and its key (PEM): {why}") from None
        if found.ca is not None:
            try:
                with _as_file(found.ca) as path:
                    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
            except ssl.SSLError as error:
                raise TlsUnusable(f"{self.ca} is not a certificate (PEM): {error.reason or error}") from None
        held = _contents(context, found.cert)
        if (warning := _out_of_time(held, time.time())) is not None:
            _log.warning("the certificate %s %s", self.cert, warning)
        until = held.get("notAfter")
        return found if until is None else replace(found, until=ssl.cert_time_to_seconds(str(until)))

    def __str__(self) -> str:
        return ", ".join(str(path) for path in (self.cert, self.key, self.ca) if path is not None)


def _out_of_time(held: Mapping[str, object], now: float) -> str | None:
    """Returns the warning about a certificate that has expired, or is not valid yet; None for any other."""
    since, until = (str(held.get(name, "")) for name in ("notBefore", "notAfter"))
    if until and ssl.cert_time_to_seconds(until) < now:
        return f"expired on {until}: callers refuse it; make a new one"
    if since and ssl.cert_time_to_seconds(since) > now:
        return f"is not valid before {since}, and callers refuse it until then"
    return None


def _contents(serving: ssl.SSLContext, cert: bytes) -> dict[str, object]:
    """Returns the contents of a certificate, as `SSLSocket.getpeercert` does; empty if they cannot be found.

    `ssl` shows only the certificate of the other end, after verifying it. So one end that has the certificate shakes
    hands, in memory, with one that trusts it whatever the time.
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
    except (OSError, ValueError):  # the certificate is not made for servers, which is not this function's concern
        return {}


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """Makes a file in memory: `ssl` loads only from files, and those that we read may have changed since."""
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
    raise TlsUnusable(
        "the key is locked with a passphrase, which the coordinator cannot ask for: use a key without one"
    )


LOOK_S = 10.0
"""Seconds between two looks at the files."""

FIRST_S = 10.0
"""Seconds to wait for the first look, without which the coordinator cannot serve."""


class CertificateKeeper:
    """The certificates in force. It looks for new files every `look_s` seconds.

    If they cannot be used, it logs an error and the last ones stay in force.
    """

    def __init__(self, paths: TlsPaths, held: Certificates, *, look_s: float = LOOK_S) -> None:
        self._paths = paths
        self._look_s = look_s
        self.held = held
        self._changed: deque[Certificates] = deque(maxlen=1)
        self._trouble = ""
        self._closed = threading.Event()
        self.credentials = grpc.dynamic_ssl_server_credentials(
            held.configuration(),
            self._newer,  # type: ignore[arg-type]  # grpc-stubs lack the None that means no change
            require_client_authentication=held.ca is not None,
        )
        threading.Thread(target=self._watch, name="paceline-certificates", daemon=True).start()

    @classmethod
    async def open(cls, paths: TlsPaths, *, look_s: float = LOOK_S, first_s: float = FIRST_S) -> CertificateKeeper:
        """Reads the files; raises `TlsUnusable` also if that takes longer than `first_s`."""
        try:
            return cls(paths, await call_apart(paths.read, "paceline-first-certificates", first_s), look_s=look_s)
        except TimeoutError:
            raise TlsUnusable(
                f"cannot read {paths} within {first_s:g} s. Are they on a network file system that does not answer?"
            ) from None

    def close(self) -> None:
        """Stops looking at the files."""
        self._closed.set()

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns the changed certificate to grpc; None if nothing has changed."""
        try:
            return self._changed.popleft().configuration()
        except IndexError:
            return None

    def _complain(self, error: Exception) -> None:
        """Logs an error once, not at every look."""
        trouble = f"{type(error).__name__}: {error}"
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if isinstance(error, (TlsUnusable, OSError)):  # OSError: there are too many open files
            _log.error("%s; the last certificate stays in force", error)
        else:
            _log.error("cannot read %s; the last certificate stays in force", self._paths, exc_info=error)

    def _watch(self) -> None:
        while not self._closed.wait(self._look_s):
            try:
                found = self._paths.read(self.held)
            except Exception as error:  # noqa: BLE001  # nothing above catches it, and the next look may succeed
                self._complain(error)
                continue
            self._trouble = ""
            if found is not self.held:
                _log.info("the certificate %s has changed, and is now in force", self._paths.cert)
                self.held = found
                self._changed.append(found)
