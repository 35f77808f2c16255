"""grpc, set up as `pacelinepb.safe_grpc` says; the package imports grpc only from here."""

from __future__ import annotations

from pacelinepb.safe_grpc import EOF, aio, grpc, rpc_status

__all__ = ["EOF", "aio", "grpc", "rpc_status"]
