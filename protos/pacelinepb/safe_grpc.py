"""Sets up grpc before it is first imported. `paceline` and `paceline_server` import it by way of this module alone.

What strangers can make it log is paced (`grpc_log`), and the metadata that it makes Python objects of is bounded
(`grpc_metadata`).

grpc reads these variables once, when it is imported. One that the user has set stays.

Fork support is switched off: with it on, a forked child of a process with a live aio stream crashes, and a worker of a
DataLoader is such a child. `paceline._base.processes` does what the child needs instead.

Names are resolved by the system. grpc's own resolver asks DNS for IPv6 addresses even of names that /etc/hosts has an
IPv4 address of, and if no DNS server answers (a network without a way out), each look-up takes 11 s.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

__all__ = ["EOF", "aio", "grpc", "rpc_status"]

_FORKS = "GRPC_ENABLE_FORK_SUPPORT"

if "grpc" in sys.modules and _FORKS not in os.environ:
    logging.getLogger("paceline").warning(
        "grpc was imported before Paceline could set it up, so a process that is forked from this one, such as a "
        "worker of a DataLoader, may crash: set %s=0 in the environment of this script",
        _FORKS,
    )
os.environ.setdefault(_FORKS, "0")
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # grpc's own C log; errors reach us as a status

import grpc  # noqa: E402
from grpc import aio  # noqa: E402
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # noqa: E402  # not in grpc-stubs
from grpc_status import rpc_status  # noqa: E402

from pacelinepb.grpc_log import pace_log  # noqa: E402
from pacelinepb.grpc_metadata import bound_metadata  # noqa: E402

pace_log(cygrpc)
bound_metadata(cygrpc)

EOF: Any = aio.EOF  # type: ignore[attr-defined]  # not in grpc-stubs
"""Returned by `read` at the end of a stream."""
