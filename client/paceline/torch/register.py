"""Tells torch.distributed of the backend. torch itself calls this when it is imported (entry point "torch.backends").

So nothing heavy is imported before a group is made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

__all__ = ["register"]

_NAME = "paceline"


def register() -> None:
    """Makes "paceline" a backend, and paceline:// an init method, of torch.distributed. Idempotent."""
    import torch.distributed as dist

    if not dist.is_available() or _NAME.upper() in dist.Backend.__dict__:
        return
    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    dist.register_rendezvous_handler(_NAME, _rendezvous)
    _take_monitored_barriers()
    _keep_own_records()


def _keep_own_records() -> None:
    """Names us among the backends that record for themselves: torch 2.15 cannot hook its recorder to our groups."""
    from torch.distributed import distributed_c10d

    recording: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(_NAME)


def _take_monitored_barriers() -> None:
    """`dist.monitored_barrier` refuses every backend but Gloo by name, whatever its groups can do."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    theirs = distributed_c10d.monitored_barrier

    @functools.wraps(theirs)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> Any:
        if dist.get_rank(group) < 0 or dist.get_backend(group) != _NAME:
            return theirs(group, timeout, wait_all_ranks)
        return (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks)

    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


def _create(opts: Any, pg_options: Any = None) -> Any:
    from paceline.torch.backend import create

    return create(opts, pg_options)


def _rendezvous(url: str, **settings: Any) -> Iterator[Any]:
    from paceline.torch.rendezvous import rendezvous

    return rendezvous(url, **settings)
