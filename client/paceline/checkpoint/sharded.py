"""Checkpoints that the ranks of a group write together, each its part, and read together, each what it needs.

`save_sharded` writes at once, a `ShardedSaver` in the background while training goes on.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.folder import ON_ONE_DISK, discard, is_there, new_attempt, open_folder, publish
from paceline.checkpoint.keep import Checkpoint, checked_tag, none_intact, remove, set_aside, tags
from paceline.checkpoint.part import Part
from paceline.checkpoint.pieces import Shard, pieces_of
from paceline.checkpoint.reading import Reader
from paceline.checkpoint.tree import split_shards
from paceline.checkpoint.writing import PartWriter, write_part
from paceline.errors import CheckpointDamaged, CheckpointFailed, PacelineError, SizeMismatch, StepOrderError
from paceline_protocol import Tag

if TYPE_CHECKING:
    from paceline._group import Group  # commands that inspect checkpoints need not load it

_log = logging.getLogger("paceline.checkpoint")

_NAMED = 8
"""Most ranks whose trouble an error names."""


def save_sharded(
    directory: str | os.PathLike[str], state: Any, tag: tuple[int, int], group: Group, *, keep: int = 2
) -> Path:
    """Saves a sharded state. After a crash at any instant the last good one is still there. A collective.

    Each rank writes a file of its own. Ranks that hold the same data write it once, in equal shares. The directory must
    lie on a disk that all ranks share; where hosts have disks of their own, save in `group.split_by_host()`, if the
    ranks of each host together hold the whole state.

    Args:
        directory: where checkpoints are kept; made if it does not exist.
        state: as for `save`, with a `Shard` in place of an array of which this rank holds a part
            (`paceline.sharded_state`). Every other value is the same on all ranks.
        tag: (generation, step) of the state. Equal tags are equal states: if the tag exists, that checkpoint stays.
        group: the ranks that hold the state.
        keep: how many checkpoints with the greatest tags to keep, 1 or more.

    Returns:
        Its folder, which is durable.

    Raises:
        CheckpointFailed: a rank could not write, the ranks do not hold a whole state, or the disk is not shared; raised
            on all ranks, with the same text.
        UnsupportedOp, ValueError: as for `save`; raised on all ranks.
        PacelineError: a collective failed.
    """
    return _Attempt(Path(directory), state, tag, group, keep).write()


class ShardedSaver:
    """Saves in the background: copies the state while the ranks compute, and writes the copy while they train on.

        saver = paceline.checkpoint.ShardedSaver(directory, group)
        saver.begin(state, tag)        # after an update
        ...                            # forward and backward
        saver.wait_until_copied()      # before the next update
        ...
        saver.finish()                 # some steps later

    The copy of this rank's part stays in memory that is allocated once. Used by one thread.

    Args:
        directory: as for `save_sharded`.
        group: as for `save_sharded`.
        keep: as for `save_sharded`.
    """

    def __init__(self, directory: str | os.PathLike[str], group: Group, *, keep: int = 2) -> None:
        self._directory = Path(directory)
        self._group = group
        self._keep = keep
        self._writer = PartWriter()
        self._attempt: _Attempt | None = None

    def begin(self, state: Any, tag: tuple[int, int]) -> None:
        """Starts to save; a collective that moves a few bytes.

        Raises:
            StepOrderError: the save before has not been finished.
            UnsupportedOp, ValueError, PacelineError: as for `save_sharded`.
        """
        if self._attempt is not None:
            raise StepOrderError("a checkpoint is still being written: finish() it first")
        attempt = _Attempt(self._directory, state, tag, self._group, self._keep)
        attempt.begin(self._writer)
        self._attempt = attempt

    def wait_until_copied(self) -> None:
        """Waits until the state has been copied, so that it may change. Communicates nothing."""
        self._writer.wait_until_copied()

    @property
    def is_writing(self) -> bool:
        """True while this rank's part is being written; others may take longer."""
        return self._writer.is_writing

    def finish(self) -> Path:
        """Waits until all ranks have written, and publishes the checkpoint. A collective.

        Returns:
            Its folder, which is durable.

        Raises:
            CheckpointFailed: as for `save_sharded`; the saver can be used again.
            StepOrderError: no save was begun.
            PacelineError: a collective failed.
        """
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            raise StepOrderError("no checkpoint is being written")
        return attempt.finish(self._writer)

    def abandon(self) -> None:
        """Drops the save that was begun, if any, because the ranks have changed. Communicates nothing.

        Returns once this rank no longer writes; the files of all ranks are removed.
        """
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.abandon(self._writer)


