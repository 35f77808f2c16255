"""Checkpoints: `save`, `load`, `tags`. Atomic, checksummed, no pickle."""

from paceline.checkpoint.keep import Checkpoint, load, save, tags
from paceline.checkpoint.tag import Tag

__all__ = ["Checkpoint", "Tag", "load", "save", "tags"]
