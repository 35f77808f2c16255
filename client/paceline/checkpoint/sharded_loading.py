"""Checkpoints that the ranks of a group read together, each what it needs of them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from paceline.checkpoint.keep import Checkpoint, tags
from paceline.checkpoint.pieces import Shard
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.reading import Reader
from paceline.checkpoint.tree import split_shards
from paceline.errors import CheckpointDamaged, SizeMismatch
from paceline_protocol import Tag

__all__ = ["load_sharded"]

_log = logging.getLogger("paceline.checkpoint")


def load_sharded(
    directory: str | os.PathLike[str], wanted: Any, group: Ranks, tag: tuple[int, int] | None = None
) -> Checkpoint | None:
    """Loads the state with the greatest tag that is whole at all ranks, each rank what it needs. A collective.

    It does not matter how many ranks saved it, under which strategy, or whether one did with `save`. One that is
    damaged at some rank is named in the log, and the one before used by all.

    Args:
        directory: where checkpoints are kept.
        wanted: a state of the same form (`paceline.sharded_state`); where it has a `Shard`, this rank gets those
            elements; of all other arrays it gets the whole. Nothing else of it counts.
        group: the ranks.
        tag: the one to load; the greatest if None. The same on all ranks.

    Returns:
        The checkpoint; None if there is none that all ranks can see.

    Raises:
        CheckpointDamaged: the one that was asked for, or every one that all ranks see, is damaged at some rank.
        SizeMismatch: it is of another model.
        PacelineError: a collective failed.
    """
    path = Path(directory)
    shards = {name: leaf for name, leaf in split_shards(wanted)[1].items() if isinstance(leaf, Shard)}
    seen = group.all_gather_object([list(found) for found in tags(path)] if tag is None else [list(tag)])
    common = set.intersection(*({Tag(*found) for found in one} for one in seen))
    damages = []
    for found in sorted(common, reverse=True):
        loaded, trouble = _try(path / str(found), found, shards)
        troubles = [text for text in group.all_gather_object(trouble) if text is not None]
        if not troubles:
            return loaded
        if misfits := [text for kind, text in troubles if kind == "misfit"]:
            raise SizeMismatch(misfits[0])
        _log.error("checkpoint %s is left out: %s", found, troubles[0][1])
        damages.append(troubles[0][1])
    if damages:
        raise CheckpointDamaged(f"no checkpoint in {path} is whole: " + "; ".join(damages))
    return None


def _try(folder: Path, tag: Tag, shards: dict[str, Shard]) -> tuple[Checkpoint | None, list[str] | None]:
    """A checkpoint, or in words what is wrong: all ranks shall hear of it, and go on alike."""
    try:
        reader = Reader(folder)
        if reader.tag != tag:
            raise CheckpointDamaged(f"{folder} is damaged: its manifest says {reader.tag}")
        return Checkpoint(tag, reader.state(shards), folder), None
    except SizeMismatch as error:
        return None, ["misfit", str(error)]
    except (CheckpointDamaged, OSError) as error:
        return None, ["damaged", str(error)]
