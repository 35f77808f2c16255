"""grpc, imported the one way that is safe here: import it from this module, never by itself.

Fork support is switched off before grpc is first imported: with it on, a forked child of a process with a live aio
stream crashed in 4 of 6 runs (grpcio 1.85.1). `_fork.py` does for the child what is needed instead.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # grpc's own C log; what matters reaches us as a status

import grpc
from grpc import aio

__all__ = ["aio", "grpc"]
