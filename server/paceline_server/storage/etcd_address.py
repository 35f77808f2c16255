"""The value of `--state` that names an etcd cluster, and the files that TLS with it takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from pacelinepb.private_files import read_private

_SCHEME = "etcd://"
_FILES = ("ca", "cert", "key")


def is_etcd(state: str) -> bool:
    """Returns True if a value of `--state` names an etcd cluster, and not a file."""
    return state.startswith("etcd:")


class TlsFiles(NamedTuple):
    """The contents of the files of TLS (PEM), in the order of `grpc.ssl_channel_credentials`."""

    ca: bytes
    key: bytes | None
    cert: bytes | None


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """Where the state is: etcd://HOST:PORT,HOST:PORT/PREFIX?ca=FILE&cert=FILE&key=FILE.

    Coordinators with one prefix share one state. `ca` signs the nodes' certificates, and is None without TLS. We show
    `cert` to the nodes.
    """

    endpoints: tuple[str, ...]
    prefix: str
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @classmethod
    def parse(cls, state: str) -> EtcdAddress:
        """Reads a value of `--state`; the text of the ValueError repeats nothing that may be secret."""
        form = "--state must be a file, or etcd://HOST:PORT,HOST:PORT/PREFIX"
        parts = urlsplit(state)
        if "@" in parts.netloc:
            raise ValueError(
                f"{form}: passwords are not supported, since everybody can see arguments; use certificates"
            )
        endpoints = tuple(parts.netloc.split(","))
        if not state.startswith(_SCHEME) or not all(_is_endpoint(each) for each in endpoints):
            raise ValueError(f"{form}; an address of a node is missing or is not host:port")
        prefix = unquote(parts.path).strip("/")
        if not prefix:
            raise ValueError(f"{form}; the prefix is missing, under which the state is kept")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.fragment or not all(name in _FILES and path for name, path in query.items()):
            raise ValueError(f"{form}; after '?' come the files of TLS: ca=FILE, cert=FILE and key=FILE")
        files = {name: Path(path) for name, path in query.items()}
        if ("cert" in files) != ("key" in files) or ("cert" in files and "ca" not in files):
            raise ValueError(f"{form}; a certificate needs its key and the authority: ca=FILE&cert=FILE&key=FILE")
        return cls(endpoints, prefix, **files)

    def read_files(self) -> TlsFiles | None:
        """Reads the files, which others must not be able to read; returns None without TLS. Blocks."""
        if self.ca is None:
            return None
        key = None if self.key is None else read_private(self.key, _MOST_BYTES)
        cert = None if self.cert is None else self.cert.read_bytes()
        if b"" in (key, cert):  # grpc would abort the process
            raise ValueError(f"{self.cert} or {self.key} is empty")
        return TlsFiles(self.ca.read_bytes(), key, cert)

    def __str__(self) -> str:
        return f"{_SCHEME}{','.join(self.endpoints)}/{self.prefix}"


_MOST_BYTES = 1 << 20


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16
