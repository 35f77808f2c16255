"""Registers the backend "paceline" with torch.distributed, and adapts torch to it where releases 2.11 to 2.15 differ.

torch calls `register` when torch is imported (entry point "torch.backends"), so nothing heavy is imported before a
group is made.

The adaptations use private names of torch, so a newer release may differ too: `make test-newest` tests with the newest
release.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from pacelinepb import install_command

_NAME = "paceline"


def register() -> None:
    """Registers the backend "paceline" and the init method paceline:// with torch.distributed. Idempotent.

    Raises:
        ModuleNotFoundError: torch is not installed; the text says how to install it.
    """
    try:
        import torch  # not at the top: torch imports this module during its own import
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f"paceline.torch needs PyTorch: {install_command('torch')}", name="torch") from None
    import torch.distributed as dist

    if not dist.is_available() or _NAME.upper() in dist.Backend.__dict__:
        return
    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    dist.register_rendezvous_handler(_NAME, _rendezvous)
    if torch.__version__ < (2, 14):
        _allow_monitored_barriers()
    _exempt_from_recorder()


def _create(opts: Any, pg_options: Any = None) -> Any:
    from paceline.torch.backend import create

    return create(opts, pg_options)


def _rendezvous(url: str, **settings: Any) -> Iterator[Any]:
    from paceline.torch.backend import rendezvous

    return rendezvous(url, **settings)


def _exempt_from_recorder() -> None:
    """Tells torch 2.15 and later not to attach its flight recorder to groups of this backend.

    torch attaches the recorder to every group whose backend is not listed as having its own. That fails with a subclass
    of ProcessGroup, and `init_process_group` raises. If torch has no such list, this does nothing: an error here would
    make `import torch` fail.
    """
    from torch.distributed import distributed_c10d

    recording: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(_NAME)


def _allow_monitored_barriers() -> None:
    """Lets `dist.monitored_barrier` accept this backend; torch before 2.14 accepts only Gloo, by name."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    original = distributed_c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> Any:
        if dist.get_rank(group) < 0 or dist.get_backend(group) != _NAME:
            return original(group, timeout, wait_all_ranks)
        return (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks)

    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
