"""`paceline certs`: what it makes, what it keeps, and what it refuses."""

from __future__ import annotations

import builtins
import ipaddress
import shlex
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.credentials import MEMBER_NAME, Credentials
from pacelinepb import install_command

FILES = ("ca", "coordinator", "member")


def certs(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["certs", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def held(cert: x509.Certificate) -> set[str]:
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))}


def test_certs_writes_authority_coordinator_and_member_certificates(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tls"
    said = certs(str(folder), "--host", "Train.example", "--host", "10.1.2.3", "--host", "[fd00::1]", "--days", "30")
    made = {name: load(folder / f"{name}.pem") for name in FILES}
    assert held(made["coordinator"]) > {"localhost", "127.0.0.1", "::1", "train.example", "10.1.2.3", "fd00::1"}
    assert held(made["member"]) == {MEMBER_NAME, "localhost", "127.0.0.1", "::1"}
    for name in ("coordinator", "member"):
        made[name].verify_directly_issued_by(made["ca"])
        assert made[name].not_valid_after_utc < made["ca"].not_valid_after_utc
        assert abs(made[name].not_valid_after_utc - datetime.now(UTC) - timedelta(days=30)) < timedelta(minutes=5)
        assert made[name].extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    uses = {name: set(made[name].extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) for name in FILES[1:]}
    assert uses["member"] == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert uses["coordinator"] == {ExtendedKeyUsageOID.SERVER_AUTH}
    for name in FILES:
        key = made[name].public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"
        assert (folder / f"{name}.key").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in folder.iterdir()} == {f"{name}.{kind}" for name in FILES for kind in ("pem", "key")}
    assert "train.example" in said


def test_printed_export_and_coordinator_command_are_usable(tmp_path: Path) -> None:
    lines = certs(str(tmp_path / "a b")).splitlines()
    exported = next(line for line in lines if line.startswith("  export "))
    environ = dict(word.split("=", 1) for word in shlex.split(exported)[1:])
    assert Credentials.from_environment(environ).for_worker().files is not None
    command = shlex.split(next(line for line in lines if line.startswith("  paceline coordinator ")))
    assert all(Path(word).exists() for word in command if word.startswith("/"))


def test_an_existing_authority_is_kept_and_hosts_are_added(tmp_path: Path) -> None:
    certs(str(tmp_path), "--host", "first.example")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    said = certs(str(tmp_path), "--host", "second.example")
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] == before[name]} == {"ca.pem", "ca.key"}
    load(tmp_path / "member.pem").verify_directly_issued_by(load(tmp_path / "ca.pem"))
    assert held(load(tmp_path / "coordinator.pem")) > {"first.example", "second.example"}
    assert "first.example" in said


def test_an_authority_without_its_key_is_not_overwritten(tmp_path: Path) -> None:
    certs(str(tmp_path))
    (tmp_path / "ca.key").unlink()
    cert = (tmp_path / "ca.pem").read_bytes()
    advice = "there is ca.pem without ca.key: copy ca.key here, or choose another directory"
    assert advice in certs(str(tmp_path), code=2)
    assert (tmp_path / "ca.pem").read_bytes() == cert
    assert not (tmp_path / "ca.key").exists()


def test_an_authority_key_that_does_not_match_is_refused(tmp_path: Path) -> None:
    certs(str(tmp_path))
    (tmp_path / "ca.key").write_bytes((tmp_path / "member.key").read_bytes())
    assert "ca.key is not the key of ca.pem" in certs(str(tmp_path), code=2)
    (tmp_path / "ca.key").write_text("nonsense")
    assert "not a certificate and a key in PEM" in certs(str(tmp_path), code=2)


def test_days_beyond_the_life_of_the_authority_are_refused(tmp_path: Path) -> None:
    certs(str(tmp_path))
    assert "--days can be at most 3649" in certs(str(tmp_path), "--days", "4000", code=2)
    certs(str(tmp_path / "long"), "--days", "4000")


@pytest.mark.parametrize("host", ["host:7400", "", "a b", "ünï.example", "a..b", "x" * 64, "http://host"])
def test_invalid_host_is_refused_and_nothing_is_written(tmp_path: Path, host: str) -> None:
    assert "is neither a host name nor an IP address" in certs(str(tmp_path / "d"), "--host", host, code=2)
    assert not (tmp_path / "d").exists()


def test_hosts_become_ip_or_dns_subject_alternative_names(tmp_path: Path) -> None:
    certs(str(tmp_path), "--host", "*.example", "--host", "10.0.0.7")
    names = load(tmp_path / "coordinator.pem").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ipaddress.ip_address("10.0.0.7") in names.get_values_for_type(x509.IPAddress)
    assert "*.example" in names.get_values_for_type(x509.DNSName)


def test_missing_cryptography_prints_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_cryptography(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.partition(".")[0] == "cryptography":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments, **keywords)

    monkeypatch.delitem(sys.modules, "paceline.cli.authority", raising=False)
    monkeypatch.setattr(builtins, "__import__", no_cryptography)
    assert install_command("tls") in certs(str(tmp_path / "d"), code=2)
    assert not (tmp_path / "d").exists()
