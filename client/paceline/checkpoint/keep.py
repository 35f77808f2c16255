"""`paceline.checkpoint`: saving, finding and loading the state of a training run."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from paceline.checkpoint.folder import (
    discard,
    hidden_folder,
    hidden_tag,
    is_there,
    new_attempt,
    open_folder,
    publish,
)
from paceline.checkpoint.pieces import pieces_of
from paceline.checkpoint.reading import Reader
from paceline.checkpoint.tree import Skeleton, split
from paceline.checkpoint.writing import write_part
from paceline.errors import CheckpointDamaged
from paceline_protocol import Tag

_log = logging.getLogger("paceline.checkpoint")

_ABANDONED = 600.0
"""Seconds after which an unfinished folder that is older than an existing checkpoint is removed."""


class Checkpoint(NamedTuple):
    """A saved state.

    Attributes:
        tag: its tag.
        state: as it was given to `save`; from `load_sharded`, with shards where they were wanted.
        folder: the folder that holds it.
    """

    tag: Tag
    state: Any
    folder: Path


def save(directory: str | os.PathLike[str], state: Any, tag: tuple[int, int], *, keep: int = 2) -> Path:
    """Saves a state and removes older ones. After a crash at any instant the last good one is still there.

    Args:
        directory: where checkpoints are kept; made if it does not exist.
        state: nested dicts, lists and tuples of arrays, numbers, text, bytes and None, such as `state_dict()` returns.
        tag: (generation, step) of the state. Equal tags are equal states: if the tag exists, that checkpoint stays.
        keep: how many checkpoints with the greatest tags to keep, 1 or more.

    Returns:
        Its folder, which is durable.

    Raises:
        UnsupportedOp: the state has a value that cannot be saved; the text has its path, and nothing was written.
        ValueError: `keep` or the tag is out of range.
        OSError: the disk refused; earlier checkpoints are untouched.
    """
    tag = checked_tag(tag, keep)
    content = split(state)
    path = Path(directory)
    folder = path / str(tag)
    if os.path.lexists(folder):
        try:
            Reader(folder).verify()
        except CheckpointDamaged as damage:
            _log.error("writing %s again: %s", folder, damage)
            _hide(path, tag)
    if not os.path.lexists(folder):
        attempt = new_attempt()
        open_folder(path, tag, attempt)
        folder = _write(path, content, tag, attempt)
    remove(set_aside(path, keep, tag))
    return folder


def save_once(directory: str | os.PathLike[str], state: Any, tag: Tag, attempt: str, *, keep: int = 2) -> bool:
    """Saves like `save`, for processes that may share the directory: the first to use the name of an attempt writes.

    The others return False at once, perhaps before the checkpoint exists. Only processes with the same state use the
    same name, 1 to 64 of a to z and 0 to 9.
    """
    content = split(state)
    path = Path(directory)
    try:
        open_folder(path, tag, attempt)
    except FileExistsError:
        if not path.is_dir():
            raise
        return False  # another process is writing it
    if is_there(path / str(tag)):  # another process has written it
        discard(path, tag, attempt)
        return False
    _write(path, content, tag, attempt)
    remove(set_aside(path, keep, tag))
    return True


def load(directory: str | os.PathLike[str], tag: tuple[int, int] | None = None) -> Checkpoint | None:
    """Loads the intact state with the greatest tag. Greater ones, damaged or not readable, are logged and left out.

    Args:
        directory: where checkpoints are kept.
        tag: the one to load; None for the greatest.

    Returns:
        The checkpoint; None if there are none.

    Raises:
        CheckpointDamaged: the requested checkpoint, or every one there, is damaged or cannot be read; the text names
            a file of each, and says what is wrong with it.
        OSError: the directory cannot be listed.
    """
    path = Path(directory)
    if tag is not None:
        return _load(path / str(Tag(*tag)), Tag(*tag))
    damages: dict[Tag, str] = {}
    while untried := [found for found in tags(path) if found not in damages]:  # others may write and remove some
        found = untried[-1]
        try:
            return _load(path / str(found), found)
        except CheckpointDamaged as damage:
            _log.error("checkpoint %s is left out: %s", found, damage)
            damages[found] = str(damage)
    if damages:
        raise none_intact(path, damages.values())
    return None


def tags(directory: str | os.PathLike[str]) -> list[Tag]:
    """Returns the tags of all checkpoints, damaged ones included, in order; none if the directory does not exist.

    Raises:
        OSError: the directory cannot be listed, or is a symbolic link to nothing, such as a disk that is not mounted.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        if os.path.islink(Path(directory)):  # without a slash at its end, which would follow the link
            raise
        return []
    return sorted(tag for name in names if (tag := Tag.parse(name)) is not None and str(tag) == name)


def none_intact(directory: Path, damages: Iterable[str]) -> CheckpointDamaged:
    """Returns the error that names all the checkpoints that were tried, and what is wrong with each."""
    return CheckpointDamaged(f"no checkpoint in {directory} is intact: " + "; ".join(damages))


def checked_tag(tag: tuple[int, int], keep: int) -> Tag:
    """Returns the tag; raises ValueError if it has a negative number, or `keep` is below 1."""
    tag = Tag(*tag)
    if keep < 1 or min(tag) < 0:
        raise ValueError(f"want keep >= 1 and a tag without negative numbers, not {keep} and {tuple(tag)}")
    return tag


def set_aside(directory: Path, keep: int, written: Tag) -> list[Path]:
    """Hides all but the greatest tags from readers at once; returns the folders to remove, which takes time.

    The one that was just written always stays, because greater ones may be of another run. One whose greater ones are
    all damaged stays too, since it is the last good one. Folders that were left unfinished long ago are removed too.
    """
    aside: list[Path] = []
    whole = 0
    greatest: Tag | None = None
    for tag in reversed(tags(directory)):
        if whole >= keep and tag != written:
            aside.append(_hide(directory, tag))
        elif is_there(directory / str(tag)):
            whole += 1
            greatest = greatest or tag
    for name in os.listdir(directory):
        tag_there = hidden_tag(name)
        if tag_there is not None and greatest is not None and tag_there <= greatest:
            with suppress(FileNotFoundError):  # another process has removed it
                if time.time() - (directory / name).lstat().st_mtime > _ABANDONED:
                    aside.append(directory / name)
    return aside


def remove(aside: Sequence[Path]) -> None:
    """Removes the folders that `set_aside` returned; one that cannot be removed stays hidden."""
    for folder in aside:
        shutil.rmtree(folder, ignore_errors=True)


def _write(directory: Path, content: tuple[Skeleton, dict[str, NDArray[Any]]], tag: Tag, attempt: str) -> Path:
    """Writes into the folder that `open_folder` made; returns the checkpoint's folder, which is durable."""
    skeleton, arrays = content
    try:
        part = write_part(directory, tag, attempt, 0, 1, pieces_of(arrays, 0, 1))
        return publish(directory, tag, attempt, [part], skeleton)
    except BaseException:
        discard(directory, tag, attempt)
        raise


def _hide(directory: Path, tag: Tag) -> Path:
    """Hides a checkpoint from readers at once, even if its removal fails later; returns its new path."""
    hidden = hidden_folder(directory, tag, new_attempt())
    with suppress(FileNotFoundError):  # another process has hidden it
        os.rename(directory / str(tag), hidden)
    return hidden


def _load(folder: Path, tag: Tag) -> Checkpoint:
    reader = Reader(folder)
    if reader.tag != tag:
        raise CheckpointDamaged(f"{folder} is damaged: its manifest has the tag {reader.tag}")
    return Checkpoint(tag, reader.state(), folder)
