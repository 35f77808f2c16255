"""Imports grpc in the one way that is safe here. Import grpc from this module, never directly.

Fork support is switched off before grpc is first imported: a worker may embed the coordinator, and with fork support
on, a forked child of a process with a live aio stream crashed in 4 of 6 runs (grpcio 1.85.1).
"""

from __future__ import annotations

import os
from typing import Any, Final

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # grpc's own C log; errors that matter reach us as exceptions

import grpc
from grpc import aio

__all__ = ["EOF", "aio", "grpc"]

EOF: Final[Any] = aio.EOF  # type: ignore[attr-defined]  # grpc-stubs lacks it
"""`context.read()` returns this when the other side has closed its half of the stream."""
