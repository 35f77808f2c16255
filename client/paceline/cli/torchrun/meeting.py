"""Where launchers meet: at a coordinator, which one of them serves if nobody else does."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator

from paceline._address import Endpoint, knock
from paceline._loop import loop_thread
from paceline.cli.access import embedded_coordinator, own_addresses, own_coordinator, own_token, worker_credentials
from paceline.errors import CoordinatorUnreachable

__all__ = ["coordinator_at", "free_port", "is_here"]

_SETTLE_S = 1.0
"""Launchers of one job start within a second or so of each other; each that comes later ends the world there is."""

_KEPT_S, _PAUSE_S = 3.0, 0.05
"""How long a launcher that serves may take to keep its token where others find it, and how often they look."""

_KNOCK_S = 1.0
"""For loopback to say whether somebody listens at a port."""


@contextlib.contextmanager
def coordinator_at(place: Endpoint, *, serve: bool | None, patience: float) -> Iterator[bool]:
    """Serves a coordinator at the place if this is its host and nobody does so yet; else another launcher has to.

    All users of the machine reach loopback, and may be first at the port. So there whoever serves makes a token, unless
    the environment has one, and the others of this user find it: it is in their environment for the rest of the block.

    Yields whether it is served here.

    Args:
        place: host and port; by number on loopback.
        serve: True if it is up to this launcher, whatever the place's name resolves to (it may be the address of a
            gateway); False if it is up to another; None if it is up to the first one on that host.
        patience: seconds to wait for another one on loopback.

    Raises:
        OSError: the port cannot be listened at.
        UsageError: the PACELINE_* variables for TLS and tokens cannot be used.
        CoordinatorUnreachable: on loopback no other launcher of this user serves.
    """
    here = is_here(place.host)
    with contextlib.ExitStack() as stack:
        served, token = False, None
        if serve or (here and serve is None):
            # What this host's own name resolves to here is often not what it resolves to elsewhere (127.0.1.1).
            host = place.host if here and (place.ip is not None or place.is_loopback) else _everywhere()
            listen = str(Endpoint(host, place.port))
            try:
                if place.is_loopback:
                    token = stack.enter_context(own_coordinator(listen=listen, settle_time=_SETTLE_S)).token
                else:
                    stack.enter_context(embedded_coordinator(listen=listen, settle_time=_SETTLE_S))
                served = True
            except OSError as error:
                # Another launcher of this host was first; only one that has to serve cannot do with that.
                if serve or error.errno != errno.EADDRINUSE:
                    raise
        if place.is_loopback and not served:
            token = _token_at(place, patience)
        if token is not None:
            os.environ["PACELINE_TOKEN"] = token
            stack.callback(os.environ.pop, "PACELINE_TOKEN", None)
        yield served


def _token_at(place: Endpoint, patience: float) -> str | None:
    """The token that another launcher of this user has made there; None if all have one of their environment.

    Raises:
        CoordinatorUnreachable: none serves there.
    """
    if worker_credentials().token is not None:
        return None
    address, give_up = str(place), time.monotonic() + patience
    taken: float | None = None
    while address not in own_addresses():
        now = time.monotonic()
        if taken is None and loop_thread().run(knock(place, _KNOCK_S)):
            taken = now
        if taken is not None and now - taken > _KEPT_S:
            raise CoordinatorUnreachable(
                f"{address} is in use, and not by a paceline run of yours, so no worker joins there. Choose another "
                "port; or name a coordinator that you trust with --coordinator; or, if launchers have several users or "
                "TMPDIRs, set PACELINE_TOKEN for all"
            )
        if now > give_up:
            raise CoordinatorUnreachable(
                f"no launcher of yours has begun to serve at {address} within {patience:.0f} s: is the one with "
                "--node-rank 0 running, on this machine?"
            )
        time.sleep(_PAUSE_S)
    return own_token(address)


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
