"""A small certificate authority: P-256 keys and X.509 version 3 certificates. It needs `cryptography`.

No other module imports that package; grpc does TLS itself.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LEAST_DAYS = 3_650
"""Least lifetime of an authority. It outlives its certificates several times: replacing it is work on every host."""

_CLOCK_SKEW = timedelta(hours=1)
"""How far in the past certificates become valid, because the clocks of hosts differ."""


class Authority:
    """An authority and its key."""

    def __init__(self, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._cert = cert
        self._key = key
        self.cert_pem = cert.public_bytes(serialization.Encoding.PEM)
        self.key_pem = _key_pem(key)

    @classmethod
    def make(cls, name: str, days: int, now: datetime | None = None) -> Self:
        """Makes a new authority, which is valid for longer than certificates for so many days. `name` is for people."""
        now = now or datetime.now(UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(name)
        usage = _usage(key_cert_sign=True, crl_sign=True)
        builder = (
            _builder(subject, subject, key, now, now + timedelta(days=max(_LEAST_DAYS, 2 * days)))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, cert_pem: bytes, key_pem: bytes) -> Self:
        """Loads an authority that was made before; raises ValueError if the two files are none."""
        try:
            cert = x509.load_pem_x509_certificate(cert_pem)
            key = serialization.load_pem_private_key(key_pem, None)
        except (ValueError, TypeError):  # TypeError: the key is locked with a passphrase
            raise ValueError("ca.pem and ca.key are not a certificate and a key in PEM without a passphrase") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or cert.public_key() != key.public_key():
            raise ValueError("ca.key is not the key of ca.pem, or is not an elliptic-curve key")
        return cls(cert, key)

    @staticmethod
    def hosts_of(cert_pem: bytes) -> list[str]:
        """Returns the host names and IP addresses in a certificate; raises ValueError if there are none."""
        try:
            cert = x509.load_pem_x509_certificate(cert_pem)
            held = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, x509.ExtensionNotFound):
            raise ValueError("coordinator.pem is not a PEM certificate with host names: move it away") from None
        return [*held.get_values_for_type(x509.DNSName), *map(str, held.get_values_for_type(x509.IPAddress))]

    def issue(
        self, name: str, hosts: Sequence[str], until: datetime, *, calls: bool, now: datetime | None = None
    ) -> tuple[bytes, bytes]:
        """Issues a certificate with a new key; returns both in PEM.

        `name` is for people. With `calls` the holder may also call others; otherwise it may only be called. Raises
        ValueError if the authority expires before `until`.
        """
        now = now or datetime.now(UTC)
        if until > self._cert.not_valid_after_utc:
            ends = self._cert.not_valid_after_utc
            raise ValueError(f"the authority expires on {ends:%Y-%m-%d}: --days can be at most {(ends - now).days}")
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if calls else [])]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            _builder(_subject(name), self._cert.subject, key, now, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
            .add_extension(issuer, critical=False)
        )
        cert = builder.sign(self._key, hashes.SHA256())
        return cert.public_bytes(serialization.Encoding.PEM), _key_pem(key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, until) - _CLOCK_SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])  # 64: ub-common-name of RFC 5280


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
