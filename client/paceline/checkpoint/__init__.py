"""Checkpoints: atomic, checksummed, no pickle. `save` and `load` are for one process, the others for ranks together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.checkpoint.keep import Checkpoint, load, save, tags
from paceline.checkpoint.pieces import Shard
from paceline.checkpoint.sharded_loading import load_sharded
from paceline.checkpoint.sharded_saving import ShardedSaver, save_sharded
from paceline.checkpoint.tag import Tag

if TYPE_CHECKING:
    from paceline.parallel.sharding._holdings import load_sharded_state, sharded_state

__all__ = [
    "Checkpoint",
    "Shard",
    "ShardedSaver",
    "Tag",
    "load",
    "load_sharded",
    "load_sharded_state",
    "save",
    "save_sharded",
    "sharded_state",
    "tags",
]


def __getattr__(name: str) -> Any:
    if name in ("load_sharded_state", "sharded_state"):  # of models: only here, for models know checkpoints
        from paceline.parallel.sharding import _holdings

        return getattr(_holdings, name)
    raise AttributeError(f"module 'paceline.checkpoint' has no attribute {name!r}")