class _Attempt:
    """One attempt to save one state."""

    def __init__(self, directory: Path, state: Any, tag: tuple[int, int], group: Group, keep: int) -> None:
        self._tag, self._keep = checked_tag(tag, keep), keep
        self._directory, self._group = directory, group
        self._skeleton, leaves = split_shards(state)
        self._pieces = pieces_of(leaves, group.rank, group.size)
        self._name = ""
        """The name of the attempt; empty if there is nothing to write."""
        self._aside: list[Path] = []
        """The folders that rank 0 may remove now."""

    def write(self) -> Path:
        self._open()
        outcome: Part | Exception | None = None
        if self._name:
            try:
                outcome = write_part(*self._place(), self._pieces)
            except Exception as error:  # noqa: BLE001  reported to all ranks
                outcome = error
        folder = self._close(outcome)
        remove(self._aside)
        return folder

    def begin(self, writer: PartWriter) -> None:
        self._open()
        if self._name:
            writer.begin(*self._place(), self._pieces)

    def finish(self, writer: PartWriter) -> Path:
        outcome: Part | Exception | None = None
        if self._name:
            try:
                outcome = writer.wait()
            except Exception as error:  # noqa: BLE001  reported to all ranks
                outcome = error
        folder = self._close(outcome)
        if self._aside:  # removing a big one takes longer than a step may wait
            threading.Thread(target=remove, args=(self._aside,), name="paceline-checkpoint").start()
        return folder

    def abandon(self, writer: PartWriter) -> None:
        if self._name:
            with suppress(OSError):  # the write may have failed
                writer.wait()
            discard(self._directory, self._tag, self._name)

    def _place(self) -> tuple[Path, Tag, str, int, int]:
        return self._directory, self._tag, self._name, self._group.rank, self._group.size

    def _open(self) -> None:
        """Lets rank 0 make the folder, if there is something to write; all ranks learn its name."""
        told: dict[str, str] = {}
        if self._group.rank == 0:
            try:
                there = is_there(self._directory / str(self._tag))  # without reading it, which takes as long as writing
                told = {"attempt": "" if there else self._opened()}
            except OSError as error:
                told = {"error": f"{_name_of(self._group)}: {error}"}
        told = self._group.broadcast_object(told)
        if "error" in told:
            raise CheckpointFailed(f"checkpoint {self._tag} was not written: {told['error']}")
        self._name = told["attempt"]

    def _opened(self) -> str:
        name = new_attempt()
        open_folder(self._directory, self._tag, name)
        return name

    def _close(self, outcome: Part | Exception | None) -> Path:
        """Lets rank 0 collect the results of all ranks and publish the checkpoint; all ranks learn the outcome."""
        told: dict[str, Any] = {}
        if isinstance(outcome, Part):
            told = {"part": outcome.to_tree()}
        elif isinstance(outcome, FileNotFoundError):
            told = {"error": f"{_name_of(self._group)} does not see {outcome.filename}; {ON_ONE_DISK}"}
        elif outcome is not None:
            told = {"error": f"{_name_of(self._group)}: {outcome}"}
        heard = self._group.gather_object(told)
        trouble = None
        if heard is not None:
            try:
                self._publish(heard)
            except (OSError, PacelineError, ValueError) as error:
                trouble = str(error)
        trouble = self._group.broadcast_object(trouble)
        if trouble is not None:
            raise CheckpointFailed(trouble) from (outcome if isinstance(outcome, Exception) else None)
        return self._directory / str(self._tag)

    def _publish(self, heard: list[Any]) -> None:
        if self._name:
            try:
                if errors := [told["error"] for told in heard if "error" in told]:
                    raise CheckpointFailed(f"checkpoint {self._tag} was not written: {'; '.join(errors[:_NAMED])}")
                parts = [Part.from_tree(told.get("part")) for told in heard]
                publish(self._directory, self._tag, self._name, parts, self._skeleton)
            except BaseException:
                discard(self._directory, self._tag, self._name)
                raise
        self._aside = set_aside(self._directory, self._keep, self._tag)


