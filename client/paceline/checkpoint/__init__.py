"""Checkpoints: atomic, checksummed, no pickle. `save` and `load` are for one process, the others for several ranks.

`paceline.sharded_state` converts a model and its optimizer to the form that `save_sharded` and `load_sharded` take.
"""

from __future__ import annotations

from paceline.checkpoint.keep import Checkpoint, load, save, tags
from paceline.checkpoint.pieces import Shard
from paceline.checkpoint.sharded import ShardedSaver, load_sharded, save_sharded
from paceline_protocol import Tag

__all__ = [
    "Checkpoint",
    "Shard",
    "ShardedSaver",
    "Tag",
    "load",
    "load_sharded",
    "save",
    "save_sharded",
    "tags",
]
