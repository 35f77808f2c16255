"""Certificates for tests: a good set, and sets that each have one thing wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from paceline.cli.authority import Authority
from paceline.credentials import MEMBER_NAME, Credentials

__all__ = ["LOOPBACK", "CertificateFolder", "make_folder", "renew"]

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class CertificateFolder:
    """An authority with a certificate for a coordinator and one for members, as `paceline certs` lays them out."""

    path: Path

    @property
    def credentials(self) -> Credentials:
        """A worker's."""
        return Credentials(*(self._read(name) for name in ("ca.pem", "member.pem", "member.key")))

    @property
    def authority_only(self) -> Credentials:
        """Those of somebody who has no certificate."""
        return Credentials(self._read("ca.pem"))

    @property
    def environment(self) -> dict[str, str]:
        """A worker's, as variables."""
        files = {"CA": "ca.pem", "CERT": "member.pem", "KEY": "member.key"}
        return {f"PACELINE_TLS_{name}": str(self.path / file) for name, file in files.items()}

    def server(self, *, mutual: bool = True) -> dict[str, Any]:
        """Settings of a coordinator."""
        settings = {"tls_cert": self.path / "coordinator.pem", "tls_key": self.path / "coordinator.key"}
        return {**settings, "tls_ca": self.path / "ca.pem"} if mutual else settings

    @property
    def arguments(self) -> list[str]:
        """Arguments of a coordinator's command."""
        return [word for name, path in self.server().items() for word in (f"--{name.replace('_', '-')}", str(path))]

    def _read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()


def make_folder(
    path: Path,
    *,
    days: float = 1.0,
    hosts: Sequence[str] = LOOPBACK,
    member: Sequence[str] = (MEMBER_NAME, *LOOPBACK),
    self_made: bool = False,
) -> CertificateFolder:
    """Makes a set.

    Args:
        path: where to.
        days: for how long its certificates are good, from now; below 0 for some that have expired.
        hosts: what the coordinator's holds.
        member: what the members' holds.
        self_made: the authority is one for the coordinator and the members each, that nobody else knows.
    """
    path.mkdir(parents=True)
    authority = Authority.make("test", 1)
    until = datetime.now(UTC) + timedelta(days=days)
    (path / "ca.pem").write_bytes(authority.cert_pem)
    _write_key(path / "ca.key", authority.key_pem)
    for name, held, calls in (("coordinator", hosts, False), ("member", member, True)):
        of = Authority.make(name, 1) if self_made else authority
        cert, key = of.issue(name, held, until, calls=calls)
        (path / f"{name}.pem").write_bytes(cert)
        _write_key(path / f"{name}.key", key)
    return CertificateFolder(path)


def renew(folder: CertificateFolder, name: str, *, days: float) -> None:
    """Makes the coordinator's or the members' certificate anew, for so long."""
    path = folder.path
    authority = Authority.load((path / "ca.pem").read_bytes(), (path / "ca.key").read_bytes())
    hosts = authority.hosts_of((path / f"{name}.pem").read_bytes())
    cert, key = authority.issue(name, hosts, datetime.now(UTC) + timedelta(days=days), calls=name == "member")
    (path / f"{name}.pem").write_bytes(cert)
    _write_key(path / f"{name}.key", key)


def _write_key(path: Path, key: bytes) -> None:
    path.touch(0o600)
    path.write_bytes(key)
