"""grpc, set up as `pacelinepb.safe_grpc` says; the package imports grpc only from here."""

from __future__ import annotations

from typing import Any

from pacelinepb.safe_grpc import EOF, aio, grpc, rpc_status

__all__ = ["EOF", "aio", "grpc", "hold_aio", "rpc_status", "untyped"]


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
