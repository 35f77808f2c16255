"""grpc, set up as `pacelinepb.safe_grpc` says; the package imports grpc only from here."""

from __future__ import annotations

from pacelinepb.safe_grpc import EOF as EOF
from pacelinepb.safe_grpc import aio as aio
from pacelinepb.safe_grpc import grpc as grpc
from pacelinepb.safe_grpc import rpc_status as rpc_status
