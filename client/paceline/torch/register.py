"""Tells torch.distributed of the backend. torch itself calls this when it is imported (entry point "torch.backends").

So nothing heavy is imported before a group is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.torch.releases import adapt

__all__ = ["register"]

_NAME = "paceline"


def register() -> None:
    """Makes "paceline" a backend, and paceline:// an init method, of torch.distributed. Idempotent."""
    import torch.distributed as dist

    if not dist.is_available() or _NAME.upper() in dist.Backend.__dict__:
        return
    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    dist.register_rendezvous_handler(_NAME, _rendezvous)
    adapt(_NAME)


def _create(opts: Any, pg_options: Any = None) -> Any:
    from paceline.torch.backend import create

    return create(opts, pg_options)


def _rendezvous(url: str, **settings: Any) -> Iterator[Any]:
    from paceline.torch._torch_store import rendezvous

    return rendezvous(url, **settings)
