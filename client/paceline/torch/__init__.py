"""Paceline for PyTorch: the backend "paceline" of torch.distributed (extra: `pip install 'paceline[torch]'`).

    import torch.distributed as dist
    dist.init_process_group("paceline")                     # in place of "gloo": nothing else changes

Where Paceline is installed, torch finds the backend by itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.torch.register import register

if TYPE_CHECKING:
    from paceline.torch.process_group import ProcessGroup
    from paceline.torch.store import Store

__all__ = ["ProcessGroup", "Store"]

_HOME = {
    "ProcessGroup": "paceline.torch.process_group",
    "Store": "paceline.torch.store",
}

register()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
