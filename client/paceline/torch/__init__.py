"""Paceline for PyTorch: importing this package needs torch, which is an extra of Paceline's."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.torch.fsdp import FSDP

__all__ = ["FSDP"]

_HOMES = {"FSDP": "paceline.torch.fsdp"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'paceline.torch' has no attribute {name!r}")
