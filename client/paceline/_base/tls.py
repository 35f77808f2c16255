"""Checks certificates before grpc gets them: grpc accepts anything, and then fails at each handshake."""

from __future__ import annotations

import contextlib
import os
import ssl
from dataclasses import dataclass, field
from typing import NoReturn

_VERIFY = {
    9: "is not valid yet: is a clock wrong?",
    10: "has expired",
    18: "is self-signed, and is not the authority of PACELINE_TLS_CA",
    19: "is from another authority than that of PACELINE_TLS_CA",
    20: "is from another authority than that of PACELINE_TLS_CA",
    21: "is from another authority than that of PACELINE_TLS_CA",
    26: "is not made for this use (extended key usage)",
}
"""Texts for X509_V_ERR_* of openssl/x509_vfy.h."""

_WRONG_NAME = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""

_FLIGHTS = 4
"""Flights of a handshake in each direction: TLS 1.2 with certificates on both sides needs as many."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for TLS: the authority's certificate, and this side's certificate and its key, if it has one."""

    ca: bytes
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


def what_is_wrong(error: ssl.SSLCertVerificationError, name: str) -> str:
    """Returns why a certificate, which should contain `name`, was refused, in words that follow "the certificate"."""
    if error.verify_code in _WRONG_NAME:
        return f"is not for {name}"
    return _VERIFY.get(error.verify_code, f"cannot be verified: {error.verify_message}")


def check_member(files: TlsFiles, name: str) -> None:
    """Checks a member's certificate by a TLS handshake with itself in memory, as other members would make it.

    `name` is what every member's certificate contains. A ValueError says why they would refuse this one.
    """
    calling, serving = make_context(files), make_context(files, serving=True)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (calling.wrap_bio(back, there, server_hostname=name), serving.wrap_bio(there, back, server_side=True))
    try:
        for _ in range(_FLIGHTS):
            for end in ends:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"this worker's own certificate (PACELINE_TLS_CERT) {what_is_wrong(error, name)}") from None
    except ssl.SSLError as error:
        raise ValueError(f"this worker's own certificate (PACELINE_TLS_CERT) cannot be used: {error.reason}") from None


def make_context(files: TlsFiles, *, serving: bool = False) -> ssl.SSLContext:
    """Returns an `ssl` context for the client's side or, with `serving`, the server's; both demand a certificate.

    A ValueError says which file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serving else ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(cadata=files.ca.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError):
        raise ValueError("the authority (ca) is not a certificate in PEM format") from None
    if files.cert is not None and files.key is not None:
        # Python's ssl loads a key from a file only: this one is in memory, where no other user can open it.
        fd = os.memfd_create("paceline-tls")
        try:
            os.write(fd, files.cert.rstrip() + b"\n" + files.key)
            context.load_cert_chain(f"/proc/self/fd/{fd}", password=_no_passphrase)
        except ssl.SSLError as error:
            why = (
                "the key does not belong to the certificate"
                if "MISMATCH" in (error.reason or "")
                else "they are not in PEM format"
            )
            raise ValueError(f"the certificate (cert) and its key (key) cannot be used: {why}") from None
        finally:
            os.close(fd)
    return context


def _no_passphrase() -> NoReturn:
    raise ValueError("the key is locked with a passphrase, and a worker cannot ask for it: give a key without one")
