"""grpc, imported the one way that is safe here: import it from this module, never by itself.

Fork support is switched off before grpc is first imported: with it on, a forked child of a process with a live aio
stream crashed in 4 of 6 runs (grpcio 1.85.1). `_fork.py` does for the child what is needed instead.

Names are looked up as the system does it. grpc's own resolver asks DNS for IPv6 addresses of names that /etc/hosts has
an IPv4 address of, and where no DNS server answers (a network without a way out) each look-up takes 11 s.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # grpc's own C log; what matters reaches us as a status

import grpc
from grpc import aio

__all__ = ["EOF", "aio", "grpc", "hold_aio", "untyped"]

EOF: object = aio.EOF  # type: ignore[attr-defined]  # not in grpc-stubs
"""What `read` returns at the end of a stream."""


def hold_aio() -> None:
    """Keeps grpc.aio up for as long as the process lives; called on the loop that it shall serve.

    Otherwise it shuts down when its last object is freed, in the thread that happens to free it (an error's traceback
    holds a channel, say), closes the socket by which its poller calls the loop, and leaves the loop to read from it:
    "Exception in callback None()", OSError 9 (grpcio 1.85.1).
    """
    aio.init_grpc_aio()  # type: ignore[attr-defined]  # not in grpc-stubs


def untyped(value: Any) -> Any:
    """A grpc.aio object without its type: grpc-stubs lacks the defaults of arguments that we leave out."""
    return value
