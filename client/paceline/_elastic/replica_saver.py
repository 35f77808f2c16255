"""Checkpoints of replicas: the ranks of the lowest replica write together what they hold, while training goes on."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline._base.activity import MemberCounters
from paceline._base.waits import Latch
from paceline._elastic.mates import Mates
from paceline._elastic.replica_checkpoint import MateLine, ReplicaContent, write
from paceline._elastic.saver import Saver
from paceline._elastic.state import StateCore
from paceline._group import Group
from paceline.checkpoint.folder import (
    ON_ONE_DISK,
    SavedFile,
    discard,
    fingerprint,
    hidden_folder,
    new_attempt,
    open_folder,
    publish,
    read_manifest,
)
from paceline.checkpoint.keep import none_intact, remove, set_aside
from paceline.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    PacelineError,
    ReplicaLost,
    SizeMismatch,
    StepOrderError,
)
from paceline_protocol import Tag

_log = logging.getLogger("paceline.elastic")

_KEEP = 2
"""How many checkpoints are kept."""


class _Attempt:
    """One checkpoint that is being written."""

    def __init__(self, tag: Tag) -> None:
        self.tag = tag
        self._committed = False
        self._decided = Latch()

    def decide(self, *, committed: bool) -> None:
        """Says whether the state is committed, so that it may be published; only the first word counts."""
        if not self._decided.is_set():
            self._committed = committed
            self._decided.set()

    def is_committed(self) -> bool:
        """Waits until that is known; False if the script has ended meanwhile."""
        while not self._decided.wait(1.0):
            if not threading.main_thread().is_alive():
                return False
        return self._committed


class ReplicaSaver(Saver):
    """The checkpoints of one rank of a replica.

    One is copied when a step has begun on all mates, and written by a thread of each rank of replica 0. Rank 0 of the
    replica publishes it once its state is committed, or drops it if training goes on from another state. In the round
    of each step mates learn whether one of them still writes the checkpoint before, so all begin the same ones.

    The directory must lie on a disk that all ranks share.

    Raises:
        StepOrderError: mates have other settings.
        ReplicaLost: a mate has ended.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None, every: int | None, counters: MemberCounters, mates: Mates
    ) -> None:
        super().__init__(directory, every, counters)
        mine = hashlib.sha256(repr((self.keeps, every)).encode()).digest()
        if len(set(mates.gather(mine))) > 1:
            raise StepOrderError(
                "some ranks of this replica call session.steps() with checkpoint_dir, others do not, or with another "
                "checkpoint_every"
            )
        self._line = MateLine(mates) if self.keeps else None
        self._attempt: _Attempt | None = None

    def load(self, state: StateCore) -> None:
        """Loads the latest checkpoint that no mate finds damaged, if there is one; all mates call it.

        Raises:
            CheckpointDamaged: all that rank 0 of this replica sees are damaged.
            SizeMismatch: the checkpoint is of another model or state.
            UnsupportedOp: the state cannot be saved.
            ReplicaLost: a mate has ended.
        """
        if self._line is None:
            return
        content = ReplicaContent(state, self._line.position)
        content.check()
        while True:
            (generation, step), left_out = self._line.gather([list(self.latest()), list(self._left_out.values())])[0]
            tag = Tag(generation, step)
            if tag == Tag(0, 0) and left_out:
                raise none_intact(Path(self._directory or "."), left_out)
            if tag == Tag(0, 0):
                _log.info("found no checkpoint in %s", self._directory)
                return
            damages = self._damages(self._line, partial(self._verify_some, tag, self._line)) or self._damages(
                self._line, partial(self._load_files, tag, content)
            )
            if not damages:
                break
            self._damaged.add(tag)
            self._leave_out(tag, CheckpointDamaged("; ".join(damages)))
        self.tag = self._last = self.loaded = tag
        self.fingerprint = fingerprint(self._path_of(tag))
        _log.info("found the checkpoint %s (step %d)", self._path_of(tag), tag.step)

    @staticmethod
    def _damages(line: MateLine, read: Callable[[], None]) -> list[str]:
        """Reads on all mates; returns what is damaged, and raises SizeMismatch on all of them if one does."""
        kind, text = "", ""
        try:
            read()
        except SizeMismatch as error:
            kind, text = "misfit", str(error)
        except (CheckpointDamaged, CheckpointFailed) as error:
            kind, text = "damaged", str(error)
        told = line.gather([kind, text])
        if misfits := [text for kind, text in told if kind == "misfit"]:
            raise SizeMismatch(misfits[0])
        return list(dict.fromkeys(text for kind, text in told if kind))

    def _verify_some(self, tag: Tag, line: MateLine) -> None:
        """Verifies this rank's part of the files; the mates verify the others."""
        if self._is_not_there_yet(tag):
            self._wait_for(tag, lambda: False)
        for file in self._files(tag)[line.position :: line.size]:
            file.verify(self._path_of(tag))

    def _load_files(self, tag: Tag, content: ReplicaContent) -> None:
        content.load(self._path_of(tag), [file.name for file in self._files(tag)])

    def _files(self, tag: Tag) -> tuple[SavedFile, ...]:
        """Returns the files of a checkpoint of replicas."""
        folder = self._path_of(tag)
        manifest = read_manifest(folder)
        if manifest.tag != tag:
            raise CheckpointDamaged(f"{folder} has the state of {manifest.tag}")
        if not manifest.files:
            raise CheckpointDamaged(f"{folder} is no checkpoint of replicas: plain workers have written it")
        return manifest.files

    def drop_others(self, held: Tag | None) -> None:
        """See `Saver.drop_others`."""
        if self._attempt is not None and self._attempt.tag != held:
            self._attempt.decide(committed=False)  # if it was committed, `commit` has said so before

    def begin(self, held: Tag | None, state: StateCore, group: Group) -> None:
        """See `Saver.begin`; `start` copies."""
        self.drop_others(held)

    def start(self, held: Tag | None, state: StateCore, group: Group, *, writing: bool) -> None:
        """See `Saver.start`."""
        if self._line is None or self._every is None or group.rank != 0:
            return
        if held is None or held.step % self._every or held in (self._last, Tag(0, 0)):
            return
        if writing:
            if self._line.position == 0:
                _log.warning("no checkpoint of step %d: the previous one is still being written", held.step)
            return
        self._complain()
        self._last, self._attempt = held, _Attempt(held)
        arguments = self._line, self._attempt, _copy_of(state, self._line.position)
        self._thread = threading.Thread(target=self._write_part, args=arguments, name="paceline-checkpoint")
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """See `Saver.is_writing`."""
        return self._thread is not None and self._thread.is_alive()

    def commit(self, step: int) -> None:
        """See `Saver.commit`: it may be published now."""
        if self._attempt is not None and self._attempt.tag.step <= step:
            self._attempt.decide(committed=True)

    def keep(self, held: Tag | None, state: StateCore, group: Group) -> None:
        """See `Saver.keep`; all mates call it."""
        trouble = self._keep_together(held, state, is_writer=group.rank == 0)
        refused = group.rank + 1 if trouble else 0
        refused = int(group.all_reduce(np.int64(refused), op="max", timeout=math.inf, label="kept"))
        if trouble:
            raise CheckpointFailed(f"the checkpoint {held} was not written: {trouble}")
        if refused:
            raise CheckpointFailed(
                f"{group.members[refused - 1]} could not write the checkpoint {held}; its log says why"
            )

    def keep_last(self, held: Tag | None, state: StateCore, group: Group) -> None:
        """See `Saver.keep_last`; mates write together. Those of all replicas may, and the first one publishes."""
        if self._line is None:
            return
        self._join(held)
        told = self._line.gather([list(held or ()), group._core.mesh.fault.failed])
        if held is None or any(tag != list(held) for tag, _ in told):
            _log.error("no checkpoint of the last step: the ranks of this replica do not hold one state")
            return
        lost = any(failed for _, failed in told)
        if not lost:
            refused: CheckpointFailed | None = None
            try:
                self.keep(held, state, group)
            except ReplicaLost:
                raise
            except CheckpointFailed as error:  # perhaps while a replica is lost in a mate's lane
                refused = error
            except PacelineError as error:
                _log.warning("a replica was lost while the last checkpoint was written: %s", error)
                lost = True
            lost = any(self._line.gather(lost))
            if refused is not None and not lost:
                raise refused
        if lost and (trouble := self._keep_together(held, state, is_writer=True)):
            raise CheckpointFailed(f"the checkpoint {held} was not written: {trouble}")

    def _keep_together(self, held: Tag | None, state: StateCore, *, is_writer: bool) -> str:
        """Writes the state now, if this replica is the writer; returns what went wrong, the same on all mates."""
        self._join(held)
        if not is_writer or self._line is None or held is None:
            return ""
        attempt = _Attempt(held)
        attempt.decide(committed=True)
        self._write_part(self._line, attempt, _copy_of(state, self._line.position))
        error, self._error = self._error, None
        troubles = self._line.gather("" if error is None else str(error))
        return next(filter(None, troubles), "")

    def wait(self) -> None:
        """See `Saver.wait`; drops a checkpoint whose state is not committed."""
        self._join(None)

    def _join(self, held: Tag | None) -> None:
        """Waits until nothing is being written, after which this thread may use the line to the mates."""
        if self._attempt is not None:
            self._attempt.decide(committed=self._attempt.tag == held)
        if self._thread is not None:
            self._thread.join()
        self._complain()

    def _write_part(self, line: MateLine, attempt: _Attempt, copy: _Copy | Exception) -> None:
        """Writes this rank's part of a checkpoint; on rank 0 of the replica, publishes it."""
        began = time.monotonic()
        try:
            published = self._write_together(line, attempt, copy)
        except Exception as error:  # noqa: BLE001  logged when the next one begins, or raised at the end
            self._error = error
            if line.position == 0:
                self._counters.checkpoint_failed()
        else:
            if published:
                self._counters.checkpoint_written(attempt.tag.step, time.monotonic() - began)

    def _write_together(self, line: MateLine, attempt: _Attempt, copy: _Copy | Exception) -> bool:
        directory, tag = Path(self._directory or "."), attempt.tag

        def opened() -> str:
            """Returns the name of the folder to write; empty if there is nothing to write."""
            if isinstance(copy, Exception):
                raise copy
            if line.position or self.has(tag):
                return ""
            name = new_attempt()
            open_folder(directory, tag, name)
            return name

        name = line.each(opened)[0]
        if not name or isinstance(copy, Exception):
            return False
        folder, is_published = hidden_folder(directory, tag, name), False
        try:
            line.each(lambda: _check_visible(folder))
            files = write(folder, *copy, line)
            if line.position == 0 and attempt.is_committed():
                publish(directory, tag, name, (), name, files)
                is_published = True
        finally:
            if line.position == 0 and not is_published:
                discard(directory, tag, name)
        if is_published:
            remove(set_aside(directory, _KEEP, tag))
        return is_published


_Copy = tuple[dict[str, Any], set[str]]
"""The content of a state, and the names of its buffers, as `write` takes them."""


def _copy_of(state: StateCore, position: int) -> _Copy | Exception:
    """Copies a state; returns the error if that fails, because mates wait for this one's word."""
    try:
        content = ReplicaContent(state, position)
        return content.copied(), content.buffers
    except Exception as error:  # noqa: BLE001
        return error


def _check_visible(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointFailed(f"{folder} is not there: {ON_ONE_DISK}")
