"""What differs between releases of torch, 2.11 to 2.15. Nothing else in this package asks for a release.

All of it is about names that are not public, so a newer release may differ too: `make test-newest` tries the newest.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

__all__ = ["adapt", "wants_reconfiguration"]


def adapt(backend: str) -> None:
    """Makes torch.distributed treat a backend of that name as it treats its own."""
    import torch  # not at the top: torch itself is being imported

    if torch.__version__ < (2, 14):
        _allow_monitored_barriers(backend)
    _keep_own_records(backend)


def wants_reconfiguration(opts: Any) -> bool:
    """True if a group is to be one whose members change.

    Args:
        opts: torch's `_DistributedBackendOptions`, which have that from 2.14 on.
    """
    return bool(getattr(opts, "enable_reconfigure", False))


def _keep_own_records(backend: str) -> None:
    """Since 2.15 torch hooks a recorder to each group, but to those of backends that record for themselves.

    It cannot be hooked to a subclass of ProcessGroup: `init_process_group` would end with an error. Where there is no
    such list nothing is done, for an error here would be one of `import torch`.
    """
    from torch.distributed import distributed_c10d

    recording: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(backend)


def _allow_monitored_barriers(backend: str) -> None:
    """Before 2.14 `dist.monitored_barrier` refuses every backend but Gloo by name, whatever its groups can do."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    theirs = distributed_c10d.monitored_barrier

    @functools.wraps(theirs)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> Any:
        if dist.get_rank(group) < 0 or dist.get_backend(group) != backend:
            return theirs(group, timeout, wait_all_ranks)
        return (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks)

    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
