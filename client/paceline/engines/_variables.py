"""The environment variables that the libraries of engines must find. They are set once in a process, for good.

Libraries read them by `getenv`, in threads that Python does not hold up, and the C library may crash a `getenv` beside
a thread that changes the environment. So `paceline run` starts workers with them. In any other process they are set
when the engine's module is imported, which `join` does before it starts threads.

A library may read a variable only once, for its first group: a process group of UCC that the script makes before `join`
decides for all later ones, and for a connection's limit so does one of NCCL.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping

_NEEDED: Mapping[str, Mapping[str, str]] = {
    # Under these c10d only sums: the fault of the generation decides what has failed. Source: torch's
    # ProcessGroupNCCL.hpp, which reads them when a group is made; NVIDIA's resiliency extension sets the third too.
    "nccl": {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # it would end the process
        "TORCH_NCCL_ENABLE_MONITORING": "0",  # so would this, when the watchdog waits in an abort
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # else it sleeps 15 s with a lock that `allreduce` needs
        "TORCH_NCCL_BLOCKING_WAIT": "0",  # `Work.wait` would have the host wait
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
        "TORCH_NCCL_DESYNC_DEBUG": "0",
    },
    # By default all groups share a communicator, also with one that was aborted. Source: torch's ProcessGroupUCC.cpp.
    "ucc": {"TORCH_UCC_SHARED_COMM": "0"},
}

_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    # Seconds for which c10d waits for a communicator that connects or is finalized, while it holds a lock that its own
    # `abort` needs; half an hour by default.
    "nccl": {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "60"},
}
"""Variables for which any value will do that the user has chosen."""

_log = logging.getLogger("paceline.engines")


def variables_of(engine: str) -> dict[str, str]:
    """Returns the variables for an engine's library; none for "links", or for an engine that needs none."""
    return {**_NEEDED.get(engine, {}), **_DEFAULTS.get(engine, {})}


def set_variables(engine: str, environ: MutableMapping[str, str] | None = None) -> None:
    """Sets the variables for an engine's library that have another value, and says which of the user's it replaces.

    None stands for this process's environment (as a default, `help` would print it, tokens and all).
    """
    environ = os.environ if environ is None else environ
    for name, value in variables_of(engine).items():
        own = environ.get(name)
        if own == value or (own is not None and name not in _NEEDED[engine]):
            continue
        if own is not None:
            _log.warning("%s=%s is replaced by %s, which the engine %s needs: leave it out", name, own, value, engine)
        environ[name] = value
