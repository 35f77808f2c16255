"""`paceline.checkpoint`: saving, finding and loading the state of a training run."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from paceline.checkpoint.arrays import decode_arrays, encode_arrays
from paceline.checkpoint.folder import HIDDEN, check_sizes, hidden_name, read_folder, write_folder
from paceline.checkpoint.tag import Tag
from paceline.checkpoint.tree import join, split
from paceline.errors import CheckpointDamaged

__all__ = ["Checkpoint", "load", "save", "tags"]

_log = logging.getLogger("paceline.checkpoint")

_ARRAYS = "arrays.safetensors"

_ABANDONED = 600.0
"""Seconds after which what a process that is not there was writing is removed."""


class Checkpoint(NamedTuple):
    """A state that was saved.

    Attributes:
        tag: which one.
        state: as it was given to `save`.
        folder: where it lies.
    """

    tag: Tag
    state: Any
    folder: Path


def save(directory: str | os.PathLike[str], state: Any, tag: tuple[int, int], *, keep: int = 2) -> Path:
    """Saves a state so that a crash at any instant leaves the last good one; removes older ones.

    Args:
        directory: where checkpoints are kept; made if it is not there.
        state: nested dicts, lists and tuples of arrays, numbers, text, bytes and None; what `state_dict()` gives.
        tag: (generation, step) that the state is of. Equal tags are equal states: one that is there stays.
        keep: how many of the greatest tags stay, 1 or more.

    Returns:
        Its folder, when it is durable.

    Raises:
        UnsupportedOp: the state has a value that cannot be kept; the text has its path, nothing was written.
        ValueError: `keep` or the tag is out of range.
        OSError: the disk refused; what was there before is untouched.
    """
    tag = Tag(*tag)
    if keep < 1 or min(tag) < 0:
        raise ValueError(f"want keep >= 1 and a tag of numbers that are not negative, not {keep} and {tuple(tag)}")
    skeleton, arrays = split(state)
    path = Path(directory)
    folder = path / str(tag)
    if not _is_whole(folder):
        folder = write_folder(path, tag, {_ARRAYS: encode_arrays(arrays)}, {"state": skeleton})
    _remove_old(path, keep)
    return folder


def load(directory: str | os.PathLike[str], tag: tuple[int, int] | None = None) -> Checkpoint | None:
    """Loads the state with the greatest tag that is whole; a damaged one is named in the log, and the one before used.

    Args:
        directory: where checkpoints are kept.
        tag: the one to load; the greatest if None.

    Returns:
        The checkpoint; None if there is none.

    Raises:
        CheckpointDamaged: the one that was asked for, or every one there, is damaged; the text says how.
    """
    path = Path(directory)
    if tag is not None:
        return _load(path / str(Tag(*tag)), Tag(*tag))
    damages = []
    for found in reversed(tags(directory)):
        try:
            return _load(path / str(found), found)
        except CheckpointDamaged as damage:
            _log.error("checkpoint %s is left out: %s", found, damage)
            damages.append(str(damage))
    if damages:
        raise CheckpointDamaged(f"no checkpoint in {path} is whole: " + "; ".join(damages))
    return None


def tags(directory: str | os.PathLike[str]) -> list[Tag]:
    """The tags of all checkpoints, damaged ones too, in their order; none if there is no such directory."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(tag for name in names if (tag := Tag.parse(name)) is not None and str(tag) == name)


def _load(folder: Path, tag: Tag) -> Checkpoint:
    body, files = read_folder(folder)
    try:
        if Tag(*body["tag"]) != tag:
            raise ValueError(f"its manifest says {body['tag']}")
        return Checkpoint(tag, join(body["state"], decode_arrays(files[_ARRAYS])), folder)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"{folder} is damaged: {error}") from error


def _is_whole(folder: Path) -> bool:
    if not folder.exists():
        return False
    try:
        read_folder(folder)
    except CheckpointDamaged as damage:
        _log.error("writing %s again: %s", folder, damage)
        return False
    return True


def _remove_old(directory: Path, keep: int) -> None:
    """Removes all but the greatest tags, and what dead processes of this host have left half written.

    One whose greater ones are all damaged stays: it is the last good one.
    """
    mine = f"{HIDDEN}{socket.gethostname()}-"
    whole = 0
    for tag in reversed(tags(directory)):
        if whole >= keep:
            hidden = directory / hidden_name(f"{tag}-old")
            os.rename(directory / str(tag), hidden)  # gone at once for readers, whatever becomes of the rest
            shutil.rmtree(hidden, ignore_errors=True)
        else:
            with suppress(CheckpointDamaged):
                check_sizes(directory / str(tag))
                whole += 1
    for name in os.listdir(directory):
        if name.startswith(mine):
            pid = name.removeprefix(mine).split("-")[0]
            path = directory / name
            with suppress(FileNotFoundError):  # another has removed it
                old = time.time() - path.stat().st_mtime > _ABANDONED
                if old and pid.isdigit() and not Path(f"/proc/{pid}").exists():
                    shutil.rmtree(path, ignore_errors=True)