def _name_of(group: Group) -> str:
    """Returns the words for this rank."""
    return f"rank {group.rank} on {group.members[group.rank].host}"


def load_sharded(
    directory: str | os.PathLike[str], wanted: Any, group: Group, tag: tuple[int, int] | None = None
) -> Checkpoint | None:
    """Loads the state with the greatest tag that is intact at all ranks, each rank what it needs. A collective.

    Any number of ranks may have saved it, under any strategy, or one process with `save`. A checkpoint that some rank
    cannot see or read, or finds damaged, is logged, and all ranks use the one before.

    Args:
        directory: where checkpoints are kept.
        wanted: a state of the same form (`paceline.sharded_state`). This rank gets the elements of each `Shard` in it,
            and all other arrays whole. Nothing else in it matters.
        group: the ranks.
        tag: the one to load, the same on all ranks; None for the greatest.

    Returns:
        The checkpoint; None if no rank sees any.

    Raises:
        CheckpointDamaged: the requested checkpoint, or every one, is damaged or cannot be read at some rank, or a rank
            cannot list the directory; raised on all ranks. The text names the ranks, the files, and what is wrong.
        SizeMismatch: the checkpoint is of another model.
        PacelineError: a collective failed.
    """
    path = Path(directory)
    shards = {name: leaf for name, leaf in split_shards(wanted)[1].items() if isinstance(leaf, Shard)}
    who = _name_of(group)
    seen = group.all_gather_object(_list(path, who) if tag is None else [list(tag)])
    if refusals := [one for one in seen if isinstance(one, str)]:
        raise CheckpointDamaged("; ".join(refusals[:_NAMED]))
    damages = []
    for found in sorted({Tag(*found) for one in seen for found in one}, reverse=True):
        loaded, trouble = _try(path / str(found), found, shards, who)
        troubles = [text for text in group.all_gather_object(trouble) if text is not None]
        if not troubles:
            return loaded
        if misfits := [text for kind, text in troubles if kind == "misfit"]:
            raise SizeMismatch(misfits[0])
        damage = "; ".join(text for _, text in troubles[:_NAMED])
        _log.error("checkpoint %s is left out: %s", found, damage)
        damages.append(damage)
    if damages:
        raise none_intact(path, damages)
    return None


def _list(directory: Path, who: str) -> list[list[int]] | str:
    """Returns the tags that this rank sees, or the text of why it cannot look, so that all ranks learn of it."""
    try:
        return [list(tag) for tag in tags(directory)]
    except OSError as error:
        return f"{who}: {directory} cannot be listed: {error.strerror or error}"


def _try(folder: Path, tag: Tag, shards: dict[str, Shard], who: str) -> tuple[Checkpoint | None, list[str] | None]:
    """Returns a checkpoint, or the text of what is wrong, so that all ranks learn of it and decide alike."""
    try:
        reader = Reader(folder)
        if reader.tag != tag:
            raise CheckpointDamaged(f"{folder} is damaged: its manifest has the tag {reader.tag}")
        return Checkpoint(tag, reader.state(shards), folder), None
    except SizeMismatch as error:
        return None, ["misfit", str(error)]
    except (CheckpointDamaged, OSError) as error:
        return None, ["damaged", f"{who}: {error}"]
