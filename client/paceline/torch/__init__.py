"""Paceline for PyTorch: names are loaded when first used, and torch with them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.torch.diloco import DiLoCo
    from paceline.torch.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]

_HOME = {"DiLoCo": "paceline.torch.diloco", "LocalSGD": "paceline.torch.local_sgd"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paceline.torch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
