"""The warning about an address that others can reach. Pure."""

from __future__ import annotations

import ipaddress

from paceline_server.settings import ServerSettings

__all__ = ["exposure"]


def exposure(settings: ServerSettings) -> str | None:
    """A warning if others can reach this coordinator without a token or can read what is sent; None if not."""
    host, _, _ = settings.listen.rpartition(":")
    if _is_loopback(host.strip("[]")):
        return None
    if not settings.wants_token and settings.tls_ca is None:
        return (
            f"whoever reaches {settings.listen} may join, read and stop every job: nobody is authenticated. Set "
            "PACELINE_TOKEN or --token-file, and --tls-cert and --tls-key (paceline certs makes them)"
        )
    if settings.tls_cert is None:
        return (
            f"the token can be read on the wire to {settings.listen}: nothing is encrypted. Set --tls-cert and "
            "--tls-key (paceline certs makes them)"
        )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
