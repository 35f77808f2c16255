"""Provides the coordinator at which launchers meet; one of them serves it if no other process does."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator

from paceline._base.addresses import Endpoint, probe
from paceline._base.waits import loop_thread
from paceline.cli.access import embedded_coordinator, own_addresses, own_coordinator, own_token, worker_credentials
from paceline.errors import CoordinatorUnreachable

_SETTLE_S = 1.0
"""Launchers of one job start within about a second of each other; each that comes later ends the current world."""

_KEPT_S, _PAUSE_S = 3.0, 0.05
"""Seconds in which a launcher that serves must store its token for the others, and seconds between their checks."""

_PROBE_S = 1.0
"""Seconds in which a connection over loopback shows whether a process listens at a port."""


@contextlib.contextmanager
def coordinator_at(place: Endpoint, *, serve: bool | None, patience: float) -> Iterator[bool]:
    """Serves a coordinator at `place` if this is its host and no process serves there yet; else another launcher must.

    All users of the machine can reach loopback, and one of them may take the port first. So on loopback the launcher
    that serves makes a token, unless the environment has one, and this user's other launchers find it. For the rest of
    the block the token is in this process's environment.

    Yields whether this launcher serves the coordinator.

    Args:
        place: host and port; a loopback host as an IP address.
        serve: True if this launcher must serve, whatever the place's name resolves to (it may be a gateway's address);
            False if another launcher must; None if the first launcher on that host does.
        patience: seconds to wait for another launcher on loopback.

    Raises:
        OSError: the coordinator cannot listen at the port.
        UsageError: the PACELINE_* variables for TLS and tokens cannot be used.
        CoordinatorUnreachable: on loopback no other launcher of this user serves.
    """
    here = is_here(place.host)
    with contextlib.ExitStack() as stack:
        served, token = False, None
        if serve or (here and serve is None):
            # This host's own name often resolves to another address here (127.0.1.1) than elsewhere.
            host = place.host if here and (place.ip is not None or place.is_loopback) else _everywhere()
            listen = str(Endpoint(host, place.port))
            try:
                if place.is_loopback:
                    token = stack.enter_context(own_coordinator(listen=listen, settle_time=_SETTLE_S)).token
                else:
                    stack.enter_context(embedded_coordinator(listen=listen, settle_time=_SETTLE_S))
                served = True
            except OSError as error:
                # Another launcher of this host was first, which is an error only if this one must serve.
                if serve or error.errno != errno.EADDRINUSE:
                    raise
        if place.is_loopback and not served:
            token = _token_at(place, patience)
        if token is not None:
            os.environ["PACELINE_TOKEN"] = token
            stack.callback(os.environ.pop, "PACELINE_TOKEN", None)
        yield served


def _token_at(place: Endpoint, patience: float) -> str | None:
    """Returns the token that another launcher of this user has made there; None if the environment has one.

    Raises:
        CoordinatorUnreachable: no launcher of this user serves there.
    """
    if worker_credentials().token is not None:
        return None
    address, give_up = str(place), time.monotonic() + patience
    taken: float | None = None
    while address not in own_addresses():
        now = time.monotonic()
        if taken is None and loop_thread().run(probe(place, _PROBE_S)):
            taken = now
        if taken is not None and now - taken > _KEPT_S:
            raise CoordinatorUnreachable(
                f"{address} is in use, but not by a paceline run of yours, so no worker joins there. Choose another "
                "port; or name a coordinator that you trust with --coordinator; or, if launchers have several users or "
                "TMPDIRs, set PACELINE_TOKEN for all of them"
            )
        if now > give_up:
            raise CoordinatorUnreachable(
                f"no launcher of yours has started a coordinator at {address} within {patience:.0f} s: is the launcher "
                "with --node-rank 0 running on this machine?"
            )
        time.sleep(_PAUSE_S)
    return own_token(address)


def is_here(host: str) -> bool:
    """True if the name or address belongs to this machine, because only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:  # the name may resolve later, or elsewhere
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return True
    return False


def free_port(wanted: int | None = None) -> int:
    """Finds a port at which no process listens now, on any interface of this machine.

    Args:
        wanted: the required port; None for any.

    Raises:
        OSError: the port is in use.
    """
    with socket.socket() as probe:
        if wanted is not None:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignores connections that just ended
        try:
            probe.bind(("", wanted or 0))
        except OSError as error:
            raise OSError(
                error.errno, f"rank 0 cannot listen at port {wanted} (--master-port): {error.strerror}"
            ) from None
        return int(probe.getsockname()[1])


def _everywhere() -> str:
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  # the user named this host
