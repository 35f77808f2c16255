"""`paceline certs`: makes an authority for one cluster, and certificates for its coordinator and its members."""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from paceline._base.terminal import UsageError
from paceline.credentials import MEMBER_NAME
from pacelinepb import install_command
from pacelinepb.private_files import read_private

if TYPE_CHECKING:
    from paceline.cli.authority import Authority

_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_KEY_MODE, _CERT_MODE = 0o600, 0o644


def make_certificates(directory: Path, hosts: Sequence[str], days: int) -> None:
    """Makes the certificates, and prints how to use them.

    An existing authority is kept; the other certificates are made anew, and the coordinator's keeps the names that it
    had. It gets `hosts` in addition to this host's names and the loopback ones.
    """
    try:
        import_module("paceline.cli.authority")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        raise UsageError(f"paceline certs needs the package cryptography: {install_command('tls')}") from None
    wanted = [*_LOOPBACK, socket.gethostname().lower(), *map(_checked, hosts)]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        authority = _authority(directory, days)
        former = directory / "coordinator.pem"
        known = authority.hosts_of(former.read_bytes()) if former.exists() else []
        names = list(dict.fromkeys([*wanted, *known]))
        until = datetime.now(UTC) + timedelta(days=days)
        leaves = {
            "coordinator": authority.issue("paceline coordinator", names, until, calls=False),
            # The loopback names are for a coordinator that `paceline run` embeds: it uses its workers' certificate.
            "member": authority.issue("paceline member", [MEMBER_NAME, *_LOOPBACK], until, calls=True),
        }
    except ValueError as error:
        raise UsageError(f"{directory}: {error}") from None
    for name, (cert, key) in leaves.items():
        _write(directory / f"{name}.key", key, _KEY_MODE)
        _write(directory / f"{name}.pem", cert, _CERT_MODE)
    print(_advice(directory.absolute(), names, days))


def _authority(directory: Path, days: int) -> Authority:
    """Loads the authority of the directory, or makes one. Never overwrites a file of an authority.

    Raises ValueError if one of its two files is missing, or they cannot be used, or others may read its key.
    """
    from paceline.cli.authority import Authority

    cert, key = directory / "ca.pem", directory / "ca.key"
    there = [path.name for path in (cert, key) if path.exists()]
    if len(there) == 1:
        missing = key.name if there == [cert.name] else cert.name
        raise ValueError(f"there is {there[0]} without {missing}: copy {missing} here, or choose another directory")
    if there:
        return Authority.load(cert.read_bytes(), read_private(key))
    made = Authority.make(f"paceline {socket.gethostname()}", days)
    _write(key, made.key_pem, _KEY_MODE)
    _write(cert, made.cert_pem, _CERT_MODE)
    return made


def _write(path: Path, data: bytes, mode: int) -> None:
    """Writes the whole file or nothing, and never lets others read a private file, not even for a moment."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            os.fsync(fd)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _checked(host: str) -> str:
    """Returns a name or an IP address in the form in which a certificate holds it."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        pass  # a name
    labels = host.removeprefix("*.").rstrip(".").split(".")
    if not all(0 < len(part) <= 63 and part.isascii() and part.replace("-", "").isalnum() for part in labels):
        raise UsageError(f"--host {host!r} is neither a host name nor an IP address (without a port)")
    return host.lower()


def _advice(directory: Path, names: Sequence[str], days: int) -> str:
    where = shlex.quote(str(directory))
    return f"""\
ca.pem, coordinator.pem and member.pem, with their keys, are in {directory}; they are valid for {days} days.
The coordinator's certificate is valid for these names and addresses: {", ".join(names)}.

On the coordinator's host:
  paceline coordinator --listen 0.0.0.0:7400 --tls-cert {where}/coordinator.pem --tls-key {where}/coordinator.key \
--tls-ca {where}/ca.pem
For workers, and for status, drain, restart and forget:
  export PACELINE_TLS_CA={where}/ca.pem PACELINE_TLS_CERT={where}/member.pem PACELINE_TLS_KEY={where}/member.key

Copy to each host only what it needs, and keep ca.key here: everyone who has it can make certificates for members."""
