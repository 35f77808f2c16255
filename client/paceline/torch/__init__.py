"""Paceline for PyTorch: DDP, FSDP and data loaders for nn.Module, and the backend "paceline" of torch.distributed.

This package is an extra: `pip install "paceline[torch] @ git+https://github.com/paceline/paceline"`.

    import torch.distributed as dist
    dist.init_process_group("paceline")                     # in place of "gloo": nothing else changes

torch finds the backend itself if Paceline is installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ == "torch":
    raise ImportError(
        "this is the folder torch of Paceline, not PyTorch: Python was started in the folder of the package paceline, "
        "where it looks first. Start it in another folder, or with -P"
    )

from paceline.torch.register import register as _register

if TYPE_CHECKING:
    from paceline._base.launcher_variables import leave_launchers_world
    from paceline.torch._data_loader import ElasticDataLoader
    from paceline.torch._elastic_batches import BatchPart, ElasticBatches
    from paceline.torch._index_shards import index_shards
    from paceline.torch._local_training import DiLoCo, LocalSGD
    from paceline.torch._replicate import Replicated, replicate
    from paceline.torch._stream_loader import ElasticStreamLoader
    from paceline.torch.backend import ProcessGroup, Store
    from paceline.torch.ddp import DDP
    from paceline.torch.fsdp import FSDP

__all__ = [
    "DDP",
    "FSDP",
    "BatchPart",
    "DiLoCo",
    "ElasticBatches",
    "ElasticDataLoader",
    "ElasticStreamLoader",
    "LocalSGD",
    "ProcessGroup",
    "Replicated",
    "Store",
    "index_shards",
    "leave_launchers_world",
    "replicate",
]

_HOME = {
    "DDP": "paceline.torch.ddp",
    "FSDP": "paceline.torch.fsdp",
    "BatchPart": "paceline.torch._elastic_batches",
    "DiLoCo": "paceline.torch._local_training",
    "ElasticBatches": "paceline.torch._elastic_batches",
    "ElasticDataLoader": "paceline.torch._data_loader",
    "ElasticStreamLoader": "paceline.torch._stream_loader",
    "LocalSGD": "paceline.torch._local_training",
    "ProcessGroup": "paceline.torch.backend",
    "Replicated": "paceline.torch._replicate",
    "Store": "paceline.torch.backend",
    "index_shards": "paceline.torch._index_shards",
    "leave_launchers_world": "paceline._base.launcher_variables",
    "replicate": "paceline.torch._replicate",
}

_register()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
