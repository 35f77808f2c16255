"""Where launchers meet: at a coordinator, which one of them serves if nobody else does."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from paceline.cli.embedded import embedded_coordinator
from paceline.session.address import Endpoint

__all__ = ["coordinator_at", "free_port", "is_here"]

_SETTLE_S = 1.0
"""Launchers of one job start within a second or so of each other; each that comes later ends the world there is."""


@contextlib.contextmanager
def coordinator_at(place: Endpoint, *, serve: bool | None) -> Iterator[bool]:
    """Serves a coordinator at the place if this is its host and nobody does so yet; else another launcher has to.

    Yields whether it is served here.

    Args:
        place: host and port.
        serve: True if it is up to this launcher, whatever the place's name resolves to (it may be the address of a
            gateway); False if it is up to another; None if it is up to the first one on that host.

    Raises:
        OSError: the port cannot be listened at.
        UsageError: the PACELINE_* variables for TLS and tokens cannot be used.
    """
    here = is_here(place.host)
    with contextlib.ExitStack() as stack:
        served = False
        if serve or (here and serve is None):
            # What this host's own name resolves to here is often not what it resolves to elsewhere (127.0.1.1).
            host = place.host if here and (place.ip is not None or place.is_loopback) else _everywhere()
            try:
                stack.enter_context(embedded_coordinator(listen=str(Endpoint(host, place.port)), settle_time=_SETTLE_S))
                served = True
            except OSError as error:
                # Another launcher of this host was first; only one that has to serve cannot do with that.
                if serve or error.errno != errno.EADDRINUSE:
                    raise
        yield served


def is_here(host: str) -> bool:
    """True if the name or address is one of this machine: only those can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:  # it may be found later, elsewhere
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return True
    return False


def free_port(wanted: int | None = None) -> int:
    """A port that nobody listens at now, on any interface of this machine.

    Args:
        wanted: the one that it must be.

    Raises:
        OSError: somebody has it.
    """
    with socket.socket() as probe:
        if wanted is not None:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what just ended is not in the way
        try:
            probe.bind(("", wanted or 0))
        except OSError as error:
            raise OSError(
                error.errno, f"rank 0 is to listen at port {wanted} (--master-port): {error.strerror}"
            ) from None
        return int(probe.getsockname()[1])


def _everywhere() -> str:
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  # asked for by the name of this host
