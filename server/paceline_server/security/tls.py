"""The coordinator's certificate, and whose certificates it asks for. Checked before anything listens."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn

from paceline_server._grpc import grpc
from paceline_server.settings import ServerSettings

__all__ = ["TlsUnusable", "server_credentials"]


class TlsUnusable(ValueError):
    """A certificate or key cannot be used; the text names the file."""


def server_credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """What the coordinator serves TLS with; None if it is to serve in the clear. Reads files: not on a loop.

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
    authority = None
    if settings.tls_ca is not None:
        authority = _read(settings.tls_ca)
        try:
            context.load_verify_locations(settings.tls_ca)
        except ssl.SSLError as error:
            raise TlsUnusable(f"{settings.tls_ca} is no certificate (PEM): {error.reason or error}") from None
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsUnusable(f"cannot read {path}: {error.strerror or error}") from None


def _no_passphrase() -> NoReturn:
    raise TlsUnusable("the key is locked with a passphrase, which a coordinator has nobody to ask for")
