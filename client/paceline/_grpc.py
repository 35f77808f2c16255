"""Sets up grpc safely before importing it; the package imports grpc only from here.

Fork support is switched off before grpc is first imported: with it on, a forked child of a process with a live aio
stream crashed in 4 of 6 runs (grpcio 1.85.1). `_fork.py` does what the child needs instead.

Names are resolved by the system. grpc's own resolver asks DNS for IPv6 addresses even of names that /etc/hosts has an
IPv4 address of, and if no DNS server answers (a network without a way out), each look-up takes 11 s.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # grpc's own C log; errors reach us as a status

import grpc
from grpc import aio

__all__ = ["EOF", "aio", "grpc", "hold_aio", "untyped"]

EOF: object = aio.EOF  # type: ignore[attr-defined]  # not in grpc-stubs
"""What `read` returns at the end of a stream."""


def hold_aio() -> None:
    """Keeps grpc.aio running for as long as the process lives; call it on the loop that grpc.aio uses.

    Otherwise it shuts down when its last object is freed, in whichever thread frees it (a traceback may hold a channel,
    for example). It then closes the socket by which its poller wakes the loop, while the loop still reads from it:
    "Exception in callback None()", OSError 9 (grpcio 1.85.1).
    """
    aio.init_grpc_aio()  # type: ignore[attr-defined]  # not in grpc-stubs


def untyped(value: Any) -> Any:
    """Returns a grpc.aio object typed as Any: grpc-stubs lacks the defaults of arguments that we leave out."""
    return value
